"""A run and its spot machines that sample, by one command through real SkyPilot on a stand-in for RunPod:
every one of them is taken away once, and all are gone when the run is over."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import hosts
import pytest
import runpod_lab
from runpod_lab import BUCKET, SMALL, SPOT, options

from trainer.fleet.objects import SIGNATURE_BYTES

pytestmark = [*hosts.marks(runpod_lab.missing()), pytest.mark.timeout(1700)]
STEPS = 24
FLEET = ["fleet.unit_prompts=2", "fleet.lost_s=10", "sample.memory_gib=16", f"run.max_steps={STEPS}"]


def marks(desk):
    """The newest mark of every worker of the run, by the pod that it runs on."""
    found = {}
    for path in desk.buckets.glob("bucket/runs/fleet/fleet/workers/*.json"):
        body = path.read_bytes()[SIGNATURE_BYTES:]
        if body.endswith(b"}"):  # the store writes in place
            mark = json.loads(body)
            found[mark["host"]] = mark
    return found


def sampling(desk, but=()):
    """Pods whose worker has sent samples, of those that are rented now."""
    rented = {pod["id"] for pod in desk.rented}
    return [pod for pod, mark in marks(desk).items() if mark["completions"] and pod in rented - set(but)]


def newest(desk):
    return max(desk.commits("fleet"), default=0)


def test_spot_machines_that_sample_come_back_and_none_outlives_its_run(desk, figure):
    sets = options(SMALL, SPOT, *FLEET)
    up = ["up", "demo", "--target", "skypilot-runpod", *sets, "--bucket", BUCKET, "--run-id", "fleet"]
    command = desk.command(sys.executable, "launch.py", *up, "--fleet", "2xA100-80GB:spot")
    log = desk.scratch / "up.log"
    began = time.monotonic()
    with log.open("wb") as out:
        launch = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        desk.until(lambda: len(sampling(desk)) == 2, 600, "two workers that sample")
        figure("RunPod stand-in, fleet: until both workers sampled", time.monotonic() - began)
        first, second = sampling(desk)
        desk.provider("/preempt", pod=first)
        saved, taken = newest(desk), time.monotonic()
        desk.until(lambda: newest(desk) > saved + 1, 120, "a step of the other worker alone")
        figure("RunPod stand-in, fleet: a step after the loss of one worker of two", time.monotonic() - taken)
        desk.provider("/preempt", pod=second)
        saved, taken = newest(desk), time.monotonic()
        assert saved < STEPS - 2, "the run has to wait for machines that come back"
        desk.until(lambda: sampling(desk, but=(first, second)), 400, "samples of a machine that came back")
        desk.until(lambda: newest(desk) > saved + 1, 120, "a step of a machine that came back")
        figure("RunPod stand-in, fleet: a step after the loss of all workers", time.monotonic() - taken)
        assert launch.wait(600) == 0, log.read_text()[-4000:]
        ended = time.monotonic()
        desk.until(lambda: not desk.rented, 240, "all machines to go")
        figure("RunPod stand-in, fleet: until no machine was left, after `up`", time.monotonic() - ended)
        figure("RunPod stand-in, fleet: the whole", time.monotonic() - began)
    finally:
        if launch.poll() is None:
            launch.terminate()
            launch.wait(60)
    assert newest(desk) == STEPS
    said = desk.launch("status", "fleet").stdout
    table = said.partition("started UTC")[2]
    assert "still costing" not in table and table.count("skypilot-runpod     finished") == 2, said
    assert "managed job 1: SUCCEEDED, RunPod" in table, said
    moved = re.findall(r"worker \d: managed job \d+: SUCCEEDED, .*, recovered (\d) times", table)
    assert moved == ["1", "1"], said
    for number in ("1", "2"):
        assert (
            "ends: the run has reached its last step"
            in desk.launch("logs", "fleet", "--worker", number).stdout
        )
    assert desk.provider()["calls"].count("podRentInterruptable") == 5
