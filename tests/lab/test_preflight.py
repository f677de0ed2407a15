"""The preflight on four hosts with two network cards each and links of one rate: faults are named, clean
rounds pass.

No Ray, no torch: `--seconds 0` leaves the collectives out. Three faults and a clean round are in the whole;
the others are labs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hosts
import pytest

from trainer import config as c

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())]
MEGABIT = 200
LIMIT_S = 120.0
LATE = (
    "import runpy, time; real = time.time; time.time = lambda: real() + 90; "
    "runpy.run_module('trainer.node', run_name='__main__', alter_sys=True)"
)
"""The launcher on a machine whose clock is 90 s ahead."""


@pytest.fixture
def lab():
    with hosts.Lab([f"h{i}" for i in range(4)]) as made:
        try:
            made.shape(MEGABIT)
        except RuntimeError as error:
            pytest.skip(f"this kernel shapes no links: {error}")
        yield made


class Round:
    """One preflight of all hosts."""

    def __init__(
        self,
        lab: hosts.Lab,
        tmp: Path,
        data: Path,
        wrap: Mapping[int, Callable[[list[str]], list[str]]] | None = None,
        env: Mapping[int, dict[str, str]] | None = None,
        absent: int | None = None,
    ):
        tmp.mkdir(parents=True, exist_ok=True)
        self.lab, self.run_dir = lab, tmp / "run"
        self.run_dir.mkdir(exist_ok=True)
        config = c.RunConfig(
            run=c.Run(name="lab", dir=str(self.run_dir)),
            model=c.Model(path=str(tmp)),
            data=c.Data(path=str(data)),
            placement=c.Placement(nodes=4, device="cpu", start_timeout_s=60.0),
        )
        path = tmp / "config.yaml"
        path.write_text(c.dump(config))
        peers = ",".join(h.address for h in lab.hosts.values())
        self.began = time.monotonic()
        self.logs = []
        self.processes = []
        for rank, host in enumerate(lab.hosts.values()):
            self.logs.append(tmp / f"node{rank}.log")
            if rank == absent:
                continue
            program = ["-m", "trainer.node", "--preflight", "--seconds", "0", "--config", str(path)]
            command = [sys.executable, *program]
            command = (wrap or {}).get(rank, list)(command)
            place = {"SPOTRL_PEERS": peers, "SPOTRL_NODE_RANK": str(rank)} | (env or {}).get(rank, {})
            self.processes.append(host.start(command, self.logs[-1], place))

    def end(self) -> list[int]:
        """Exit codes; the seconds it took are in `took_s`."""
        end = self.began + LIMIT_S
        codes = [p.wait(max(0.1, end - time.monotonic())) for p in self.processes]
        self.took_s = time.monotonic() - self.began
        return codes

    def text(self) -> str:
        return "\n".join(log.read_text() for log in self.logs if log.exists())

    def wrong(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(level, check, nodes) of what did not pass."""
        found = json.loads((self.run_dir / "preflight.json").read_text())["findings"]
        return [(f["level"], f["check"], tuple(f["nodes"])) for f in found if f["level"] != "pass"]


def shell(before: str) -> Callable[[list[str]], list[str]]:
    """Runs the launcher after a command of the shell."""
    return lambda command: ["sh", "-c", f'{before} && exec "$@"', "sh", *command]


def prepare(lab: hosts.Lab, tmp: Path, data: Path, fault: str) -> dict[str, Any]:
    """Makes one thing wrong; returns arguments of Round."""
    h = list(lab.hosts.values())
    match fault:
        case "wrong interface":
            return {"env": {2: {"NCCL_SOCKET_IFNAME": "eth0"}}}
        case "head's address on the wrong interface":
            return {"env": {2: {"SPOTRL_PEERS": "172.17.0.2,10.50.0.12,10.50.0.13,10.50.0.14"}}}
        case "blocked pair":
            lab.drop("h1", "h3")
            lab.drop("h3", "h1")
        case "one-way block":
            lab.drop("h1", "h3", only="syn")
        case "blocked from the head":
            lab.drop("h2", "h0", only="syn")
        case "loss":
            lab.drop("h1", "h2", share=0.01)
        case "slow link":
            lab.slow("h0", "h3", MEGABIT // 10)
        case "small MTU":
            lab.drop("h1", "h2", only="large")
        case "other MTU":
            h[2].ip("link set eth1 mtu 1200")
        case "clock":
            return {"wrap": {3: lambda command: [sys.executable, "-c", LATE, *command[3:]]}}
        case "full disk":
            (tmp / "run").mkdir(parents=True, exist_ok=True)
            return {"wrap": {1: shell(f"mount -t tmpfs -o size=64m tmpfs {tmp}/run")}}
        case "file limit":
            return {"wrap": {2: shell("ulimit -n 512")}}
        case "other package":
            return {"env": {1: other_ray(tmp)}}
        case "other data":
            other = tmp / "other"
            shutil.copytree(data, other)
            shard = next(other.rglob("*.parquet"))
            shard.write_bytes(shard.read_bytes()[:-8])
            return {"wrap": {3: shell(f"mount --bind {other} {data}")}}
        case "many":
            return many(lab, tmp, data)
        case "dead node":
            return {"absent": 2}
        case "long packets to the head are lost":
            lab.drop("h2", "h0", only="large")
        case "another head":
            return {"env": {2: {"SPOTRL_HEAD": "10.50.0.12"}}}
        case "a head that is not there":
            return {"env": {2: {"SPOTRL_HEAD": "10.50.0.99"}}}
        case "two heads":
            return {"env": {1: {"SPOTRL_NODE_RANK": "0"}}}
        case "missing package" | "missing package of the head":
            node, package = (2, "psutil") if fault == "missing package" else (0, "yaml")
            fake = tmp / "lacking"
            fake.mkdir()
            (fake / f"{package}.py").write_text(f"raise ImportError(\"No module named '{package}'\")\n")
            return {"env": {node: {"PYTHONPATH": str(fake)}}}
        case "address twice":
            h[2].ip("addr add 10.50.0.12/24 dev eth1")
        case "address of another":
            h[2].ip("addr del 10.50.0.13/24 dev eth1")
            h[2].ip("addr add 10.50.0.12/24 dev eth1")
    return {}


def other_ray(tmp: Path) -> dict[str, str]:
    """Variables under which a node finds another version of Ray."""
    fake = tmp / "fake" / "ray-2.0.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.0.0\n")
    return {"PYTHONPATH": str(fake.parent)}


def many(lab: hosts.Lab, tmp: Path, data: Path) -> dict[str, Any]:
    """Faults of one machine each, all in one round; returns arguments of Round."""
    for source in ("h0", "h2", "h3"):
        lab.drop(source, "h1", only="high")
    lab.hosts["h2"].ip("link set lo down")
    lab.hosts["h2"].run("hostname", "h3")
    other = tmp / "other"
    shutil.copytree(data, other)
    shard = next(other.rglob("*.parquet"))
    whole = bytearray(shard.read_bytes())
    whole[len(whole) // 2] ^= 1
    shard.write_bytes(whole)
    code = tmp / "code.py"
    code.write_text((hosts.ROOT / "trainer/system/exit_codes.py").read_text() + "# another commit\n")
    settings = tmp / "config3.yaml"
    mounts = f"mount --bind {other} {data} && mount -t tmpfs -o nr_inodes=40 tmpfs {tmp}/run"
    mounts += f" && mount --bind {code} {hosts.ROOT}/trainer/system/exit_codes.py"
    mounts += f" && sed 's/^  seed: .*/  seed: 99/' {tmp}/config.yaml > {settings}"
    mounts += f" && mount --bind {settings} {tmp}/config.yaml"
    return {
        "wrap": {3: shell(mounts)},
        "env": {2: {"NCCL_SOCKET_IFNAME": "ens9"}, 1: other_ray(tmp)},
    }


MANY = {("ports", 1), ("packages", 1), ("interface", 2), ("loopback", 2), ("host name", 2)}
MANY |= {("data", 3), ("code", 3), ("configuration", 3), ("disk space", 3)}
FAULTS = {
    "wrong interface": (2, [("fail", "interface", (2,))]),
    "blocked pair": (36, [("fail", "ports", (1, 3))]),
    "one-way block": (36, [("fail", "ports", (1, 3))]),
    "loss": (36, [("fail", "loss", (1, 2))]),
    "slow link": (36, [("fail", "bandwidth", (0, 3))]),
    "small MTU": (36, [("fail", "MTU", (1, 2))]),
    "other MTU": (0, [("warn", "MTU", (2,))]),
    "clock": (36, [("fail", "clock", (3,))]),
    "full disk": (2, [("fail", "disk space", (1,))]),
    "file limit": (2, [("fail", "open files", (2,))]),
    "other package": (2, [("fail", "packages", (1,))]),
    "other data": (2, [("fail", "data", (3,))]),
}
QUICK = ("other package",)


@pytest.mark.parametrize(
    "fault", [f if f in QUICK else pytest.param(f, marks=pytest.mark.lab) for f in FAULTS]
)
def test_a_fault_is_named(lab, tmp_path, mixed_dataset, figure, fault):
    code, expected = FAULTS[fault]
    data = tmp_path / "data"
    shutil.copytree(mixed_dataset, data)
    check = Round(lab, tmp_path, data, **prepare(lab, tmp_path, data, fault))
    codes = check.end()
    assert set(codes) == {code}, check.text()
    found = check.wrong()
    # A fault of the network may show in more than one figure of the same pair, never elsewhere.
    assert expected[0] in found and all(set(f[2]) <= set(expected[0][2]) for f in found), check.text()
    figure(f"until named: {fault}", check.took_s)


def test_each_of_many_faults_is_named(lab, tmp_path, mixed_dataset, figure):
    data = tmp_path / "data"
    shutil.copytree(mixed_dataset, data)
    check = Round(lab, tmp_path, data, **prepare(lab, tmp_path, data, "many"))
    assert set(check.end()) == {36}, check.text()
    failed = {(name, *nodes) for level, name, nodes in check.wrong() if level == "fail"}
    assert failed >= MANY, check.text()
    figure("until named: nine faults at once", check.took_s)


@pytest.mark.lab
@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("dead node", 34, "node 2 (10.50.0.13) did not connect within 60 s"),
        (
            "blocked from the head",
            36,
            "node 2 (10.50.0.13) -> node 0: it is up and cannot connect to the head's port",
        ),
        ("head's address on the wrong interface", 2, "the head's address 172.17.0.2 is this node's own"),
        ("long packets to the head are lost", 36, "short packets arrive and long ones do not"),
        ("another head", 2, "node 2 (10.50.0.13) takes 10.50.0.12, which is node 1, for the head"),
        ("a head that is not there", 2, "node 2 (10.50.0.13) looks for the head at 10.50.0.99"),
        ("two heads", 2, "it has the address of node 1 (10.50.0.12) and takes itself for node 0"),
        ("missing package", 2, "No module named 'psutil': run trainer/shell/setup.sh"),
        ("missing package of the head", 2, "No module named 'yaml': run trainer/shell/setup.sh"),
        ("address twice", 2, "address 10.50.0.12"),
        ("address of another", 2, "it has the address of node 1 (10.50.0.12) and takes itself for node 2"),
    ],
)
def test_a_node_that_does_not_come_is_named_and_all_leave_with_one_code(
    lab, tmp_path, figure, fault, code, text
):
    check = Round(lab, tmp_path, tmp_path, **prepare(lab, tmp_path, tmp_path, fault))
    codes = check.end()
    assert set(codes) == {code} and text in check.text(), (codes, check.text())
    figure(f"until named: {fault}", check.took_s)


def test_a_clean_round_is_clean(lab, tmp_path):
    clean(lab, tmp_path)


@pytest.mark.lab
@pytest.mark.skipif(not os.environ.get("LAB_LONG"), reason="ten minutes: set LAB_LONG=1")
def test_fifty_clean_rounds_are_clean(lab, tmp_path):
    for number in range(50):
        clean(lab, tmp_path / str(number))


def clean(lab: hosts.Lab, tmp_path: Path) -> None:
    check = Round(lab, tmp_path, tmp_path)
    codes = check.end()
    assert set(codes) == {0} and check.wrong() == [], check.text()
    text = check.logs[0].read_text()
    assert "preflight passed" in text and "all nodes" in text
    pairs = json.loads((check.run_dir / "preflight.json").read_text())["pairs"]
    speeds = [speed for pair in pairs for speed in pair["bytes_per_s"]]
    assert len(speeds) == 12 and all(0.5 < s * 8e-6 / MEGABIT < 1.2 for s in speeds), speeds
