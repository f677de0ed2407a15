"""A step that the trainer's own engines share with rollout workers: how often they are started for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.fleet.test_dispatch import PlayedWorker
from tests.fleet.test_dispatch import head as head
from tests.fleet.test_verify import UNIT, good
from trainer.algorithm.traces import Prompt, Trace
from trainer.config import Split
from trainer.fleet import beside_sampler
from trainer.fleet.beside_sampler import BesideSampler, SharedGroups
from trainer.fleet.dispatch import Dispatcher
from trainer.fleet.head import FleetGroups
from trainer.fleet.units import RolloutUnit
from trainer.sampling.sampler import SampledGroups, SamplingRequest


class PlayedFleet:
    """What a `FleetSampler` does of a step that is shared: it has units, and waits."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    def meanwhile(self) -> None:
        """Nobody is probed."""

    def pause(self) -> None:
        self.dispatcher.pause()

    def wait_for(self, units: list[RolloutUnit]) -> list[Trace]:
        return [trace for unit in units for trace in self.dispatcher.take(unit)]


class OwnEngines:
    """Samples the completions of `good`, and notes how many prompts it was given at a time."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.meanwhile: Callable[[], object] = lambda: None
        """What happens while they sample for the first time."""

    def sample(self, ask: SamplingRequest) -> SampledGroups:
        if not self.calls:
            self.meanwhile()
        self.calls.append(len(ask.prompts))
        return SampledGroups(completions_of(ask.prompts))


def completions_of(prompts) -> list[list[Trace]]:
    """Two completions of each prompt: those of a prompt on its row in `good`."""
    groups = []
    for prompt in prompts:
        kind = 0 if prompt.row == UNIT.prompts[0].row else 1
        groups.append([replace(trace, group=prompt.group) for trace in good() if trace.group == kind])
    return groups


def units_of(count: int) -> list[RolloutUnit]:
    """Units of one step, of two groups each."""
    rows = [prompt.row for prompt in UNIT.prompts]
    units = []
    for number in range(count):
        prompts = tuple(Prompt(2 * number + i, rows[i], 7) for i in (0, 1))
        units.append(replace(UNIT, name=f"{number:06d}", prompts=prompts))
    return units


@pytest.fixture
def shared(head, monkeypatch):
    """A function that samples a step of some units, and the engines that it does so with."""
    monkeypatch.setattr(beside_sampler, "HEARTBEAT_S", 0.3)
    dispatcher = head(own=True)
    own = OwnEngines()
    sampler = BesideSampler(own, PlayedFleet(dispatcher))  # ty: ignore[invalid-argument-type]

    def step(units: list[RolloutUnit]) -> list[Trace]:
        prompts = [prompt for unit in units for prompt in unit.prompts]
        ask = SamplingRequest("train", 7, 6, prompts, Split("rows", ""), np.zeros(9), 2, 1.0, 6)
        dispatcher.offer(units)
        return SharedGroups(ask, FleetGroups(units, sampler.fleet), sampler).all()

    return step, own, dispatcher


def test_without_workers_a_step_is_one_batch_of_the_trainers_engines(shared):
    step, own, dispatcher = shared
    traces = step(units_of(6))
    assert own.calls == [12] and dispatcher.counts.own == 6
    assert [(trace.group, trace.index) for trace in traces] == [(g, i) for g in range(12) for i in (0, 1)]


def test_a_worker_that_dies_with_a_unit_costs_one_more_batch(shared, tmp_path):
    step, own, dispatcher = shared
    worker = PlayedWorker(tmp_path, "w0")
    worker.join(dispatcher.held.name)
    while not dispatcher.scheduler.workers:
        dispatcher.pause()
    own.meanwhile = worker.mail
    assert len(step(units_of(6))) == 24
    assert own.calls == [10, 2] and dispatcher.scheduler.doubled == 1


def test_a_worker_that_samples_its_share_in_time_is_waited_for(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(beside_sampler, "HEARTBEAT_S", 30.0)
    step, own, dispatcher = shared
    worker = PlayedWorker(tmp_path, "w0")
    worker.join(dispatcher.held.name)
    while not dispatcher.scheduler.workers:
        dispatcher.pause()

    def serve() -> None:
        unit, _ = worker.mail().mail[0]
        traces = [trace for group in completions_of(unit.prompts) for trace in group]
        threading.Timer(0.5, worker.send, [traces]).start()

    own.meanwhile = serve
    assert len(step(units_of(6))) == 24
    assert own.calls == [10] and (dispatcher.counts.own, dispatcher.counts.units) == (5, 1)
