"""The record of attempts on real stores, with and without conditional puts; two attempts at once; the
budget."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import servers
from tests.checkpoint.synthetic import attempt, configure, cut, finish, holds, save, steps_in, whole, writers
from trainer.checkpoint.__main__ import main
from trainer.checkpoint.attempt import AttemptFenced, Attempts, Machine, RunIsFinal
from trainer.checkpoint.manager import Checkpoints
from trainer.config import override
from trainer.storage import attempt_record
from trainer.storage.storage import Storage
from trainer.system.exit_codes import (
    EXIT_CONFIG,
    EXIT_ERROR,
    EXIT_FENCED,
    EXIT_GAVE_UP,
    EXIT_NODE_LOST,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_PREFLIGHT,
    EXIT_RAY,
)


@pytest.fixture(scope="module")
def rclone(tmp_path_factory):
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="module")
def moto():
    with servers.moto() as server:
        yield server


@pytest.fixture(params=["file", "rclone", "moto"])
def record(request, tmp_path):
    """The record on a disk, on a store that ignores the condition of a put, and on one that obeys it."""
    if request.param == "file":
        return Attempts(Storage(tmp_path / "attempts"))
    server = request.getfixturevalue(request.param)
    return Attempts(Storage(f"s3://bucket/{tmp_path.name}/attempts", env=server.env))


def test_a_newer_attempt_replaces_the_older_for_good(record):
    first = record.take(0)
    first.check()
    second = record.take(0)
    assert (first.epoch, second.epoch) == (1, 2)
    with pytest.raises(AttemptFenced, match=rf"attempt {first.name} is over: attempt {second.name}"):
        first.check()
    with pytest.raises(AttemptFenced):
        first.beat()
    second.beat()
    third = record.take(0)
    for old in (first, second):
        with pytest.raises(AttemptFenced):
            old.check()
    third.check()


def test_of_many_that_start_at_once_one_is_left(record):
    with ThreadPoolExecutor(6) as pool:
        taken = list(pool.map(lambda _: record.take(0), range(6)))
    alive = []
    for one in taken:
        try:
            one.check()
            alive.append(one)
        except AttemptFenced:
            pass
    assert len(alive) == 1 and alive[0].epoch == max(one.epoch for one in taken)


def objects(store: Storage) -> dict[str, str]:
    return {key: hashlib.sha256(store.get_bytes(key)).hexdigest() for key, _ in store.list()}


@pytest.mark.parametrize("server_name", ["rclone", "moto"])
def test_two_attempts_of_other_world_sizes_at_once(request, tmp_path, told, server_name, monkeypatch):
    """The older one continues on its own disk while the newer one works: it commits and deletes nothing any
    more."""
    server = request.getfixturevalue(server_name)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    url = f"s3://bucket/two-{server_name}"
    base = [f"checkpoint.remote={url}", "checkpoint.keep_last_remote=2"]
    one = override(configure(tmp_path / "one"), base)
    two = override(configure(tmp_path / "two"), base)
    store = Storage(f"{url}/test/checkpoints", env=server.env)
    record = Attempts(Storage(f"{url}/test/attempts", env=server.env))

    older = Checkpoints(one, "data", attempt=record.take(0), storage=store, say=told.append)
    older_ranks = writers(one, 2, storage=store)
    save(older, older_ranks, 2)
    # The older attempt has uploaded all of step 4, and is about to commit it, when the newer one starts.
    older.begin(4, {"step": 4})
    for writer in older_ranks:
        writer.start(4, cut(whole(400), writer.rank, 2), {}, attempt=older.attempt)
        writer.wait()

    newer = Checkpoints(two, "data", attempt=record.take(2), storage=store, say=told.append)
    assert newer.find().step == 2
    newer_ranks = writers(two, 1, storage=store)
    save(newer, newer_ranks, 4)
    committed = objects(store)
    with pytest.raises(AttemptFenced):
        finish(older, older_ranks)
    assert objects(store) == committed, "the older attempt wrote or deleted after it was replaced"
    with pytest.raises(AttemptFenced):
        save(older, older_ranks, 6)
    for key, digest in committed.items():
        assert objects(store)[key] == digest, "a committed object was changed"
    save(newer, newer_ranks, 6)
    newer.close()
    left = {key.split("/")[0] for key, _ in store.list() if key.endswith("manifest.json")}
    assert left == {"step-00000004", "step-00000006"}
    found = Checkpoints(
        override(two, [f"run.dir={tmp_path}/three"]), "data", storage=store, say=told.append
    ).find()
    assert found.step == 6 and found.manifest["attempt"] == newer.attempt and found.world_size == 1


def test_retention_leaves_what_a_person_put_there(tmp_path, told):
    config = configure(tmp_path, "checkpoint.keep_last=1", "checkpoint.keep_last_remote=1")
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    local, remote = tmp_path / "run/checkpoints", tmp_path / "remote/test/checkpoints"
    mine = []
    for root in (local, remote):
        for name in ("step-00000002.keep", "step-00000001.bak", "step-notes", "step-2", "step-000000001"):
            path = root / name / "file.txt"
            path.parent.mkdir(parents=True)
            path.write_text("mine")
            mine.append(path)
    for step in (2, 4, 6):
        save(checkpoints, ranks, step)
    assert all(path.read_text() == "mine" for path in mine)
    names = {p.name for p in local.iterdir() if p.name[5:].isdigit() and len(p.name) == 13}
    assert names == {"step-00000006"}
    assert steps_in(remote) == [6]


def test_a_checkpoint_of_another_run_is_not_deleted(tmp_path, told):
    config = configure(tmp_path, "checkpoint.keep_last=1", "checkpoint.keep_last_remote=1")
    other = override(config, ["run.id=other", f"run.dir={tmp_path}/run"])
    save(attempt(other, told), writers(other, 1), 1)
    (tmp_path / "remote/test/checkpoints").mkdir(parents=True, exist_ok=True)
    theirs = tmp_path / "remote/other/checkpoints/step-00000001"
    theirs.rename(tmp_path / "remote/test/checkpoints/step-00000001")
    checkpoints, ranks = attempt(config, told), writers(config, 1)
    for step in (2, 4):
        save(checkpoints, ranks, step)
    assert steps_in(tmp_path / "run/checkpoints") == steps_in(tmp_path / "remote/test/checkpoints") == [1, 4]


def test_the_older_layout_is_read(tmp_path, told):
    """A checkpoint whose files lie in the step's folder itself, as before attempts had folders."""
    config = configure(tmp_path)
    old = Checkpoints(config, "data", say=told.append)
    save(old, writers(config, 2), 2)
    assert (tmp_path / "remote/test/checkpoints/step-00000002/manifest.json").exists()
    moved = override(config, [f"run.dir={tmp_path}/fresh"])
    checkpoints = attempt(moved, told)
    assert holds(checkpoints.find(), 2)
    save(checkpoints, writers(moved, 1), 4)
    assert steps_in(tmp_path / "remote/test/checkpoints") == [2, 4]


# --- the budget ---------------------------------------------------------------------------------------------


def end(
    record: Attempts, committed_before: int, code: int | None, committed_after: int | None = None
) -> int | None:
    taken = record.take(committed_before, "launch")
    if code is None:
        return None
    return record.close(taken, code, "why", committed_before if committed_after is None else committed_after)


def test_failures_without_progress_end_the_run(record, capsys):
    record.max_restarts = 2
    assert end(record, 0, EXIT_ERROR) == EXIT_ERROR
    assert end(record, 0, EXIT_ERROR, committed_after=4) == EXIT_ERROR, (
        "it got further: the count starts again"
    )
    assert end(record, 4, EXIT_ERROR) == EXIT_ERROR
    assert end(record, 4, EXIT_ERROR) == EXIT_ERROR
    assert end(record, 4, EXIT_ERROR) == EXIT_GAVE_UP, "the first, and two restarts"
    assert "gives up at step 4: 3 attempts failed with no new checkpoint" in capsys.readouterr().out
    with pytest.raises(RunIsFinal, match="gives up at step 4") as final:
        record.take(4, "launch")
    assert final.value.code == EXIT_GAVE_UP
    with pytest.raises(RunIsFinal):
        record.take(4, "launch")
    assert record.final().code == EXIT_GAVE_UP
    record.take(4, "another launch from the desk").check()


def test_lost_machines_have_a_limit_of_their_own(record):
    record.max_restarts, record.max_losses = 1, 3
    for code in (EXIT_PREEMPTED, None, EXIT_NODE_LOST):
        end(record, 2, code)
    assert end(record, 2, EXIT_ERROR) == EXIT_ERROR, "a failure is counted apart"
    end(record, 2, None)
    with pytest.raises(RunIsFinal, match="4 attempts lost their machines"):
        record.take(2, "launch")


def test_preemptions_that_committed_cost_nothing(record):
    record.max_losses = 1
    for step in range(0, 20, 2):
        assert end(record, step, EXIT_PREEMPTED, step + 2) == EXIT_PREEMPTED
    record.take(20, "launch").check()


def die(record: Attempts, committed: int, step: int | None, code: int = EXIT_NODE_LOST) -> int:
    """An attempt that starts with `committed`, and of which a process dies at `step`."""
    taken = record.take(committed, "launch")
    return record.close(taken, code, "rank 3: out of memory?", committed, died_at_step=step)


def test_the_second_death_at_one_step_ends_the_run(record, capsys):
    assert die(record, 40, 41) == EXIT_NODE_LOST
    assert "failures 3, lost machines 9; one more death at step 41" in record.past()[-1].left
    assert end(record, 40, EXIT_PREEMPTED) == EXIT_PREEMPTED, "a machine that is taken away says nothing"
    assert end(record, 40, None) is None, "nor does one that vanishes"
    assert "lost machines 8; one more death at step 41" in record.past()[-1].left
    assert die(record, 40, 41) == EXIT_GAVE_UP
    said = capsys.readouterr().out
    assert "gives up at step 40: it has died twice at step 41 with no new checkpoint between" in said
    assert "rank 3: out of memory?" in said
    with pytest.raises(RunIsFinal):
        record.take(40, "launch")
    record.take(40, "another launch from the desk").check()


@pytest.mark.parametrize(
    "ends",
    [
        # (committed at the start and the end, step of the death, exit code) of each; the last gives up
        [(40, 40, step, EXIT_NODE_LOST) for step in (41, 43, 41, 42)] + [(40, 40, 42, EXIT_RAY)],
        [(0, 0, 0, EXIT_NODE_LOST)] * 2,
        [(20, 20, 25, EXIT_NODE_LOST), (20, 24, 25, EXIT_NODE_LOST), (24, 24, 25, EXIT_NODE_LOST)],
    ],
    ids=["other steps are the machines'", "before the first step", "a commit between two is progress"],
)
def test_deaths_of_processes(record, capsys, ends):
    codes = []
    for before, after, step, code in ends:
        taken = record.take(before, "launch")
        codes.append(record.close(taken, code, "rank 3: out of memory?", after, died_at_step=step))
    assert codes == [code for _, _, _, code in ends[:-1]] + [EXIT_GAVE_UP]
    where = f"at step {ends[-1][2]}" if ends[-1][2] else "at its start"
    assert f"it has died twice {where}" in capsys.readouterr().out


def test_machines_that_are_lost_at_one_step_are_only_counted(record):
    for _ in range(5):
        assert end(record, 40, EXIT_NODE_LOST) == EXIT_NODE_LOST


def test_an_attempt_of_an_older_version_is_read(record):
    record.write(
        "00000001",
        {"epoch": 1, "name": "1-a", "launch": "launch", "committed": 4, "host": "h", "begun_unix_s": 1.0},
    )
    record.write("00000001.end", {"name": "1-a", "code": EXIT_NODE_LOST, "why": "", "unix_s": 2.0})
    assert die(record, 4, 5) == EXIT_NODE_LOST
    assert record.past()[0].died_at_step is None


def test_an_error_that_no_restart_cures_ends_the_run_at_once(record):
    assert end(record, 0, EXIT_CONFIG) == EXIT_CONFIG
    with pytest.raises(RunIsFinal, match="why") as final:
        record.take(0, "launch")
    assert final.value.code == EXIT_CONFIG


def test_a_fenced_attempt_writes_nothing_at_its_end(record):
    old, _ = record.take(0), record.take(0)
    before = record.storage.list()
    assert record.close(old, EXIT_FENCED, "fenced", 0) == EXIT_FENCED
    assert record.storage.list() == before


@pytest.mark.parametrize("code", [EXIT_OK, EXIT_CONFIG, EXIT_GAVE_UP, EXIT_NODE_LOST])
def test_the_end_of_a_replaced_attempt_does_not_end_the_run(record, code):
    """It was replaced less than a beat ago, and has not heard of it."""
    old = record.take(0, "monday")
    living = record.take(0, "tuesday")
    before = record.storage.list()
    assert record.close(old, code, "no such option", 0) == EXIT_FENCED
    assert record.storage.list() == before and record.final() is None
    living.beat()
    assert record.take(0, "tuesday").epoch == 3


def test_whether_a_run_is_alive(record, monkeypatch):
    assert record.alive() is None
    taken = record.take(0)
    taken.beat()
    assert record.alive().name == taken.name
    with monkeypatch.context() as patch:
        patch.setattr(attempt_record, "ALIVE_S", -1.0)
        assert record.alive() is None, "silent for too long"
    record.close(taken, EXIT_PREEMPTED, "", 0)
    assert record.alive() is None


def test_whether_a_run_is_over(record):
    """As a machine asks that may come late to it, before it installs anything."""
    assert record.over() == "" == record.over("monday")
    first = record.take(0, "monday")
    assert record.over("monday") == ""
    record.close(first, EXIT_PREEMPTED, "", 0)
    assert record.over("monday") == "", "its platform starts it again"
    record.close(record.take(3, "monday"), EXIT_OK, "", 6)
    assert record.over("monday") == record.over() == "the run has reached its last step"
    assert record.over("tuesday") == "", "it is to sample for a launch that has not begun"
    again = record.take(6, "tuesday")
    assert record.over("tuesday") == record.over("monday") == ""
    record.close(again, EXIT_CONFIG, "no such option", 6)
    assert record.over("tuesday") == record.over() == "no such option"


def test_asking_whether_a_run_is_over_takes_no_training_stack():
    heavy = "{'numpy', 'torch', 'ray', 'transformers', 'vllm'}"
    asks = f"import sys, trainer.checkpoint.__main__; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stdout + done.stderr


def test_the_desk_asks_the_record(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "attempt": None,
        "host": None,
        "code": None,
        "left": None,
        "seen_unix_s": None,
        "alive": False,
        "final": None,
    }
    record = Attempts(Storage(tmp_path / "attempts"))
    name = record.take(0, "launch").name
    main([str(tmp_path)])
    told = json.loads(capsys.readouterr().out)
    assert (told["attempt"], told["alive"], told["code"]) == (name, True, None)
    end(record, 0, EXIT_CONFIG)
    main([str(tmp_path)])
    told = json.loads(capsys.readouterr().out)
    assert (told["alive"], told["code"], told["final"]) == (False, EXIT_CONFIG, [EXIT_CONFIG, "why"])


def test_the_commit_waits_for_a_store_that_is_away(tmp_path, told):
    """An outage while the epoch is read is no fencing: it is told, and the commit follows when the store is
    back."""
    with servers.rclone(tmp_path / "disk") as server, servers.proxy(server.port) as relay:
        env = servers.s3_environment(relay.port)
        config = override(configure(tmp_path), ["checkpoint.remote=s3://bucket/x"])
        store = Storage("s3://bucket/x/test/checkpoints", env=env)
        held = Attempts(Storage("s3://bucket/x/test/attempts", env=env)).take(0)
        checkpoints = Checkpoints(config, "data", attempt=held, storage=store, say=told.append)
        ranks = writers(config, 1, storage=store)
        relay.cut()
        threading.Timer(2.0, relay.restore).start()
        save(checkpoints, ranks, 2)
        assert (checkpoints.progress.failures, checkpoints.progress.safe) == (0, 2)


def test_a_machine_that_fails_its_checks_again_and_again_ends_the_run(record, capsys):
    bad = [Machine("pod-1", ("GPU-a", "GPU-b")), Machine("pod-2", ("GPU-c",)), Machine("pod-3", ("GPU-b",))]
    left = [record.count(0, "first", EXIT_PREFLIGHT, "NVLink 3 of 18 down", [machine]) for machine in bad]
    assert left == [EXIT_PREFLIGHT] * 3, "three machines by their names; two by their GPUs"
    assert record.count(0, "first", EXIT_PREFLIGHT, "NVLink 3 of 18 down", bad[:2]) == EXIT_GAVE_UP
    said = capsys.readouterr().out
    assert (
        said.count("\n") == 1 and "machine pod-1 has failed its checks 3 times" in said and "NVLink" in said
    )
    assert record.count(0, "second", EXIT_PREFLIGHT, "", bad[:1]) == EXIT_PREFLIGHT, (
        "a new launch counts anew"
    )


def test_a_start_that_fails_early_replaces_only_what_its_engine_has_ended(record):
    held = record.take(0, "first")
    held.beat()
    assert record.count(0, "second", EXIT_PREFLIGHT, "port 6379 is taken") == EXIT_PREFLIGHT
    held.check()
    assert record.count(0, "first", EXIT_PREFLIGHT, "") == EXIT_PREFLIGHT
    with pytest.raises(AttemptFenced):
        held.check()


def store_dates(storage, clock, monkeypatch):
    """The store stamps what it is given by this clock."""
    dates = {}

    def stamped(method):
        def write(key, data):
            dates[key] = clock[0]
            return method(key, data)

        return write

    monkeypatch.setattr(storage, "put_bytes", stamped(storage.put_bytes))
    monkeypatch.setattr(storage, "create", stamped(storage.create))
    monkeypatch.setattr(storage, "written_s", dates.get)


def test_a_machines_clock_that_is_a_day_off_costs_no_hours(record, monkeypatch):
    right = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: right() - 86400)
        taken = record.take(0, "launch")
    record.close(taken, EXIT_PREEMPTED, "", 0)
    assert record.spent_s("launch") < 60


def test_a_forged_number_costs_no_start_an_hour(record, capsys):
    """One object far above the others: the store is not asked for all the numbers below it."""
    record.take(0, "launch")
    forged = {"epoch": 99999999, "name": "99999999-abcdef", "launch": "launch", "committed": 0, "host": "x"}
    record.write("99999999", forged | {"begun_unix_s": 1.0})
    for name in ("0000000\u00b2", "00000002.end.end", "9" * 12):
        record.storage.put_bytes(f"{name}.json", b"{}")
    asked = []
    get = record.storage.get_bytes
    record.storage.get_bytes = lambda *given: asked.append(given) or get(*given)
    assert record.take(0, "launch").epoch == 2 and len(asked) < 20
    assert record.spent_s("launch") < 3600
    assert "99999999.json follows no other attempt" in capsys.readouterr().err


def test_the_hours_of_a_launch_are_counted_over_its_attempts(record, monkeypatch):
    """Attempts that ended count, and one that was killed; another launch begins anew."""
    record.max_hours = 10
    clock = [1_000_000.0]
    store_dates(record.storage, clock, monkeypatch)

    def attempt_of(hours: float, code: int | None) -> int | None:
        taken = record.take(int(clock[0]), "launch")
        clock[0] += 3600 * hours
        if code is None:
            taken.beat()
            return None
        return record.close(taken, code, "why", int(clock[0]))

    assert attempt_of(4, EXIT_PREEMPTED) == EXIT_PREEMPTED
    assert attempt_of(3, None) is None
    clock[0] += 3600 * 50  # nothing was rented
    assert attempt_of(2, EXIT_NODE_LOST) == EXIT_NODE_LOST
    assert attempt_of(0.8, EXIT_PREEMPTED) == EXIT_GAVE_UP, "10 minutes are left: a start would take them"
    with pytest.raises(RunIsFinal, match=r"have taken 9.8 h, and budget.max_hours is 10") as final:
        record.take(99, "launch")
    assert final.value.code == EXIT_GAVE_UP
    record.take(99, "resumed from the desk").check()
    assert record.spent_s("launch") == 0


@pytest.mark.parametrize("damage", [b"{", b"[]", b'{"begun_unix_s": "x"}', b'{"begun_unix_s": NaN}'])
def test_hours_are_counted_past_a_damaged_record(tmp_path, damage):
    record = Attempts(Storage(tmp_path / "attempts"), max_hours=10)
    for _ in range(3):
        record.close(record.take(0, "launch"), EXIT_PREEMPTED, "", 0)
    (tmp_path / "attempts" / "00000002.json").write_bytes(damage)
    assert record.spent_s("launch") < 1
