"""Draws the rooms and their imports into docs/architecture.md: `python docs/draw_architecture.py`.

An arrow that follows from others (a imports b, b imports c, so a may import c) is left out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
PACKAGES = ("recipes", "trainer", "data_prep", "examples")
BEGIN, END = "<!-- drawn by docs/draw_architecture.py -->\n", "<!-- end of the drawing -->\n"


def room(module: str) -> str:
    """The room of a module: its package under trainer or recipes, or the file itself; data_prep and examples
    whole."""
    parts = module.split(".")
    if parts[0] in ("data_prep", "examples"):
        return parts[0]
    return ".".join(parts[:2])


def imports(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms(root: Path = ROOT) -> dict[str, set[str]]:
    """Room -> rooms that it imports. root: a checkout of the repository."""
    graph: dict[str, set[str]] = {}
    paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    for path in paths:
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        if path.name == "__init__.py" and module.count(".") == 1:
            continue
        here = graph.setdefault(room(module), set())
        for name in imports(path):
            if name.partition(".")[0] in PACKAGES and room(name) != room(module):
                here.add(room(name))
    known = {room(name) for name in graph}
    return {name: targets & known for name, targets in graph.items()}


def reduced(graph: dict[str, set[str]]) -> dict[str, list[str]]:
    """The graph without arrows that longer ways imply."""

    def below(name: str) -> set[str]:
        return graph[name].union(*(below(other) for other in graph[name]))

    kept = {}
    for name, targets in sorted(graph.items()):
        implied: set[str] = set()
        for other in targets:
            implied |= below(other)
        kept[name] = sorted(targets - implied)
    return kept


def drawing() -> str:
    """The graph as Mermaid, which GitHub renders."""
    graph = reduced(rooms())
    lines = ["```mermaid", "graph TD"]
    for package in PACKAGES:
        inside = [name for name in graph if name.partition(".")[0] == package]
        lines += [f"  subgraph {package}"] if len(inside) > 1 else []
        lines += [f'    {name.replace(".", "_")}["{name.partition(".")[2] or name}"]' for name in inside]
        lines += ["  end"] if len(inside) > 1 else []
    lines += [
        f"  {a.replace('.', '_')} --> {b.replace('.', '_')}" for a, targets in graph.items() for b in targets
    ]
    return "\n".join([*lines, "```", ""])


def drawn(page: str) -> str:
    """The page with the drawing of the code as it is."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + drawing() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
    sys.exit(0)
