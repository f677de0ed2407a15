"""`Sampler` of a fleet: weights go out as patches, prompts as units, samples come back verified.

Everything passes through the bucket, and the head alone decides who samples what. What it accepted is in the
rollout log, so a new attempt needs nothing of this one but the weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from trainer.algorithm.traces import Prompt, Trace
from trainer.checkpoint import history
from trainer.checkpoint.attempt import Attempt
from trainer.checkpoint.layout import remote_url
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.manifest import code_fingerprint, manifests_there
from trainer.config import ConfigError, RunConfig, to_dict
from trainer.config.run_folder import ROSTER, write_whole
from trainer.config.run_store import FLEET, RunStore
from trainer.data.processor import Prompter
from trainer.data.reader import Datasets
from trainer.fleet import objects as keys
from trainer.fleet.admission import AdmissionTest
from trainer.fleet.dispatch import POLL_S, Dispatcher
from trainer.fleet.mirror import Layout, WeightVersion
from trainer.fleet.objects import Anchor, Objects, first_lineage, next_lineage
from trainer.fleet.publish import PublisherPart
from trainer.fleet.same_software import sampling_packages
from trainer.fleet.units import RolloutUnit
from trainer.fleet.verify import AskedUnit, RouterShape
from trainer.hardware import model_shapes
from trainer.learning.distributed import RankWeights
from trainer.ranks.ranks import Ranks
from trainer.sampling.sampler import SampledGroups, SamplingRequest
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError
from trainer.weights.source import WeightSource

DIGEST_EVERY = 20
"""Versions between two whose content is hashed, for mirrors to compare."""
SMALL_BYTES = 256 << 20
"""Shards up to this size are hashed at every version."""
MOST_FP32_BYTES = 1 << 30
"""Largest shard of fp32 weights: their patches are as large as they are."""
PROBE_S = 60.0
"""Longest time that the trainer waits for a worker's probe where it has no other reason to wait."""
KEPT_ANCHORS = 2
"""Newest checkpoints that a worker may begin with; older versions are deleted."""


class FleetGroups(SampledGroups):
    """What becomes of an ask: its units, each of which a worker samples."""

    def __init__(self, units: list[RolloutUnit], fleet: FleetSampler) -> None:
        self.units, self._fleet = units, fleet
        self._traces: list[Trace] | None = None

    @property
    def whole(self) -> bool:
        return self._traces is not None or self._fleet.dispatcher.has(self.units)

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
        ranks: Ranks,
        held: Attempt,
        datasets: Datasets,
        checkpoints: Checkpoints,
        admission: AdmissionTest | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """checkpoints: the run's, with which workers may begin. admission: how workers are probed; None: all
        of them may sample. moved: see `Dispatcher`. Raises ConfigError without a key."""
        store = RunStore.of(config)
        assert store is not None, "fleet.workers without checkpoint.remote is refused before"
        self.config, self.ranks = config, ranks
        self.held = held
        self._datasets, self._checkpoints = datasets, checkpoints
        self._admission, self._moved = admission, moved
        self._current = False
        """Whether the learner holds the newest version that was published, of which the probes are."""
        self._waited: dict[str, float] = {}
        """Seconds that the trainer has waited for each worker's probe."""
        self.objects = Objects(Storage(store.fleet), Seal.of(config))
        self.dispatcher: Dispatcher
        self.version: int | None = None
        self.lineage = ""
        self._lineages: dict[int, str] = {}
        self._anchors: list[Anchor] = []
        self._published: list[str] = []
        """Manifests and patches that are in the bucket, of this attempt and of older ones."""
        self._made = 0
        self._over = False
        self._times = {"fleet/wait_s": 0.0, "fleet/publish_s": 0.0}
        self._sent = True
        """Whether every rank has sent its part of the newest version."""
        self._patch_bytes = 0
        self._bytes = 0

    def start(self, poll_s: float = POLL_S) -> None:
        """Begins to look for workers. poll_s: seconds between two looks."""
        self.prompter = Prompter(self.config.model)
        fleet = self.config.fleet
        self.dispatcher = Dispatcher(
            self.objects,
            self.held,
            self._expected(),
            lost_s=fleet.lost_s,
            wait_s=fleet.wait_s,
            say=lambda text: print(f"fleet: {text}", flush=True),
            moved=self._moved,
            poll_s=poll_s,
        )

    def _expected(self) -> AskedUnit:
        """What samples must be like."""
        splits = {"train": self.config.train_split, "evaluation": self.config.evaluation_split}

        @lru_cache(maxsize=4096)
        def row(split: str, number: int) -> tuple[list[int], int]:
            found = self._datasets[splits[split]][number]
            return self.prompter.token_ids(found), len(found.images)

        shape = model_shapes.from_config(self.prompter.hf_config.to_dict())
        routers = None
        if shape.experts:
            routers = RouterShape(shape.layers, shape.experts.count, shape.experts.active)
        return AskedUnit(
            vocabulary=shape.vocabulary,
            ends=self.prompter.end_token_ids(),
            banned=self.prompter.banned_token_ids(),
            row=row,
            routers=routers,
        )

    # --- weights out ----------------------------------------------------------------------------------------

    def load(self, weights: WeightSource) -> None:
        """`Sampler.load`: every rank begins to send what changed of its shard since the version before.
        Raises what kept a rank from sending that one."""
        if not isinstance(weights, RankWeights) or weights.ranks is not self.ranks:
            raise ValueError("a fleet publishes the weights of the ranks that it was made for")
        began = time.monotonic()
        if self.version is None:
            self._open(weights.version)
        elif weights.version != self.version:
            self._publish(weights.version)
        self._current = True
        self._times["fleet/publish_s"] += time.monotonic() - began

    def _probe_with(self, number: int) -> None:
        """From now on workers that join sample a probe of a version, which the learner holds."""
        if self._admission:
            asked = self._admission.ask(number)
            self.dispatcher.probe_with(self._unit("probe", asked, asked.prompts))

    def _open(self, number: int) -> None:
        """The attempt begins: with the pretrained model, or with the checkpoint that it resumed from."""
        opened = self.ranks.all(PublisherPart.open)
        self._bytes = max(shard.nbytes for shard in opened)
        if self.config.model.dtype == "fp32" and self._bytes > MOST_FP32_BYTES:
            raise ConfigError(
                "fleet.workers: fp32 weights change in every element, so a version would be as large as the"
                " model: set model.dtype to bf16"
            )
        self._begin(number, [one.layout for one in opened], [one.digest for one in opened])

    def open_pretrained(self) -> None:
        """The attempt begins with the pretrained model, and has no rank that holds any of it: workers have
        the model's files themselves."""
        if self.version is None:
            self._begin(0, [], [])

    def _begin(self, number: int, layout: Layout, digests: list[str]) -> None:
        """Tells workers what they begin with. layout, digests: of each rank's shard."""
        kind: Literal["model", "checkpoint"] = "checkpoint" if number else "model"
        self.version, self.lineage = number, first_lineage(kind, number, digests)
        self._lineages[number] = self.lineage
        wrote = self._checkpoint_attempt(number) if number else ""
        self._anchors = [Anchor(kind, number, self.lineage, wrote)]
        about = {
            "attempt": self.held.name,
            "config": to_dict(self.config),
            "code": code_fingerprint(),
            "packages": sampling_packages(),
            "data": self._datasets[self.config.train_split].fingerprint,
            "layout": layout,
        }
        self.objects.put_json(keys.about_key(self.held.name), about)
        gone = self._of_older_attempts(number)
        self.dispatcher.announce(**self._newest())
        self._probe_with(number)  # before the thread sees its first worker
        self.dispatcher.start()
        self.dispatcher.delete(gone)

    def _checkpoint_attempt(self, step: int) -> str:
        """The attempt that wrote the checkpoint of a step. Waits until the bucket has it. Raises StorageError
        where it does not get there."""
        while self._checkpoints.busy and self._checkpoints.stored < step:
            time.sleep(0.1)
        counts = history.history_from_record(self.held.record, self.held.epoch).counts
        manifests, _ = manifests_there(Storage(remote_url(self.config)), counts, self.objects.seal)
        if step not in manifests:
            raise StorageError(
                f"the run resumes from a checkpoint of step {step} that is on this machine only, and it could"
                f" not be sent to {remote_url(self.config)}, where rollout workers begin"
            )
        return manifests[step].get("attempt", "")

    def _of_older_attempts(self, number: int) -> list[str]:
        """What older attempts have left and nobody needs: this one begins with whole weights, and what was
        sampled and is needed is in the rollout log. Patches behind its first version stay until nobody may
        hold what they made: a worker undoes them instead of reading whole weights."""
        storage = self.objects.storage
        gone = [key for folder in (keys.SAMPLES, keys.MAIL) for key, _ in storage.list(folder)]
        self._published = [key for key, _ in storage.list(keys.WEIGHTS)]
        self.held.check()
        return gone + self._older_to(number)

    def _older_to(self, number: int) -> list[str]:
        """What was published up to a version, which is told once."""
        gone = [key for key in self._published if keys.version_of(key) <= number]
        self._published = [key for key in self._published if keys.version_of(key) > number]
        return gone

    def _publish(self, number: int) -> None:
        assert self.version is not None
        with_digest = self._bytes <= SMALL_BYTES or len(self._lineages) % DIGEST_EVERY == 0
        entries = self.ranks.all(PublisherPart.publish, number, self.held.name, with_digest)
        digests = [entry.pop("digest") for entry in entries]
        after = next_lineage(self.lineage, [entry["sha256"] for entry in entries])
        made = WeightVersion(
            number, after, self.version, self.lineage, entries, digests if with_digest else []
        )
        self.version, self.lineage = number, after
        self._lineages[number] = after
        self._patch_bytes = sum(entry["bytes"] for entry in entries)
        self._sent = False
        gone = self._outdated()
        manifest = keys.version_key(number, after)
        patches = [entry["key"] for entry in entries]
        self._published += [manifest, *patches]
        self.dispatcher.publish(patches, {manifest: asdict(made)}, gone, **self._newest())
        self._probe_with(number)

    def _newest(self) -> dict[str, Any]:
        """What the head says of its newest version."""
        anchors = [asdict(anchor) for anchor in self._anchors]
        return {"version": self.version, "lineage": self.lineage, "anchors": anchors}

    def _check_sending(self) -> None:
        """Raises what keeps a rank from sending its part of the newest version, for which the trainer may be
        about to wait."""
        if not self._sent:
            self._sent = all(self.ranks.all(PublisherPart.has_sent))

    def _outdated(self) -> list[str]:
        """A new checkpoint is one more version to begin with; returns the objects of versions before the
        oldest."""
        step = self._checkpoints.stored
        if step in self._lineages and step != self._anchors[-1].version:
            self._anchors.append(Anchor("checkpoint", step, self._lineages[step], self.held.name))
        if len(self._anchors) <= KEPT_ANCHORS:
            return []
        # no unit needs an older one: a checkpoint is committed after all that older weights had sampled
        self._anchors = self._anchors[-KEPT_ANCHORS:]
        return self._older_to(self._anchors[0].version)

    # --- samples in -----------------------------------------------------------------------------------------

    def sample(self, ask: SamplingRequest) -> FleetGroups:
        """`Sampler.sample`: returns at once. Raises ValueError for a version that was not published."""
        if ask.version not in self._lineages:
            raise ValueError(f"version {ask.version} of the weights was not published by this attempt")
        size = self.config.fleet.unit_prompts or self.config.rollout.prompts_per_step
        units = []
        for start in range(0, len(ask.prompts), size):
            self._made += 1
            units.append(self._unit(f"{self._made:06d}", ask, ask.prompts[start : start + size]))
        # a training run waits for its evaluations; of pass rates the blocks go in order
        self.dispatcher.offer(units, first=ask.kind != "train" and self.config.loads_policy)
        return FleetGroups(units, self)

    def _unit(self, name: str, ask: SamplingRequest, prompts: Sequence[Prompt]) -> RolloutUnit:
        return RolloutUnit(
            name=name,
            step=ask.step,
            version=ask.version,
            lineage=self._lineages[ask.version],
            split="train" if ask.split == self.config.train_split else "evaluation",
            prompts=tuple(prompts),
            samples_per_prompt=ask.samples_per_prompt,
            temperature=ask.temperature,
            top_p=ask.top_p,
            max_tokens=ask.max_tokens,
            with_routes=self.config.algorithm.routing_replay and ask.kind != "eval",
        )

    def _await_probes(self) -> None:
        """Waits a while for workers that are being probed: their probes are of the weights that the learner
        holds now, and a trainer that never waits would admit nobody."""
        self.meanwhile()
        if not self._current:
            return
        while probing := {
            name for name in self.dispatcher.probing() if self._waited.get(name, 0.0) < PROBE_S
        }:
            began = time.monotonic()
            self.dispatcher.pause()
            self.meanwhile()
            for name in probing:
                self._waited[name] = self._waited.get(name, 0.0) + time.monotonic() - began

    def meanwhile(self) -> None:
        """While the trainer waits: admits workers whose probe is the policy's, and turns the others away.
        Raises what keeps a rank from sending its weights."""
        self._check_sending()
        if self._admission is None or not self._current:
            return
        for worker, device, traces in self.dispatcher.probed():
            if why := self._admission.refusal(traces, device):
                self.dispatcher.turn_away(worker, why)
            else:
                self.dispatcher.admit(worker)

    def wait_for(self, units: list[RolloutUnit]) -> list[Trace]:
        """The units' traces by group and index, with their text."""
        began = time.monotonic()
        self._await_probes()
        traces = []
        for unit in units:
            for trace in self.dispatcher.take(unit, self.meanwhile):
                traces.append(replace(trace, text=self.prompter.reply_text(trace.completion.tolist())))
        self._times["fleet/wait_s"] += time.monotonic() - began
        self.write_roster()
        return sorted(traces, key=lambda trace: (trace.group, trace.index))

    def rest(self) -> None:
        """`Sampler.rest`: nothing is shared with the learner, whose weights change from now on: until the
        next `load` no probe can be scored."""
        self._current = False

    def write_roster(self) -> None:
        """Writes who samples into the run's folder, for the display and the desk."""
        text = json.dumps({"unix_s": time.time(), "workers": self.dispatcher.roster()})
        write_whole(Path(self.config.run.dir) / ROSTER, text.encode())

    def close(self) -> None:
        """`Sampler.close`: the run is over, and its workers end. So says an attempt, too, that found no step
        left to train: the one before it may have been killed before it could."""
        self._end("over", "the run has reached its last step")

    def leave(self) -> None:
        """This attempt ends before the run: workers wait for the next one."""
        if self.version is not None:
            self._end("away", "this attempt of the trainer has ended")

    def _end(self, state: str, why: str) -> None:
        if not self._over:
            self._over = True
            self.dispatcher.close(state, why, self._published if state == "over" else ())

    def metrics(self) -> dict[str, float]:
        """Metrics of the fleet; times are those since the last call."""
        dispatcher = self.dispatcher
        counts, scheduler = dispatcher.counts, dispatcher.scheduler
        found = {
            "fleet/workers": float(len(scheduler.workers)),
            "fleet/completions_per_s": sum(seen.rate for seen in scheduler.workers.values()),
            "fleet/units": float(counts.units),
            "fleet/late": float(counts.late),
            "fleet/refused": float(counts.refused),
            "fleet/turned_away": float(counts.turned_away),
            "fleet/forged": float(counts.forged + self._forged_elsewhere()),
            "fleet/lost": float(scheduler.lost),
            "fleet/doubled": float(scheduler.doubled),
            "fleet/again": float(scheduler.again),
            "fleet/patch_mib": self._patch_bytes / 2**20,
        }
        found |= self._times | dispatcher.take_metrics()
        self._times = dict.fromkeys(self._times, 0.0)
        return found

    def _forged_elsewhere(self) -> int:
        """Objects outside of the run's folder `fleet` that this process has refused."""
        return sum(not place.startswith(f"{FLEET}/") for place in self.objects.seal.refused)
