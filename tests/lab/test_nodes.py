"""The node launcher on namespaced hosts: its place, what it refuses, and how a launch ends when something
dies."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hosts
import pytest

from tests.data_prep import hub_server
from trainer import config as c

pytestmark = hosts.marks(hosts.missing())
TWO_HOSTS = ["placement.nodes=2", "placement.workers_per_node=1", "checkpoint.shared_files=true"]
JOB = [sys.executable, str(Path(__file__).with_name("jobs.py"))]


class Launch:
    """The launchers of one job, one per host."""

    def __init__(
        self, lab: hosts.Lab, config: c.RunConfig, tmp: Path, *arguments: str, absent: int = 0, **env: str
    ):
        self.lab = lab
        path = tmp / "config.yaml"
        path.write_text(c.dump(config))
        peers = ",".join(h.address for h in lab.hosts.values())
        self.logs, self.processes = [], []
        for rank, host in enumerate(list(lab.hosts.values())[: len(lab.hosts) - absent]):
            place = {"SPOTRL_PEERS": peers, "SPOTRL_NODE_RANK": str(rank)} | env
            self.logs.append(tmp / f"node{rank}.log")
            command = [sys.executable, "-m", "trainer.node", "--config", str(path), *arguments]
            self.processes.append(host.start(command, self.logs[-1], place))

    def text(self, rank: int = 0) -> str:
        return self.logs[rank].read_text()

    def wait_for(self, text: str, rank: int = 0, timeout_s: float = 180.0) -> None:
        end = time.monotonic() + timeout_s
        while text not in self.text(rank):
            assert time.monotonic() < end, f"no {text!r} in:\n" + self.text(rank)
            assert self.processes[rank].poll() is None, self.text(rank)
            time.sleep(0.1)

    def codes(self, timeout_s: float = 180.0) -> list[int]:
        end = time.monotonic() + timeout_s
        return [p.wait(max(0.1, end - time.monotonic())) for p in self.processes]

    def signal(self, rank: int, number: int) -> None:
        """To the launcher itself, as an engine does it."""
        host = list(self.lab.hosts.values())[rank]
        host.run("sh", "-c", f"kill -{number} $(pgrep -of 'trainer.node --config')")


@pytest.fixture
def lab(request):
    with hosts.Lab([f"h{i + 1}" for i in range(getattr(request, "param", 2))]) as made:
        yield made


def plain(tmp_path: Path, nodes: int = 2, **placement) -> c.RunConfig:
    """A run whose loop is replaced by jobs.py."""
    place: dict[str, Any] = {"nodes": nodes, "workers_per_node": 1, "device": "cpu", "start_timeout_s": 120.0}
    place |= placement
    folder = str(tmp_path)
    return c.RunConfig(
        run=c.Run(name="lab", dir=f"{folder}/run"),
        model=c.Model(path=folder),
        data=c.Data(path=folder),
        rollout=c.Rollout(prompts_per_step=12),
        placement=c.Placement(**place),
    )


@pytest.mark.parametrize("lab", [3], indirect=True)
def test_three_hosts_work_together_over_the_shared_card_and_leave_with_the_jobs_code(lab, tmp_path):
    launch = Launch(lab, plain(tmp_path, nodes=3), tmp_path, "--", *JOB, "--code", "35")
    assert launch.codes() == [35, 35, 35]
    for number in (1, 2, 3):
        assert f"ran on h{number} =eth1 10.50.0.1{number}" in launch.text()
    assert [h.processes() for h in lab.hosts.values()] == [[], [], []]
    assert "ran on h1" in (tmp_path / "run" / "launch.log").read_text()


@pytest.mark.parametrize("death", ["worker host", "head host", "worker launcher", "head launcher", "cable"])
def test_a_death_ends_the_job_everywhere_within_a_minute(lab, tmp_path, figure, death):
    launch = Launch(lab, plain(tmp_path), tmp_path, "--", *JOB, "--seconds", "300")
    launch.wait_for("working")
    began = time.monotonic()
    head, worker = lab.hosts.values()
    match death:
        case "worker host":
            worker.kill()
        case "head host":
            head.kill()
        case "worker launcher":
            launch.signal(1, signal.SIGKILL)
        case "head launcher":
            launch.signal(0, signal.SIGKILL)
        case "cable":
            lab.cut("h2")
    survivors = [0, 1] if death == "cable" else [0] if "worker" in death else [1]
    codes = launch.codes(60.0)
    figure(f"until all other nodes ended, after death of: {death}", time.monotonic() - began)
    assert [codes[rank] for rank in survivors] == [34] * len(survivors)
    for rank in survivors:
        assert f"10.50.0.{12 - rank}" in launch.text(rank).splitlines()[-1], launch.text(rank)
    for host in (head, worker):
        while host.alive and host.processes():
            assert time.monotonic() < began + 60.0, host.processes()
            time.sleep(0.2)


def test_a_notice_on_any_node_lets_the_job_save_and_ends_all(lab, tmp_path):
    launch = Launch(lab, plain(tmp_path), tmp_path, "--", *JOB, "--seconds", "300", SPOTRL_NOTICE_S="30")
    launch.wait_for("working")
    launch.signal(1, signal.SIGTERM)
    assert launch.codes(30.0) == [33, 33]
    assert [h.processes() for h in lab.hosts.values()] == [[], []]


METADATA = """
import http.server
class Preempted(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"TRUE")
http.server.HTTPServer(("127.0.0.1", 8123), Preempted).handle_request()
"""


def test_a_notice_from_the_metadata_server_of_another_node_is_one_for_all(lab, tmp_path):
    # Every host has a loopback of its own.
    env = {"SPOTRL_METADATA": "", "GCE_METADATA_HOST": "127.0.0.1:8123", "SPOTRL_NOTICE_S": "30"}
    launch = Launch(lab, plain(tmp_path), tmp_path, "--", *JOB, "--seconds", "300", **env)
    launch.wait_for("working")
    server = lab.hosts["h2"].start([sys.executable, "-c", METADATA], tmp_path / "metadata.log", {})
    assert launch.codes(40.0) == [33, 33]
    assert server.wait(10) == 0, "it was asked"
    assert [h.processes() for h in lab.hosts.values()] == [[], []]


def test_ctrl_c_on_the_head_ends_all(lab, tmp_path):
    launch = Launch(lab, plain(tmp_path), tmp_path, "--", *JOB, "--seconds", "300")
    launch.wait_for("working")
    launch.signal(0, signal.SIGINT)
    assert launch.codes(30.0) == [130, 130]
    assert [h.processes() for h in lab.hosts.values()] == [[], []]


def test_a_node_that_does_not_come_is_named(lab, tmp_path):
    launch = Launch(lab, plain(tmp_path, start_timeout_s=4.0), tmp_path, "--", *JOB, absent=1)
    assert launch.codes(30.0) == [34]
    assert "node 1 (10.50.0.12) did not connect within 4 s" in launch.text()


def test_what_one_node_lacks_is_said_by_the_head_and_nothing_starts(lab, tmp_path):
    options = ["placement.device=cuda", "placement.workers_per_node=8", "rollout.prompts_per_step=16"]
    config = c.override(plain(tmp_path), options)
    launch = Launch(lab, config, tmp_path, "--", *JOB)
    assert launch.codes(30.0) == [2, 2], "of the image: the next machine has it too"
    assert "error: node 1 (10.50.0.12): no nvidia-smi or rocm-smi here" in launch.text()
    assert "starting Ray" not in launch.text()


def test_preflight_reduces_between_all_nodes(lab, tmp_path):
    launch = Launch(lab, plain(tmp_path), tmp_path, "--preflight", "--seconds", "3")
    assert launch.codes(90.0) == [0, 0]
    assert "over 2 ranks" in launch.text() and "preflight passed" in launch.text()


def test_training_runs_over_two_hosts_to_the_end(lab, tmp_path, small_config):
    config = c.override(small_config, TWO_HOSTS)
    launch = Launch(lab, config, tmp_path)
    assert launch.codes(400.0) == [0, 0], launch.text()
    steps = [
        json.loads(line)["step"] for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4]
    reached = re.search(r"all-reduce between all nodes: ([\d.]+) GB/s \(wanted: no InfiniBand", launch.text())
    assert reached and float(reached[1]) > 0 and launch.text().count("all-reduce of") == 1
    assert [h.processes() for h in lab.hosts.values()] == [[], []]


def test_two_hosts_share_the_download_of_a_model(lab, tmp_path, small_config, tiny_model):
    """The first host downloads two of three files, into a cache of its own, and the second host one."""
    files = hub_server.in_parts(tiny_model, 3)
    (tmp_path / "model").mkdir()
    for name, data in files.items():
        (tmp_path / "model" / name).write_bytes(data)
    head, worker = lab.hosts.values()
    serve = f"-m tests.data_prep.hub_server {head.address} {head.name} 8800 owner/model {tmp_path}/model"
    head.start([sys.executable, *serve.split()], tmp_path / "hub.log")
    config = c.override(small_config, [*TWO_HOSTS, "run.max_steps=1", "model.path=owner/model"])
    launch = Launch(lab, config, tmp_path, HF_ENDPOINT=f"http://{head.address}:8800", HF_HUB_OFFLINE="0")
    codes = launch.codes(400.0)
    assert codes == [0, 0], launch.text()
    weights = sorted(name for name in files if name.endswith(".safetensors"))
    held = [sorted(path.name for path in host.scratch.rglob("*.safetensors")) for host in (head, worker)]
    assert held == [weights[::2], weights[1::2]]
    assert "(files: 2)" in launch.text(0) and "(files: 1)" in launch.text(1)
