"""What a run says of each step: its line of metrics, its samples, its alarms, its profile."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from trainer.algorithm.traces import Trace
from trainer.checkpoint.place import Retention
from trainer.config import ConfigError, RunConfig, by_model
from trainer.data.dialog import Dialogs, dialogs_of
from trainer.data.reader import RowReader
from trainer.hardware.gpus import peak_flops
from trainer.hardware.model_shapes import shape_of
from trainer.learning.learner_part import LearnerFacts
from trainer.observe.guards import GuardWatch
from trainer.observe.history import read_history
from trainer.observe.live import step_line
from trainer.observe.metrics import Metrics
from trainer.observe.node_monitor import NodeStats
from trainer.observe.phases import Phases, StartClock
from trainer.observe.step_profile import StepProfiles
from trainer.observe.step_stats import throughput, utilisation
from trainer.rewards.grading.stated_answers import FORMS
from trainer.storage import hub


class StepLog:
    """Gathers what a step took, writes it, and watches it. `metrics` is opened on resume."""

    metrics: Metrics
    _total = 0
    _started = False
    """Whether the seconds of the start were written."""

    def __init__(
        self,
        config: RunConfig,
        clock: StartClock,
        phases: Phases,
        profiles: StepProfiles,
        retention: Retention,
        learner: LearnerFacts | None,
    ) -> None:
        """retention: of the checkpoints, which is told since when there is trouble. learner: None where
        nothing is learned."""
        self.config, self.clock = config, clock
        self._phases, self._profiles = phases, profiles
        self._retention, self._learner = retention, learner
        self._guards = GuardWatch(config, FORMS[config.rewards.answer].expected)
        self._nodes = NodeStats(config.run.dir)
        self._peak_flops = peak_flops(learner.device_name if learner else "")
        models = by_model(config) if self._peak_flops else []
        self._shapes = [shape_of(str(hub.model_folder(model))) for model in models]

    def open(self, step: int, history: bytes, samples: bytes) -> None:
        """Goes on behind `step`. history, samples: as `Metrics` takes them."""
        self.metrics = Metrics(self.config.run.dir, self.config, step, history, samples)
        self._guards.remember(read_history(self.config.run.dir))
        self._retention.trouble = self._guards.trouble_since

    def begin(self, step: int, total: int) -> None:
        """Before every step."""
        self._total = total
        self._phases.begin(step, total)
        self._profiles.begin(step)

    def end(self) -> dict[str, float]:
        """After every step: the seconds of its phases, as metrics."""
        times = self._phases.take()
        self._profiles.end()
        return times

    def write(
        self,
        step: int,
        stats: dict[str, float],
        times: dict[str, float],
        parts: dict[str, float],
        traces: Sequence[Trace],
        suspects: dict[str, str],
        samples: Sequence[dict[str, Any]],
    ) -> None:
        """Writes the step's metrics and samples, and prints its alarms and its line. Raises ConfigError where
        an alarm ends the run. stats: the loop's. times: those of `end`. parts: metrics of the run's parts.
        traces: all that was trained on, for the utilization. suspects: what a guard would name."""
        gpus = self.config.placement.nodes * self.config.processes_per_node
        stats = stats | throughput(stats, times, gpus) | times | parts
        if not self._started:
            self._started = True
            print(self.clock, flush=True)
            stats |= self.clock.metrics()
        shapes = [shape for shape in self._shapes if shape]
        if self._peak_flops and self._learner and len(shapes) == len(by_model(self.config)):
            image = self._learner.image_token_id
            stats |= utilisation(self.config, shapes, self._peak_flops, image, traces, times)
        stats |= self._nodes.take()
        self.metrics.log(step, stats)
        alarms = self._guards.look(step, stats, traces[0].text if traces else "", suspects)
        self._retention.trouble = self._guards.trouble_since
        for alarm in alarms:
            if alarm.end:
                raise ConfigError(f"{alarm.text}; the run ends: guards.end names this guard")
            print(f"warning: {alarm.text}", flush=True)
        if samples:
            self.metrics.samples(step, list(samples))
        print(step_line({"step": step} | stats, self._total), flush=True)


class EpisodeImages:
    """Makes the images of later turns again, in the driver."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @cached_property
    def _dialogs(self) -> Dialogs | None:
        """It reads the model's processor, so it waits for the first sample that showed anything."""
        return dialogs_of(self.config, RowReader(self.config))

    def of(self, trace: Trace) -> list[list[bytes]]:
        """The images of each observation, as PNG files."""
        dialogs = self._dialogs if trace.dialog else None
        if dialogs is None or not dialogs.environment.shows_images:
            return [[] for _ in trace.dialog[1::2]]
        situation = dialogs.situation(self.config.train_split, trace.row)
        shown = []
        for turn in range(0, len(trace.dialog), 2):
            observation = dialogs.environment.answer(situation, trace.dialog[: turn + 1 : 2])
            files = []
            for image in observation.images if observation else ():
                buffer = io.BytesIO()
                image.save(buffer, "PNG")
                files.append(buffer.getvalue())
            shown.append(files)
        return shown
