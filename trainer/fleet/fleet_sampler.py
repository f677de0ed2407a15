"""`Sampler` of a fleet: weights go out as patches, prompts as units, samples come back verified.

Everything passes through the bucket, and the head alone decides who samples what. What it accepted is in the
rollout log, so a new attempt needs nothing of this one but the weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from trainer.algorithm.traces import Prompt, Trace
from trainer.checkpoint.attempt import Attempt
from trainer.checkpoint.manager import Checkpoints
from trainer.config import RunConfig
from trainer.config.run_folder import ROSTER, write_whole
from trainer.config.run_store import FLEET, RunStore
from trainer.data.processor import Prompter
from trainer.data.reader import Datasets
from trainer.fleet.dispatch import POLL_S, Dispatcher
from trainer.fleet.fleet_records import RolloutUnit
from trainer.fleet.objects import Objects
from trainer.fleet.sample_intake import AskedUnit
from trainer.fleet.weight_publisher import VersionPublisher
from trainer.hardware import model_shapes
from trainer.learning.distributed import RankWeights
from trainer.ranks.ray_ranks import RayRanks
from trainer.sampling.sampler import SampledGroups, SamplingRequest
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.system.terminal_text import terminal_line
from trainer.weights.source import WeightSource

PROBE_S = 60.0
"""Longest time that the trainer waits for a worker's probe where it has no other reason to wait."""


@dataclass(frozen=True)
class AdmissionTest:
    ask: Callable[[int], SamplingRequest]
    """What a probe asks of a version of the weights."""
    score: Callable[[Sequence[Trace]], Sequence[np.ndarray]]
    """The learner's log-probabilities of completions, with the weights that it holds."""
    limit: float
    """Mean difference in nats per token beyond which a worker is turned away."""

    def refusal(self, traces: Sequence[Trace], device: str) -> str:
        """Why a worker may not sample, as a sentence; empty where it may. traces: of a probe with the
        learner's weights."""
        gaps = []
        for trace, policy in zip(traces, self.score(traces), strict=True):
            gaps.append(np.abs(policy - trace.logprobs))
        mean = float(np.concatenate(gaps).mean())
        if mean <= self.limit:
            return ""
        return (
            f"on a probe its engine ({device}) and the policy differ by {mean:.2e} nats per token (limit"
            f" {self.limit:.0e}, rollout.sync_tolerance): its weights, kernels or temperature are others"
        )


class WorkerAdmission:
    """Admits workers by their probes, from the trainer's own thread while it waits: the learner scores them
    with the weights that it holds."""

    def __init__(self, test: AdmissionTest | None, dispatcher: Dispatcher) -> None:
        self._test, self._dispatcher = test, dispatcher
        self.learner_holds_newest = False
        """Whether the learner holds the newest version that was published, of which the probes are."""
        self._waited_s: dict[str, float] = {}
        """How long the trainer has waited for each worker's probe."""

    def probe_request(self, version: int) -> SamplingRequest | None:
        """What workers that join sample of a version; None where they are not probed."""
        return self._test.ask(version) if self._test else None

    def judge_probes(self) -> None:
        """Admits workers whose probe is the policy's, and turns the others away."""
        if self._test is None or not self.learner_holds_newest:
            return
        for worker, device, traces in self._dispatcher.probed():
            if why := self._test.refusal(traces, device):
                self._dispatcher.turn_away(worker, why)
            else:
                self._dispatcher.admit(worker)

    def await_probes(self, meanwhile: Callable[[], None]) -> None:
        """Waits a while for workers that are being probed: their probes are of the weights that the learner
        holds now, and a trainer that never waits would admit nobody. meanwhile: called at every news."""
        while self.learner_holds_newest and (names := self._worth_waiting_for()):
            began = time.monotonic()
            self._dispatcher.pause()
            meanwhile()
            for name in names:
                self._waited_s[name] = self._waited_s.get(name, 0.0) + time.monotonic() - began

    def _worth_waiting_for(self) -> list[str]:
        return [name for name in self._dispatcher.probing() if self._waited_s.get(name, 0.0) < PROBE_S]


class FleetGroups(SampledGroups):
    """What becomes of an ask: its units, each of which a worker samples."""

    def __init__(self, units: list[RolloutUnit], fleet: FleetSampler) -> None:
        self.units, self._fleet = units, fleet
        self._traces: list[Trace] | None = None

    @property
    def whole(self) -> bool:
        return self._traces is not None or self._fleet.dispatcher.has_samples(self.units)

    def all(self) -> list[Trace]:
        if self._traces is None:
            self._traces = self._fleet.wait_for(self.units)
        return self._traces


class FleetSampler:
    """A `Sampler` whose engines are on machines of their own."""

    overlaps_learning = True

    def __init__(
        self,
        config: RunConfig,
        ranks: RayRanks,
        attempt: Attempt,
        datasets: Datasets,
        checkpoints: Checkpoints,
        admission_test: AdmissionTest | None = None,
        engine_moved: Callable[[], None] = lambda: None,
        poll_s: float = POLL_S,
    ) -> None:
        """checkpoints: the run's, with which workers may begin. admission_test: how workers are probed; None:
        all of them may sample. engine_moved: see `Dispatcher`. Raises ConfigError without a key."""
        store = RunStore.of(config)
        assert store is not None, "fleet.workers without checkpoint.remote is refused before"
        self.config = config
        self.prompter = Prompter(config.model)
        self.dispatcher = Dispatcher(
            Objects(Storage(store.fleet), Seal.of(config)),
            attempt,
            expected_samples(config, self.prompter, datasets),
            lost_s=config.fleet.lost_s,
            wait_s=config.fleet.wait_s,
            say=lambda text: print(f"fleet: {terminal_line(text)}", flush=True),
            engine_moved=engine_moved,
            poll_s=poll_s,
        )
        fingerprint = datasets[config.train_split].fingerprint
        self.publisher = VersionPublisher(config, ranks, attempt, checkpoints, self.dispatcher, fingerprint)
        self.admission = WorkerAdmission(admission_test, self.dispatcher)
        self._units_made = 0
        self._is_over = False
        self._times = {"fleet/wait_s": 0.0, "fleet/publish_s": 0.0}

    # --- weights out ----------------------------------------------------------------------------------------

    def load(self, weights: WeightSource) -> None:
        """`Sampler.load`: every rank begins to send what changed of its shard since the version before.
        Raises what kept a rank from sending that one."""
        if not isinstance(weights, RankWeights) or weights.ranks is not self.publisher.ranks:
            raise ValueError("a fleet publishes the weights of the ranks that it was made for")
        began = time.monotonic()
        if self.publisher.version is None:
            self.publisher.open(weights.version)
            self._probe_workers(weights.version)  # before the thread sees its first worker
            self.dispatcher.start()
        elif weights.version != self.publisher.version:
            self.publisher.publish(weights.version)
            self._probe_workers(weights.version)
        self.admission.learner_holds_newest = True
        self._times["fleet/publish_s"] += time.monotonic() - began

    def open_pretrained(self) -> None:
        if self.publisher.version is None:
            self.publisher.open_pretrained()
            self.dispatcher.start()

    def _probe_workers(self, version: int) -> None:
        """From now on workers that join sample a probe of a version, which the learner holds."""
        if (request := self.admission.probe_request(version)) is not None:
            self.dispatcher.probe_with(self._unit("probe", request, request.prompts))

    # --- samples in -----------------------------------------------------------------------------------------

    def sample(self, ask: SamplingRequest) -> FleetGroups:
        """`Sampler.sample`: returns at once. Raises ValueError for a version that was not published."""
        if ask.version not in self.publisher.lineages:
            raise ValueError(f"version {ask.version} of the weights was not published by this attempt")
        size = self.config.fleet.unit_prompts or self.config.rollout.prompts_per_step
        units = []
        for start in range(0, len(ask.prompts), size):
            self._units_made += 1
            units.append(self._unit(f"{self._units_made:06d}", ask, ask.prompts[start : start + size]))
        # a training run waits for its evaluations; of pass rates the blocks go in order
        self.dispatcher.add_units(units, first=ask.kind != "train" and self.config.loads_policy)
        return FleetGroups(units, self)

    def _unit(self, name: str, ask: SamplingRequest, prompts: Sequence[Prompt]) -> RolloutUnit:
        return RolloutUnit(
            name=name,
            step=ask.step,
            version=ask.version,
            lineage=self.publisher.lineages[ask.version],
            split="train" if ask.split == self.config.train_split else "evaluation",
            prompts=tuple(prompts),
            samples_per_prompt=ask.samples_per_prompt,
            temperature=ask.temperature,
            top_p=ask.top_p,
            max_tokens=ask.max_tokens,
        )

    def _meanwhile(self) -> None:
        """While the trainer waits: raises what keeps a rank from sending its weights, and admits workers."""
        self.publisher.check_sending()
        self.admission.judge_probes()

    def wait_for(self, units: list[RolloutUnit]) -> list[Trace]:
        """The units' traces by group and index, with their text."""
        began = time.monotonic()
        self._meanwhile()
        self.admission.await_probes(self._meanwhile)
        traces = []
        for unit in units:
            for trace in self.dispatcher.wait_for(unit, self._meanwhile):
                traces.append(replace(trace, text=self.prompter.reply_text(trace.completion.tolist())))
        self._times["fleet/wait_s"] += time.monotonic() - began
        self.write_roster()
        return sorted(traces, key=lambda trace: (trace.group, trace.index))

    def rest(self) -> None:
        """`Sampler.rest`: nothing is shared with the learner, whose weights change from now on: until the
        next `load` no probe can be scored."""
        self.admission.learner_holds_newest = False

    def write_roster(self) -> None:
        text = json.dumps({"unix_s": time.time(), "workers": self.dispatcher.rows()})
        write_whole(Path(self.config.run.dir) / ROSTER, text.encode())

    def close(self) -> None:
        """`Sampler.close`: the run is over, and its workers end. So says an attempt, too, that found no step
        left to train: the one before it may have been killed before it could."""
        self._end("over", "the run has reached its last step", self.publisher.published_keys())

    def leave(self) -> None:
        """Ends this attempt before the run: workers wait for the next one."""
        if self.publisher.version is not None:
            self._end("away", "this attempt of the trainer has ended", [])

    def _end(self, state: str, why: str, outdated: Sequence[str]) -> None:
        if not self._is_over:
            self._is_over = True
            self.dispatcher.close(state, why, outdated)

    def metrics(self) -> dict[str, float]:
        """Metrics of the fleet; times are those since the last call."""
        dispatcher = self.dispatcher
        counts, scheduler = dispatcher.counts, dispatcher.scheduler
        metrics = {
            "fleet/workers": float(len(scheduler.workers)),
            "fleet/completions_per_s": sum(worker.rate for worker in scheduler.workers.values()),
            "fleet/units": float(counts.units),
            "fleet/late": float(counts.late),
            "fleet/refused": float(counts.refused),
            "fleet/turned_away": float(counts.turned_away),
            "fleet/forged": float(counts.forged + self._forged_elsewhere()),
            "fleet/lost": float(scheduler.lost),
            "fleet/doubled": float(scheduler.duplicated),
            "fleet/again": float(scheduler.reassigned),
            "fleet/patch_mib": self.publisher.patch_bytes / 2**20,
        }
        metrics |= self._times | dispatcher.take_metrics()
        self._times = dict.fromkeys(self._times, 0.0)
        return metrics

    def _forged_elsewhere(self) -> int:
        return sum(not place.startswith(f"{FLEET}/") for place in self.dispatcher.objects.seal.refused)


def expected_samples(config: RunConfig, prompter: Prompter, datasets: Datasets) -> AskedUnit:
    splits = {"train": config.train_split, "evaluation": config.evaluation_split}

    @lru_cache(maxsize=4096)
    def row(split: str, number: int) -> tuple[list[int], int]:
        of_data = datasets[splits[split]][number]
        return prompter.token_ids(of_data), len(of_data.images)

    shape = model_shapes.from_config(prompter.hf_config.to_dict())
    return AskedUnit(
        vocabulary=shape.vocabulary,
        ends=prompter.end_token_ids(),
        banned=prompter.banned_token_ids(),
        row=row,
    )
