"""Records of CSV and TSV files. A quote without a partner costs its line at most, never those below it."""

from __future__ import annotations

import csv
from collections import Counter, deque
from collections.abc import Iterator
from itertools import zip_longest
from operator import itemgetter
from typing import Any, TextIO

from data_prep.sources.row_source import RAW_CHARS, UnreadableRecord
from data_prep.sources.text_files import SEPARATOR, bounded_lines

LOOKAHEAD_LINES = 1000
"""Most lines of one quoted field."""
ROWS_ALIKE = 10
"""So many lines that each hold a whole row are rows, and no field that two stray quotes enclose."""
LINE_BREAKS = "rows with line breaks inside a quoted field"
STRAY_QUOTES = "lines whose quotes do not pair, read as they stand"

csv.field_size_limit(1 << 30)  # images may be inside, in base64


class RepeatedColumn(Exception):
    """A table that names two columns alike."""


def refuse_repeats(names: list[str]) -> None:
    """Raises RepeatedColumn for a name that two columns have: nobody knows which one is meant."""
    name, times = max(Counter(filter(None, names)).items(), key=itemgetter(1), default=("", 0))
    if times > 1:
        raise RepeatedColumn(f"{times} columns are named {name!r}: give each its own name")


class _Lines:
    """Lines of a file, which can be given back."""

    def __init__(self, file: TextIO) -> None:
        self._file = bounded_lines(file)
        self._returned: deque[str] = deque()
        self.taken: list[str] = []
        """Lines of the record that is being read."""
        self.number = 0
        """Number of the record's first line, from 1."""

    def begin(self) -> None:
        """Begins with another record."""
        self.number += max(1, len(self.taken))
        self.taken = []

    def keep_first(self) -> str:
        """Gives all taken lines back but the first, which is returned."""
        self._returned.extendleft(reversed(self.taken[1:]))
        self.taken = self.taken[:1]
        return self.taken[0]

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if len(self.taken) == LOOKAHEAD_LINES:
            raise StopIteration
        line = self._returned.popleft() if self._returned else next(self._file)
        self.taken.append(line)
        return line


def records(file: TextIO, delimiter: str, notes: Counter[str]) -> Iterator[dict[str, Any] | UnreadableRecord]:
    """The rows below the header. What is remarkable is counted in `notes`. Raises RepeatedColumn."""
    lines = _Lines(file)
    header = _fields(lines, delimiter, 0, notes)
    if isinstance(header, list) and SEPARATOR.fullmatch(delimiter.join(header)):
        header = _fields(lines, delimiter, 0, notes)
    if not isinstance(header, list):
        return
    refuse_repeats(header)
    while (fields := _fields(lines, delimiter, len(header), notes)) is not None:
        if isinstance(fields, UnreadableRecord):
            yield fields
        elif len(fields) > len(header):
            yield UnreadableRecord("more fields than the header has", str(fields)[:RAW_CHARS])
        elif fields:
            yield dict(zip_longest(header, fields))


def _fields(
    lines: _Lines, delimiter: str, width: int, notes: Counter[str]
) -> list[str] | UnreadableRecord | None:
    """The fields of the next record; None at the end. width: number of fields; 0 for that of the header."""
    lines.begin()
    try:
        fields = next(csv.reader(lines, delimiter=delimiter, strict=True), None)
    except csv.Error:
        pass
    else:
        if len(lines.taken) < 2 or not _is_swallowed(lines.taken, fields or [], delimiter, width):
            notes[LINE_BREAKS] += len(lines.taken) > 1
            return fields

    first = lines.keep_first()
    try:  # other programs write \" for a quote inside a field
        fields = next(csv.reader([first.replace('\\"', '""')], delimiter=delimiter, strict=True))
    except csv.Error:
        fields = first.rstrip("\r\n").split(delimiter)
        notes[STRAY_QUOTES] += len(fields) == width
    if width and len(fields) != width:
        return UnreadableRecord(f"line {lines.number}: its quotes do not pair", first[:RAW_CHARS])
    return fields


def _is_swallowed(taken: list[str], fields: list[str], delimiter: str, width: int) -> bool:
    """Whether lines that two quotes enclose are rows of their own."""
    if not width:
        return False
    whole_rows = all(len(line.split(delimiter)) == width for line in taken)
    return len(fields) != width or (whole_rows and width > 1 and len(taken) >= ROWS_ALIKE)
