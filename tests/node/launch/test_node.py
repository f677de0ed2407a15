"""The node launcher on this machine: rendezvous, checks, and a whole launch with a small Ray job. Hosts:
tests/lab."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from trainer import config as c
from trainer.config import ConfigError
from trainer.node.launch import rendezvous
from trainer.node.launch.job_watch import JobLog
from trainer.node.launch.launcher import MASTER_PORT
from trainer.node.launch.ray_node import Ports, ray_temporary_folder
from trainer.node.preflight import host as preflight
from trainer.node.preflight import same_setup
from trainer.node.preflight.findings import (
    Finding,
    exit_code,
    finding_from_message,
    findings_table,
    write_findings,
)
from trainer.node.preflight.host import GIB, Disk, MeasuredHost
from trainer.node.topology import read_node_environment
from trainer.system.exit_codes import EXIT_NODE_LOST

ROOT = Path(__file__).parents[3]
LOCAL = read_node_environment({})
PLACE = {"device": 1, "filesystem": "ext4", "free_bytes": 500 * GIB}
DISK = Disk(purpose="run", path="/runs", need_bytes=2 * GIB, write_bytes_per_s=2e9, **PLACE)
TEMPORARY = Disk(purpose="Ray's temporary folder", path="/tmp", need_bytes=GIB, write_bytes_per_s=0, **PLACE)
GOOD = MeasuredHost(
    gpus=8, shm_bytes=64 * GIB, memory_bytes=900 * GIB, disks=(DISK, TEMPORARY), files=1 << 20, processes=-1
)


# --- rendezvous -----------------------------------------------------------------------------------------


def meet(nodes: int, *hellos: dict, silence_s: float = 15.0):
    head = rendezvous.RendezvousHead(nodes, "run", port=0, silence_s=silence_s)
    joined = [rendezvous.join_head("127.0.0.1", h, 5.0, head.port, silence_s) for h in hellos]
    for _ in hellos:
        head.accept(5.0)
    return head, joined


def hello(rank: int, nodes: int = 3, run: str = "run") -> dict:
    return {"rank": rank, "nodes": nodes, "run": run, "host": f"h{rank}"}


def test_nodes_meet_in_any_order_and_the_head_knows_who_is_missing():
    head, (second,) = meet(3, hello(2))
    assert head.missing() == [1]
    first = rendezvous.join_head("127.0.0.1", hello(1), 5.0, head.port)
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
        (hello(1), "both claim to be node 1"),
        (hello(3), "claims to be node 3 of 3"),
        (hello(2, nodes=4), "claims to be node 2 of 4"),
    ],
)
def test_a_node_that_does_not_belong_is_refused_by_name(second, message):
    with pytest.raises(rendezvous.LaunchEnded, match=message):
        meet(3, hello(1), second)


TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 4


@pytest.mark.parametrize("line", [
    b"GET / HTTP/1.0\r\n\r\n", b'{"rank": "abc", "run": "run"}\n', b'{"rank": 1.5, "run": "run"}\n', b"",
    b'{"rank": true, "run": "run"}\n', b'{"rank": 1}\n', b'{"rank": 1, "run": "run", "nodes": 2}\n',
    b'["rank", 1]\n', b'"rank"\n', b"[" * 200_000 + b"\n", b"x" * (9 << 20),
    TLS,
], ids=str)  # fmt: skip
def test_a_stranger_does_not_disturb_the_head(line):
    """Whatever it says, and while it keeps its connection open."""
    head = rendezvous.RendezvousHead(2, "run", port=0)
    with socket.create_connection(("127.0.0.1", head.port)) as stranger:

        def talk():
            with contextlib.suppress(OSError):  # the head may close while it is still talking
                stranger.sendall(line)

        threading.Thread(target=talk, daemon=True).start()
        assert head.accept(0.3) is None
        began = time.monotonic()
        link = rendezvous.join_head("127.0.0.1", hello(1, 2), 5.0, head.port)
        assert head.accept(5.0) == 1 and link.lost() is None
        assert time.monotonic() - began < 2.0, "one that says nothing makes nobody wait"
    head.close()


@pytest.mark.parametrize(
    ("late", "why"),
    [
        ({"run": "other"}, "belongs to run 'other', this head to 'run'"),
        (
            {"start": {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}},
            "its SLURM_RESTART_COUNT is '1', not '2'",
        ),
        ({"start": {"SPOTRL_LAUNCH": "old"}}, "its SPOTRL_LAUNCH is 'old', not 'new'"),
    ],
)
def test_a_late_node_of_another_run_or_start_is_told_so_and_sent_away(capsys, late, why):
    start = {"SPOTRL_LAUNCH": "new", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    head = rendezvous.RendezvousHead(2, "run", port=0, start=start)
    left_over = rendezvous.join_head("127.0.0.1", hello(1, 2) | late, 5.0, head.port)
    assert head.accept(0.5) is None
    told = left_over.receive(5.0) or {}
    assert why in told["why"] and told["code"] == EXIT_NODE_LOST
    assert why in capsys.readouterr().out
    # A variable that only the head has says nothing about the node.
    ours = hello(1, 2) | {"start": {"SPOTRL_LAUNCH": "new", "SKYPILOT_TASK_ID": "t"}}
    link = rendezvous.join_head("127.0.0.1", ours, 5.0, head.port)
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
        rendezvous.LaunchEnded, match=rf"no answer from the head at 127.0.0.1:{free_port} within 1 s"
    ):
        rendezvous.join_head("127.0.0.1", hello(1), 1.0, free_port)
    assert time.monotonic() - began < 4.0


# --- checks ---------------------------------------------------------------------------------------------


def gpu_run(tmp_path: Path) -> c.RunConfig:
    return c.RunConfig(
        run=c.Run(dir=str(tmp_path / "run")),
        placement=c.Placement(workers_per_node=8),
        rollout=c.Rollout(prompts_per_step=64),
        data=c.Data(path="s3://bucket/data"),
    )


def wrong(tmp_path: Path, host: MeasuredHost, node=LOCAL) -> list[Finding]:
    return [f for f in preflight.check_host(gpu_run(tmp_path), node, host) if f.level != "pass"]


def disks(**change) -> dict:
    return {"disks": (dataclasses.replace(DISK, **change), TEMPORARY)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 7}, "7 GPUs are visible and placement.workers_per_node is 8"),
        ({"gpus": None}, "no nvidia-smi"),
        ({"shm_bytes": GIB}, "/dev/shm has 1.0 GiB free and 2.0 GiB are needed"),
        ({"memory_bytes": 10 * GIB}, "10.0 GiB of memory are available and 56.0 GiB are needed"),
        (
            disks(free_bytes=GIB),
            "1.0 GiB are free for run and Ray's temporary folder (/runs) and 3.0 are needed",
        ),
        (disks(write_bytes_per_s=1e6), "/runs takes 1 MB/s: a checkpoint would take 45"),
        (
            disks(purpose="model cache", need_bytes=140 * GIB, write_bytes_per_s=2e7),
            "20 MB/s: the model would",
        ),
        ({"disks": (dataclasses.replace(TEMPORARY, write_bytes_per_s=1e7),)}, "/tmp takes 10 MB/s: what is"),
        ({"disks": (dataclasses.replace(TEMPORARY, filesystem="nfs4"),)}, "is on nfs4, over the network"),
        (disks(free_files=5), "/runs has room for 5 more files"),
        ({"cpus": 0.1}, "its 8 ranks may use 0.1 processors"),
        ({"lacks": ("no Python.h",)}, "Triton builds its launchers when a kernel first runs: no"),
        ({"loopback": False}, "127.0.0.1 does not answer"),
        ({"files": 1024}, "only 1024 files may be open"),
        ({"processes": 100}, "only 100 processes may be started"),
    ],
)
def test_each_lack_is_one_finding_with_its_remedy_and_takes_no_other_machine(tmp_path, change, message):
    assert wrong(tmp_path, GOOD) == []
    (finding,) = wrong(tmp_path, dataclasses.replace(GOOD, **change))
    assert message in finding.figure and finding.remedy and not finding.machine


@pytest.mark.parametrize(("nodes", "figures"), [(1, []), (2, ["only 65536 bytes may be pinned"])])
def test_pinned_memory_is_asked_for_where_infiniband_is_used(tmp_path, nodes, figures):
    node = dataclasses.replace(LOCAL, nodes=nodes)
    findings = wrong(tmp_path, dataclasses.replace(GOOD, locked_bytes=65536, infiniband=True), node)
    assert [f.figure.partition(" and there")[0] for f in findings] == figures
    assert not any(f.machine for f in findings)


def test_infiniband_without_its_library_is_the_images_fault(tmp_path):
    host = dataclasses.replace(GOOD, infiniband=True, lacks_verbs=("libibverbs.so.1",))
    assert wrong(tmp_path, host) == [], "one node does not use it"
    (finding,) = wrong(tmp_path, host, dataclasses.replace(LOCAL, nodes=2))
    assert finding.figure.startswith("without libibverbs.so.1 NCCL trains over TCP") and not finding.machine
    assert "apt-get install libibverbs1 ibverbs-providers librdmacm1" in finding.remedy


def test_a_machine_of_one_gpu_needs_what_one_rank_needs(tmp_path):
    """Docker's /dev/shm of 64 MiB, and limits that eight ranks would not fit."""
    config = c.override(gpu_run(tmp_path), ["placement.workers_per_node=1"])
    host = dataclasses.replace(GOOD, gpus=1, shm_bytes=60 << 20, files=8192, processes=1024, cpus=1.0)
    assert [f for f in preflight.check_host(config, LOCAL, host) if f.level != "pass"] == []


def test_a_gpu_that_dropped_out_is_the_machines_fault(tmp_path):
    node = read_node_environment({"SPOTRL_NODES": "1", "SPOTRL_GPUS_PER_NODE": "8"})
    (finding,) = wrong(tmp_path, dataclasses.replace(GOOD, gpus=7), node)
    assert finding.machine and "dropped out" in finding.remedy


def test_local_paths_that_are_missing_are_named(tmp_path):
    config = dataclasses.replace(gpu_run(tmp_path), model=c.Model(path="/nowhere/model"))
    (finding,) = [f for f in preflight.check_host(config, LOCAL, GOOD) if f.level != "pass"]
    assert finding.figure == "model.path /nowhere/model is not on this node" and not finding.machine


def needs_of(config: c.RunConfig, home: Path) -> dict[str, int]:
    return {purpose: need for purpose, _, need in preflight.disk_needs(config, {"HF_HOME": str(home)}, False)}


def test_a_hub_model_is_planned_for_by_its_shape_and_a_preflight_plans_for_none(tmp_path):
    config = dataclasses.replace(gpu_run(tmp_path), model=c.Model(path="Qwen/Qwen2.5-VL-7B-Instruct"))
    needs = needs_of(config, tmp_path)
    billions = 8.29e9
    assert needs["run"] == pytest.approx(2 * GIB + 3 * 12 * billions, rel=0.01)
    assert needs["model cache"] == pytest.approx(2 * billions, rel=0.01)
    (tmp_path / "hub/models--Qwen--Qwen2.5-VL-7B-Instruct/snapshots").mkdir(parents=True)
    needs = needs_of(config, tmp_path)
    assert needs["model cache"] == 0
    assert [need for _, _, need in preflight.disk_needs(config, {}, True)] == [2 * GIB, GIB]


def test_a_teacher_is_downloaded_besides(tmp_path):
    options = ["model.path=Qwen/Qwen2.5-VL-7B-Instruct", "algorithm.kl_coef=0"]
    options.append("algorithm.teacher=Qwen/Qwen2.5-VL-72B-Instruct")
    config = c.override(gpu_run(tmp_path), options)
    needs = needs_of(config, tmp_path)
    assert needs["model cache"] == 2 * 8_292_166_656 and needs["teacher cache"] == 2 * 73_410_777_344


def test_nodes_that_share_a_download_need_disk_for_their_share(tmp_path):
    def cache(*changes: str) -> int:
        base = ["model.path=Qwen/Qwen2.5-VL-72B-Instruct", "placement.nodes=4", "checkpoint.export_hf=end"]
        config = c.override(gpu_run(tmp_path), base + [*changes])
        return needs_of(config, tmp_path)["model cache"]

    model = 73_410_777_344 * 2
    assert cache() == model // 4 + 5 * GIB and cache("placement.nodes=1") == model
    assert cache("model.freeze_vision=true") == model, "the exporting node copies the frozen tower"
    assert cache("checkpoint.shared_files=true") == model, "the shares of all nodes lie in one place"
    assert cache("optimizer.zero_stage=2") == model


def test_a_disk_is_measured_where_it_will_be(tmp_path):
    place, needs = tmp_path / "not" / "there", [("run", 7), ("model cache", 0), ("Ray's temporary folder", 1)]
    disks = list(preflight.measure_disks((purpose, place, need) for purpose, need in needs))
    assert [d.need_bytes for d in disks] == [7, 0, 1]
    assert all(d.free_bytes > 0 and d.write_bytes_per_s > 1e5 and d.filesystem for d in disks)
    assert len({d.write_bytes_per_s for d in disks}) == 1  # of one file system once


def test_code_configuration_versions_and_data_are_compared(tmp_path, mixed_dataset):
    config = dataclasses.replace(gpu_run(tmp_path), data=c.Data(path=str(mixed_dataset)))
    ours = same_setup.node_facts(config)
    assert ours["data"] and same_setup.check_facts(ours, 0) == []
    assert {f.level for f in same_setup.compare_facts(ours, ours, 1)} == {"pass"}
    other = ours | {"versions": ours["versions"] | {"ray": "2.0"}, "data": "0" * 16, "code": "1" * 16}
    other["config"] = same_setup.config_fingerprints(c.override(config, ["optimizer.learning_rate=1"]))
    versions, code, configuration, data = same_setup.compare_facts(ours, other, 1)
    assert versions.figure == f"ray 2.0 (head: {ours['versions']['ray']})" and versions.nodes == (1,)
    assert (code.level, code.machine) == ("fail", False)
    assert configuration.figure == "its configuration is not the head's: optimizer.learning_rate"
    assert (
        data.figure == f"its data is not the head's ({'0' * 16}, head: {ours['data']})" and not data.machine
    )


def test_a_configuration_says_nothing_of_its_tokens_and_of_each_nodes_own_home(tmp_path):
    config = gpu_run(tmp_path)
    here = c.override(config, ["rewards.remote_url=https://me:SECRET@host/r", "run.dir=/home/a/runs/x"])
    there = c.override(here, ["run.dir=/home/b/runs/x"])
    assert same_setup.config_fingerprints(here) == same_setup.config_fingerprints(there)
    assert "SECRET" not in json.dumps(same_setup.config_fingerprints(here))


def test_one_byte_of_a_source_file_changes_the_code(tmp_path):
    (tmp_path / "trainer").mkdir()
    file = tmp_path / "trainer" / "a.py"
    file.write_text("a = 1")
    before = same_setup.code_fingerprint(tmp_path)
    file.write_text("a = 2")
    assert same_setup.code_fingerprint(tmp_path) != before


def test_a_shard_that_is_not_what_its_manifest_says_is_named(tmp_path, mixed_dataset):
    copy = shutil.copytree(mixed_dataset, tmp_path / "copy")
    assert same_setup.data_fingerprint(str(copy)) == same_setup.data_fingerprint(str(mixed_dataset))
    shard = next(copy.rglob("*.parquet"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])  # of equal size
    name = shard.relative_to(copy).as_posix()
    assert same_setup.data_fingerprint(str(copy))[1] == [name]
    facts = same_setup.node_facts(dataclasses.replace(gpu_run(tmp_path), data=c.Data(path=str(copy))))
    (finding,) = same_setup.check_facts(facts, 3)
    assert name in finding.figure and finding.nodes == (3,) and not finding.machine
    shard.write_bytes(whole[:-1])
    assert same_setup.data_fingerprint(str(copy))[1] == [name]
    assert same_setup.data_fingerprint("s3://bucket/data") == ("", [])


def test_findings_make_one_table_one_file_and_one_code(tmp_path):
    good = [Finding(check="memory", nodes=(n,), figure=f"{n} GiB", target="1 GiB") for n in range(4)]
    slow = Finding(check="bandwidth", nodes=(0, 2), level="fail", figure="1 Gb/s", remedy="another machine")
    full = Finding(
        check="disk space", nodes=(1,), level="fail", figure="full", remedy="free some", machine=False
    )
    late = Finding(check="clock", nodes=(3,), level="warn", figure="8 s off", remedy="NTP")
    assert [exit_code(f) for f in ([], [late], [full], [full, slow])] == [0, 0, 2, 36]
    rows = findings_table([*good, late, slow, full], lambda n: f"node {n}").splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["fail", "fail", "warn", "pass"]
    assert "node 0 -> node 2" in rows[1] and "4 nodes" in rows[4] and "0 GiB, 1 GiB and 2 more" in rows[4]
    assert slow.line(lambda n: f"n{n}") == "n0 -> n2: 1 Gb/s: another machine"
    content = json.loads(write_findings([slow], {"pairs": []}, tmp_path / "run").read_text())
    assert content["code"] == 36 and [finding_from_message(f) for f in content["findings"]] == [slow]


def test_gpus_are_counted_from_the_visible_devices():
    assert preflight.count_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert preflight.count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert preflight.count_gpus({"ROCR_VISIBLE_DEVICES": "1"}) == 1


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
    own = "2026 INFO job_manager.py:581 -- Runtime env is setting up.\nRunning entrypoint for job x: y\n"
    source.write_text(f"{own}step 1\nste")
    log.pump()
    assert capsys.readouterr().out == "step 1\n"
    source.open("a").write("p 2\nlast")
    log.close()
    assert capsys.readouterr().out == "step 2\nlast\n"
    assert (tmp_path / "run" / "launch.log").read_text() == "step 1\nstep 2\nlast\n"


def test_a_temporary_folder_with_too_long_a_name_is_avoided_or_refused(tmp_path):
    long = tmp_path / ("x" * 40)
    long.mkdir()
    assert ray_temporary_folder({"TMPDIR": str(long)}) == Path("/tmp") and ray_temporary_folder(
        {"TMPDIR": "/tmp"}
    ) == Path("/tmp")
    with pytest.raises(ConfigError, match="SPOTRL_TMP"):
        ray_temporary_folder({"SPOTRL_TMP": str(long)})


def test_the_all_reduce_checks_its_sums(tmp_path, free_port):
    from trainer.node.preflight import speed

    out = tmp_path / "speed.json"
    command = speed.speed_command(0.3, "cpu", 0, 1, 2, "127.0.0.1", free_port, str(out))
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        f"all-reduce of {kib} KiB over 2 ranks" for kib in (64, 1024, 16384)
    ]
    ranks = json.loads(out.read_text())
    assert [r["rank"] for r in ranks] == [0, 1] and all(
        r["between_gb_per_s"] > 0 and not r["wrong"] for r in ranks
    )
    assert speed.judge_speed(ranks, 0.0) == []


def test_every_port_is_in_the_catalogue_of_failures():
    text = (ROOT / "docs/failures.md").read_text().split("## Ports")[1].split("\n## ")[0]
    listed: set[int] = set()
    for first, last in re.findall(r"(?<=[| ])(\d{4,5})(?:-(\d{4,5}))?(?=[ ,])", text):
        listed.update(range(int(first), int(last or first) + 1))
    ours = {f.default for f in dataclasses.fields(Ports)} | {rendezvous.PORT, MASTER_PORT}
    assert ours <= listed
