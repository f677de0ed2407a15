"""How a record is read: whatever the bytes are, a value of its type or one named error, in bounded memory."""

from __future__ import annotations

import dataclasses
import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.drivers.shared_record import SharedManifest
from recipes.records.run_record import RunRecord
from trainer.checkpoint.manifest import ManifestForm
from trainer.storage.attempt_record import (
    BeatRecord,
    EndRecord,
    FinalRecord,
    MachinesRecord,
    OriginRecord,
    StartRecord,
)
from trainer.system.records import MalformedRecord, convert_record, decode_record

RECORD = RunRecord(run_id="mine", recipe="demo", target="local", rented=[(1.0, 2.0, "x")], uploads={"a": "b"})
FILE = {"name": "state.json", "bytes": 1, "sha256": "0" * 64}
VALID = {
    RunRecord: dataclasses.asdict(RECORD),
    SharedManifest: {"launch": {"record": dataclasses.asdict(RECORD), "recipe_file": "x = 1"}},
    ManifestForm: {"run_id": "mine", "step": 2, "world_size": 1, "bytes": 1, "files": [FILE], "score": None}
    | {"data_fingerprint": "", "code_fingerprint": "", "config": {}, "attempt": "1-abcdef", "ahead": [3]},
    StartRecord: {"epoch": 1, "name": "1-abcdef", "launch": "x", "committed": 0, "host": "h"}
    | {"begun_unix_s": 1.0, "counted": [[1, ""]], "before": 0, "left": ""},
    OriginRecord: {"name": "1-abcdef", "step": 3},
    BeatRecord: {"name": "1-abcdef", "unix_s": 1.5},
    EndRecord: {"name": "1-abcdef", "code": 33, "why": "x", "left": "", "died_at_step": None, "unix_s": 1},
    FinalRecord: {"code": 2, "why": "two\nlines", "launch": "x"},
    MachinesRecord: {"launch": "x", "times": {"here": 2}},
}
"""Every type that `decode_record` reads from a bucket, besides those of the fleet (tests/fleet)."""

NASTY = [1e300, -1, 2**70, "x" * 5000, "\x1b[2J", "../x", "--x", "a\nb", "\u00b2", {}, []]
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from(NASTY)
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def places(value, path=()):
    """The paths of all values in JSON data."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


def changed(value, path, other):
    """The data with another value at a path."""
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], other)
    return copy


def check_read(data, kind):
    try:
        value = decode_record(data, kind, "the record")
    except MalformedRecord as error:
        assert str(error).startswith("the record ") and len(str(error)) < 500
        return
    again = convert_record(json.loads(msgspec.json.encode(value)), kind, "the record")
    assert again == value, "what is read is what it would be written as"


@pytest.mark.parametrize("kind", VALID, ids=lambda kind: kind.__name__)
def test_what_a_run_writes_is_read(kind):
    value = decode_record(json.dumps(VALID[kind]), kind, "the record")
    assert isinstance(value, kind)


@pytest.mark.parametrize("kind", VALID, ids=lambda kind: kind.__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_value_in_any_place_is_right_or_named(kind, data):
    path = data.draw(st.sampled_from(sorted(places(VALID[kind]), key=str)))
    if "config" in path:  # a dictionary of the run's own, which `from_dict` checks
        return
    check_read(json.dumps(changed(VALID[kind], path, data.draw(JSON))), kind)


@pytest.mark.parametrize("kind", VALID, ids=lambda kind: kind.__name__)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_bytes_are_right_or_named(kind, data):
    whole = json.dumps(VALID[kind]).encode()
    at = data.draw(st.integers(0, len(whole)))
    other = data.draw(st.binary(max_size=8))
    for bytes_ in (other, whole[:at], whole[:at] + other + whole[at + len(other) :]):
        check_read(bytes_, kind)


@pytest.mark.parametrize(
    "data", [b"", b"[" * 10**6, b'{"a":' * 10**5, b"\xff", b'"' + b"x" * (5 << 20) + b'"', b"7" * 10**6]
)
def test_what_is_deep_or_long_is_named(data):
    for kind in VALID:
        with pytest.raises(MalformedRecord, match="the record"):
            decode_record(data, kind, "the record")


@pytest.mark.parametrize("wrong", [True, 7.5, "7", -1, 2**60, math.inf, None])
def test_a_count_is_a_whole_number(wrong):
    record = VALID[OriginRecord] | {"step": wrong}
    with pytest.raises(MalformedRecord):
        decode_record(json.dumps(record), OriginRecord, "the record")
