"""Rules of easy reading that ruff does not know, held for every Python file of the repository.

    python tests/test_density.py [FOLDER...]       # what breaks a rule, as FILE:LINE: RULE
    python tests/test_density.py --write           # lowers the allowances to what is there

`density_allowances.json` counts what each file may still break from the time before the rules. The numbers
may only shrink: a file that breaks more fails, and so does one that breaks less until its number is lowered.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWANCES = Path(__file__).with_name("density_allowances.json")
FOLDERS = ("trainer", "recipes", "data_prep", "examples", "benchmarks", "docs", "requirements", "tests")

LONGEST_LINE = 110
MOST_COMPREHENSIONS = 2
MOST_ASSIGNED = 2
ROWS_OF_A_TABLE = 3

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
TESTS = {"bool", "isinstance", "issubclass", "hasattr", "any", "all", "callable"}
TEST_METHODS = {
    "startswith",
    "endswith",
    "exists",
    "is_file",
    "is_dir",
    "isdigit",
    "isidentifier",
    "fullmatch",
}


@dataclass(frozen=True, order=True)
class Breach:
    """A place that breaks a rule."""

    line: int
    rule: str


# --- The tree -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a tree, which every rule looks at."""
    return list(ast.walk(tree))


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in nodes(tree):
        if isinstance(node, ast.stmt):
            yield node


def expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Every expression of a statement, without those of the statements in its body."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                waiting.append(child)


def header_end(statement: ast.stmt) -> int:
    """The last line of a statement, or of a compound statement's header."""
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body:
        return max(
            [statement.lineno, *(getattr(n, "end_lineno", 0) or 0 for n in list(expressions(statement))[1:])]
        )
    return statement.end_lineno or statement.lineno


def documentation(tree: ast.Module) -> Iterator[ast.Constant]:
    """Docstrings, and the strings that document the field or constant above them."""
    for statement in statements(tree):
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            continue
        if isinstance(statement.value.value, str):
            yield statement.value


# --- The rules ----------------------------------------------------------------------------------------------


def long_lines(text: str) -> Iterator[Breach]:
    """Lines of more than LONGEST_LINE characters, but for those that hold one word, such as an address."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LONGEST_LINE and " " in line.strip():
            yield Breach(number, "line too long")


def crowded_comprehensions(tree: ast.Module) -> Iterator[Breach]:
    for statement in statements(tree):
        count = sum(isinstance(node, COMPREHENSIONS) for node in expressions(statement))
        if count > MOST_COMPREHENSIONS:
            yield Breach(statement.lineno, "comprehensions")


def flags(tree: ast.Module) -> set[str]:
    """Names that are annotated as `bool`, as arguments, variables or fields, or that are given a
    comparison."""
    names = set()
    for node in nodes(tree):
        if isinstance(node, ast.Assign) and is_boolean(node.value, set()):
            names |= {name_of(target) for target in node.targets} - {""}
        annotation = getattr(node, "annotation", None)
        if not (isinstance(annotation, ast.Name) and annotation.id == "bool"):
            continue
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, (ast.Name, ast.Attribute)):
            names.add(name_of(node.target))
    return names


def name_of(node: ast.AST) -> str:
    """`name` of `name` and of `owner.name`, else nothing."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_boolean(node: ast.AST, known: set[str]) -> bool:
    """Whether an expression is true or false, by its form or by the names in `known`."""
    match node:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.BoolOp(values=values):
            return any(is_boolean(value, known) for value in values)
        case ast.Call(func=ast.Name(id=name)):
            return name in TESTS
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in TEST_METHODS or name.startswith("is_")
        case ast.Name() | ast.Attribute():
            return name_of(node) in known
    return False


def is_sequence(node: ast.AST) -> bool:
    """Whether an expression is written as a list, tuple, set or text."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (str, bytes))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return is_sequence(node.left) or is_sequence(node.right)
    return isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.ListComp, ast.JoinedStr))


def multiplied_by_booleans(tree: ast.Module, fields: set[str]) -> Iterator[Breach]:
    """`["x"] * wanted`: an `if` that does not look like one."""
    known = flags(tree) | fields
    for node in nodes(tree):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
            continue
        pairs = ((node.left, node.right), (node.right, node.left))
        if any(is_sequence(one) and is_boolean(other, known) for one, other in pairs):
            yield Breach(node.lineno, "multiplied by a boolean")


def crowded_assignments(tree: ast.Module) -> Iterator[Breach]:
    """`a, b, c = x, y, z`: three assignments on a line."""
    for node in nodes(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
        if any(len(target.elts) > MOST_ASSIGNED for target in targets):
            yield Breach(node.lineno, "assignments")


def named_lambdas(tree: ast.Module) -> Iterator[Breach]:
    for node in nodes(tree):
        if not (isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Lambda)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        # An attribute cannot be given its value by `def`.
        if any(isinstance(target, ast.Name) for target in targets):
            yield Breach(node.lineno, "named lambda")


def is_data(node: ast.AST) -> bool:
    """Whether an expression only states values: no loop, no condition, no call but of a class."""
    for part in ast.walk(node):
        if isinstance(
            part, (*COMPREHENSIONS, ast.Lambda, ast.IfExp, ast.JoinedStr, ast.NamedExpr, ast.Await)
        ):
            return False
        if isinstance(part, ast.Call) and not name_of(part.func).lstrip("_")[:1].isupper():
            return False
    return True


def is_table(node: ast.AST) -> bool:
    if not isinstance(node, DISPLAYS):
        return False
    rows = node.keys if isinstance(node, ast.Dict) else node.elts
    stands_as_rows = node.end_lineno is not None and node.end_lineno > node.lineno
    return len(rows) >= ROWS_OF_A_TABLE and stands_as_rows and is_data(node)


def skipped_formatting(tree: ast.Module, text: str) -> Iterator[Breach]:
    """`fmt: skip` after anything but a table that stands as rows."""
    if "fmt:" not in text:
        return
    ends: dict[int, list[ast.stmt]] = {}
    for statement in statements(tree):
        ends.setdefault(header_end(statement), []).append(statement)
    decorators = [d for node in nodes(tree) for d in getattr(node, "decorator_list", [])]

    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or "fmt:" not in token.string:
            continue
        line = token.start[0]
        parts = [part for statement in ends.get(line, []) for part in expressions(statement)]
        parts += [
            part for decorator in decorators if decorator.end_lineno == line for part in ast.walk(decorator)
        ]
        if not any(is_table(part) for part in parts):
            yield Breach(line, "fmt: skip")


def docstrings_without_subject(tree: ast.Module) -> Iterator[Breach]:
    for string in documentation(tree):
        if str(string.value).startswith("Of "):
            yield Breach(string.lineno, "docstring begins with Of")


# --- The repository -----------------------------------------------------------------------------------------


def breaches(text: str, fields: set[str]) -> list[Breach]:
    """Everything in a file that breaks a rule. `fields`: names of fields that are true or false anywhere."""
    tree = ast.parse(text)
    return sorted(
        [
            *long_lines(text),
            *crowded_comprehensions(tree),
            *multiplied_by_booleans(tree, fields),
            *crowded_assignments(tree),
            *named_lambdas(tree),
            *skipped_formatting(tree, text),
            *docstrings_without_subject(tree),
        ]
    )


def sources() -> dict[str, str]:
    """Text of every Python file: path from the root -> text."""
    paths = [*ROOT.glob("*.py")]
    for folder in FOLDERS:
        paths += (ROOT / folder).rglob("*.py")
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(paths)}


def boolean_fields(texts: dict[str, str]) -> set[str]:
    """Names of fields of classes that are annotated as `bool`."""
    names = set()
    for text in texts.values():
        for node in nodes(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                fields = ast.Module([s for s in node.body if isinstance(s, ast.AnnAssign)], [])
                names |= flags(fields)
    return names


def broken() -> dict[str, list[Breach]]:
    texts = sources()
    fields = boolean_fields(texts)
    return {path: found for path, text in texts.items() if (found := breaches(text, fields))}


def counts(found: dict[str, list[Breach]]) -> dict[str, dict[str, int]]:
    """Path -> rule -> how many places break it."""
    return {path: dict(sorted(Counter(b.rule for b in places).items())) for path, places in found.items()}


def totals(by_file: dict[str, dict[str, int]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for by_rule in by_file.values():
        sums.update(by_rule)
    return sums


def test_no_file_breaks_more_rules_than_it_is_allowed():
    found = broken()
    now, allowed = counts(found), json.loads(ALLOWANCES.read_text())
    more, fewer = [], []
    for path in sorted(now.keys() | allowed.keys()):
        for rule in sorted(now.get(path, {}).keys() | allowed.get(path, {}).keys()):
            here = now.get(path, {}).get(rule, 0)
            limit = allowed.get(path, {}).get(rule, 0)
            if here > limit:
                lines = [breach.line for breach in found[path] if breach.rule == rule]
                more.append(f"{path}: {rule}: {here}, allowed {limit}, at lines {lines}")
            elif here < limit:
                fewer.append(f"{path}: {rule}: {here}, allowed {limit}")
    assert not more, "\n".join(more)
    assert not fewer, "lower these by python tests/test_density.py --write:\n" + "\n".join(fewer)


def rules(code: str, fields: set[str] | None = None) -> list[str]:
    return [breach.rule for breach in breaches(code, fields or set())]


def test_long_lines_are_found():
    assert rules("x = 1  # " + "word " * 30 + "\n") == ["line too long"]
    assert rules("x = 1  # " + "word " * 20 + "\n") == []
    assert rules(f'x = (\n    "{"a" * 120}"\n)\n') == []


def test_comprehensions_of_one_statement_are_counted_without_its_body():
    one = "[y for y in x]"
    assert rules(f"a = {one} + {one}\n") == []
    assert rules(f"a = {one} + {one} + {one}\n") == ["comprehensions"]
    assert rules(f"for a in {one}:\n    b = {one} + {one}\n") == []
    assert rules("a = [{y for y in x if any(z for z in y)} for x in w]\n") == ["comprehensions"]


def test_multiplication_by_a_boolean_is_found():
    assert rules('a = ["x"] * (b > 0)\n') == ["multiplied by a boolean"]
    assert rules('a = f"{b}" * b.startswith("c")\n') == ["multiplied by a boolean"]
    assert rules('a = "x" * (not b)\n') == ["multiplied by a boolean"]
    assert rules('def f(old: bool):\n    return [("o", 1)] * old\n') == ["multiplied by a boolean"]
    assert rules('a = ["x"] * config.wanted\n', {"wanted"}) == ["multiplied by a boolean"]
    assert rules('wide = b > 3\na = (["x"] + c) * wide\n') == ["multiplied by a boolean"]
    assert rules('a = ["x"] * len(b) + mask * (b > 0)\n') == []


def test_crowded_assignments_are_found():
    assert rules("a, b, c = 1, 2, 3\n") == ["assignments"]
    assert rules("a, b = b, a\na, b, c = f()\n") == []


def test_named_lambdas_are_found():
    assert rules("f = lambda x: x\n") == ["named lambda"]
    assert rules("f = sorted(x, key=lambda y: y)\nx.y = lambda: 1\n") == []


def test_formatting_is_skipped_for_tables_only():
    assert rules("TABLE = {1: 2,\n  3: Row(4), 5: 6}  # fmt: skip\n") == []
    assert rules("for a in (1,\n  2, 3):  # fmt: skip\n    pass\n") == []
    assert rules("@case('a', [1, 2,\n  3])  # fmt: skip\ndef f(): pass\n") == []
    assert rules("f(a,\n  b, c)  # fmt: skip\n") == ["fmt: skip"]
    assert rules("f(a,\n  (1, 2, 3))  # fmt: skip\n") == ["fmt: skip"]
    assert rules("x = {a: f(1),\n  2: 3, 4: 5}  # fmt: skip\n") == ["fmt: skip"]


def test_docstrings_name_their_subject():
    assert rules('"""Of the engine, [T]."""\n') == ["docstring begins with Of"]
    assert rules('class A:\n    b: int = 0\n    """Of a pass."""\n') == ["docstring begins with Of"]
    assert rules('"""Often."""\n') == []


# --- The command --------------------------------------------------------------------------------------------


def write() -> int:
    """Makes the allowances what is there now. Where files were moved the numbers move; no rule's sum may
    grow."""
    now = counts(broken())
    if ALLOWANCES.exists():
        before = totals(json.loads(ALLOWANCES.read_text()))
        grown = {rule: (before[rule], n) for rule, n in totals(now).items() if n > before[rule]}
        if grown:
            print(f"more than is allowed, mend these first: {grown}", file=sys.stderr)
            return 1
    lines = [f" {json.dumps(path)}: {json.dumps(by_rule)}" for path, by_rule in sorted(now.items())]
    ALLOWANCES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(dict(totals(now)))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", default=[""])
    parser.add_argument("--write", action="store_true", help="lower the allowances to what is there")
    args = parser.parse_args()
    if args.write:
        return write()
    for path, places in broken().items():
        if path.startswith(tuple(args.folders)):
            for breach in places:
                print(f"{path}:{breach.line}: {breach.rule}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
