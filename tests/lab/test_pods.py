"""The pods of a JobSet on hosts of the lab: each runs the rendered command on the packed code, with the
variables that Kubernetes gives it, and finds the head by its stable name.

No API server is packaged: who starts the pods, and the names that the headless service gives, are played.
"""

from __future__ import annotations

import dataclasses

import checkout
import hosts
import pytest
import yaml

from recipes.drivers import kubernetes_driver
from recipes.platforms import job_set
from recipes.presets import resolve
from tests.recipes.rendered import render

pytestmark = hosts.marks(hosts.missing())
NAMES = [f"try-{job_set.NODE}-0-{rank}.try" for rank in range(2)]


OLD = "old"


def small():
    """The preflight of two nodes with one rank each."""
    recipe = resolve("preflight", ["cluster.nodes=2", "cluster.gpus_per_node=0", "setup=cpu"])
    placement = dataclasses.replace(recipe.config.placement, workers_per_node=1)
    return dataclasses.replace(recipe, config=dataclasses.replace(recipe.config, placement=placement))


@pytest.fixture
def lab():
    with hosts.Lab([*NAMES, OLD]) as made:
        yield made


def pod(lab, folder, host, rank, restart):
    """(process, log) of one pod of a run called `try`, on a host."""
    recipe = small()
    archive = folder / job_set.ARCHIVE
    archive.write_bytes(kubernetes_driver.packed_tree(checkout.ROOT, recipe))
    text = job_set.of_run(next(iter(render(recipe, "kubernetes").values())), "try")
    job = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    *shell, body = container["command"]
    body = body.replace(f"{job_set.ARCHIVE_FOLDER}/{job_set.ARCHIVE}", str(archive))
    place = checkout.environment(folder / host, recipe.environment)
    env = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    env |= {"JOB_COMPLETION_INDEX": str(rank), "SPOTRL_RESTART": str(restart)}
    env |= {"WORK": str(place / "workspace")}
    command = ["bash", "-c", 'cd "$1" && shift && exec "$@"', "pod", str(place), *shell, body]
    log = folder / f"{host}.log"
    return lab.hosts[host].start(command, log, env), log


def test_a_preflight_runs_in_two_pods_that_meet_by_name(lab, tmp_path):
    started = [pod(lab, tmp_path, name, rank, restart=0) for rank, name in enumerate(NAMES)]
    said = [(process.wait(400), log.read_text()) for process, log in started]
    assert [code for code, _ in said] == [0, 0], said
    assert "over 2 ranks" in said[0][1] and "preflight passed" in said[0][1], said[0][1]
    assert f"joined the head {NAMES[0]}" in said[1][1], said[1][1]


def test_a_pod_that_an_earlier_start_left_over_is_turned_away(lab, tmp_path):
    old, old_log = pod(lab, tmp_path, OLD, 1, restart=0)
    head, head_log = pod(lab, tmp_path, NAMES[0], 0, restart=1)
    assert old.wait(400) != 0, old_log.read_text()
    new, new_log = pod(lab, tmp_path, NAMES[1], 1, restart=1)
    assert (head.wait(400), new.wait(400)) == (0, 0), head_log.read_text() + new_log.read_text()
    said = head_log.read_text()
    assert "its SPOTRL_RESTART is '0', not '1': sent away" in said and "over 2 ranks" in said, said
