"""Records of data files, one dictionary after the other: JSONL, JSON, CSV, TSV and Parquet.

Numbers keep the digits they were written with: integers of any size, and decimals as text (`0.50` stays
`0.50`).
"""

from __future__ import annotations

import ast
import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources import separated
from data_prep.sources.row_source import RAW_CHARS, UnreadableRecord
from data_prep.sources.text_files import TextForm, bounded_lines, recognize
from trainer.config import ConfigError

ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
BATCH_ROWS = 64


def read(
    path: Path,
    text: TextForm = TextForm(),  # noqa: B008 - frozen
    notes: Counter[str] | None = None,
) -> Iterator[dict[str, Any] | UnreadableRecord]:
    """All records of a file, by its ending; what is remarkable about them is counted in `notes`.

    Raises ConfigError where the file as a whole cannot be read.
    """
    try:
        match path.suffix:
            case ".jsonl" | ".ndjson":
                yield from _lines(path, recognize(path, text))
            case ".json":
                yield from _document(path, recognize(path, text))
            case ".csv" | ".tsv":
                form = recognize(path, text)
                with form.open(path, newline="") as file:
                    yield from separated.records(file, form.delimiter, Counter() if notes is None else notes)
            case ".parquet":
                file = pq.ParquetFile(path)
                separated.refuse_repeats(file.schema_arrow.names)
                for batch in file.iter_batches(BATCH_ROWS):
                    yield from _rows(_shortest_decimals(batch))
            case _:
                raise ConfigError(f"{path}: not a data file that can be read; use {', '.join(ENDINGS)}")
    except separated.RepeatedColumn as error:
        raise ConfigError(f"{path}: {error}") from None
    except (pa.ArrowException, UnicodeError, csv.Error, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of the disk, and not of what pyarrow reads from it
        raise ConfigError(
            f"{path} is damaged or not what its name says ({str(error).splitlines()[0]})"
        ) from None


def parse_json(text: str) -> Any:
    """JSON with decimals kept as text. Raises ValueError, and for a key that an object has twice."""
    try:
        return json.loads(text, parse_float=str, object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def structure(text: str) -> Any:
    """A structure that is written as JSON, or as Python writes it; None for another text."""
    for read_text in (parse_json, ast.literal_eval):
        try:
            return read_text(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name!r} twice")
    return values


def _shortest_decimals(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch whose floats of 32 and 16 bits are text: 0.1 as a double is 0.10000000149011612."""
    columns = []
    for column in batch.columns:
        if pa.types.is_float16(column.type):  # its cast to text writes the digits of a double
            column = pa.array([None if v is None else str(np.float16(v)) for v in column.to_pylist()])
        wanted = _as_text(column.type)
        columns.append(column if wanted == column.type else column.cast(wanted))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | UnreadableRecord]:
    """The rows of a batch; one with a value that Python has none for costs itself alone."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:
        if batch.num_rows == 1:
            yield UnreadableRecord(str(error), "")
        for row in range(batch.num_rows) if batch.num_rows > 1 else ():
            yield from _rows(batch.slice(row, 1))


def _as_text(kind: pa.DataType) -> pa.DataType:
    """A type with text where it has floats of 32 bits."""
    if pa.types.is_float32(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_as_text(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_as_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_text(field.type)) for field in kind])
    return kind


def _lines(path: Path, form: TextForm) -> Iterator[dict[str, Any] | UnreadableRecord]:
    with form.open(path, newline="\n") as file:
        for line in bounded_lines(file):
            if not line.strip():
                continue
            try:
                yield _object(parse_json(line))
            except ValueError as error:
                yield UnreadableRecord(str(error), line[:RAW_CHARS])


def first_object(records: Iterable[Any]) -> dict[str, Any]:
    """The first record that could be read; empty if there is none."""
    for record in records:
        if isinstance(record, dict):
            return record
    return {}


def first_value(values: dict[str, Any], names: Sequence[str], default: Any = None) -> Any:
    """The first of the named values that is there and not empty."""
    for name in names:
        if values.get(name):
            return values[name]
    return default


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} where an object should be")
    return value


def _holds_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _document(path: Path, form: TextForm) -> Iterator[dict[str, Any] | UnreadableRecord]:
    """A list of objects, an object with one such list inside, or objects by their id."""
    try:
        with form.open(path, newline="\n") as file:
            whole = parse_json(file.read())
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON ({error}): one object per line belongs into a .jsonl"
        ) from None
    if isinstance(whole, dict):
        lists = list(filter(_holds_objects, whole.values()))
        whole = lists[0] if len(lists) == 1 else list(whole.values())
    for value in whole if isinstance(whole, list) else [whole]:
        try:
            yield _object(value)
        except ValueError as error:
            yield UnreadableRecord(str(error), str(value)[:RAW_CHARS])
