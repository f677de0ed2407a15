"""The gate of the fleet: samples of workers outside the cluster train the same run, bit for bit, whatever
dies meanwhile. Runs of the same options share one that nothing disturbs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.families import VISION
from tests.fleet.fault_run import FaultRun, is_committed
from tests.fleet.jobs import FleetJob, assert_same_run, without_workers
from tests.loops.jobs import REWARD, Job
from tests.servers import proxy, rclone
from tests.waiting import until
from trainer.config import RunConfig, override
from trainer.config.run_folder import read_roster
from trainer.system.exit_codes import EXIT_FENCED

pytestmark = [pytest.mark.slow, pytest.mark.long]
STEPS = 6


@pytest.fixture
def run_config(small_config, tmp_path_factory):
    """A run of a few steps that learns, evaluates, saves every second step, and keeps all that it sampled."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "reward.py").write_text(REWARD)

    def configured(name: str, *more: str) -> RunConfig:
        return override(
            small_config,
            [
                f"run.dir={folder / name / 'run'}",
                f"run.id={name}",
                f"run.max_steps={STEPS}",
                f"rewards.function={folder / 'reward.py'}:reward",
                "rewards.workers=1",
                "evaluation.every_steps=4",
                "evaluation.max_samples=6",
                "checkpoint.every_steps=2",
                "logging.keep_rollouts=true",
                "placement.workers_per_node=1",
                *more,
            ],
        )

    return configured


@pytest.fixture(scope="module")
def played() -> dict[tuple[str, ...], Job]:
    """Runs that nothing disturbs, by their options."""
    return {}


@pytest.fixture
def undisturbed(run_config, played, tmp_path_factory) -> Callable[..., Job]:
    """The run of some options whose own engines sample, played once."""

    def of_options(*options: str) -> Job:
        if options not in played:
            played[options] = without_workers(
                run_config("colocated", *options), tmp_path_factory.mktemp("colocated")
            )
        return played[options]

    return of_options


@dataclass(frozen=True)
class Case:
    """A run, and what happens to it."""

    name: str
    faults: tuple[str, ...]
    options: tuple[str, ...] = ()
    store: str = "folder"
    workers: int = 2


BF16 = ("model.dtype=bf16", "optimizer.learning_rate=1e-4")
PAIR = ("placement.workers_per_node=2", "rollout.tensor_parallel=2", "data.image_cache_gib=0.05")
ONE_AHEAD, TWO_AHEAD = ("rollout.staleness=1",), ("rollout.staleness=2",)
STOPS = ("workers stopped at random",)
CASES = [
    Case("on policy", ("liar", "worker killed", "objects forged")),
    Case("on policy, the trainer killed twice", ("trainer killed early", "trainer killed")),
    Case("bf16, two ranks", ("worker noticed", "objects forged"), (*BF16, "placement.workers_per_node=2")),
    Case("bf16, a server", ("worker killed", "objects forged", "network cut"), BF16, store="s3"),
    Case("adapters, one ahead", ("worker killed", "objects forged", "trainer killed"),
         (*BF16, "lora.rank=4", "rollout.staleness=1")),
    Case("an engine of two ranks", ("rank of an engine killed",), PAIR),
    Case("two ahead", STOPS, TWO_AHEAD),
    Case("two ahead, the trainer killed", ("worker stopped", "trainer killed"), TWO_AHEAD),
    Case("two ahead, a cable pulled", ("network stalled",), TWO_AHEAD, store="s3"),
    Case("two ahead, faults drawn", ("faults drawn",), (*TWO_AHEAD, "run.max_steps=40"), store="s3"),
    Case("one ahead", STOPS, ONE_AHEAD),
    Case("one ahead, a teacher", STOPS, (*ONE_AHEAD, "TEACHER"), workers=1),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_fed_by_workers_is_the_colocated_run(run_config, undisturbed, larger_model, tmp_path, case):
    """TEACHER: one judges what they sample; the trainer's ranks hold it, and no worker."""
    options = case.options
    if "TEACHER" in options:
        teacher = (f"algorithm.teacher={larger_model}", "algorithm.kl_coef=0", "algorithm.kl_target=0")
        options = (*options[:-1], *teacher)
    with contextlib.ExitStack() as stack:
        server = relay = None
        bucket = str(tmp_path / "stored")
        if case.store == "s3":
            server = stack.enter_context(rclone(tmp_path / "stored"))
            relay, bucket = stack.enter_context(proxy(server.port)), "s3://bucket/runs"
        run = FaultRun(run_config("fleet", *options), tmp_path / "fleet", bucket, server, relay)
        run.play(case.faults, case.workers)
    config, job = run.job.config, run.job
    ahead = config.rollout.staleness
    apart = ahead or run.starts > 1
    assert_same_run(undisturbed(*options), job, but=("mismatch/",) if apart else ())
    lines = job.metrics()[1:]
    assert all(("teacher/kl" in line) == bool(config.algorithm.teacher) for line in lines)
    if ahead:
        behind = [line.get("rollout/staleness_max") for line in lines]
        assert behind == [min(step, ahead) for step in range(config.run.max_steps)]
    if ahead and run.starts == 1:
        probed = {line["step"]: line["mismatch/kl"] for line in lines if "mismatch/kl" in line}
        assert probed.keys() == {4, 6} and max(probed.values()) < 1e-6, "engine and policy at evaluations"
    if case.options == PAIR:
        rows = {row["worker"]: row for row in read_roster(job.run_dir)}
        assert rows["w1"]["completions"] > 0
        assert rows["w1"]["why"] == "rank 1 of its engine has ended by signal 9"
        assert "fleet/sampled_2x-cpu" in run.trained()[-1]


@pytest.mark.parametrize(
    "family, dtype, ahead", [("qwen3_moe", "fp32", 0), ("qwen3_moe", "bf16", 0), ("qwen3_vl_moe", "fp32", 1)]
)
def test_a_mixture_of_experts_fed_by_workers_is_the_colocated_run(
    run_config, undisturbed, tmp_path, family_model, text_dataset, family, dtype, ahead
):
    options = [
        f"model.path={family_model(family)}",
        f"model.dtype={dtype}",
        f"rollout.staleness={ahead}",
        f"optimizer.learning_rate={'1e-4' if dtype == 'bf16' else '1e-3'}",
    ]
    if family not in VISION:
        options += [f"data.path={text_dataset}", "evaluation.every_steps=0"]
    run = FaultRun(run_config("fleet", *options), tmp_path / "fleet", str(tmp_path / "stored"))
    run.play(["worker killed"])
    assert_same_run(undisturbed(*options), run.job, but=("mismatch/",) if ahead else ())
    assert run.trained()[-1]["fleet/refused"] == 0


def test_two_heads(run_config, undisturbed, tmp_path):
    """The first trainer's driver is stopped, as by a machine that hangs, and goes on beside the second."""
    run = FaultRun(run_config("fleet"), tmp_path / "fleet", str(tmp_path / "stored"))
    old = run.job
    elsewhere = replace(old.config, run=replace(old.config.run, dir=str(tmp_path / "elsewhere/run")))
    new = FleetJob(elsewhere, tmp_path / "elsewhere", str(tmp_path / "stored"))
    try:
        run.add_worker()
        run.add_worker()
        run.start_trainer()
        run.live(until=lambda: is_committed(run) and old.in_phase("wait", 4))
        assert old.process
        os.kill(old.process.pid, signal.SIGSTOP)
        new.start()
        new.until(lambda: new.in_phase("wait", 3), 600)
        os.kill(old.process.pid, signal.SIGCONT)
        assert old.wait(300) == EXIT_FENCED, old.tail()
        assert new.wait(900) == 0, new.tail()
        until(lambda: all(worker.process.poll() == 0 for worker in old.workers.values()), 300)
    finally:
        old.kill()
        new.kill()
        old.end_workers()
    assert "attempt 1-" in old.tail() and "has taken over" in old.tail()
    assert_same_run(undisturbed(), new, since=last_step_of_old(new.log) + 1)


def last_step_of_old(log: Path) -> int:
    """The last step that the first trainer had sampled, which is read from the bucket and not written to the
    second one's disk."""
    text = log.read_text()
    resumed = re.search(r"^resumed from step (\d)$", text, re.MULTILINE)
    assert resumed and int(resumed[1]) >= 2, "the second trainer began anew"
    replayed = re.search(r"^rollout log: steps \d to (\d) are replayed", text, re.MULTILINE)
    logged = int(replayed[1]) if replayed else int(resumed[1])
    assert logged < STEPS
    return logged


def test_ranks_without_engines_need_not_divide_the_prompts(run_config, undisturbed, tmp_path):
    """Three ranks learn from four prompts a step, which a worker samples: the run of one rank, up to
    rounding."""
    ranks = "placement.workers_per_node=3"
    run = FaultRun(run_config("fleet", ranks), tmp_path / "fleet", str(tmp_path / "stored"))
    run.play([], workers=1)
    ours, theirs = run.job.metrics(), undisturbed().metrics()
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, against in zip(ours[1:], theirs[1:], strict=True):
        assert line["reward/mean"] == against["reward/mean"]
        for name in ("loss/total", "grad/norm", "kl/mean"):
            assert line[name] == pytest.approx(against[name], rel=1e-4, abs=1e-6), (line["step"], name)
