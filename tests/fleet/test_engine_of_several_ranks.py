"""A worker whose engine is two ranks: one copy of the weights for both, and neither outlives the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fleet.jobs import KEY, WorkerProcess, other_ranks
from tests.loops.jobs import ROOT
from tests.waiting import until
from trainer import config as configuration
from trainer.algorithm.traces import Prompt, Trace
from trainer.checkpoint.attempt import Attempts
from trainer.config import RunConfig, override
from trainer.data.reader import Datasets
from trainer.fleet.fleet_records import SAMPLING, RolloutUnit, WeightVersion
from trainer.fleet.fleet_sampler import FleetSampler
from trainer.fleet.objects import next_lineage, version_key
from trainer.fleet.worker_heartbeat import read_heartbeat
from trainer.ranks.environment import rank_environment
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.system.exit_codes import EXIT_NODE_LOST
from trainer.system.processes import has_ended

PAIR = ("--set", "rollout.tensor_parallel=2")


@pytest.fixture
def config(small_config, tmp_path) -> RunConfig:
    """A run on one rank whose worker may have two."""
    return override(
        small_config,
        [
            f"run.dir={tmp_path / 'run'}",
            "run.id=mine",
            f"checkpoint.remote={tmp_path / 'bucket'}",
            "fleet.workers=only",
            "placement.workers_per_node=1",
            "rollout.max_tokens=200",
            "rollout.sync_bucket_bytes=262144",
        ],
    )


@pytest.fixture
def head(config, tmp_path, monkeypatch):
    """The head of a run that trains nothing: workers begin with the model's files."""
    monkeypatch.setenv("SPOTRL_FLEET_KEY", KEY)
    seal = Seal("mine", KEY.encode())
    held = Attempts(Storage(tmp_path / "bucket/mine/attempts"), seal=seal).take(0)
    one = FleetSampler(config, Any, held, Datasets(config), Any, poll_s=0.05)
    one.open_pretrained()
    yield one
    one.close()


def unit(head: FleetSampler, name: str, rows: int, tokens: int, version: int = 0) -> RolloutUnit:
    prompts = tuple(Prompt(row, row, 1000 + 100 * row) for row in range(rows))
    return RolloutUnit(name, 1, version, head.publisher.lineages[0], "train", prompts, 4, 1.0, 1.0, tokens)


def sampled(head: FleetSampler, asked: RolloutUnit) -> list[Trace]:
    """Waits for a unit's traces, by group and index."""
    return sorted(head.dispatcher.wait_for(asked), key=lambda trace: (trace.group, trace.index))


@pytest.mark.slow
@pytest.mark.long
def test_it_samples_with_rank_0_s_weights_and_ends_with_any_of_its_ranks(config, head, tmp_path):
    """What it samples is what an engine of one rank samples; weights that are late hold up no rank; and
    when its second rank is killed, another worker samples its unit."""
    root = str(tmp_path / "bucket/mine")
    objects = head.dispatcher.objects
    started = []

    def worker(name: str, *more: str) -> WorkerProcess:
        started.append(WorkerProcess(root, tmp_path / "workers", name, {}, ("--poll", "1.5", *more)))
        return started[-1]

    first, late = unit(head, "first", 3, 24), unit(head, "late", 2, 8, version=1)
    late = replace(late, lineage=next_lineage(head.publisher.lineages[0], []))
    lengthy = unit(head, "lengthy", 6, 200)
    try:
        pair = worker("pair", *PAIR)
        head.dispatcher.add_units([first])
        of_pair = sampled(head, first)
        (rank_1,) = other_ranks(pair.process.pid)

        # Said to be there before the store shows it.
        head.dispatcher.announce(version=1, lineage=late.lineage)
        head.dispatcher.add_units([late])
        until(lambda: "late: weights/00000001" in pair.said(), 60)
        assert "not in" in pair.said()
        made = WeightVersion(1, late.lineage, 0, head.publisher.lineages[0], (), ())
        objects.put_record(version_key(1, late.lineage), made)
        assert {trace.versions for trace in sampled(head, late)} == {(1, 1)}

        head.dispatcher.add_units([lengthy])
        until(lambda: read_heartbeat(objects, "pair").state == SAMPLING, 60)
        os.kill(rank_1, signal.SIGKILL)
        killed = time.monotonic()
        assert pair.wait(20) == EXIT_NODE_LOST, pair.said()
        until(lambda: "pair" not in head.dispatcher.scheduler.workers, 20)
        assert time.monotonic() - killed < 15 < head.dispatcher.scheduler.lost_s
        last = read_heartbeat(objects, "pair")
        assert last.goodbye == "rank 1 of its engine has ended by signal 9"
        assert last.device == "2x cpu" and [given.unit for given in last.sent] == ["first", "late"]

        worker("single")
        assert len(sampled(head, lengthy)) == 24
        again = replace(first, name="again")
        head.dispatcher.add_units([again])
        of_single = sampled(head, again)
    finally:
        for one in started:
            one.signal(signal.SIGKILL)
            one.process.wait()
    gaps = [
        float(np.abs(ours.logprobs - theirs.logprobs).max())
        for ours, theirs in zip(of_pair, of_single, strict=True)
        if np.array_equal(ours.completion, theirs.completion)
    ]
    assert len(gaps) > 0.8 * len(of_pair) and max(gaps) < 1e-4


RANKS = """
import sys, time
from trainer import config as configuration
from trainer.fleet.engine_ranks import OtherRanks
others = OtherRanks(configuration.load(sys.argv[1]), lambda why, code: print(why, code, flush=True))
time.sleep(300)
"""


def test_ranks_end_with_rank_0_and_it_hears_of_theirs(config, tmp_path):
    """Ranks that wait for their first call: a notice that reaches them too does not end them, a kill of one
    is told, and a kill of rank 0 ends the rest."""
    config = override(config, ["rollout.tensor_parallel=3", "placement.workers_per_node=3"])
    path = tmp_path / "config.yaml"
    path.write_text(configuration.dump(config))
    Path(config.run.dir).mkdir()
    command = [sys.executable, "-c", RANKS, str(path)]
    env = os.environ | rank_environment(config) | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as rank_0:
        try:
            until(lambda: len(other_ranks(rank_0.pid)) == 2, 60)
            one, other = other_ranks(rank_0.pid)
            until(lambda: ignores_sigterm(one) and ignores_sigterm(other), 60)
            os.kill(one, signal.SIGTERM)
            os.kill(one, signal.SIGKILL)
            assert rank_0.stdout is not None
            said = rank_0.stdout.readline()
            assert said == f"rank 1 of its engine has ended by signal 9 {EXIT_NODE_LOST}\n"
            assert not has_ended(other)
        finally:
            rank_0.kill()
            rank_0.wait()
        until(lambda: has_ended(other), 10)


def ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in status if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)
