"""A stranger who may write to the bucket of a run with a key decides nothing of what is trained: each kind of
object is forged and given to its real readers."""

from __future__ import annotations

import io
import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.synthetic import (
    SHAPES,
    attempt,
    configure,
    holds,
    save,
    spoil_file,
    steps_in,
    whole,
    writers,
)
from tests.checkpoint.test_rollout_log import equal, graded, write
from trainer.checkpoint.attempt import Attempts
from trainer.checkpoint.course import check_resumable
from trainer.checkpoint.manifest import CorruptCheckpoint, every_manifest, pack, unpack
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.config import ConfigError, override
from trainer.fleet.fleet_records import Anchor
from trainer.fleet.weight_mirror import fill_from_anchor
from trainer.storage import seal
from trainer.storage.attempt_record import (
    AttemptRecord,
    EndRecord,
    FinalRecord,
    MachinesRecord,
    OriginRecord,
    StartRecord,
)
from trainer.storage.seal import FIELD, KEY_VARIABLE, Seal

KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    seal._of_run.cache_clear()
    return configure(tmp_path, "fleet.workers=only", "checkpoint.keep_last_remote=9")


@pytest.fixture
def told():
    return []


@pytest.fixture
def remote(tmp_path):
    return tmp_path / "remote/test"


def unsigned(path) -> dict[str, Any]:
    value = json.loads(path.read_bytes())
    del value[FIELD]
    return value


# --- rollout logs -------------------------------------------------------------------------------------------


@pytest.fixture
def logged(config, told):
    """The log of an attempt that has sampled steps 1 and 2; a new one reads them on a fresh disk."""

    def new(disk: str) -> RolloutLog:
        held = Attempts.of(config).take(0)
        return RolloutLog(
            override(config, [f"run.dir={config.run.dir}-{disk}"]), "data", attempt=held, say=told.append
        )

    first = new("one")
    write(first, 1, 2)
    first.close()
    return first, new


def rewritten(data: bytes, **about: Any) -> bytes:
    """A log that says something else of itself, as anybody can make it."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        arrays = dict(archive)
    said = json.loads(arrays["about"].tobytes()) | about
    arrays["about"] = np.frombuffer(json.dumps(said).encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, **arrays)  # ty: ignore[invalid-argument-type]
    return out.getvalue()


@pytest.mark.parametrize("how", ["copied", "copied and signed as it was", "of a later attempt", "rewritten"])
def test_a_rollout_log_of_a_stranger_is_not_replayed(logged, remote, how):
    first, new = logged
    mine = remote / f"rollouts/step-00000001/{first.place.attempt_name}.npz"
    data = mine.read_bytes()
    steps = [1, 2]
    match how:
        case "copied":
            forged, steps = remote / f"rollouts/step-00000003/{first.place.attempt_name}.npz", [1, 2, 3]
            data = rewritten(data, step=3)
        case "copied and signed as it was":
            forged, steps = remote / f"rollouts/step-00000003/{first.place.attempt_name}.npz", [1, 2, 3]
        case "of a later attempt":
            forged = remote / "rollouts/step-00000001/999-abcdef.npz"
            data = rewritten(data, attempt="999-abcdef", epoch=999)
        case _:
            forged, data = mine, rewritten(data, stats={"reward": 1.0})
    forged.parent.mkdir(exist_ok=True)
    forged.write_bytes(data)
    log = new("two")
    assert log.open(0) == steps
    read = {step: log.read(step) for step in steps}
    if how == "rewritten":
        assert read == {1: None, 2: None}, "what follows is sampled again too"
    else:
        assert all(equal(read[step], graded(step)) for step in (1, 2)) and read.get(3) is None
    place = f"{forged.relative_to(remote)}"
    assert log.place.seal.refused == {place}


def test_a_signed_log_is_read_by_who_has_no_key(logged, remote):
    first, _ = logged
    path = remote / f"rollouts/step-00000002/{first.place.attempt_name}.npz"
    with np.load(path, allow_pickle=False) as archive:
        assert json.loads(archive["about"].tobytes())["step"] == 2
    local = (first.place.folder / "step-00000002.npz").read_bytes()
    assert (
        Seal("test", KEY.encode()).signed_archive(f"rollouts/{path.parent.name}/{path.name}", local)
        == path.read_bytes()
    )


# --- the record of attempts ---------------------------------------------------------------------------------


FORGED_RECORDS = {
    "final": {"code": 38, "why": "give up", "launch": "one"},
    "00000002": {
        "epoch": 2,
        "name": "2-abcdef",
        "launch": "one",
        "committed": 9,
        "host": "x",
        "begun_unix_s": 1.0,
    },
    "00000001.from": {"name": "1-abcdef", "step": 0},
    "00000001.end": {"name": "1-abcdef", "code": 2},
    "machines": {"launch": "one", "times": {"here": 99}},
}


KINDS: dict[str, Any] = {
    "": StartRecord,
    "from": OriginRecord,
    "end": EndRecord,
    "final": FinalRecord,
    "machines": MachinesRecord,
}


@pytest.mark.parametrize("signed", ["not signed", "by another key", "no signature at all"])
@pytest.mark.parametrize("name", FORGED_RECORDS)
def test_a_record_of_a_stranger_is_passed_over(config, remote, name, signed, capsys):
    record = Attempts.of(config)
    held = record.take(0, "one")
    value = FORGED_RECORDS[name]
    value = value | ({"name": held.name} if name.startswith("00000001") else {})
    match signed:
        case "by another key":
            value = Seal("test", b"x" * 32).signed_json(f"attempts/{name}.json", value)
        case "no signature at all":
            value = value | {FIELD: 7}
    (remote / f"attempts/{name}.json").write_text(json.dumps(value))
    kind = KINDS[name.partition(".")[2] or name.strip("0123456789")]
    assert AttemptRecord(record.storage).get(name, kind) is not None, "a desk without the key only shows it"
    assert record.get(name, kind) is None
    held.check()  # no newer attempt has begun
    second = record.take(0, "one")
    assert second.epoch == (3 if name == "00000002" else 2)
    with pytest.raises(Exception, match="has taken over"):
        held.check()
    assert f"attempts/{name}.json" in record.seal.refused
    assert capsys.readouterr().err.count(f"signature: attempts/{name}.json of run test") == 1


# --- checkpoints --------------------------------------------------------------------------------------------


@pytest.fixture
def saved(config, told):
    """The run's checkpoints of steps 2 and 4, in the store alone."""
    checkpoints = attempt(config, told)
    ranks = writers(config, 2)
    for step in (2, 4):
        save(checkpoints, ranks, step)
    shutil.rmtree(config.run.dir)
    return checkpoints


def test_a_signed_checkpoint_is_resumed_and_read_without_a_key(saved, config, told):
    assert holds(attempt(config, told).find(), 4)
    open_run = override(config, ["fleet.workers=off"])
    assert holds(attempt(open_run, told).find(), 4)


@pytest.mark.parametrize("how", ["unsigned", "moved", "of a later step"])
def test_a_manifest_of_a_stranger_is_no_checkpoint(saved, config, remote, told, how):
    """A forged manifest names other files, or other steps than those whose logs are replayed."""
    folder = remote / f"checkpoints/step-00000004/{saved.attempt}"
    path = folder / "manifest.json"
    match how:
        case "unsigned":
            manifest = unpack(path.read_bytes())
            assert manifest
            path.write_bytes(pack(manifest | {"score": 1.0}))
        case "moved":
            shutil.copy(folder.parent.parent / f"step-00000002/{saved.attempt}/manifest.json", path)
        case _:
            shutil.copytree(folder, later := remote / f"checkpoints/step-00000006/{saved.attempt}")
            manifest = unpack(path.read_bytes())
            assert manifest
            path = later / "manifest.json"
            path.write_bytes(pack(manifest | {"step": 6}))
    now = attempt(config, told)
    found = now.find()
    assert holds(found, 4 if how == "of a later step" else 2)
    place = str(path.relative_to(remote))
    assert Seal.of(config).refused == {place}
    save(now, writers(config, 2), 8)  # nothing of the run's own is dropped for it
    assert {step for step, _ in every_manifest(now.storage, Seal.of(config))[0]} >= {2, 8}


def test_where_none_is_signed_the_run_does_not_begin_anew(saved, config, remote, told):
    for path in (remote / "checkpoints").rglob("manifest.json"):
        path.write_text(json.dumps(unsigned(path)))
    with pytest.raises(ConfigError, match="2 checkpoints in its bucket, .* none.*fleet.workers=off"):
        check_resumable(config, "data")
    with pytest.raises(ConfigError, match="of which it has signed none"):
        attempt(config, told).find()


# --- what a worker begins with ------------------------------------------------------------------------------


class Host:
    """A worker's copy of the weights, without a model around it."""

    whole = True

    def __init__(self) -> None:
        self.tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("how", ["manifest", "weights", "index"])
def test_a_worker_does_not_begin_with_a_strangers_checkpoint(config, remote, told, how):
    checkpoints = attempt(config, told)
    save(checkpoints, writers(config, 2), 2)
    full = whole(2)
    shutil.rmtree(config.run.dir)
    anchor = Anchor("checkpoint", 2, "", checkpoints.attempt)
    fill_from_anchor(host := Host(), config, anchor)  # ty: ignore[invalid-argument-type]
    assert all(torch.equal(host.tensors[name].view(-1), full[name]["master"]) for name in SHAPES)
    shutil.rmtree(config.run.dir)
    folder = remote / f"checkpoints/step-00000002/{checkpoints.attempt}"
    match how:
        case "manifest":
            manifest = unpack((folder / "manifest.json").read_bytes())
            assert manifest
            (folder / "manifest.json").write_bytes(pack(manifest))
        case "index":
            path = folder / "rank-00000-of-00002.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"extra": {}}))
        case _:
            spoil_file(folder / "rank-00000-of-00002.safetensors", "flip", -5)
    with pytest.raises(CorruptCheckpoint, match="not signed with the run's key|sha256|damaged from byte 0"):
        fill_from_anchor(Host(), config, anchor)  # ty: ignore[invalid-argument-type]


def test_a_run_without_a_key_writes_what_it_always_wrote(tmp_path, told, monkeypatch):
    """Its seal changes nothing; a key in the environment alone makes no run one with a key."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    config = configure(tmp_path)
    assert Seal.of(config) is seal.OPEN and not seal.OPEN
    value, data = {"a": 1}, b"data"
    assert seal.OPEN.signed_json("x", value) is value and seal.OPEN.signed_archive("x", data) is data
    save(attempt(config, told), writers(config, 1), 2)
    assert steps_in(tmp_path / "remote/test/checkpoints") == [2]
