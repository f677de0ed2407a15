"""What a training loop uses: workers, data, grading, metrics, checkpoints, notices; opened and closed together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.algorithm.batching import TrainItem
from trainer.algorithm.records import Outcome, Sample
from trainer.checkpoint.attempt import of_this_job
from trainer.checkpoint.export import export_adapter, export_hf
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.reader import Found
from trainer.checkpoint.rollout_log import Graded, RolloutLog
from trainer.config import ConfigError, RunConfig
from trainer.data import lengths
from trainer.data.dataset import Dataset
from trainer.data.prompt_stream import PromptStream
from trainer.data.schema import question
from trainer.hardware.gpus import peak_flops
from trainer.hardware.model_shapes import shape_of
from trainer.node.preemption import Notice
from trainer.node.run_lock import RunLock
from trainer.observe.guards import Guards
from trainer.observe.history import newest_lines
from trainer.observe.metrics import Metrics, Phases
from trainer.observe.node_monitor import NodeStats
from trainer.observe.report import write_report
from trainer.observe.start_clock import StartClock
from trainer.observe.step_profile import StepProfiles
from trainer.observe.step_stats import one_line, throughput, utilisation
from trainer.ranks.worker_group import Workers
from trainer.rewards.scorer import Scorer
from trainer.run.saving import ATTACHED, Saving
from trainer.storage import hub

SYNC_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""Mean |log-probability difference| of engine and policy above which the first sync counts as broken."""


class Session:
    """Use as a context manager. The loop calls the methods in the order below."""

    def __init__(
        self, config: RunConfig, total_updates: Callable[[RunConfig, int], int], workers: Workers | None = None
    ) -> None:
        """total_updates: of (config, rows): optimizer steps of the whole run, for the learning-rate schedule.

        workers: those that are there already; None: Ray places them.
        """
        self.config = config
        self.clock = StartClock()
        self.clock.mark("launch")
        self.datasets: dict[tuple[str, str], Dataset] = {}
        self.train_set = self.dataset(config.data.path, config.data.split)
        self.lock = RunLock(config.run.dir, "driver")
        self.lock.take(wait=True)
        self.notice = Notice(exit_at_deadline=True)
        self.phases = Phases(config.run.dir, lambda phase: self.saving.on_boundary(phase))
        self.phases.note(message="loading model and engine")
        self.rewards = Scorer(config.rewards)
        held = of_this_job(config)
        self.checkpoints = Checkpoints(config, self.train_set.fingerprint, held=held)
        self.rollouts = RolloutLog(config, self.train_set.fingerprint, held=held)
        self.workers = workers or Workers(config)
        self._lengths: dict[tuple[str, str, int], np.ndarray] = {}
        self._usable: dict[tuple[str, str, int], tuple[list[int], int]] = {}
        self.rows, self.left_out = self.usable_rows(config.data.path, config.data.split, config.data.max_samples)
        if config.evaluation.every_steps:  # what is wrong with its rows ends the run before anything is loaded
            look = self.usable_rows if config.method == "sft" else self.lengths
            look(config.evaluation_path, config.evaluation.split, config.evaluation.max_samples)
        self.stream = PromptStream(self.rows, config.rows_per_step, config.run.seed)
        self.clock.mark("place")
        self._found = self.checkpoints.find()  # before the model: every rank fetches its files beside that
        facts = self.workers.start(total_updates(config, len(self.rows)), self._found)
        self.clock.mark("load")
        self._peak_flops = peak_flops(facts["device_name"])
        self._image_token_id = facts["image_token_id"]
        self._shape = shape_of(str(hub.folder(config))) if self._peak_flops else None
        self.metrics: Metrics
        self.guards = Guards(config.guards)
        self.nodes = NodeStats(config.run.dir)
        self.saving = Saving(config.run.dir, self.checkpoints, self.workers, self.notice)
        self.profiles = StepProfiles(config, self.workers)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.rewards.close()
        self.checkpoints.close()
        self.rollouts.close()
        self.lock.close()
        if hasattr(self, "metrics"):
            self.metrics.close()

    def dataset(self, path: str, split: str) -> Dataset:
        if (path, split) not in self.datasets:
            self.datasets[path, split] = Dataset(path, split)
        return self.datasets[path, split]

    def lengths(self, path: str, split: str, max_samples: int) -> np.ndarray:
        """Tokens of prompts and solutions of a split's first rows (0: all), [rows, 2]; see trainer/data/lengths.py."""
        dataset = self.dataset(path, split)
        rows = min(len(dataset), max_samples or len(dataset))
        if (path, split, rows) not in self._lengths:
            key = [dataset.fingerprint, split, rows, self.config.method, self.workers.fingerprint()]
            compute = lambda: self.workers.lengths(path, split, rows)  # noqa: E731
            self._lengths[path, split, rows] = lengths.cached(key, compute)
        return self._lengths[path, split, rows]

    @property
    def prompt_tokens(self) -> np.ndarray:
        """Tokens of every training row's prompt, [rows]."""
        data = self.config.data
        return self.lengths(data.path, data.split, data.max_samples)[:, 0]

    def usable_rows(self, path: str, split: str, max_samples: int) -> tuple[list[int], int]:
        """Indices of a split's rows that are not too long and have what the method needs, and how many are not so."""
        if (path, split, max_samples) not in self._usable:
            measured = self.lengths(path, split, max_samples)
            rows = lengths.usable_rows(self.config, measured, path, split)
            self._usable[path, split, max_samples] = rows, len(measured) - len(rows)
        return self._usable[path, split, max_samples]

    def resume(self, norm: dict[str, float]) -> int:
        """Loads the newest complete checkpoint and returns its step, 0 if there is none. Fills `norm`."""

        def load(found: Found) -> None:
            self.workers.all("load", found)  # all of them, before any resumes: one may find its files damaged
            self.workers.skipped = found.state.get("skipped", 0)
            self.workers.all("loaded", found.state["updates"], self.workers.skipped)
            norm.update(found.state["reward_norm"])

        with self.phases("resume"):
            restored = self.checkpoints.restore(load, self._found)
        if restored is None and self._found is not None:  # the ranks may hold no weights at all
            raise ConfigError(f"the checkpoint of step {self._found.step} is gone since the start: bring it back")
        if restored is None and self.config.checkpoint.resume == "must":
            raise ConfigError(
                "checkpoint.resume is `must` and there is no committed checkpoint: check run.id and remote"
            )
        step = restored[0].step if restored else 0
        self.rollouts.open(step)
        history, shown = (_attached(restored[0], name) if restored else b"" for name in ATTACHED)
        self.metrics = Metrics(self.config.run.dir, self.config, step, history, shown)
        logged = newest_lines(Path(self.config.run.dir) / "metrics.jsonl")
        self.rewards.resume(logged[-1] if logged else {})
        print(f"resumed from step {step}" if restored else "starting from scratch", flush=True)
        self.clock.mark("resume")
        return step

    def check_first_sync(self) -> None:
        """Compares engine and policy on fixed prompts. Raises RuntimeError if they are not the same model."""
        gaps = self.workers.all("probe", self.rows)
        mean, worst = max(g["mean"] for g in gaps), max(g["max"] for g in gaps)
        limit = self.config.rollout.sync_tolerance or SYNC_TOLERANCE[self.config.model.dtype]
        print(f"weight sync: engine and policy differ by {mean:.1e} nats (mean), {worst:.1e} (max)", flush=True)
        if not mean <= limit:
            raise RuntimeError(
                f"after the weight sync engine and policy differ by {mean:.2e} nats per token (limit {limit:.0e}): the "
                "engine does not hold the policy's weights; training on it would be noise. See docs/failures.md"
            )
        self.clock.mark("sync")

    def begin(self, step: int, total: int) -> None:
        """Before every step."""
        self.phases.begin(step, total)
        self.profiles.begin(step)

    def score(self, samples: list[Sample], dataset: Dataset | None = None) -> list[Outcome]:
        """Grades completions against the reference answers of their rows."""
        dataset = dataset or self.train_set
        rows = {s.row: dataset[s.row] for s in samples}
        asked = {index: question(row.messages) for index, row in rows.items()}
        return self.rewards.score(
            [s.text for s in samples],
            [rows[s.row].answer for s in samples],
            [rows[s.row].answer_type for s in samples],
            [asked[s.row] for s in samples],
        )

    def keep(self, step: int, samples: list[Sample], outcomes: list[Outcome]) -> Graded:
        """Logs a step's graded completions, before the weights change."""
        stats = {name: value for name, value in self.rewards.stats().items() if not name.startswith("perf/")}
        graded = Graded(samples, outcomes, stats)
        self.rollouts.write(step, graded, self.checkpoints.floor)
        return graded

    @staticmethod
    def due(every: int, step: int, total: int) -> bool:
        """Whether something done every `every` steps is due; the last step always is. 0: never."""
        return bool(every) and (step % every == 0 or step == total)

    def log(
        self,
        step: int,
        stats: dict[str, float],
        samples: Sequence[Sample | TrainItem],
        shown: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Writes the step's metrics, and the samples to show. Comes before the save: its step is always logged.

        samples: all that was trained on, for the utilization.
        """
        times = self.phases.take()
        self.profiles.end()
        self.saving.stepped(times["time/step_s"])
        stats = self.rewards.stats() | stats | {"data/left_out": self.left_out}  # the loop's own before an evaluation's
        stats |= throughput(stats, times, self.workers.world_size) | times
        stats |= self.checkpoints.metrics() | self.rollouts.metrics()
        if not self.clock.told:
            print(self.clock.tell(), flush=True)
            stats |= self.clock.metrics()
        if self._peak_flops and self._shape:
            stats |= utilisation(self.config, self._shape, self._peak_flops, self._image_token_id, samples, times)
        stats |= self.nodes.take()
        self.metrics.log(step, stats)
        for alarm in self.guards.look(step, stats):
            if alarm.end:
                raise ConfigError(f"{alarm.text}; the run ends: guards.end names this guard")
            print(f"warning: {alarm.text}", flush=True)
        if shown:
            self.metrics.samples(step, list(shown))
        print(one_line(step, stats), flush=True)

    def finish(self, step: int, total: int, norm: dict[str, float], updates: int) -> None:
        """Waits until the last checkpoint is committed, exports the weights, writes the report."""
        with self.phases("checkpoint"):
            self.saving.finish(step, total, norm, updates)
        if self.config.checkpoint.export_hf != "never":
            with self.phases("export"):
                self.export()
        self.phases.finish()
        self.metrics.close()
        print(f"report: {write_report(self.config.run.dir)}", flush=True)

    def export(self) -> Path:
        """Writes the newest checkpoint as a Hugging Face model folder, or its adapter as peft's, and pushes it beside
        the checkpoints."""
        found, out = self.checkpoints.find(), Path(self.config.run.dir) / "hf"
        assert found is not None
        if self.config.lora.rank:
            export_adapter(found, out, self.config)
        else:
            if self.config.model.freeze_vision:  # its weights are the base model's, of which this node may have a share
                hub.fetch(self.config, hub.weight_files(self.config))
            export_hf(found, out, hub.folder(self.config), self.config.model.dtype)
        if self.checkpoints.storage:
            for path in sorted(out.iterdir()):
                self.checkpoints.storage.put(path, f"hf/{path.name}")
        print(f"weights: {out}", flush=True)
        return out

    def mark(self, status: str) -> None:
        """Writes for other processes how the run ended, if the disk allows it."""
        with contextlib.suppress(OSError):
            self.phases.finish(status)


def _attached(found: Found, name: str) -> bytes:
    names = {entry["name"] for entry in found.manifest["files"]}
    return found.local(name).read_bytes() if name in names else b""
