"""A real run of two ranks, killed in every phase and resumed: metrics and weights are those of a run never
killed."""

from __future__ import annotations

import hashlib
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
from tests.checkpoint.synthetic import spoil
from tests.families import dtype
from tests.loops.jobs import REWARD, Job
from trainer import config as c
from trainer.checkpoint.shard_reader import ShardReader
from trainer.system.exit_codes import EXIT_PREEMPTED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

STEPS = 12
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
        evaluation=c.Evaluation(every_steps=6, max_samples=4),
        checkpoint=c.Checkpoint(every_steps=1, keep_last=STEPS, export_hf="end"),
        placement=c.Placement(workers_per_node=2, device="cpu"),
        logging=c.Logging(tensorboard=False, samples_per_step=0),
    )


def placed(config, folder, **checkpoint):
    return replace(
        config,
        run=replace(config.run, dir=str(folder / "run")),
        checkpoint=replace(config.checkpoint, **checkpoint),
    )


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory):
    job = Job(base, tmp_path_factory.mktemp("undisturbed")).start()
    assert job.wait(900) == 0, job.tail()
    assert job.left_over() == [], "processes are left over"
    lines = job.metrics()
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert all(line["grad/norm"] > 0 for line in lines[1:]), "a run that learns nothing proves nothing"
    assert any(line["group/sampled"] > 4 for line in lines[1:]), "no group was replaced"
    assert len({line["kl/coef"] for line in lines[1:]}) > 1
    return job


def weights_of(job: Job) -> str:
    return hashlib.sha256((job.run_dir / "hf/model.safetensors").read_bytes()).hexdigest()


def kill_and_resume(job, undisturbed, plan, before=lambda name: None, floor=1) -> None:
    """Starts the job for every (name, condition, whether the next node is a fresh one), kills it there, then
    ends it.

    before(name) prepares the network; floor: the first kill waits for this step, so that there is something
    committed. After that metrics and weights must be those of the undisturbed run, and nothing may be left
    over.
    """
    for name, condition, fresh in plan:
        before(name)
        job.start()
        job.until(
            lambda at=floor: job.progress().get("step", 0) >= at and job.progress().get("phase") != "resume"
        )
        job.until(lambda condition=condition: condition() and job.frozen(condition))
        step = job.progress()["step"]
        job.kill()
        print(f"killed in {name} at step {step}")
        floor = max(1, step - 2)  # lost: the step under way, and one whose commit was cut off
        if fresh:
            shutil.rmtree(job.run_dir)
    before("")
    assert job.start().wait(900) == 0, job.tail()
    starts = re.findall(
        r"^(?:resumed from step (\d+)|starting from scratch)$", job.log.read_text(), re.MULTILINE
    )
    begun = [int(step or 0) for step in starts]
    assert len(begun) == len(plan) + 1 and sum(step > 0 for step in begun) >= len(plan) - 1
    for (name, _, fresh), before_it, after_it in zip(plan, begun, begun[1:], strict=False):
        # A disk that went with its node takes along what the store had not got yet.
        assert fresh or after_it >= before_it, f"the resume after {name} went back behind the one before"
    assert job.metrics() == undisturbed.metrics()
    assert weights_of(job) == weights_of(undisturbed)
    assert job.left_over() == []
    assert not list(job.run_dir.rglob("*.partial"))


@pytest.mark.long
def test_killed_in_an_update_on_a_node_that_is_lost(base, undisturbed, tmp_path):
    with servers.rclone(tmp_path / "disk") as server:
        job = Job(placed(base, tmp_path, remote="s3://bucket/runs", keep_last=2), tmp_path, server.env)
        kill_and_resume(job, undisturbed, [("update", lambda: job.in_phase("update", 5), True)])


@pytest.mark.long
def test_killed_in_every_other_phase(base, undisturbed, tmp_path):
    with servers.rclone(tmp_path / "disk") as server:
        job = Job(placed(base, tmp_path, remote="s3://bucket/runs", keep_last=2), tmp_path, server.env)
        plan = [
            ("generation", lambda: job.in_phase("rollout", 2), False),
            ("grading", lambda: job.in_phase("grade", 4), True),
            ("weight sync", lambda: job.in_phase("sync", 6), True),
            ("evaluation", lambda: job.in_phase("eval", 7), False),
        ]
        kill_and_resume(job, undisturbed, plan)


@pytest.mark.long
def test_killed_around_a_save(base, undisturbed, tmp_path):
    with servers.rclone(tmp_path / "disk") as server, servers.proxy(server.port) as relay:
        config = placed(base, tmp_path, remote="s3://bucket/runs", keep_last=2, keep_last_remote=2)
        job = Job(config, tmp_path, servers.s3_environment(relay.port))
        local = job.run_dir / "checkpoints"
        remote = tmp_path / "disk/bucket/runs/small/checkpoints"

        def writing() -> bool:
            return any(local.glob("step-*/.rank-*.partial"))

        def uploading() -> bool:
            """All of the newest checkpoint's shards are written, and the store lacks at least one of them."""
            folder = max(local.glob("step-*"), default=None)
            if folder is None or len(list(folder.glob("rank-*"))) < 4:
                return False
            return len(list((remote / folder.name).rglob("rank-*.safetensors"))) < 2

        def before_the_manifest() -> bool:
            """The store has all shards of a checkpoint, and no manifest."""
            folder = max(remote.glob("step-*"), default=None)
            if folder is None or len(list(folder.rglob("rank-*.sha256"))) < 4:
                return False
            return not list(folder.rglob("manifest.json"))

        def committed_locally_only() -> bool:
            return any(
                not list((remote / m.parent.name).rglob("manifest.json"))
                for m in local.glob("*/manifest.json")
            )

        def network(name: str) -> None:
            relay.bytes_per_s = 0 if name in ("", "mid-write") else 10e6

        plan = [
            ("mid-upload", uploading, False),
            ("before the manifest", before_the_manifest, True),
            ("committed locally only", committed_locally_only, False),
            ("mid-write", writing, True),
        ]
        kill_and_resume(job, undisturbed, plan, network, floor=4)
        kept = sorted(p for p in remote.iterdir() if p.name.startswith("step-"))
        assert len(kept) == 2 and kept[-1].name == f"step-{STEPS:08d}"
        assert all(len(list(folder.glob("*/manifest.json"))) == 1 for folder in kept), (
            "something is left over"
        )


@pytest.mark.parametrize("killed", [(8,), pytest.param((4, 8), marks=pytest.mark.long)])
def test_no_logged_step_is_sampled_again(base, undisturbed, tmp_path, killed):
    """Killed in updates far from a checkpoint, the node's disk lost once: updates are repeated, completions
    are not."""
    count = f"    open({str(tmp_path / 'graded')!r}, 'a').write('.')\n    return"
    (tmp_path / "reward.py").write_text(TWO_VALUES.replace("    return", count))
    config = placed(base, tmp_path, every_steps=5, remote=f"file://{tmp_path}/store")
    config = replace(config, rewards=replace(config.rewards, function=f"{tmp_path}/reward.py:reward"))
    job = Job(config, tmp_path)
    for step in killed:
        sent = f"store/small/rollouts/step-{step:08d}/*.npz"

        def updating(at=step, sent=sent):
            return job.in_phase("update", at) and any(tmp_path.glob(sent))

        job.start().until(lambda updating=updating: updating() and job.frozen(updating))
        job.kill()
        assert job.progress()["step"] == step
        if step == 8:
            shutil.rmtree(job.run_dir)
    assert job.start().wait(900) == 0, job.tail()
    said = job.log.read_text()
    assert ("rollout log: steps 1 to 4 are replayed" in said) == (4 in killed)
    assert "rollout log: steps 6 to 8 are replayed" in said and "resumed from step 5" in said
    starts = re.findall(r"^ready [0-9.]+ s after the launch: launch .*, sync [0-9.]+$", said, re.MULTILINE)
    assert len(starts) == 1 + len(killed)
    groups = sum(line["group/sampled"] for line in undisturbed.metrics()[1:])
    # before step 1, after step 6 twice, after step 12; once more if killed before
    evaluated = 3 + len(killed)
    tried = 2 * (1 + len(killed))  # each start calls the function for one row, twice
    assert len((tmp_path / "graded").read_text()) == 4 * groups + 4 * evaluated + tried
    assert groups > 4 * STEPS, "none was replaced"
    assert job.metrics() == undisturbed.metrics()
    assert weights_of(job) == weights_of(undisturbed)
    assert not list((job.run_dir / "rollouts").glob("step-0000000[1-5].npz")), (
        "no restart goes on from before step 5"
    )


@pytest.mark.long
def test_after_a_long_notice_no_step_is_lost(base, undisturbed, tmp_path):
    """The step under way is finished and saved; nothing is left over, and the run ends as the undisturbed
    one."""
    job = Job(placed(base, tmp_path, every_steps=5), tmp_path, {"SPOTRL_NOTICE_S": "60"}).start()
    job.until(lambda: job.in_phase("update", 8))
    step = job.progress()["step"]
    assert job.process
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(60) == EXIT_PREEMPTED, job.tail()
    assert f"the run resumes from step {step}" in job.tail()
    assert job.left_over() == [], "processes are left over"
    assert job.start().wait(900) == 0, job.tail()
    assert f"resumed from step {step}" in job.tail(100_000)
    assert job.metrics() == undisturbed.metrics()
    assert weights_of(job) == weights_of(undisturbed)


@pytest.mark.long
def test_damage_that_only_one_rank_sees(base, undisturbed, tmp_path):
    """A fresh node, and in the store one rank's file is damaged: all ranks fall back together, none waits for
    it."""
    store = tmp_path / "store/small/checkpoints"
    for step in (10, 11):
        source = undisturbed.run_dir / f"checkpoints/step-{step:08d}"
        attempt = json.loads((source / "manifest.json").read_text())["manifest"]["attempt"]
        shutil.copytree(source, store / source.name / attempt)
    spoil(store / "step-00000011", "flip")
    job = Job(placed(base, tmp_path, remote=f"file://{tmp_path}/store"), tmp_path)
    assert job.start().wait(300) == 0, job.tail()
    assert "resumed from step 10" in job.tail(100_000)
    assert job.metrics() == undisturbed.metrics()
    assert weights_of(job) == weights_of(undisturbed)


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
    whole, cut = (Job(placed(config, folder / name), folder / name) for name in ("whole", "cut"))
    assert whole.start().wait(900) == 0, whole.tail()
    cut.start().until(lambda: cut.in_phase("update", 3))
    cut.kill()
    assert cut.start().wait(900) == 0, cut.tail()
    assert "resumed from step" in cut.log.read_text()
    assert cut.metrics() == whole.metrics()
    return whole, cut


@pytest.mark.long
def test_a_killed_run_with_adapters_resumes_bit_for_bit(base, tmp_path):
    """Killed while it learns, it comes from its committed adapters to the metrics and the adapter of a whole
    run."""
    config = replace(base, lora=c.LoRA(rank=4), run=replace(base.run, max_steps=4))
    whole, cut = whole_and_killed(config, tmp_path)
    adapters = [(job.run_dir / "hf/adapter_model.safetensors").read_bytes() for job in (whole, cut)]
    assert adapters[0] == adapters[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "replays"),
    [("qwen3_vl_moe", False), ("qwen3_vl_moe", True), ("qwen3_5", False), ("qwen3_5_moe", True)],
)
def test_a_killed_run_of_another_family_resumes_bit_for_bit(base, family_model, tmp_path, family, replays):
    """Also where the update goes through the experts that the engine chose: the step that is logged and
    killed goes through the same again."""
    options = [f"model.path={family_model(family)}", f"algorithm.routing_replay={replays}"]
    config = c.override(base, [*options, f"model.dtype={dtype(family)}", "run.max_steps=4"])
    whole, cut = whole_and_killed(config, tmp_path)
    assert weights_of(cut) == weights_of(whole)
    assert [replays] * 4 == ["mismatch/rerouted_fraction" in line for line in whole.metrics()[1:]]


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


AHEAD = 8
"""Steps of the runs that sample two steps ahead."""


@pytest.fixture(scope="module")
def ahead(base):
    """The same run, sampled two steps ahead, which excludes new prompts for flat groups."""
    return c.override(base, ["rollout.staleness=2", "algorithm.refill_rounds=0", f"run.max_steps={AHEAD}"])


@pytest.fixture(scope="module")
def undisturbed_ahead(ahead, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed-ahead")
    job = Job(placed(ahead, folder), folder).start()
    assert job.wait(900) == 0, job.tail()
    lines = job.metrics()
    assert [line.get("rollout/staleness_max") for line in lines[1:]] == [0, 1, *[2] * (AHEAD - 2)]
    assert all(line["mismatch/kl"] < 1e-6 < line["staleness/kl"] for line in lines[3 : AHEAD - 1])
    return job


def kill_in(job: Job, phase: str, step: int) -> None:
    """Starts the job and kills it in this phase of a step, or while the checkpoint of the step is written."""

    def there() -> bool:
        if phase == "save":
            return any(job.run_dir.glob(f"checkpoints/step-{step:08d}/.rank-*.partial"))
        return job.in_phase(phase, step)

    job.start().until(lambda: there() and job.frozen(there))
    job.kill()
    print(f"killed in {phase} of step {job.progress().get('step')}")


def killed_is_undisturbed(config, undisturbed: Job, folder: Path, plan) -> None:
    """Runs it in a folder that stays, killed in each of these (phase, step): its figures and weights are the
    other's."""
    job = Job(placed(config, folder), folder)
    for phase, step in plan:
        kill_in(job, phase, step)
    assert job.start().wait(900) == 0, job.tail()
    assert job.metrics() == undisturbed.metrics()
    assert weights_of(job) == weights_of(undisturbed)
    assert job.left_over() == []


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        [("sync", 0), ("rollout", 1), ("grade", 3), ("update", 4), ("sync", 6)],
        [("grade", 1), ("update", 1), ("rollout", 2), ("eval", 6)],
        [("save", 2), ("save", 4), ("save", 5)],
    ],
)
def test_sampled_ahead_and_killed_anywhere_it_is_the_same_run(ahead, undisturbed_ahead, tmp_path, plan):
    """The disk stays: what was sampled ahead with weights that are gone is replayed, never sampled again."""
    killed_is_undisturbed(ahead, undisturbed_ahead, tmp_path, plan)


@pytest.mark.long
def test_sampled_ahead_on_nodes_that_are_lost_it_is_the_same_run(ahead, undisturbed_ahead, tmp_path):
    """Every node is a fresh one: the store had the logs before it had the checkpoint."""
    job = Job(placed(ahead, tmp_path, remote=f"file://{tmp_path}/store", every_steps=2), tmp_path)
    store = tmp_path / "store/small"
    for phase, step in (("update", 4), ("rollout", 5)):  # step 8 is sampled in step 6, the last
        kill_in(job, phase, step)
        newest = max((int(p.parents[1].name[5:]) for p in store.rglob("manifest.json")), default=0)
        logged = {int(p.parent.name[5:]) for p in store.glob("rollouts/step-*/*.npz")}
        assert not newest or {newest + 1, newest + 2} <= logged
        shutil.rmtree(job.run_dir)
    assert job.start().wait(900) == 0, job.tail()
    assert len(re.findall(r"^resumed from step [246]$", job.log.read_text(), re.MULTILINE)) >= 1
    assert job.metrics() == undisturbed_ahead.metrics()
    assert weights_of(job) == weights_of(undisturbed_ahead)
