"""torchrun without Ray: nodes that do not fit together are named within seconds, and the run is the one under
Ray."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from trainer import config as c
from trainer.config import ConfigError
from trainer.ranks import torchrun
from trainer.system.exit_codes import EXIT_NODE_LOST

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(small_config):
    return replace(
        small_config,
        method="sft",
        run=replace(small_config.run, max_steps=3),
        lora=c.LoRA(rank=4),
        sft=c.SFT(batch_size=16, max_tokens=300),
        rewards=c.Rewards(workers=1),
        evaluation=c.Evaluation(every_steps=3),
        checkpoint=c.Checkpoint(every_steps=3, export_hf="end"),
    )


def meet(port, ranks, configs, wait_s=3.0):
    """What `meet` raises of each of these nodes, which come at once; None: nothing."""
    server = dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=10), False)
    said: list[str | None] = [None] * len(ranks)

    def node(i):
        store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10), False)
        try:
            torchrun.meet_others(torchrun.SharedStore(store, ranks[i], 2), configs[i], "node", wait_s)
        except ConfigError as error:
            said[i] = str(error)

    threads = [threading.Thread(target=node, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert server is not None
    return said


def test_nodes_that_fit_together_pass(config, free_port):
    assert meet(free_port, [0, 1], [config, config]) == [None, None]


def test_a_rank_that_came_twice_is_named(config, free_port):
    said = meet(free_port, [0, 1, 1], [config] * 3)
    assert (
        any(s and "node 1 was started twice" in s and "NODE_RANK" in s for s in said) or said.count(None) == 2
    )
    assert any(s and "node 1" in s and "was started before" in s for s in said[1:])


def test_a_node_that_does_not_come_is_named(config, free_port):
    assert meet(free_port, [0], [config], 0.5) == [
        "no word from node 1 within 0 s: start it, or look at its output"
    ]


def test_other_data_is_named(config, picture_dataset, free_port):
    other = replace(config, data=replace(config.data, path=str(picture_dataset)))
    for said in meet(free_port, [0, 1], [config, other]):
        assert said and said.startswith("data differs: node 1 on ") and said.endswith("make them the same")


def test_other_settings_are_named(config, free_port):
    other = replace(config, optimizer=replace(config.optimizer, learning_rate=0.5))
    for said in meet(free_port, [0, 1], [config, other]):
        assert said and said.startswith("configuration differs: node 1")
        assert "optimizer.learning_rate is 0.5 there and 0.001 here" in said, "the key, not a hash"


def test_a_dead_master_is_named_in_one_line(config, tmp_path, free_port):
    path = tmp_path / "run.yaml"
    path.write_text(
        c.dump(
            replace(
                config,
                placement=replace(config.placement, nodes=2, workers_per_node=1),
                checkpoint=replace(config.checkpoint, shared_files=True),
            )
        )
    )
    env = os.environ | {
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port),
    }
    command = [sys.executable, "-m", "trainer.ranks.torchrun", "--config", str(path), "--wait", "1"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    assert "node 1 on" in errors[0] and f"no answer from the master at 127.0.0.1:{free_port + 1}" in errors[0]
    assert len(done.stderr.splitlines()) < 5, done.stderr


@pytest.mark.long
def test_two_ranks_under_torchrun_learn_what_two_learn_under_ray(config, tmp_path):
    """Losses, held-out loss and adapter, bit for bit."""
    found = {}
    for name, start in (
        ("ray", ["-m"]),
        ("torchrun", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.yaml").write_text(
            c.dump(replace(config, run=replace(config.run, dir=str(folder / "run"))))
        )
        env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, *start, "trainer.loops.sft", "--config", str(folder / "run.yaml")]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        values = [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines]
        found[name] = values, (folder / "run/hf/adapter_model.safetensors").read_bytes()
    assert len(found["ray"][0]) == 4 and found["torchrun"] == found["ray"]


@pytest.mark.slow
def test_a_world_that_is_not_the_configured_one_is_refused(config, tmp_path):
    (tmp_path / "run.yaml").write_text(c.dump(config))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        "-m",
        "trainer.loops.sft",
    ]
    command += ["--config", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "error: torchrun has started 1 ranks, 1 on this node, and placement is 1 nodes x 2" in done.stderr


def node(config, folder, rank, port, env=()):
    """`examples/torchrun/sft.sh` as one of `placement.nodes` nodes on this machine."""
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(c.dump(config))
    given = {
        "NNODES": config.placement.nodes,
        "NODE_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    given |= {"GPUS_PER_NODE": config.placement.workers_per_node, "PYTHONPATH": ROOT}
    given["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = (
        {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        | {k: str(v) for k, v in given.items()}
        | dict(env)
    )
    log = open(folder / f"{rank}.log", "a")  # noqa: SIM115
    command = ["bash", str(ROOT / "examples/torchrun/sft.sh"), str(folder / "run.yaml")]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)


@pytest.mark.long
def test_two_nodes_by_the_script(config, tmp_path, free_port):
    config = replace(
        config,
        run=replace(config.run, dir=str(tmp_path / "run")),
        placement=replace(config.placement, nodes=2, workers_per_node=1),
        checkpoint=replace(config.checkpoint, shared_files=True),
    )
    nodes = [node(config, tmp_path, rank, free_port) for rank in (0, 1)]
    try:
        assert [process.wait(600) for process in nodes] == [0, 0], (tmp_path / "0.log").read_text()[-3000:]
    finally:
        for process in nodes:
            process.kill()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and lines[-1]["sft/loss"] < lines[1]["sft/loss"]


@pytest.mark.long
def test_a_notice_is_saved_and_the_next_start_resumes(config, tmp_path, free_port):
    config = replace(
        config,
        run=replace(config.run, dir=str(tmp_path / "run"), max_steps=500),
        checkpoint=replace(config.checkpoint, every_steps=400, export_hf="never"),
        evaluation=c.Evaluation(),
    )
    metrics = tmp_path / "run/metrics.jsonl"
    process = node(config, tmp_path, 0, free_port)
    try:
        end = time.monotonic() + 600
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "0.log").read_text()[-3000:]
            time.sleep(0.1)
        process.terminate()  # the script has become torchrun, which passes it on
        process.wait(120)
    finally:
        process.kill()
    said = (tmp_path / "0.log").read_text()
    saved = re.search(r"the run resumes from step (\d+)", said)
    assert saved and int(saved[1]) >= 2, said[-3000:]
    config = replace(config, run=replace(config.run, max_steps=int(saved[1]) + 1))
    assert node(config, tmp_path, 0, free_port).wait(600) == 0
    assert f"resumed from step {saved[1]}" in (tmp_path / "0.log").read_text()


@pytest.mark.long
def test_a_node_that_vanishes_is_named_by_the_other_in_one_line(config, tmp_path, free_port):
    config = replace(
        config,
        run=replace(config.run, dir=str(tmp_path / "run"), max_steps=5000),
        placement=replace(config.placement, nodes=2, workers_per_node=1),
        checkpoint=replace(config.checkpoint, shared_files=True, every_steps=4000),
        evaluation=c.Evaluation(),
    )
    nodes = [node(config, tmp_path, rank, free_port) for rank in (0, 1)]
    metrics = tmp_path / "run/metrics.jsonl"
    try:
        end = time.monotonic() + 400
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            assert nodes[0].poll() is None and time.monotonic() < end, (tmp_path / "0.log").read_text()[
                -3000:
            ]
            time.sleep(0.2)
        os.killpg(nodes[1].pid, signal.SIGSTOP)  # with its ranks, as if the host had lost its cable
        for process in psutil.Process(nodes[1].pid).children(recursive=True):
            process.suspend()
        vanished = time.monotonic()
        assert nodes[0].wait(150) == EXIT_NODE_LOST
        assert time.monotonic() - vanished < 100
    finally:
        for process in nodes:
            for child in (
                psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            ):
                child.kill()
            process.kill()
    said = (tmp_path / "0.log").read_text()
    assert "a worker or node was lost: rank 1 on " in said and "has said nothing for 60 s" in said
    assert "Traceback" not in said, said[-4000:]
