"""Text from outside as a terminal may show it."""

from __future__ import annotations

import re

ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?")
"""Sequences that color text, move the cursor, or set the window's title."""
CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, marks that turn the direction of writing, and halves of a character."""
BREAKS = re.compile(r"\r\n?|[\u2028\u2029\x85]")


def terminal_text(text: object) -> str:
    """A text that a run, a bucket or a platform gave, without what a terminal would obey.

    Lines and tabs stay: a progress bar that goes back to the start of its line becomes lines.
    """
    plain = BREAKS.sub("\n", ESCAPES.sub("", str(text)))
    return CONTROLS.sub("", plain)


def terminal_line(text: object) -> str:
    """The same as one line, for a word that stands in a line of ours."""
    return " ".join(terminal_text(text).split())
