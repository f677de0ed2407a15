"""Checkpoints in a store that answers in small pages, lags, or loses what it has acknowledged."""

from __future__ import annotations

import shutil

import pytest

from tests import servers
from tests.checkpoint.synthetic import again, attempt, configure, holds, resend, save, writers
from tests.lying_store import lying_store
from trainer.checkpoint import attempt as attempts
from trainer.checkpoint.attempt import AttemptFenced, Attempts
from trainer.checkpoint.manifest import manifests_there
from trainer.checkpoint.shard_reader import ShardReader
from trainer.config import override
from trainer.system.errors import StorageError


@pytest.fixture(scope="module")
def moto():
    with servers.moto() as server:
        yield server


@pytest.fixture
def store(moto):
    with lying_store(moto.port) as lying:
        yield lying


@pytest.fixture
def config(store, tmp_path, monkeypatch):
    """A run of two ranks whose bucket is the lying store's."""
    for name, value in servers.s3_environment(store.port).items():
        monkeypatch.setenv(name, value)
    remote = f"checkpoint.remote=s3://bucket/{tmp_path.name}"
    return configure(tmp_path, "placement.workers_per_node=2", "checkpoint.keep_last_remote=9", remote)


def fresh(config):
    """The node is lost: what is left is the store."""
    shutil.rmtree(config.run.dir)


def test_a_listing_in_pages_is_read_to_its_end(store, config, told):
    """Pages of three keys, where a checkpoint has ten: none is overlooked, by a resume or by retention."""
    store.page = 3
    first = attempt(config, told)
    ranks = writers(config, 2)
    for step in (2, 4, 6):
        save(first, ranks, step)
    assert first.progress.safe == 6 and store.listings > 30
    fresh(config)
    assert holds(again(config, told).find(), 6, 2)
    last = attempt(override(config, ["checkpoint.keep_last_remote=1"]), told)
    assert last.find().step == 6
    save(last, writers(config, 2), 8)
    assert list(manifests_there(last.storage)[0]) == [8]
    assert all(key.startswith("step-00000008/") for key, _ in last.storage.list()), "nothing is left over"
    assert last.attempt.startswith("2-")


def test_a_listing_that_lags_hides_no_attempt(store, config):
    """A node that sees the record of a minute ago takes no number that is taken, and is not fenced."""
    record = Attempts.of(config)
    record.take(0)
    store.remember()
    assert record.newest().attempt.epoch == 1
    older = record.take(0)
    newer = record.take(0)
    assert (older.epoch, newer.epoch) == (2, 3)
    newer.check()
    with pytest.raises(AttemptFenced):
        older.check()


def test_a_listing_that_lags_delays_no_commit_and_deletes_nothing(store, config, told):
    checkpoints = attempt(config, told)
    ranks = writers(config, 2)
    save(checkpoints, ranks, 2)
    store.remember()
    for step in (4, 6):
        save(checkpoints, ranks, step)
    assert (checkpoints.progress.failures, checkpoints.progress.safe) == (0, 6)
    store.stale = False
    assert sorted(manifests_there(checkpoints.storage)[0]) == [2, 4, 6]
    fresh(config)
    assert holds(again(config, told).find(), 6, 2)


def test_what_a_listing_still_shows_may_be_gone(store, config, told):
    checkpoints = attempt(config, told)
    ranks = writers(config, 2)
    for step in (2, 4):
        save(checkpoints, ranks, step)
    store.remember()
    checkpoints.storage.list()
    checkpoints.storage.delete([key for key, _ in checkpoints.storage.list() if "00000004" in key])
    fresh(config)
    assert holds(again(config, told).find(), 2, 2)


@pytest.mark.parametrize("shown", ["nothing", "not the newest"])
def test_a_listing_that_hides_checkpoints_starts_no_run_anew(store, config, told, shown):
    """It answers 200, and a start that believed it would train from step 0 and prune what is there."""
    first = attempt(config, told)
    ranks = writers(config, 2)
    if shown == "nothing":
        store.empty = True
    for step in (2, 4):
        save(first, ranks, step)
        if shown != "nothing" and step == 2:
            store.remember()
            first.storage.list()
    fresh(config)
    with pytest.raises(StorageError, match=r"lists nothing newer than step .* and keeps step-0000000"):
        attempts.start_attempt(config, "again")
    assert Attempts.of(config).alive().name == first.attempt, "the desk sees that it lives"
    store.stale = store.empty = False
    assert attempts.start_attempt(config, "again").epoch == 2
    assert holds(again(config, told).find(), 4, 2)


@pytest.mark.parametrize(
    ("fault", "what", "told_of"),
    [
        ("loses", ".safetensors", "is not whole in the store"),
        ("loses", "rank-00001-of-00002.json", "is not whole in the store"),
        ("loses", "state.json", "is not whole in the store"),
        # as many bytes as were sent: a store that keeps no checksum does not see it
        ("spoils", ".safetensors", "keeps other bytes of"),
        ("spoils", "rank-00001-of-00002.json", "keeps other bytes of"),
        ("spoils", "/manifest.json", "keeps other bytes of"),
    ],
)
def test_a_file_that_is_acknowledged_and_not_kept_holds_up_the_commit(
    store, config, told, fault, what, told_of
):
    checkpoints = attempt(config, told)
    ranks = writers(config, 2)
    if fault == "loses":  # what a rank sends first is read back
        save(checkpoints, ranks, 2)
    setattr(store, fault, what)
    save(checkpoints, ranks, 4)
    assert checkpoints.progress.safe != 4 and any(told_of in text for text in told), told
    setattr(store, fault, "")
    if fault == "loses":
        assert store.lost and resend(checkpoints, ranks) == 4
    else:
        save(checkpoints, ranks, 6)
    newest = checkpoints.progress.safe
    assert newest == (4 if fault == "loses" else 6)
    fresh(config)
    assert holds(again(config, told).find(), newest, 2)


def test_a_manifest_that_is_acknowledged_and_lost_is_no_commit(store, config, told):
    """What is older would be dropped for a checkpoint that the store does not have."""
    checkpoints = attempt(override(config, ["checkpoint.keep_last=1"]), told)
    ranks = writers(config, 2)
    save(checkpoints, ranks, 2)
    store.loses = "manifest.json"
    save(checkpoints, ranks, 4)
    assert len(store.lost) == 1 and checkpoints.progress.safe == 2
    assert checkpoints.retention.local_steps() == [2, 4], "the older one stays here, too"
    assert any("manifest.json, which it took" in text for text in told)
    store.loses = ""
    assert resend(checkpoints, ranks) == 4
    assert checkpoints.progress.safe == 4


def test_a_store_that_keeps_nothing_ends_the_start(store, config, monkeypatch):
    monkeypatch.setattr(attempts, "MOST_NUMBERS", 5)
    store.loses = ".json"
    with pytest.raises(StorageError, match="keeps nothing of what it acknowledges"):
        Attempts.of(config).take(0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_file_of_the_right_size_whose_end_is_zeros_is_never_used(store, config, told, world_size):
    """Each file in turn, as an upload leaves it that broke on the store's side."""
    checkpoints = attempt(config, told)
    ranks = writers(config, 2)
    save(checkpoints, ranks, 2)
    save(checkpoints, ranks, 4)
    there = checkpoints.storage
    inside = f"step-00000004/{checkpoints.attempt}"
    files = [key for key, _ in there.list(inside) if not key.endswith(".sha256")]
    assert len(files) >= 6
    for key in files:
        whole = there.get_bytes(key)
        there.put_bytes(key, whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
        fresh(config)
        now = again(config, told)

        def load(found):
            reader = ShardReader(found)
            for name in reader.names():
                for kind in reader.kinds(name):
                    reader.read(kind, name)
            return holds(found, found.step, world_size)

        found, equal = now.restore(load)
        assert (found.step, equal) == (2, True), key
        there.put_bytes(key, whole)
    fresh(config)
    assert again(config, told).find().step == 4


def test_runs_whose_ids_begin_alike_share_nothing(config, told):
    """`x`, `x-1` and `x-10` in one bucket: checkpoints, attempts, retention."""
    runs = []
    for name in ("x", "x-1", "x-10"):
        one = override(config, [f"run.name={name}", f"run.id={name}", f"run.dir={config.run.dir}/{name}"])
        runs.append((override(one, ["checkpoint.keep_last_remote=1"]), len(runs)))
    for one, number in runs:
        for _ in range(number + 1):
            checkpoints = attempt(one, told)
        ranks = writers(one, 2)
        for step in (2, 4 + 2 * number):
            save(checkpoints, ranks, step)
    fresh(config)
    for one, number in runs:
        newest = Attempts.of(one).newest()
        assert newest.attempt.epoch == number + 1
        now = again(one, told)
        assert list(manifests_there(now.storage)[0]) == [4 + 2 * number]
        found = now.find()
        assert found.manifest["run_id"] == one.run_id and holds(found, 4 + 2 * number, 2)


def test_a_commit_that_the_store_lost_later_falls_back(config, told):
    """Acknowledged, listed, committed, and gone a day later."""
    checkpoints = attempt(config, told)
    ranks = writers(config, 2)
    for step in (2, 4):
        save(checkpoints, ranks, step)
    key = next(key for key, _ in checkpoints.storage.list("step-00000004") if key.endswith(".safetensors"))
    checkpoints.storage.delete([key])
    fresh(config)
    now = again(config, told)
    assert holds(now.find(), 2, 2)
    assert any("is damaged or missing, in the store too" in text for text in told)
