"""The gate of the fleet: samples of workers outside the cluster train the same run, bit for bit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading

import pytest

from tests.families import VISION
from tests.fleet.jobs import FleetJob, assert_same_run, other_ranks, rollouts, wait_for, without_workers
from tests.loops.jobs import REWARD
from tests.servers import rclone
from trainer.config import RunConfig, override
from trainer.config.run_folder import read_roster
from trainer.observe.history import read_history
from trainer.storage.storage import Storage
from trainer.system.exit_codes import EXIT_NODE_LOST

STEPS = 5


@pytest.fixture
def run_config(small_config, tmp_path):
    """A run of a few steps that learns, evaluates, and keeps all that it sampled."""
    (tmp_path / "reward.py").write_text(REWARD)

    def configured(folder: str, *more: str) -> RunConfig:
        return override(
            small_config,
            [
                f"run.dir={tmp_path / folder / 'run'}",
                f"run.id={folder}",
                f"run.max_steps={STEPS}",
                f"rewards.function={tmp_path / 'reward.py'}:reward",
                "rewards.workers=1",
                "evaluation.every_steps=4",
                "evaluation.max_samples=6",
                f"checkpoint.every_steps={STEPS}",
                "logging.keep_rollouts=true",
                "placement.workers_per_node=1",
                *more,
            ],
        )

    return configured


def attack(storage: Storage) -> None:
    """Somebody with access to the run's folder `fleet` and without the key."""
    ((about, _),) = storage.list("about")
    attempt = about.removeprefix("about/").removesuffix(".json")
    storage.put_bytes("workers/stranger.json", os.urandom(32) + b'{"worker": "stranger", "serial": 1}')
    storage.put_bytes("workers/copied.json", storage.get_bytes("workers/w1.json"))
    storage.put_bytes(f"mail/{attempt}/stranger.json", os.urandom(64))
    for folder in ("head", "about"):
        storage.put_bytes(f"{folder}/99-ffffff.json", storage.get_bytes(f"{folder}/{attempt}.json"))
    for number in range(8, 20):
        storage.put_bytes(f"samples/{attempt}/{number:06d}.1-w1.npz", os.urandom(2048))


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype, world, store, lora",
    [("fp32", 1, "folder", 0), ("bf16", 2, "folder", 0), ("bf16", 1, "s3", 0), ("bf16", 1, "folder", 4)],
)
def test_a_run_fed_by_workers_is_the_colocated_run(run_config, tmp_path, dtype, world, store, lora):
    """Two workers, of which one is killed in step 2, and forged objects in the bucket. lora: rank of the
    adapters, which are all that is sent."""
    rate = "1e-4" if dtype == "bf16" else "1e-3"
    options = [
        f"model.dtype={dtype}",
        f"placement.workers_per_node={world}",
        f"optimizer.learning_rate={rate}",
        f"lora.rank={lora}",
    ]
    colocated = without_workers(run_config("colocated", *options), tmp_path / "colocated")

    folder = tmp_path / "stored"
    with rclone(folder) if store == "s3" else contextlib.nullcontext() as server:
        bucket = "s3://bucket/runs" if server else str(folder / "bucket/runs")
        env = server.env if server else {}
        job = FleetJob(run_config("fleet", *options), tmp_path / "fleet", bucket, env)
        try:
            job.add_worker("w0")
            job.add_worker("w1")
            job.start()
            job.until(lambda: job.in_phase("wait", 2), 600)
            job.workers["w0"].signal(signal.SIGKILL)
            storage = Storage(f"{bucket}/fleet/fleet", env=os.environ | env)
            wait_for(lambda: storage.exists("workers/w1.json"))
            attack(storage)
            job.finish()
        finally:
            job.kill()
            job.end_workers()
        assert_same_run(colocated, job)
        last = read_history(job.run_dir)[-1]
        assert last["fleet/units"] >= 2 * STEPS and last["fleet/forged"] > 0 and last["fleet/refused"] == 0
        assert "the run has reached its last step" in job.workers["w1"].said()


@pytest.mark.long
@pytest.mark.parametrize(
    "family, dtype, replays, ahead",
    [
        ("qwen3_moe", "fp32", True, 0),
        ("qwen3_moe", "fp32", False, 0),
        ("qwen3_moe", "bf16", True, 0),
        ("qwen3_vl_moe", "fp32", True, 1),
    ],
)
def test_a_mixture_of_experts_fed_by_workers_is_the_colocated_run(
    run_config, tmp_path, family_model, text_dataset, family, dtype, replays, ahead
):
    """Two workers, of which one is killed in step 2. replays: whether the update goes through the experts
    that the workers' engines chose; with steps ahead these are the choices of older weights."""
    options = [
        f"model.path={family_model(family)}",
        f"model.dtype={dtype}",
        f"algorithm.routing_replay={replays}",
        f"rollout.staleness={ahead}",
        f"optimizer.learning_rate={'1e-4' if dtype == 'bf16' else '1e-3'}",
    ]
    if family not in VISION:
        options += [f"data.path={text_dataset}", "evaluation.every_steps=0"]
    job = FleetJob(run_config("fleet", *options), tmp_path / "fleet", str(tmp_path / "stored"))
    try:
        first, _ = job.add_worker("w0"), job.add_worker("w1")
        job.start()
        job.until(lambda: job.in_phase("wait", 2), 600)
        first.signal(signal.SIGKILL)
        job.finish()
    finally:
        job.kill()
        job.end_workers()
    colocated = without_workers(run_config("colocated", *options), tmp_path / "colocated")
    assert_same_run(colocated, job, but=("mismatch/",) if ahead else ())
    assert read_history(job.run_dir)[-1]["fleet/refused"] == 0
    logged = rollouts(job).values()
    assert [replays] * STEPS == ["routes" in arrays for arrays in logged]
    rerouted = "staleness/rerouted_fraction" if ahead else "mismatch/rerouted_fraction"
    assert [replays] * STEPS == [rerouted in line for line in job.metrics() if line["step"]]


@pytest.mark.slow
@pytest.mark.long
def test_a_worker_with_an_engine_of_two_ranks_is_the_engine_of_two_of_the_trainer_s(run_config, tmp_path):
    """The worker loses its second rank in step 2, and another one samples the rest."""
    options = ["placement.workers_per_node=2", "rollout.tensor_parallel=2", "data.image_cache_gib=0.05"]
    colocated = without_workers(run_config("colocated", *options), tmp_path / "colocated")
    job = FleetJob(run_config("fleet", *options), tmp_path / "fleet", str(tmp_path / "stored"))
    try:
        first = job.add_worker("first")
        job.start()
        job.until(lambda: job.in_phase("wait", 2), 600)
        (rank_1,) = other_ranks(first.process.pid)
        os.kill(rank_1, signal.SIGKILL)
        assert first.wait() == EXIT_NODE_LOST, job.told()
        second = job.add_worker("second")
        job.finish()
    finally:
        job.kill()
        job.end_workers()
    assert_same_run(colocated, job)
    sampled = {row["worker"]: row for row in read_roster(job.run_dir)}
    assert min(row["completions"] for row in sampled.values()) > 0 and second.process.returncode == 0
    assert sampled["first"]["why"] == "rank 1 of its engine has ended by signal 9"
    assert "fleet/sampled_2x-cpu" in read_history(job.run_dir)[-1]


@contextlib.contextmanager
def stops_at_random(job: FleetJob, seed: int):
    """Stops workers for up to two seconds, again and again, one at a time: who is first is left to chance."""
    draw = random.Random(seed)
    ended = threading.Event()

    def disturb() -> None:
        while not ended.wait(draw.uniform(0.2, 2.0)):
            worker = draw.choice(list(job.workers.values()))
            worker.signal(signal.SIGSTOP)
            ended.wait(draw.uniform(0.2, 2.0))
            worker.signal(signal.SIGCONT)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    "ahead, workers, taught",
    [
        pytest.param(2, 2, False, marks=pytest.mark.long),
        pytest.param(1, 1, True, marks=pytest.mark.long),
        pytest.param(1, 2, False, marks=pytest.mark.long),
    ],
)
def test_sampled_ahead_by_workers_it_is_the_colocated_run(
    run_config, tmp_path, larger_model, ahead, workers, taught
):
    """Workers that are stopped at random times: a function of the seed and the steps ahead, not of time.

    taught: whether a teacher judges what they sample; the trainer's ranks hold it, and no worker."""
    options = [f"rollout.staleness={ahead}"]
    if taught:
        options += [f"algorithm.teacher={larger_model}", "algorithm.kl_coef=0", "algorithm.kl_target=0"]
    job = FleetJob(run_config("fleet", *options), tmp_path / "fleet", str(tmp_path / "stored"))
    try:
        for number in range(workers):
            job.add_worker(f"w{number}")
        job.start()
        with stops_at_random(job, seed=ahead):
            job.finish()
    finally:
        job.kill()
        job.end_workers()
    colocated = without_workers(run_config("colocated", *options), tmp_path / "colocated")
    assert_same_run(colocated, job, but=("mismatch/",))
    probed = {line["step"]: line["mismatch/kl"] for line in job.metrics() if "mismatch/kl" in line}
    assert probed.keys() == {4, 5} and max(probed.values()) < 1e-6, "engine and policy at evaluations"
    assert all(("teacher/kl" in line) == taught for line in job.metrics()[1:])
    behind = [line.get("rollout/staleness_max") for line in job.metrics()[1:]]
    assert behind == [min(step, ahead) for step in range(STEPS)]


@pytest.mark.slow
@pytest.mark.long
def test_ranks_without_engines_need_not_divide_the_prompts(run_config, tmp_path):
    """Three ranks learn from four prompts a step, which a worker samples: the run of one rank, up to
    rounding."""
    job = FleetJob(
        run_config("fleet", "placement.workers_per_node=3"), tmp_path / "fleet", str(tmp_path / "stored")
    )
    try:
        job.add_worker("w0")
        job.start()
        job.finish()
    finally:
        job.kill()
        job.end_workers()
    colocated = without_workers(run_config("colocated"), tmp_path / "colocated")
    ours, theirs = job.metrics(), colocated.metrics()
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, against in zip(ours[1:], theirs[1:], strict=True):
        assert line["reward/mean"] == against["reward/mean"]
        for name in ("loss/total", "grad/norm", "kl/mean"):
            assert line[name] == pytest.approx(against[name], rel=1e-4, abs=1e-6), (line["step"], name)
