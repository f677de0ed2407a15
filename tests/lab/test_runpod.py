"""Recipes through real SkyPilot on a stand-in for RunPod: on demand to the end; on spot through a
preemption."""

from __future__ import annotations

import json
import re
import time

import checkout
import hosts
import pytest
import runpod_lab
from runpod_lab import BUCKET, SMALL, SPOT, options

pytestmark = [*hosts.marks(runpod_lab.missing()), pytest.mark.timeout(1700)]


def test_sky_launch_of_a_committed_file_runs_to_the_end_and_gives_the_machine_back(desk):
    _, text = checkout.committed_file("skypilot-runpod", 3)
    (desk.repository / "small.yaml").write_text(text)
    command = f"sky launch -y -c by-hand small.yaml --env RUN_ID=by-hand --env BUCKET={BUCKET}"
    command += f" --env AWS_ENDPOINT_URL=http://{runpod_lab.STORE}"
    command += " --secret AWS_ACCESS_KEY_ID --secret AWS_SECRET_ACCESS_KEY"
    done = desk.call(*command.split())
    assert "starting from scratch" in done.stdout and desk.commits("by-hand")[-1] == 3, done.stdout[-4000:]
    (pod,) = desk.rented
    assert not pod["spot"] and pod["vcpuCount"] == 4
    desk.call("sky", "down", "-y", "by-hand")
    assert desk.rented == [] and desk.provider()["calls"].count("deployCpuPod") == 1


def test_a_preempted_spot_job_goes_on_elsewhere_from_its_last_commit(desk, capsys):
    sets = options(SMALL, SPOT, "run.max_steps=30")
    up = ["up", "demo", "--target", "skypilot-runpod", *sets, "--bucket", BUCKET, "--run-id", "spot"]
    shown = desk.launch(*up, "--dry-run").stdout
    assert "sky jobs launch -y -n spot" in shown and runpod_lab.SECRET not in shown
    began = time.monotonic()
    desk.launch(*up, "--detach")
    desk.until(lambda: max(desk.commits("spot"), default=0) >= 3, 300, "three steps in the bucket")
    (pod,) = desk.rented
    assert pod["spot"]
    desk.provider("/stock", without=[pod["dataCenterId"]])
    desk.provider("/preempt", pod=pod["id"])
    taken, saved = time.monotonic(), desk.commits("spot")[-1]
    desk.until(lambda: desk.rented, 300, "another machine")
    assert desk.rented[0]["dataCenterId"] != pod["dataCenterId"]
    rented = time.monotonic()
    desk.until(lambda: desk.commits("spot")[-1] > saved, 300, "another step in the bucket")
    again = time.monotonic()
    desk.until(
        lambda: "SUCCEEDED, RunPod" in desk.launch("status", "spot").stdout, 600, "the end", every_s=15
    )
    assert desk.commits("spot")[-1] == 30
    resumed = re.findall(r"resumed from step (\d+)", desk.launch("logs", "spot").stdout)
    assert resumed and saved <= int(resumed[-1]) <= saved + 1  # one may have been under way
    desk.until(lambda: not desk.rented, 60, "the machine to go")
    with capsys.disabled():
        print(
            f"\nafter the loss: another machine {rented - taken:.0f} s, another step in the bucket "
            f"{again - taken:.0f} s; the whole job {time.monotonic() - began:.0f} s"
        )


def test_down_ends_a_job_and_leaves_no_machine(desk):
    desk.provider("/stock", without=[])
    sets = options(SMALL, SPOT, "run.max_steps=1000")
    up = f"up demo --target skypilot-runpod --bucket {BUCKET} --run-id ended --detach"
    desk.launch(*up.split(), *sets)
    desk.until(lambda: desk.commits("ended"), 300, "a commit")
    desk.launch("down", "ended")
    desk.until(lambda: not desk.rented, 240, "the machine to go")
    assert "CANCELLED" in desk.launch("status", "ended").stdout


def test_a_check_of_a_card_runs_to_its_end_and_its_machine_goes(desk):
    """The machine has no GPU: every check that a CPU can, at the tiny model's size."""
    desk.provider("/stock", without=[])
    sets = options(SPOT)
    up = ["up", "gpu-check", "--target", "skypilot-runpod", *sets, "--bucket", BUCKET, "--run-id", "card"]
    done = desk.launch(*up, check=False, timeout_s=1500)
    said = json.loads((desk.buckets / "bucket/runs/card/gpu-check.json").read_text())
    outcomes = {check["name"]: check["outcome"] for check in said["checks"]}
    # The model of this lab has not seen the demo's warm start.
    assert set(outcomes) > {"parity", "three-billion", "decode", "demo"}, done.stdout[-4000:]
    assert {name for name, outcome in outcomes.items() if outcome not in ("passed", "skipped")} <= {"demo"}
    assert "a decode step's host work" in said["figures"]
    desk.until(lambda: not desk.rented, 240, "the machine to go")
