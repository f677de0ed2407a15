"""A record of the folder `fleet` has the types and bounds of its kind, or is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fleet.jobs import about_run
from tests.fleet.test_verify import UNIT
from trainer.fleet.fleet_records import (
    AboutRun,
    Anchor,
    GivenUnit,
    HeadRecord,
    HeartbeatRecord,
    Mail,
    MailedUnit,
    RankPatch,
    WeightVersion,
)
from trainer.fleet.objects import Objects, worker_key
from trainer.fleet.worker_heartbeat import read_heartbeat
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.system.records import MalformedRecord

HEARTBEAT = HeartbeatRecord(
    worker="w0",
    attempt="1-a",
    state="idle",
    host="here",
    device="cpu",
    goodbye="",
    process=1,
    serial=2,
    pieces=3,
    rate=4.0,
    sent=(GivenUnit("000001", 1),),
)
RECORDS = {
    HeartbeatRecord: HEARTBEAT,
    HeadRecord: HeadRecord(
        attempt="7-3f2c1a",
        version=6,
        lineage="ab" * 32,
        anchors=(Anchor("checkpoint", 4, "cd" * 32, "6-aaaaaa"),),
        turned_away={"w1": "other kernels"},
    ),
    AboutRun: about_run("7-3f2c1a"),
    Mail: Mail((MailedUnit(UNIT, 2),)),
    WeightVersion: WeightVersion(6, "ab", 5, "cd", (RankPatch("weights/1-a/x.patch", 9, "ef"),), ()),
}


@pytest.fixture
def objects(tmp_path):
    return Objects(Storage(tmp_path / "run/fleet"), Seal("run", b"0123456789abcdef"))


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_is_read_as_it_was_written(objects, kind):
    objects.put_record("x", RECORDS[kind])
    assert objects.get_record("x", kind) == RECORDS[kind]
    assert objects.get_record("y", kind) is None


@pytest.mark.parametrize("name", msgspec.to_builtins(HEARTBEAT))
def test_a_heartbeat_lacks_no_field(objects, name):
    value = {key: field for key, field in msgspec.to_builtins(HEARTBEAT).items() if key != name}
    objects.put_record(worker_key("w0"), value)
    with pytest.raises(MalformedRecord, match=f"workers/w0.json is not .* field `{name}`"):
        read_heartbeat(objects, "w0")


UNIT_JSON = msgspec.to_builtins(UNIT)
WRONG: dict[str, tuple[type, dict[str, Any] | list[Any] | None]] = {
    "a list": (HeartbeatRecord, []),
    "null": (HeartbeatRecord, None),
    "text for a number": (HeartbeatRecord, {"serial": "2"}),
    "true for a number": (HeartbeatRecord, {"serial": True}),
    "a number beyond a counter": (HeartbeatRecord, {"serial": 1 << 63}),
    "a negative rate": (HeartbeatRecord, {"rate": -1.0}),
    "an unknown state": (HeartbeatRecord, {"state": "asleep"}),
    "half a pair": (HeartbeatRecord, {"sent": [["000001"]]}),
    "a number for a unit": (HeartbeatRecord, {"sent": [[1, 1]]}),
    "a unit whose name is a path": (HeartbeatRecord, {"sent": [["../../secret", 1]]}),
    "text for a list": (HeartbeatRecord, {"sent": "000001"}),
    "no goodbye": (HeartbeatRecord, {"goodbye": None}),
    "a checkpoint whose attempt is a path": (
        HeadRecord,
        {"anchors": [{"kind": "checkpoint", "version": 1, "lineage": "", "attempt": "../x"}]},
    ),
    "an unknown kind of anchor": (HeadRecord, {"anchors": [{"kind": "x", "version": 1, "lineage": ""}]}),
    "a version below 0": (HeadRecord, {"version": -1}),
    "an attempt that is a path": (HeadRecord, {"attempt": "../1-a"}),
    "a host that moves the cursor": (HeartbeatRecord, {"host": "\x1b[2J"}),
    "a lineage that is a path": (HeadRecord, {"lineage": "../../x"}),
    "reasons that are a list": (HeadRecord, {"turned_away": ["w0"]}),
    "a configuration that is a list": (AboutRun, {"config": []}),
    "packages that are text": (AboutRun, {"packages": "vllm"}),
    "a layout of pairs": (AboutRun, {"layout": [[["embed", 1]]]}),
    "a layout that begins below 0": (AboutRun, {"layout": [[["embed", -1, 3]]]}),
    "a unit that is a path": (Mail, {"units": [{"unit": UNIT_JSON | {"name": "a/b"}, "turn": 1}]}),
    "a unit of no completion": (
        Mail,
        {"units": [{"unit": UNIT_JSON | {"samples_per_prompt": 0}, "turn": 1}]},
    ),
    "a prompt without a row": (Mail, {"units": [{"unit": UNIT_JSON | {"prompts": [{}]}, "turn": 1}]}),
    "an unknown split": (Mail, {"units": [{"unit": UNIT_JSON | {"split": "rows"}, "turn": 1}]}),
    "a patch of negative size": (
        WeightVersion,
        {"patches": [{"key": "weights/x", "bytes": -1, "sha256": ""}]},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_record_of_other_types_is_refused(objects, name):
    kind, changes = WRONG[name]
    value = msgspec.to_builtins(RECORDS[kind]) | changes if isinstance(changes, dict) else changes
    objects.put_record("x", value)
    with pytest.raises(MalformedRecord, match="x is not what a run writes"):
        objects.get_record("x", kind)


@pytest.mark.parametrize("body", [b'{"rate": NaN}', b'{"rate": -Infinity}', b"[" * 100_000, b"\xff", b""])
def test_what_is_no_json_is_refused(objects, body):
    objects.put("x", body)
    with pytest.raises(MalformedRecord):
        objects.get_record("x", HeartbeatRecord)


def test_a_heartbeat_under_another_s_name_is_refused(objects):
    objects.put_record(worker_key("w1"), HEARTBEAT)
    with pytest.raises(MalformedRecord, match="workers/w1.json is the heartbeat of w0"):
        read_heartbeat(objects, "w1")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(list(RECORDS)), data=st.data())
def test_any_value_of_any_field_is_a_record_or_refused(tmp_path_factory, kind, data):
    objects = Objects(
        Storage(tmp_path_factory.getbasetemp() / "fuzz/fleet"), Seal("run", b"0123456789abcdef")
    )
    value = msgspec.to_builtins(RECORDS[kind])
    value[data.draw(st.sampled_from(sorted(value)))] = data.draw(JSON)
    objects.put_record("x", value)
    try:
        assert isinstance(objects.get_record("x", kind), kind)
    except MalformedRecord as error:
        assert "x is not what a run writes" in str(error)
