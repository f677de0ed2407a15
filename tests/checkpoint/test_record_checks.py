"""What the record of attempts holds is checked before use, and liveness is judged by the store's clock."""

from __future__ import annotations

import json
import os
import time

import pytest

from tests import servers
from tests.lying_store import lying_store
from trainer.checkpoint import __main__ as asked
from trainer.checkpoint.attempt import AttemptFenced, Attempts
from trainer.config import ConfigError
from trainer.storage import __main__ as storage_command
from trainer.storage.attempt_record import ALIVE_S
from trainer.storage.storage import Storage, probe_store
from trainer.storage.stores import QUICK
from trainer.system.errors import StorageError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_PREEMPTED, EXIT_STORAGE

BAD = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"7",
    b"{}",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"name": 3, "code": "0", "epoch": []}',
)


@pytest.fixture
def record(tmp_path):
    return Attempts(Storage(tmp_path / "attempts"))


def ask(tmp_path, capsys):
    """What the desk is told: (exit code, answer, complaint)."""
    code = asked.main([str(tmp_path)])
    said = capsys.readouterr()
    return code, json.loads(said.out) if code == 0 else {}, said.err


def aged(tmp_path, seconds):
    """All marks of the record as a store would show them that received them so long ago."""
    for path in (tmp_path / "attempts").iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.parametrize("data", BAD)
@pytest.mark.parametrize(
    "name", ["00000001", "00000002", "00000003", "00000002.end", "00000002.beat", "machines"]
)
def test_a_malformed_object_is_named_and_passed_over(tmp_path, record, capsys, name, data):
    first = record.take(0, "launch")
    record.close(first, EXIT_PREEMPTED, "gone", 0)
    second = record.take(2, "launch")
    second.beat()
    (tmp_path / f"attempts/{name}.json").write_bytes(data)
    newest = record.newest()
    assert newest is not None and newest.attempt.epoch == (1 if name == "00000002" else 2)
    assert ask(tmp_path, capsys)[0] == 0
    third = record.take(2, "launch")
    third.check()
    read = name not in ("00000001", "00000002.beat", "machines")  # what nobody needs to read is not
    assert not read or f"attempts/{name}.json is not what an attempt writes" in capsys.readouterr().err
    assert third.epoch == (4 if name == "00000003" else 3)
    with pytest.raises(AttemptFenced, match=f"attempt {third.name}"):
        second.check()
    assert record.close(third, EXIT_PREEMPTED, "gone", 2) == EXIT_PREEMPTED


@pytest.mark.parametrize(
    "change",
    [{"committed": "4"}, {"committed": -1}, {"committed": True}, {"begun_unix_s": "now"}, {"epoch": None},
     {"name": "9-3f2c1a"}, {"name": "../x"}, {"launch": None}, {"host": 7}, {"counted": [[1, "../x"]]},
     {"counted": {"1": 2}}, {"left": 3}],
)  # fmt: skip
def test_every_field_is_checked(tmp_path, record, change):
    held = record.take(0, "launch")
    path = tmp_path / "attempts/00000001.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert record.newest() is None and held.record.past() == []
    assert record.take(0, "launch").epoch == 2


@pytest.mark.parametrize("data", [*BAD, b'{"code": 2, "why": "x"}', b'{"code": 2, "why": "x", "launch": 3}'])
def test_a_malformed_end_of_the_run_is_no_yes(tmp_path, record, capsys, data):
    record.take(0, "launch")
    (tmp_path / "attempts/final.json").write_bytes(data)
    code, _, said = ask(tmp_path, capsys)
    assert (
        code == EXIT_CONFIG and "final.json is not what an attempt writes" in said and said.count("\n") == 1
    )
    with pytest.raises(ConfigError, match="delete it to let the run start again"):
        record.take(0, "launch")


@pytest.mark.parametrize("skew_s", [-300.0, -86400.0, 0.0, 3600.0, 86400.0])
def test_the_clock_of_the_runs_machine_does_not_matter(tmp_path, record, capsys, monkeypatch, skew_s):
    held = record.take(0, "launch")
    right = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: right() + skew_s)
        held.beat()
    assert ask(tmp_path, capsys)[1]["alive"] is True
    assert abs(ask(tmp_path, capsys)[1]["seen_unix_s"] - right()) < 5
    aged(tmp_path, ALIVE_S + 5)
    assert ask(tmp_path, capsys)[1]["alive"] is False
    assert record.alive() is None


@pytest.mark.parametrize("skew_s", [-7200.0, 7200.0])
def test_the_clock_of_the_desk_does_not_matter(tmp_path, record, capsys, monkeypatch, skew_s):
    record.take(0, "launch").beat()
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + skew_s)
    told = ask(tmp_path, capsys)[1]
    assert told["alive"] is True and abs(told["seen_unix_s"] - time.time()) < 5


def test_where_the_store_does_not_tell_the_time_nobody_knows(tmp_path, record, capsys, monkeypatch):
    record.take(0, "launch").beat()

    def refuse(self):
        raise ConfigError("the key has no right to do this: 403")

    monkeypatch.setattr(Storage, "clock_s", refuse)
    code, told, said = ask(tmp_path, capsys)
    assert code == 0 and told["alive"] is None and "the store's clock cannot be read" in said
    assert record.alive() is not None, "a node that cannot tell leaves what may be alive alone"


def test_the_probe_of_a_store_that_loses_it_is_one_line(tmp_path, capsys, monkeypatch):
    with servers.moto() as moto, lying_store(moto.port) as store:
        for name, value in servers.s3_environment(store.port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("trainer.storage.storage.secrets.token_hex", lambda count: "lost")
        store.loses = "probe-lost"
        with pytest.raises(StorageError, match="keeps nothing of what it acknowledges"):
            probe_store(f"s3://bucket/{tmp_path.name}", retry=QUICK)
        assert storage_command.main(["probe", f"s3://bucket/{tmp_path.name}"]) == EXIT_STORAGE
        assert capsys.readouterr().err.count("\n") == 1
