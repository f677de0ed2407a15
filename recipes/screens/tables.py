"""The one form of every table on the terminal: no lines, words to the left, figures to the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 100


def narrow_console() -> Console:
    """A console of at most WIDTH columns, and of as many where output goes to a file."""
    console = Console()
    return Console(width=min(WIDTH, console.width) if console.is_terminal else WIDTH)


def wide_console() -> Console:
    """A console that is wide enough for every table where output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=190)


def show_table(
    console: Console,
    columns: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    words: int,
    marked: int = -1,
    last_is_words: bool = False,
) -> None:
    """Prints a table. words: the first columns that are words; the others are figures, but for the last one
    with `last_is_words`, which breaks over lines. marked: the row in bold."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(columns))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < words else "right", no_wrap=True)
    if last_is_words:
        table.columns[-1].justify = "left"
        table.columns[-1].no_wrap = False
    for i, cells in enumerate(rows):
        # words stand as they are: brackets are no markup
        shown = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        table.add_row(*shown, style="bold" if i == marked else "")
    console.print(table)


def show_lines(console: Console, lines: Iterable[str], indent: str = "", whole: bool = False) -> None:
    """Prints lines as they stand, without markup. whole: each on one line, however narrow the terminal is."""
    for line in lines:
        console.print(Text(f"{indent}{line}"), soft_wrap=whole)


def verdict_line(verdict: str) -> Text:
    """A verdict, its first words green or red."""
    text = Text(verdict)
    text.highlight_regex(r"^fits", "green")
    text.highlight_regex(r"^does not fit", "red")
    return text
