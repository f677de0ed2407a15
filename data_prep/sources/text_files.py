"""How a text file is read: its encoding, and what stands between the fields of a table.

Both are recognized where nobody names them. Bytes that are no characters become half a character each, which
costs the row that has it and no other one.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TextIO

from trainer.config import ConfigError

DELIMITERS = ",;\t|"
SAMPLE_LINES = 50
CHUNK_BYTES = 1 << 20
MOST_CHARACTERS = 256 << 20
"""Longest line of a file: a row with its images in base64."""
_BROKEN = re.compile("[\udc80-\udcff]")
_HIGH = re.compile(rb"[\x80-\xff]+")
SEPARATOR = re.compile(r"sep=(.?)", re.IGNORECASE)
"""A first line of spreadsheet programs, which names what stands between fields."""
UTF8 = "utf-8-sig"
LATIN = "cp1252"


def _half_a_character(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\udcff", error.end


codecs.register_error("half_a_character", _half_a_character)


@dataclass(frozen=True)
class TextForm:
    """How a text file is read."""

    encoding: str = ""
    """Python's name for it; empty: to be recognized."""
    delimiter: str = ""
    """What stands between the fields of a table; empty: to be recognized, or the file is no table."""

    def open(self, path: Path, newline: str) -> TextIO:
        """The file as text."""
        return open(path, newline=newline, encoding=self.encoding, errors="half_a_character")

    def unusual(self, path: Path) -> str:
        """What differs from UTF-8 and the delimiter of the file's ending; empty if nothing does."""
        differences = []
        if self.encoding != UTF8:
            differences.append(f"in {self.encoding} (--encoding names another)")
        if self.delimiter not in ("", _usual_delimiter(path)):
            differences.append(f"with {self.delimiter!r} between fields (--delimiter names another)")
        return ", ".join(differences)


def text_form(encoding: str, delimiter: str) -> TextForm:
    """How files are read as a person said. Raises ConfigError for what is no encoding or no delimiter."""
    try:
        "x".encode(encoding or "utf-8")
    except LookupError:
        raise ConfigError(f"--encoding {encoding}: give one that Python knows, such as latin-1") from None
    written = {"\\t": "\t", "tab": "\t"}.get(delimiter, delimiter)
    if len(written) > 1 or written in ('"', "\n", "\r"):
        raise ConfigError(f"--delimiter {delimiter}: give one character, such as ; or tab")
    return TextForm(encoding, written)


def recognize(path: Path, given: TextForm = TextForm()) -> TextForm:
    """How the file is read, `given` first."""
    facts = path.stat()
    return _recognize(path, given, facts.st_size, facts.st_mtime_ns)


@lru_cache(maxsize=1024)
def _recognize(path: Path, given: TextForm, size: int, changed_ns: int) -> TextForm:
    encoded = TextForm(given.encoding or _encoding(path), given.delimiter)
    if encoded.delimiter or path.suffix not in (".csv", ".tsv"):
        return encoded
    with encoded.open(path, newline="") as file:
        lines = list(islice(bounded_lines(file), SAMPLE_LINES))
    best = _usual_delimiter(path)
    if lines and (stated := SEPARATOR.fullmatch(lines[0].rstrip("\r\n"))):
        return TextForm(encoded.encoding, stated[1] or best)
    for delimiter in DELIMITERS:
        if _agreement(lines, delimiter) > _agreement(lines, best):
            best = delimiter
    return TextForm(encoded.encoding, best)


def _usual_delimiter(path: Path) -> str:
    return "\t" if path.suffix == ".tsv" else ","


def _agreement(lines: list[str], delimiter: str) -> float:
    """Share of the rows that have as many fields as the first one; 0 if that has a single one."""
    widths = [len(fields) for fields in csv.reader(lines, delimiter=delimiter) if fields]
    if not widths or widths[0] < 2:
        return 0.0
    return widths.count(widths[0]) / len(widths)


def _encoding(path: Path) -> str:
    with open(path, "rb") as file:
        start = file.read(4096)
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        if 4 * start.count(0) > len(start):
            return "utf-16-be" if start[::2].count(0) > start[1::2].count(0) else "utf-16-le"
        file.seek(0)
        sound = broken = high = high_together = 0
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        while chunk := file.read(CHUNK_BYTES):
            text = decoder.decode(chunk)
            broken_here = len(_BROKEN.findall(text))
            broken += broken_here
            sound += len(text) - len(text.encode("ascii", "ignore")) - broken_here
            for run in _HIGH.findall(chunk) if broken_here else ():
                high += len(run)
                high_together += len(run) if len(run) > 2 else 0
    # In Latin letters an accent stands alone; other scripts have runs of such bytes. What is neither is UTF-8
    # with broken rows, or in an encoding that only a person can name.
    if broken <= sound or (high >= 4 and 2 * high_together > high):
        return UTF8
    return LATIN


def bounded_lines(file: TextIO) -> Iterator[str]:
    """The lines of a file, of which a longer one than MOST_CHARACTERS ends there."""
    while line := file.readline(MOST_CHARACTERS):
        yield line
        while len(line) == MOST_CHARACTERS and not line.endswith("\n"):
            line = file.readline(MOST_CHARACTERS)
