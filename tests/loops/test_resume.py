"""A real run of two ranks, killed in every phase and resumed: metrics and weights are those of a run never
killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import servers
from tests.checkpoint.synthetic import logged_steps, spoil
from tests.families import dtype
from tests.learning.one_rank import same
from tests.loops.fault_run import FaultRun, Kill, in_phase, in_save, placed, weights_of
from tests.loops.jobs import REWARD, Job
from trainer import config as c
from trainer.checkpoint.shard_reader import ShardReader
from trainer.system.exit_codes import EXIT_PREEMPTED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

STEPS = 8
TWO_VALUES = REWARD.replace("% 17) / 17", "% 2)")
"""One group of eight is flat, and replaced."""


@pytest.fixture(scope="module")
def base(tiny_model, mixed_dataset, tmp_path_factory):
    """The configuration that every run of this file shares, but for its folder."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "reward.py").write_text(TWO_VALUES)
    return c.RunConfig(
        run=c.Run(name="small", dir=str(folder / "undisturbed/run"), max_steps=STEPS),
        model=c.Model(path=str(tiny_model), dtype="fp32", gradient_checkpointing=False, min_pixels=784),
        data=c.Data(path=str(mixed_dataset), prompt_max_tokens=300),
        rollout=c.Rollout(
            prompts_per_step=4, samples_per_prompt=4, max_tokens=12, kv_cache_gib=0.25, sleep_level=0
        ),
        algorithm=c.Algorithm(
            micro_batch_tokens=400,
            kl_coef=0.01,
            kl_target=1e-3,
            kl_horizon=100,
            normalize_reward=True,
            refill_rounds=2,
            samples_per_update=16,
            epochs=2,
        ),
        optimizer=c.Optimizer(learning_rate=1e-3, schedule="cosine", warmup_steps=3, weight_decay=0.01),
        rewards=c.Rewards(function=f"{folder}/reward.py:reward", workers=1),
        evaluation=c.Evaluation(every_steps=4, max_samples=4),
        checkpoint=c.Checkpoint(every_steps=1, keep_last=STEPS, export_hf="end"),
        placement=c.Placement(workers_per_node=2, device="cpu"),
        logging=c.Logging(tensorboard=False, samples_per_step=0),
    )


@pytest.fixture(scope="module")
def undisturbed_runs(base, tmp_path_factory):
    """The finished run of a kind that nothing strikes; all cases of this file share it."""
    jobs: dict[str, Job] = {}

    def of_kind(kind: str) -> Job:
        if kind not in jobs:
            folder = tmp_path_factory.mktemp("undisturbed")
            jobs[kind] = Job(placed(c.override(base, KINDS[kind]), folder), folder).start()
            assert jobs[kind].wait(900) == 0, jobs[kind].tail()
            assert jobs[kind].left_over() == [], "processes are left over"
            lines = jobs[kind].metrics()
            assert [line["step"] for line in lines] == list(range(jobs[kind].config.run.max_steps + 1))
            assert all(line["grad/norm"] > 0 for line in lines[1:]), (
                "a run that learns nothing proves nothing"
            )
            CHECKS[kind](lines)
        return jobs[kind]

    return of_kind


@pytest.fixture(scope="module")
def undisturbed(undisturbed_runs):
    return undisturbed_runs("on policy")


def check_on_policy(lines: list[dict]) -> None:
    assert any(line["group/sampled"] > 4 for line in lines[1:]), "no group was replaced"
    assert len({line["kl/coef"] for line in lines[1:]}) > 1


def check_ahead(lines: list[dict]) -> None:
    assert [line.get("rollout/staleness_max") for line in lines[1:]] == [0, 1, *[2] * (STEPS - 2)]
    assert all(line["mismatch/kl"] < 1e-6 < line["staleness/kl"] for line in lines[3 : STEPS - 1])


def check_carried(lines: list[dict]) -> None:
    check_ahead(lines)
    assert all(line["rollout/carried_fraction"] > 0.5 for line in lines[2:])
    # In the newest segment the ratio is that of kernels alone.
    assert all(abs(line["staleness/age_0_ratio_max"] - 1) < 1e-3 for line in lines[1:])
    assert all(abs(line["staleness/age_2_ratio_max"] - 1) > 1e-3 for line in lines[3:])


AHEAD = ["rollout.staleness=2", "algorithm.refill_rounds=0"]
"""Sampled two steps ahead, which excludes new prompts for flat groups."""
KINDS = {
    "on policy": [],
    "short": ["run.max_steps=6"],
    "ahead": AHEAD,
    "carried": [*AHEAD, "rollout.tokens_per_step=4"],
}
"""Options of a run by its kind. `carried`: completions of 12 tokens at most grow by 4 in a phase."""
CHECKS = {
    "on policy": check_on_policy,
    "short": check_on_policy,
    "ahead": check_ahead,
    "carried": check_carried,
}


def has_logs(run: FaultRun, ahead: int) -> None:
    """The store had the logs that a checkpoint goes on from before it had the checkpoint."""
    store = run.folder / "store/small"
    newest = max((int(path.parents[1].name[5:]) for path in store.rglob("manifest.json")), default=0)
    logged = {int(path.parent.name[5:]) for path in store.glob("rollouts/step-*/*.npz")}
    assert not newest or ({newest + 1, newest + 2} if ahead else {newest}) <= logged


PHASES = [
    in_phase("rollout", 2),
    in_phase("grade", 3, fresh=True),
    in_phase("update", 5, fresh=True),
    in_phase("sync", 6, fresh=True),
    in_phase("eval", 7),
]
"""Each phase once, on nodes whose disk stays and on others."""
ANYWHERE = [
    in_phase("sync", 0),
    in_phase("rollout", 1),
    in_phase("grade", 1),
    in_phase("update", 1),
    in_save(2),
    in_phase("grade", 3),
    in_phase("update", 4),
    in_save(5),
    in_phase("sync", 6),
    in_phase("eval", 6),
]
"""The disk stays: what was sampled with weights that are gone is replayed or goes on, never sampled again."""


def lost(ahead: int) -> list[Kill]:
    """On nodes that are lost, each time."""
    check = {"check": lambda run: has_logs(run, ahead)}
    return [in_phase("update", 4, fresh=True, **check), in_phase("rollout", 5, fresh=True, **check)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "store", "kills"),
    [
        ("on policy", {"remote": "s3://bucket/runs", "keep_last": 2}, PHASES),
        ("ahead", {}, ANYWHERE),
        ("carried", {}, ANYWHERE),
        ("ahead", {"remote": "file://{}/store", "every_steps": 2}, lost(1)),
        ("carried", {"remote": "file://{}/store", "every_steps": 2}, lost(0)),
    ],
    ids=["every phase", "ahead", "carried", "ahead, nodes lost", "carried, nodes lost"],
)
def test_killed_anywhere_it_is_the_same_run(base, undisturbed_runs, tmp_path, kind, store, kills):
    store = {
        name: str(value).format(tmp_path) if name == "remote" else value for name, value in store.items()
    }
    config = placed(c.override(base, KINDS[kind]), tmp_path, **store)
    with servers.rclone(tmp_path / "disk") as server:
        FaultRun(config, tmp_path, server.env).play(kills, undisturbed_runs(kind))


@pytest.mark.long
def test_killed_around_a_save(base, undisturbed, tmp_path):
    local = tmp_path / "run/checkpoints"
    remote = tmp_path / "disk/bucket/runs/small/checkpoints"

    def writing(_) -> bool:
        return any(local.glob("step-*/.rank-*.partial"))

    def uploading(_) -> bool:
        """All of the newest checkpoint's shards are written, and the store lacks at least one of them."""
        folder = max(local.glob("step-*"), default=None)
        if folder is None or len(list(folder.glob("rank-*"))) < 4:
            return False
        return len(list((remote / folder.name).rglob("rank-*.safetensors"))) < 2

    def before_the_manifest(_) -> bool:
        """The store has all shards of a checkpoint, and no manifest."""
        folder = max(remote.glob("step-*"), default=None)
        if folder is None or len(list(folder.rglob("rank-*.sha256"))) < 4:
            return False
        return not list(folder.rglob("manifest.json"))

    def committed_locally_only(_) -> bool:
        kept = (path.parent.name for path in local.glob("*/manifest.json"))
        return any(not list((remote / name).rglob("manifest.json")) for name in kept)

    with servers.rclone(tmp_path / "disk") as server, servers.proxy(server.port) as relay:

        def slow(_) -> None:
            relay.bytes_per_s = 10e6

        def fast(_) -> None:
            relay.bytes_per_s = 0

        kills = [
            Kill(uploading, before=slow),
            Kill(before_the_manifest, fresh=True),
            Kill(committed_locally_only, check=fast),
            Kill(writing, fresh=True),
        ]
        config = placed(base, tmp_path, remote="s3://bucket/runs", keep_last=2, keep_last_remote=2)
        run = FaultRun(config, tmp_path, servers.s3_environment(relay.port))
        run.play(kills, undisturbed, floor=3)
    kept = sorted(path for path in remote.iterdir() if path.name.startswith("step-"))
    assert len(kept) == 2 and kept[-1].name == f"step-{STEPS:08d}"
    assert all(len(list(folder.glob("*/manifest.json"))) == 1 for folder in kept), "something is left over"


@pytest.mark.parametrize("killed", [(5,), pytest.param((2, 5), marks=pytest.mark.long)])
def test_no_logged_step_is_sampled_again(base, undisturbed_runs, tmp_path, killed):
    """Killed in updates far from a checkpoint, the node's disk lost once: updates are repeated, completions
    are not."""
    count = f"    open({str(tmp_path / 'graded')!r}, 'a').write('.')\n    return"
    (tmp_path / "reward.py").write_text(TWO_VALUES.replace("    return", count))
    undisturbed = undisturbed_runs("short")
    config = c.override(base, KINDS["short"])
    config = placed(config, tmp_path, every_steps=3, remote=f"file://{tmp_path}/store")
    config = replace(config, rewards=replace(config.rewards, function=f"{tmp_path}/reward.py:reward"))
    run = FaultRun(config, tmp_path)
    job = run.job

    def updating(step: int) -> Kill:
        sent = f"store/small/rollouts/step-{step:08d}/*.npz"

        def strikes_it(_: FaultRun) -> None:
            assert job.progress()["step"] == step

        return Kill(
            lambda _: job.in_phase("update", step) and any(tmp_path.glob(sent)), step == 5, check=strikes_it
        )

    run.play([updating(step) for step in killed], undisturbed)
    said = job.log.read_text()
    assert ("rollout log: steps 1 to 2 are replayed" in said) == (2 in killed)
    assert "rollout log: steps 4 to 5 are replayed" in said and "resumed from step 3" in said
    starts = re.findall(r"^ready [0-9.]+ s after the launch: launch .*, sync [0-9.]+$", said, re.MULTILINE)
    assert len(starts) == 1 + len(killed)
    groups = sum(line["group/sampled"] for line in undisturbed.metrics()[1:])
    # before step 1, after step 4 twice, after step 6; once more if killed before
    evaluated = 3 + len(killed)
    tried = 2 * (1 + len(killed))  # each start calls the function for one row, twice
    assert len((tmp_path / "graded").read_text()) == 4 * groups + 4 * evaluated + tried
    assert groups > 4 * config.run.max_steps, "none was replaced"
    old = list((job.run_dir / "rollouts").glob("step-0000000[1-3].npz"))
    assert not old, "no restart goes on from before step 3"


@pytest.mark.long
def test_after_a_long_notice_no_step_is_lost(base, undisturbed, tmp_path):
    """The step under way is finished and saved; nothing is left over, and the run ends as the undisturbed
    one."""
    run = FaultRun(placed(base, tmp_path, every_steps=5), tmp_path, {"SPOTRL_NOTICE_S": "60"})
    job = run.job.start()
    job.until(lambda: job.in_phase("update", 7))
    step = job.progress()["step"]
    assert job.process
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(60) == EXIT_PREEMPTED, job.tail()
    assert f"the run resumes from step {step}" in job.tail()
    assert job.left_over() == [], "processes are left over"
    assert job.start().wait(900) == 0, job.tail()
    assert f"resumed from step {step}" in job.tail(100_000)
    run.is_like(undisturbed)


@pytest.mark.long
def test_damage_that_only_one_rank_sees(base, undisturbed, tmp_path):
    """A fresh node, and in the store one rank's file is damaged: all ranks fall back together, none waits for
    it."""
    store = tmp_path / "store/small/checkpoints"
    for step in (6, 7):
        source = undisturbed.run_dir / f"checkpoints/step-{step:08d}"
        attempt = json.loads((source / "manifest.json").read_text())["manifest"]["attempt"]
        shutil.copytree(source, store / source.name / attempt)
    spoil(store / "step-00000007", "flip")
    run = FaultRun(placed(base, tmp_path, remote=f"file://{tmp_path}/store"), tmp_path)
    assert run.job.start().wait(300) == 0, run.job.tail()
    assert "resumed from step 6" in run.job.tail(100_000)
    run.is_like(undisturbed)


@pytest.mark.long
def test_elastic(base, undisturbed, tmp_path):
    """Two ranks' checkpoint continues with one rank, then two, then four: the same run but for rounding."""
    source = undisturbed.run_dir / "checkpoints"
    for step in (1, 2):
        shutil.copytree(source / f"step-{step:08d}", tmp_path / f"run/checkpoints/step-{step:08d}")
    for ranks, last in ((1, 3), (2, 4), (4, 5)):
        config = placed(base, tmp_path)
        config = replace(config, placement=replace(config.placement, workers_per_node=ranks))
        job, local = Job(config, tmp_path), tmp_path / "run/checkpoints"
        job.start().until(lambda at=local / f"step-{last:08d}/manifest.json": at.exists())
        job.kill()
        for folder in local.glob("step-*"):
            if folder.name > f"step-{last:08d}":
                shutil.rmtree(folder)
        assert f"resumed from step {last - 1}" in job.tail(100_000)
        mine, theirs = (ShardReader(folder / f"step-{last:08d}") for folder in (local, source))
        assert mine.world_size == ranks
        for name in theirs.names():
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                a, b = mine.read(kind, name), theirs.read(kind, name)
                assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()) + 1e-12), (
                    ranks,
                    kind,
                    name,
                )
        line, other = job.metrics()[last], undisturbed.metrics()[last]
        assert line["step"] == other["step"] == last
        for key in ("reward/mean", "loss/total", "grad/norm", "kl/mean", "optim/lr", "tokens/response_mean"):
            assert line[key] == pytest.approx(other[key], rel=1e-3, abs=1e-6), (ranks, key)


def whole_and_killed(config: c.RunConfig, folder: Path) -> tuple[Job, Job]:
    """A run, and the same one killed in the update of step 3 and started again: their metrics are equal."""
    whole, cut = (FaultRun(placed(config, folder / name), folder / name) for name in ("whole", "cut"))
    assert whole.job.start().wait(900) == 0, whole.job.tail()
    cut.play([in_phase("update", 3)], whole.job)
    return whole.job, cut.job


@pytest.mark.long
def test_a_killed_run_with_adapters_resumes_bit_for_bit(base, tmp_path):
    """Killed while it learns, it comes from its committed adapters to the metrics and the adapter of a whole
    run."""
    config = replace(base, lora=c.LoRA(rank=4), run=replace(base.run, max_steps=4))
    _, cut = whole_and_killed(config, tmp_path)
    assert (cut.run_dir / "hf/adapter_model.safetensors").exists()


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_a_killed_run_of_another_family_resumes_bit_for_bit(base, family_model, tmp_path, family):
    options = [f"model.path={family_model(family)}", f"model.dtype={dtype(family)}", "run.max_steps=4"]
    whole_and_killed(c.override(base, options), tmp_path)


@pytest.mark.long
def test_a_killed_distilled_run_asks_its_teacher_nothing_twice(base, larger_model, tmp_path):
    """Steps that the teacher judged before the kill keep its judgment: their files are not written again, and
    the run ends as one that nobody killed. Another teacher is refused."""
    teacher = tmp_path / "teacher"
    shutil.copytree(larger_model, teacher)
    options = [f"algorithm.teacher={teacher}", "algorithm.kl_coef=0", "algorithm.kl_target=0"]
    config = c.override(base, [*options, "run.max_steps=4"])
    config = replace(config, checkpoint=replace(config.checkpoint, every_steps=4))
    whole, cut = (Job(placed(config, tmp_path / name), tmp_path / name) for name in ("whole", "cut"))
    assert whole.start().wait(900) == 0, whole.tail()
    assert all(line["teacher/kl"] > 0 for line in whole.metrics()[1:])

    def judged() -> dict[str, int]:
        """When each step's judgment was written, by file."""
        files = cut.run_dir.glob("rollouts/step-*.npz")
        return {file.name: file.stat().st_mtime_ns for file in files if "teacher" in np.load(file).files}

    cut.start().until(lambda: cut.in_phase("update", 2) and len(judged()) == 2)
    before = judged()
    cut.kill()
    cut.start().until(lambda: cut.in_phase("update", 3) and len(judged()) == 3)
    after = judged()
    cut.kill()
    assert before.items() <= after.items()
    assert cut.start().wait(900) == 0, cut.tail()
    assert "rollout log: steps 1 to 3 are replayed" in cut.log.read_text()
    assert cut.metrics() == whole.metrics()
    assert weights_of(cut) == weights_of(whole)

    with (teacher / "model.safetensors").open("r+b") as weights:
        weights.seek(-4, os.SEEK_END)
        weights.write(b"\0\0\0\1")
    assert cut.start().wait(900) != 0
    assert "is not the one that the checkpoint learned from" in cut.log.read_text()


@pytest.mark.long
def test_a_limit_as_long_as_a_completion_changes_no_bit(base, undisturbed_runs, tmp_path):
    """All figures of the run that only samples ahead, and its weights."""
    config = c.override(base, [*AHEAD, "rollout.tokens_per_step=12"])
    job = Job(placed(config, tmp_path), tmp_path).start()
    assert job.wait(900) == 0, job.tail()
    for mine, theirs in zip(job.metrics(), undisturbed_runs("ahead").metrics(), strict=True):
        assert theirs.items() <= mine.items()
    assert weights_of(job) == weights_of(undisturbed_runs("ahead"))


@pytest.mark.long
def test_one_rank_carries_over_what_two_do(base, tmp_path):
    """At a learning rate that changes no weight: what two ranks sum, they round otherwise."""
    logs = []
    for ranks in (1, 2):
        options = ["optimizer.learning_rate=1e-30", f"placement.workers_per_node={ranks}", "run.max_steps=4"]
        config = c.override(base, [*KINDS["carried"], *options])
        job = Job(placed(config, tmp_path / str(ranks)), tmp_path / str(ranks)).start()
        assert job.wait(900) == 0, job.tail()
        logs.append(dict(logged_steps(job.run_dir / "rollouts")))
    one, two = logs
    assert list(one) == list(two) == [1, 2, 3, 4]
    for step in one:
        for name in ("traces", "waiting"):
            pairs = list(zip(getattr(one[step], name), getattr(two[step], name), strict=True))
            assert all(same(a, b) for a, b in pairs)
        assert {trace.end for trace in one[step].waiting} <= {"stop", "cut"}
    assert [len(trace.segments) for trace in one[3].traces].count(3) > 8
    assert any(trace.images for trace in one[3].traces if len(trace.segments) == 3)
