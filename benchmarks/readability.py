"""How dense a tree of Python files is, in the figures by which trainers can be compared.

    python -m benchmarks.readability trainer                # prints them
    python -m benchmarks.readability --before CHECKOUT      # a table of both repositories

A code line has at least one token of Python that is neither a comment nor a part of a docstring. Its
characters are counted without the indentation.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

from docs.draw_architecture import reduced, rooms

ROOT = Path(__file__).resolve().parents[1]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
RANK_CALLS = {"all", "each"}
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstrings(tree: ast.Module) -> list[ast.Constant]:
    """Every documentation string: those of modules, classes and functions, and those that stand below a
    field."""
    found = []
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            if isinstance(statement.value.value, str):
                found.append(statement.value)
    return found


def is_rank_call(node: ast.AST) -> bool:
    """Whether `node` calls a method of the ranks by its name: `workers.all("sync", step)`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
        return False
    first = node.args[0]
    if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
        return False
    return node.func.attr in RANK_CALLS and first.value.isidentifier()


def measure(text: str) -> Counter[str]:
    """The counts of one file."""
    tree = ast.parse(text)
    lines = text.splitlines()
    strings = docstrings(tree)
    prose = set()
    for string in strings:
        prose.update(range(string.lineno, (string.end_lineno or string.lineno) + 1))

    count: Counter[str] = Counter(files=1, lines=len(lines), files_over_500_lines=len(lines) > 500)
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            count["fmt_skip"] += "fmt: skip" in token.string
            stands_alone = token.line.strip().startswith("#")
            count["comment_lines"] += stands_alone
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= prose

    count["code_lines"] = len(code)
    for number in code:
        count["code_characters"] += len(lines[number - 1].strip())
        count["code_lines_over_100"] += len(lines[number - 1]) > 100
    for node in ast.walk(tree):
        count["comprehensions"] += isinstance(node, COMPREHENSIONS)
        count["walrus_operators"] += isinstance(node, ast.NamedExpr)
        count["rank_calls_by_string"] += is_rank_call(node)
    for string in strings:
        count["docstrings_that_begin_with_of"] += str(string.value).startswith("Of ")
    return count


def figures(folder: Path) -> dict[str, float]:
    """The sums over all files of `folder`, and the two ratios."""
    total: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        total.update(measure(path.read_text()))
    if not total["code_lines"]:
        raise SystemExit(f"no Python code under {folder}")
    ratios = {
        "comprehensions_per_100_code_lines": round(100 * total["comprehensions"] / total["code_lines"], 1),
        "characters_per_code_line": round(total["code_characters"] / total["code_lines"], 1),
    }
    return {**ratios, **dict(sorted(total.items()))}


def names_that_stand_twice(root: Path) -> list[str]:
    """Names of classes that several modules of a checkout define."""
    places: Counter[str] = Counter()
    for package in ("trainer", "recipes", "data_prep", "examples"):
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name] += 1
    return sorted(name for name, count in places.items() if count > 1)


def house(root: Path) -> dict[str, float]:
    """The figures of a checkout: those of its trainer, its rooms and arrows, and what is rendered into it."""
    graph = rooms(root)
    drawn = reduced(graph)
    own = [name for name in graph if name.startswith("trainer.")]
    generated = [path for path in (root / "recipes/generated").rglob("*") if path.is_file()]
    found: dict[str, float] = {
        "rooms": len(graph),
        "rooms_of_the_trainer": len(own),
        "arrows": sum(map(len, graph.values())),
        "arrows_that_are_drawn": sum(map(len, drawn.values())),
        "files_in_generated": len(generated),
        "lines_in_generated": sum(path.read_text().count("\n") for path in generated),
        "class_names_that_stand_twice": len(names_that_stand_twice(root)),
    }
    return found | figures(root / "trainer")


def compare(before: Path) -> None:
    """Prints the figures of another checkout and of this one, side by side."""
    then, now = house(before), house(ROOT)
    print(f"{'':40} {'before':>10} {'after':>10}")
    for name, value in now.items():
        print(f"{name:40} {then.get(name, 0):>10} {value:>10}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "trainer")
    parser.add_argument("--before", type=Path, help="a checkout of the repository to compare this one with")
    args = parser.parse_args()
    if args.before:
        compare(args.before)
        return
    for name, value in figures(args.folder).items():
        print(f"{name:40} {value}")


if __name__ == "__main__":
    main()
