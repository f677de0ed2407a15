"""The node launcher on this machine: rendezvous, checks, and a whole launch with a small Ray job. Hosts: tests/lab."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from trainer import config as c
from trainer.config import ConfigError
from trainer.node import head as node_head
from trainer.node import preflight, rendezvous
from trainer.node.job_log import JobLog
from trainer.node.preflight import GIB, Host
from trainer.node.ray_node import Ports, temporary
from trainer.node.topology import read

ROOT = Path(__file__).parents[2]
LOCAL = read({})
GOOD = Host(gpus=8, shm_bytes=64 * GIB, memory_bytes=900 * GIB, disk_bytes=500 * GIB, files=1 << 20)


# --- rendezvous -------------------------------------------------------------------------------------------------------


def meet(nodes: int, *hellos: dict, silence_s: float = 15.0):
    head = rendezvous.Head(nodes, "run", port=0, silence_s=silence_s)
    joined = [rendezvous.join("127.0.0.1", h, 5.0, head.port, silence_s) for h in hellos]
    for _ in hellos:
        head.accept(5.0)
    return head, joined


def hello(rank: int, nodes: int = 3, run: str = "run") -> dict:
    return {"rank": rank, "nodes": nodes, "run": run, "host": f"h{rank}"}


def test_nodes_meet_in_any_order_and_the_head_knows_who_is_missing():
    head, (second,) = meet(3, hello(2))
    assert head.missing() == [1]
    first = rendezvous.join("127.0.0.1", hello(1), 5.0, head.port)
    assert head.accept(5.0) == 1 and head.missing() == []
    head.send({"kind": "end", "code": 33})
    assert first.receive(5.0) == second.receive(5.0) == {"kind": "end", "code": 33}
    second.send({"kind": "ready"})
    deadline = time.monotonic() + 5
    while not (got := head.receive()):
        assert time.monotonic() < deadline
    assert got == [(2, {"kind": "ready"})]
    head.close()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (hello(1), "both say that they are node 1"),
        (hello(3), "says node 3 of 3"),
        (hello(2, nodes=4), "says node 2 of 4"),
        (hello(2, run="other"), "belongs to run 'other'"),
    ],
)
def test_a_node_that_does_not_belong_is_refused_by_name(second, message):
    with pytest.raises(rendezvous.RendezvousError, match=message):
        meet(3, hello(1), second)


def test_a_stranger_does_not_disturb_the_head():
    head = rendezvous.Head(2, "run", port=0)
    with socket.create_connection(("127.0.0.1", head.port)) as s:
        s.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert head.accept(1.0) is None
    link = rendezvous.join("127.0.0.1", hello(1, 2), 5.0, head.port)
    assert head.accept(5.0) == 1 and link.lost() is None
    head.close()


def test_a_closed_connection_is_lost_at_once_and_a_silent_one_after_the_deadline():
    head, (one, two) = meet(3, hello(1), hello(2), silence_s=1.5)
    one.close()
    deadline = time.monotonic() + 1.0
    while 1 not in head.lost():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert 2 not in head.lost()
    two.send = lambda *_: 0  # it lives, but nothing gets through
    time.sleep(2.0)
    assert "silent" in head.lost()[2]
    head.close()


def test_an_absent_head_is_named_at_the_deadline(free_port):
    began = time.monotonic()
    with pytest.raises(
        rendezvous.RendezvousError, match=rf"no answer from the head at 127.0.0.1:{free_port} within 1 s"
    ):
        rendezvous.join("127.0.0.1", hello(1), 1.0, free_port)
    assert time.monotonic() - began < 4.0


# --- checks -----------------------------------------------------------------------------------------------------------


def gpu_run(tmp_path: Path) -> c.RunConfig:
    return c.RunConfig(run=c.Run(dir=str(tmp_path / "run")), placement=c.Placement(workers_per_node=8),
                       rollout=c.Rollout(prompts_per_step=64), data=c.Data(path="s3://bucket/data"))  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message", "host"),
    [
        ({"gpus": 7}, "7 GPUs are visible and placement.workers_per_node is 8", False),
        ({"gpus": None}, "no nvidia-smi", True),
        ({"shm_bytes": GIB}, "/dev/shm has 1.0 GiB free and 2.0 are needed", True),
        ({"memory_bytes": 10 * GIB}, "10.0 GiB of memory are available and 48.0 are needed", True),
        ({"disk_bytes": GIB}, "1.0 GiB are free where", False),
        ({"files": 1024}, "only 1024 files may be open", True),
    ],
)
def test_each_lack_is_one_failure_with_its_remedy(tmp_path, change, message, host):
    assert preflight.check(gpu_run(tmp_path), LOCAL, GOOD) == []
    (failure,) = preflight.check(gpu_run(tmp_path), LOCAL, dataclasses.replace(GOOD, **change))
    assert message in failure.what and failure.remedy and failure.host is host


def test_a_gpu_that_dropped_out_is_the_machines_fault(tmp_path):
    node = read({"SPOTRL_NODES": "1", "SPOTRL_GPUS_PER_NODE": "8"})
    (failure,) = preflight.check(gpu_run(tmp_path), node, dataclasses.replace(GOOD, gpus=7))
    assert failure.host and "dropped out" in failure.remedy


def test_local_paths_that_are_missing_are_named(tmp_path):
    config = dataclasses.replace(gpu_run(tmp_path), model=c.Model(path="/nowhere/model"))
    (failure,) = preflight.check(config, LOCAL, GOOD)
    assert failure.what == "model.path /nowhere/model is not on this node" and not failure.host


def test_versions_and_clocks_are_compared():
    ours = preflight.facts()
    assert preflight.compare(ours, ours) == []
    other = {"versions": ours["versions"] | {"ray": "2.0"}, "time": ours["time"] + 90}
    versions, clock = preflight.compare(ours, other)
    assert versions.what == f"ray 2.0 (head: {ours['versions']['ray']})" and clock.what.startswith("its clock is +90 s")


def test_gpus_are_counted_from_the_visible_devices_and_container_memory_from_its_limit(tmp_path):
    assert preflight.count_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert preflight.count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert preflight.count_gpus({"ROCR_VISIBLE_DEVICES": "1"}) == 1
    (tmp_path / "memory.max").write_text(f"{3 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 20}\n")
    assert preflight.available_memory(tmp_path) == 2 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.available_memory(tmp_path) > 100 << 20


def test_a_taken_port_is_avoided_alone_and_named_among_nodes():
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("", Ports.client))
        except OSError:
            pytest.skip("another launch is running on this machine")
        taken.listen()
        assert Ports.choose(alone=True).client != Ports.client
        with pytest.raises(ConfigError, match=f"port {Ports.client} \\(client\\) is taken"):
            Ports.choose(alone=False)


def test_the_job_log_shows_whole_lines_without_rays_own(tmp_path, capsys):
    source = tmp_path / "job.log"
    log = JobLog(source, tmp_path / "run", show=True)
    log.pump()
    source.write_text(
        "2026 INFO job_manager.py:581 -- Runtime env is setting up.\nRunning entrypoint for job x: y\nstep 1\nste"
    )
    log.pump()
    assert capsys.readouterr().out == "step 1\n"
    source.open("a").write("p 2\nlast")
    log.close()
    assert capsys.readouterr().out == "step 2\nlast\n"
    assert (tmp_path / "run" / "launch.log").read_text() == "step 1\nstep 2\nlast\n"


def test_a_temporary_folder_with_too_long_a_name_is_avoided_or_refused(tmp_path):
    long = tmp_path / ("x" * 40)
    long.mkdir()
    assert temporary({"TMPDIR": str(long)}) == Path("/tmp") and temporary({"TMPDIR": "/tmp"}) == Path("/tmp")
    with pytest.raises(ConfigError, match="SPOTRL_TMP"):
        temporary({"SPOTRL_TMP": str(long)})


# --- a whole launch ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tmp_path():
    """A short path: the names of Ray's sockets may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="node-", dir="/tmp") as folder:
        yield Path(folder)


def launch(tmp_path: Path, *command: str, run=("-m", "trainer.node"), **env: str) -> subprocess.Popen[str]:
    config = c.RunConfig(run=c.Run(name="one", dir=str(tmp_path / "run")), model=c.Model(path=str(tmp_path)),
                         data=c.Data(path=str(tmp_path)),
                         placement=c.Placement(device="cpu", workers_per_node=2))  # fmt: skip
    (tmp_path / "run.yaml").write_text(c.dump(config))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTRL_", "SLURM_", "RAY_"))}
    clean |= {"SPOTRL_TMP": str(tmp_path), "SPOTRL_METADATA": "off"} | env
    arguments = ["--config", str(tmp_path / "run.yaml"), *(["--", *command] if command else [])]
    return subprocess.Popen([sys.executable, *run, *arguments], cwd=ROOT, env=clean, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip


def leftovers(tmp_path: Path) -> list[str]:
    """Command lines of processes that this launch left behind: all carry its folder in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SPOTRL_TMP") == str(tmp_path) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return found


def until_line(process: subprocess.Popen[str], text: str, timeout_s: float = 120.0) -> list[str]:
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    lines: list[str] = []
    assert process.stdout
    for line in process.stdout:
        lines.append(line)
        if text in line:
            timer.cancel()
            return lines
    raise AssertionError("".join(lines))


SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(33))
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
print("working", flush=True)
time.sleep(300)
"""
RESOURCES = """
import os, ray
ray.init(logging_level="ERROR")
has = ray.cluster_resources()
print(int(has["CPU"]), has.get("GPU"), flush=True)
os._exit(35)
"""


def test_a_launch_leaves_with_the_jobs_code_and_leaves_nothing(tmp_path):
    process = launch(tmp_path, sys.executable, "-c", RESOURCES)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 35, output
    assert "2 None" in output.splitlines()
    assert (tmp_path / "run" / "launch.log").read_text().splitlines()[-1] == "2 None"
    assert leftovers(tmp_path) == []


TAKEN_MEANWHILE = """
import runpy, socket
from dataclasses import replace
from trainer.node.ray_node import Ports
taken = socket.create_server(("", 0))
choose, turns = Ports.choose, []
def chosen(alone):
    turns.append(alone)
    return replace(choose(alone), **({"gcs": taken.getsockname()[1]} if len(turns) == 1 else {}))
Ports.choose = chosen
runpy.run_module("trainer.node", run_name="__main__", alter_sys=True)
"""


def test_a_port_that_is_taken_after_it_was_chosen_costs_one_more_start(tmp_path):
    process = launch(tmp_path, sys.executable, "-c", RESOURCES, run=("-c", TAKEN_MEANWHILE))
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 35, output
    assert output.count("again, on other ports") == 1
    assert leftovers(tmp_path) == []


def test_ctrl_c_reaches_the_job_and_leaves_nothing(tmp_path):
    process = launch(tmp_path, sys.executable, "-c", SLEEPER)
    until_line(process, "working")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_killed_launcher_takes_everything_with_it(tmp_path):
    process = launch(tmp_path, sys.executable, "-c", SLEEPER)
    until_line(process, "working")
    process.kill()
    process.wait(5)
    deadline = time.monotonic() + 30
    while left := leftovers(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@pytest.mark.slow
def test_a_job_that_outlasts_the_notice_is_ended(tmp_path):
    stubborn = SLEEPER.replace("sys.exit(33)", "None")
    process = launch(tmp_path, sys.executable, "-c", stubborn, SPOTRL_NOTICE_S="3")
    until_line(process, "working")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 33
    assert leftovers(tmp_path) == []


def test_a_missing_configuration_is_one_line(tmp_path):
    done = subprocess.run([sys.executable, "-m", "trainer.node", "--config", str(tmp_path / "no.yaml")], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2 and done.stderr == f"error: no configuration at {tmp_path / 'no.yaml'}\n"


def test_another_number_of_nodes_than_asked_for_is_refused(tmp_path):
    process = launch(tmp_path, SPOTRL_PEERS="10.0.0.1,10.0.0.2", SPOTRL_NODE_RANK="0")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 2 and output == "error: placement.nodes is 1, and spotrl started 2: make them equal\n"


def test_the_all_reduce_checks_its_sums(tmp_path, free_port):
    from trainer.node import allreduce

    command = allreduce.command(sys.executable, 0.3, "cpu", 0, 1, 2, "127.0.0.1", free_port)
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        f"all-reduce of {kib} KiB over 2 ranks" for kib in (64, 1024, 16384)
    ]


def test_every_port_is_in_the_catalogue_of_failures():
    text = (Path(__file__).parents[2] / "docs" / "failures.md").read_text().split("## Ports")[1].split("\n## ")[0]
    listed: set[int] = set()
    for first, last in re.findall(r"(?<=[| ])(\d{4,5})(?:-(\d{4,5}))?(?=[ ,])", text):
        listed.update(range(int(first), int(last or first) + 1))
    ours = {f.default for f in dataclasses.fields(Ports)} | {rendezvous.PORT, node_head.MASTER_PORT}
    assert ours <= listed
