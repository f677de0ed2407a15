"""The rollout log: what comes back is what was sampled, of this run and history only, and nothing is kept for
ever."""

import math
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.synthetic import ARCHIVE_DAMAGE, configure, logged_steps, spoil_archive
from tests.learning.one_rank import same
from trainer.algorithm.traces import ImageRef, Outcome, completed_trace
from trainer.checkpoint.attempt import Attempts
from trainer.checkpoint.rollout_archive import GradedStep, trace_columns, traces_of
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.config import override
from trainer.storage.storage import Storage

LOGPROBS = [struct.unpack("f", struct.pack("f", x))[0] for x in (-0.1, -1e-30, -17.25, 0.0)]


def graded(step, groups=3, of=2):
    """Ragged groups with images' placeholders, an empty completion, and text that no file encoding likes."""
    samples = []
    for group in range(groups):
        prompt = [151652, *[151655] * (300 * group), 151653, step]
        for index in range(of):
            ids = list(range(step, step + 4 * index * (group + 1)))
            logprobs = [LOGPROBS[i % 4] for i in range(len(ids))]
            text = f"Ünï \ud83d {group}.{index}\n\0"
            samples.append(
                completed_trace(
                    prompt,
                    ids,
                    group=group,
                    row=7 * group,
                    index=index,
                    learned_earlier=[1, 2][: group % 3],
                    logprobs=[*LOGPROBS[: group % 3], *logprobs],
                    images=(ImageRef(7 * group, 0),) * min(group, 2),
                    version=step - 1,
                    end=("length", "stop", "turns")[(index + group) % 3],
                    text=text,
                )
            )
    outcomes = [Outcome("correct", 1.0, 0.5, 1 / 3), *[Outcome("wrong", 0, -0.0, 1e-17)] * (len(samples) - 1)]
    return GradedStep(samples, outcomes, {"reward/algebra_fraction": 1 / 7})


def equal(a, b) -> bool:
    """Whether two steps are equal to the bit."""
    traces = zip([*a.traces, *a.waiting], [*b.traces, *b.waiting], strict=True)
    return all(same(x, y) for x, y in traces) and (a.outcomes, a.stats) == (b.outcomes, b.stats)


@pytest.fixture
def config(tmp_path):
    return configure(tmp_path)


@pytest.fixture
def start(config, told):
    """Starts the next attempt of the run; `disk` is the node's."""
    logs = []

    def started(disk="run", **others):
        mine = override(config, [f"run.dir={config.run.dir}-{disk}"])
        held = Attempts(Storage(f"{config.checkpoint.remote}/{config.run_id}/attempts")).take(0)
        logs.append(RolloutLog(mine, others.get("data", "data"), attempt=held, say=told.append))
        return logs[-1]

    yield started
    for log in logs:
        log.close()


def write(log, *steps, floor=0):
    for step in steps:
        log.write(step, graded(step), floor)
        log._pool.submit(int).result()  # what was handed over before it is in the store


def replayed(log, step):
    return {at: log.read(at) for at in log.open(step)}


@pytest.mark.parametrize("disk", ["run", "fresh"])
def test_what_was_sampled_comes_back_to_the_bit(start, disk):
    write(start(), 1, 2, 3)
    log = start(disk)
    found = replayed(log, 0)
    assert list(found) == [1, 2, 3] and all(equal(found[step], graded(step)) for step in found)
    assert math.copysign(1, graded(1).outcomes[1].format) == -1.0
    assert log.metrics() == {"perf/replayed_completions": 18.0, "perf/rollout_log_failures": 0.0}
    assert log.read(4) is None and log.open(2) == [3] and log.open(3) == []


def test_a_log_of_the_second_format_is_read_for_a_checkpoint_and_by_a_desk_and_never_replayed(config, told):
    """golden/rollout-2.npz: `graded(3)`, as the revision before segments wrote it."""
    log = RolloutLog(config, "data", say=told.append)
    log.place.folder.mkdir(parents=True)
    path = log.place.folder / "step-00000003.npz"
    shutil.copyfile(Path(__file__).with_name("golden") / "rollout-2.npz", path)
    assert log.open(2, needed=[3]) == [3]
    found = log.read(3)
    assert found is not None and equal(found, graded(3)) and found.waiting == ()
    ((step, read),) = logged_steps(log.place.folder)
    assert step == 3 and equal(read, found)
    assert log.open(2) == []
    log.close()


def test_what_waits_comes_back_with_the_versions_of_its_tokens(start):
    waiting = []
    for trace in graded(2).traces:
        tokens = len(trace.completion)
        pieces = [(trace.shared, 0), (trace.shared + 2, 1), (trace.shared + 5, 3)]
        segments = tuple(piece for piece in pieces if piece[0] < trace.shared + tokens)
        waiting.append(replace(trace, group=trace.group + 3, segments=segments, end="cut"))
    step = replace(graded(1), waiting=waiting)
    start().write(1, step)
    log = start("run")
    assert equal(replayed(log, 0)[1], step)
    log = start("run")
    log.open(1, needed=[1])
    found = log.waiting()
    assert all(same(one, other) for one, other in zip(found, waiting, strict=True))
    assert found[5].token_versions.tolist() == [0] * 2 + [1] * 3 + [3] * 7
    assert found[0].token_versions.tolist() == [] and found[0].versions == (-1, -1)


def test_columns_that_older_code_wrote_are_passed_over():
    """It logged which experts computed the tokens."""
    traces = graded(1).traces
    columns = trace_columns(traces) | {"routes": np.zeros((3, 2), np.uint8), "routed": np.ones(3, bool)}
    again = traces_of(columns, [trace.text for trace in traces])
    for before, after in zip(traces, again, strict=True):
        assert np.array_equal(before.tokens, after.tokens) and before.segments == after.segments


def test_another_run_configuration_dataset_or_code_is_not_replayed(start, config, told, monkeypatch):
    write(start(), 1)
    log = start("run", data="others")
    assert log.open(0) == [1], "the store's are read when their turn comes"
    assert (
        log.read(1) is None
        and "data_fingerprint" in told[-1]
        and log.metrics()["perf/rollout_log_failures"] == 1
    )
    monkeypatch.setattr("trainer.checkpoint.rollout_log.code_fingerprint", lambda: "changed")
    log = start()
    log.open(0)
    assert log.read(1) is None and "code_fingerprint" in told[-1]


def test_a_run_that_must_not_resume_replays_nothing(start, config):
    write(start(), 1)
    afresh = override(config, [f"run.dir={config.run.dir}-run", "checkpoint.resume=never"])
    assert RolloutLog(afresh, "data").open(0) == []


@pytest.mark.parametrize("damage", ARCHIVE_DAMAGE)
def test_damage_is_sampled_again_and_so_is_all_that_follows(start, told, damage):
    log = start()
    write(log, 1, 2, 3)
    for path in (
        log.place.folder / "step-00000002.npz",
        *log.place.folder.parent.parent.rglob("step-00000002/*.npz"),
    ):
        spoil_archive(path, damage, "token_ids")
    log = start()
    log.open(0)
    assert equal(log.read(1), graded(1))
    assert log.read(2) is None and "step 2 cannot be replayed" in told[-1]
    assert log.read(3) is None, "it was sampled after what is lost"


@pytest.mark.parametrize("damage", ARCHIVE_DAMAGE)
def test_damage_here_is_fetched_from_the_store(start, damage):
    log = start()
    write(log, 1)
    spoil_archive(log.place.folder / "step-00000001.npz", damage, "logprobs")
    found = replayed(start(), 0)
    assert list(found) == [1] and equal(found[1], graded(1))


def test_an_attempt_that_was_replaced_is_no_part_of_the_history(start, config):
    first = start("one")
    write(first, 1, 2, 3)
    second = start("two")
    assert second.open(1) == [2, 3]
    write(second, 2)  # it could not read the first one's, say
    write(first, 4)  # fenced: its disk has it, the store does not
    assert not list(Storage(first.place.storage.url).list("step-00000004"))
    assert start("three").open(1) == [2], "step 3 was sampled by weights that are no longer this run's"
    assert start("one").open(1) == [2]


def test_what_no_restart_needs_goes_and_what_is_not_ours_stays(start):
    log = start()
    write(log, 1, 2, 3)
    (log.place.folder / "step-00000001.npz.keep").write_text("mine")
    log.place.storage.put_bytes("notes/step-1", b"mine")
    write(log, 4, floor=2)
    assert sorted(p.name for p in log.place.folder.iterdir()) == [
        "step-00000001.npz.keep",
        "step-00000003.npz",
        "step-00000004.npz",
    ]
    keys = [key.partition("/")[0] for key, _ in log.place.storage.list()]
    assert keys == ["notes", "step-00000003", "step-00000004"]


def test_a_log_that_cannot_be_written_is_counted_and_costs_nothing_else(start, told):
    log = start()
    log.place.folder.parent.mkdir(parents=True, exist_ok=True)
    log.place.folder.write_text("in the way")
    log.write(1, graded(1))
    assert log.metrics()["perf/rollout_log_failures"] == 1 and "step 1 is not logged" in told[-1]
