"""How a record is read that lies where others may write: in a bucket, in a run's folder, on a server.

What such a record holds is a stranger's words. `decode_record` makes a typed value of them, or a named
error: msgspec's strict types hold for every field, sizes and ranges stand beside the fields (`Name`, `Line`,
`Count`, `UnixTime` ...), and nothing else gets in. A bad record costs itself and no other.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

MOST_BYTES = 4 << 20
"""The largest record, where nothing else is said: a manifest of a large run has some hundred KiB."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=200)]
"""A word that may become a part of a path, of a key or of a command line: it never begins with a dash."""
Line = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z", max_length=4096)]
"""A text that may be shown: without line breaks and other control characters."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
UnixTime = Annotated[float, Meta(ge=0, le=2**36)]
"""Seconds since 1970, up to the year 4147; 0 where a time is not known."""
Amount = Annotated[float, Meta(ge=0, le=1e9)]
"""Dollars or hours."""

Record = TypeVar("Record")


class MalformedRecord(ValueError):
    """A record that is not what its readers rely on, named with what is wrong."""


def decode_record(data: bytes | str, kind: type[Record], name: str, most_bytes: int = MOST_BYTES) -> Record:
    """The record as a value of its type (a msgspec Struct or a dataclass with annotated fields).

    name: of the object, for the error. Raises MalformedRecord for what is too large, is no JSON, or has
    another form.
    """
    if len(data) > most_bytes:
        raise MalformedRecord(f"{name} has {len(data):,} bytes, and such a record has {most_bytes:,} at most")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedRecord(f"{name} is not what a run writes: {error}") from None


def convert_record(value: Any, kind: type[Record], name: str) -> Record:
    """The same for what was parsed before, such as a part of a record that was decoded as a whole."""
    try:
        return msgspec.convert(value, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedRecord(f"{name} is not what a run writes: {error}") from None
