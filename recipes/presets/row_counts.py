"""How many rows a data file has, read with the standard library alone: `launch.py plan` has nothing else."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WHOLE_BYTES = 1 << 30
"""Largest .json document that is read to be counted, since it is one value and is parsed whole."""
MAGIC = b"PAR1"
NUM_ROWS = 3
"""Number of the field with the rows in Parquet's FileMetaData."""
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
"""Types of Thrift's compact protocol, in which Parquet's footer is written."""


def rows_in(path: Path) -> int | None:
    """Rows of a file, by its ending as `launch.py data prepare` reads it; None where they cannot be
    counted."""
    try:
        match path.suffix:
            case ".jsonl" | ".ndjson":
                with path.open("rb") as file:
                    return sum(1 for line in file if line.strip())
            case ".csv" | ".tsv":
                return _records(path, "\t" if path.suffix == ".tsv" else ",")
            case ".json":
                return _objects(json.loads(path.read_bytes())) if path.stat().st_size < WHOLE_BYTES else None
            case ".parquet":
                return _parquet(path)
    except (OSError, ValueError, IndexError, csv.Error, RecursionError):
        return None  # preparing says what is wrong with it
    return None


def _records(path: Path, delimiter: str) -> int:
    """Records below a header; one may go over several lines."""
    csv.field_size_limit(1 << 30)  # images may be inside, in base64
    with path.open(newline="", encoding="utf-8-sig") as file:
        records = sum(1 for record in csv.reader(file, delimiter=delimiter) if record)
    return max(0, records - 1)


def _objects(whole: Any) -> int:
    """Rows of a document: a list, an object with one list of objects inside, or objects by their id."""
    if isinstance(whole, list):
        return len(whole)
    if not isinstance(whole, dict):
        return 1
    lists = [
        value for value in whole.values() if isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    return len(lists[0]) if len(lists) == 1 else len(whole)


def _parquet(path: Path) -> int | None:
    """The rows that a Parquet file's footer names; None where it is no such file."""
    with path.open("rb") as file:
        file.seek(-8, 2)
        size, magic = int.from_bytes(file.read(4), "little"), file.read(4)
        if magic != MAGIC:
            return None
        file.seek(-8 - size, 2)
        return next((value for field, value in _fields(Footer(file.read(size))) if field == NUM_ROWS), None)


class Footer:
    """Bytes in Thrift's compact protocol, read from front to back."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def byte(self) -> int:
        """The next byte."""
        self.at += 1
        return self.data[self.at - 1]

    def number(self) -> int:
        """The next whole number: seven bits a byte, the lowest first."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def signed(self) -> int:
        """The next whole number that may be negative: its lowest bit is the sign."""
        value = self.number()
        return (value >> 1) ^ -(value & 1)


def _fields(footer: Footer) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a struct; values that are no whole number are passed over as None."""
    field = 0
    while header := footer.byte():
        field = field + (header >> 4) if header >> 4 else footer.signed()
        yield field, _value(footer, header & 0x0F)


def _value(footer: Footer, kind: int) -> int | None:
    match kind:
        case _ if kind in (I16, I32, I64):
            return footer.signed()
        case _ if kind == BYTE:
            footer.at += 1
        case _ if kind == DOUBLE:
            footer.at += 8
        case _ if kind == BINARY:
            size = footer.number()
            footer.at += size
        case _ if kind in (LIST, SET):
            _skip_list(footer)
        case _ if kind == STRUCT:
            for _ in _fields(footer):
                pass
        case _ if kind == MAP:
            raise ValueError("Parquet's footer has no maps")
    return None


def _skip_list(footer: Footer) -> None:
    header = footer.byte()
    size = header >> 4 if header >> 4 < 15 else footer.number()
    for _ in range(size):
        if header & 0x0F in (TRUE, FALSE):
            footer.at += 1
        else:
            _value(footer, header & 0x0F)
