"""What a training loop uses: rows, learner, sampler, grading, metrics, checkpoints; opened and closed
together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer.algorithm.traces import Outcome, Trace
from trainer.checkpoint.attempt import of_this_job
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.rollout_archive import GradedStep
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.checkpoint.shard_reader import FoundCheckpoint
from trainer.config import ConfigError, RunConfig
from trainer.config.run_folder import METRICS, newest_lines
from trainer.data.dataset import Dataset
from trainer.data.prompt_form import PromptForm
from trainer.data.prompt_stream import PromptStream
from trainer.data.reader import Datasets
from trainer.fleet.fleet_sampler import FleetSampler
from trainer.learning.distributed import DistributedLearner
from trainer.learning.learner_part import LearnerFacts
from trainer.node.watch.preemption import PreemptionNotice
from trainer.node.watch.run_lock import RunLock
from trainer.observe.phases import Phases, StartClock
from trainer.observe.report import last_line
from trainer.observe.step_profile import StepProfiles
from trainer.ranks.process import RankProcess
from trainer.ranks.ray_ranks import RayRanks
from trainer.rewards.grading import RULES
from trainer.rewards.grading.stated_answers import FORMS
from trainer.rewards.scorer import Scorer
from trainer.rewards.trial import try_at_start
from trainer.run.completion_grader import CompletionGrader
from trainer.run.measured_rows import Rows
from trainer.run.probe import Probe
from trainer.run.saving import ATTACHED, RunPosition, Saving, export_weights
from trainer.run.step_log import StepLog
from trainer.sampling.colocated import Colocated
from trainer.sampling.sampler import Sampler
from trainer.system.errors import StorageError


@dataclass(frozen=True)
class ResumedRun:
    """Where a run goes on."""

    step: int
    """The last step that is done; 0 for a fresh start."""
    loop_state: dict[str, float]
    """What the loop left in the checkpoint for its next step; empty for a fresh start."""


class Session:
    """Use as a context manager. The loop calls the methods in the order below. The constructor works in
    stages. One that fails undoes those before it, and the run's folder says how it ended."""

    learner: DistributedLearner
    """The policy's, where one is loaded."""
    probe: Probe
    """Compares engines with it."""
    sampler: Sampler
    """The engines, where completions are sampled."""

    def __init__(self, config: RunConfig, total_updates: Callable[[RunConfig, int], int]) -> None:
        """total_updates: (config, rows) -> optimizer steps of the whole run, for the learning-rate
        schedule."""
        self.config = config
        clock = StartClock()
        clock.mark("launch")
        with contextlib.ExitStack() as exits:
            datasets = Datasets(config)
            notice = self._claim_run(exits, datasets)
            self._open_stores(exits, datasets)
            self._measure_rows(datasets)
            clock.mark("place")
            self._load(exits, total_updates, notice, clock)
            self._exits = exits.pop_all()

    def _claim_run(self, exits: contextlib.ExitStack, datasets: Datasets) -> PreemptionNotice:
        """Takes the run's folder for this process. From here on a notice is heard."""
        datasets[self.config.train_split]  # ends the run before anything is claimed, where it is none
        lock = RunLock(self.config.run.dir, "driver")
        exits.callback(lock.close)
        lock.take(wait=True)
        notice = PreemptionNotice(exit_at_deadline=True)
        self.phases = Phases(self.config.run.dir, lambda phase: self.saving.on_boundary(phase))
        self.phases.note(message="loading model and engine")
        exits.push(self._mark_failed_start)
        return notice

    def _mark_failed_start(self, kind: type[BaseException] | None, *_: object) -> None:
        """Marks the run as failed if the session cannot be made: its `progress.json` would say "running"."""
        if kind is not None and not hasattr(self, "_exits"):
            self.mark("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")

    def _open_stores(self, exits: contextlib.ExitStack, datasets: Datasets) -> None:
        """Opens the grader, the rollout log and the checkpoints."""
        config, train_set = self.config, datasets[self.config.train_split]
        scorer = Scorer(config.rewards)
        exits.callback(scorer.close)
        try_at_start(config.rewards, config.turns, train_set[0])
        attempt = of_this_job(config)
        self.grader = CompletionGrader(config, scorer, train_set)
        self.rollouts = RolloutLog(config, train_set.fingerprint, attempt=attempt)
        exits.callback(self.rollouts.close)
        self.checkpoints = Checkpoints(config, train_set.fingerprint, attempt=attempt, logs=self.rollouts)
        exits.callback(self.checkpoints.close)

    def _measure_rows(self, datasets: Datasets) -> None:
        """Places the ranks and has them measure the rows. What is wrong with rows ends the run before models
        load."""
        config = self.config
        self.ranks = RayRanks(config)
        self.rows = Rows(config, self.ranks, datasets)
        train_rows = self.rows.usable(config.train_split)
        if config.evaluation.every_steps and config.method == "sft":
            self.rows.usable(config.evaluation_split)
        elif config.evaluation.every_steps:
            self.rows.lengths(config.evaluation_split)
        size = config.rows_per_step
        if config.evaluation.pass_rate_samples:  # there are blocks of rows instead of steps
            size = max(1, min(size, len(train_rows)))
        self.stream = PromptStream(train_rows, size, config.run.seed)

    def _load(
        self,
        exits: contextlib.ExitStack,
        total_updates: Callable[[RunConfig, int], int],
        notice: PreemptionNotice,
        clock: StartClock,
    ) -> None:
        """Loads policy, reference and engine on every rank."""
        config = self.config
        self._newest = self.checkpoints.find()  # before the model: every rank fetches its files beside that
        learner = None
        facts: LearnerFacts | None = None
        if config.loads_policy:
            self.ranks.start()
            learner = DistributedLearner(config, self.ranks)
            learner.start(total_updates(config, len(self.stream.rows)), self._newest)
            self.learner, facts = learner, learner.facts
            self.probe = Probe(config, self.rows, learner)
        if config.method == "grpo":
            self.sampler = self._make_sampler(exits)
        clock.mark("load")
        if config.method == "grpo":
            self._say_what_is_asked()
        self.saving = Saving(config.run.dir, self.checkpoints, learner, notice)
        record = partial(self.ranks.all, RankProcess.record)
        profiles = StepProfiles(config, record, partial(self.ranks.all, RankProcess.recorded))
        self.step_log = StepLog(config, clock, self.phases, profiles, self.checkpoints.retention, facts)

    def _make_sampler(self, exits: contextlib.ExitStack) -> Sampler:
        """Engines in the learner's ranks, or a fleet of workers."""
        config, checkpoints = self.config, self.checkpoints
        if config.fleet.workers == "off":
            colocated = Colocated(config, self.ranks)
            colocated.start()
            return colocated
        admission = self.probe.admission_test() if config.loads_policy else None
        attempt = checkpoints.place.attempt
        assert attempt is not None, "a session has the right to write for its run"
        fleet = FleetSampler(
            config, self.ranks, attempt, self.rows.datasets, checkpoints, admission, self.phases.sampled
        )
        exits.callback(fleet.leave)
        return fleet

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if isinstance(error, ConfigError | RuntimeError):
            self._say_what_stands()
        self._exits.close()

    @property
    def train_set(self) -> Dataset:
        """The rows that are trained on."""
        return self.rows.dataset(self.config.train_split)

    @property
    def fleet(self) -> FleetSampler | None:
        """The sampler, where rollout workers sample."""
        if self.config.fleet.workers == "off":
            return None
        assert isinstance(self.sampler, FleetSampler)
        return self.sampler

    def _say_what_stands(self) -> None:
        """Prints which checkpoint is older than the alarms that the guards had given before an error."""
        trouble = self.checkpoints.retention.trouble
        if not trouble:
            return
        try:
            good = self.checkpoints.retention.from_before_the_trouble()
        except StorageError:
            return  # the error that ends the run is printed anyway
        command = f"python3 launch.py resume {self.config.run_id} --before {trouble}"
        advice = "no checkpoint is from before it: start a new run"
        if good:
            advice = f"the checkpoint of step {good} is from before it: `{command}`"
        print(f"guards: trouble since step {trouble}; {advice}", flush=True)

    def resume(self) -> ResumedRun:
        """Loads the newest complete checkpoint, if there is one."""
        with self.phases("resume"):
            restored = self.checkpoints.restore(self._restore, self._newest)
        if restored is None and self._newest is not None:  # the ranks may hold no weights at all
            raise ConfigError(
                f"the checkpoint of step {self._newest.step} is gone since the start: bring it back"
            )
        if restored is None and self.config.checkpoint.resume == "must":
            raise ConfigError(
                "checkpoint.resume is `must` and there is no committed checkpoint: check run.id and remote"
            )
        checkpoint = restored[0] if restored else None
        step = checkpoint.step if checkpoint else 0
        if checkpoint is None:
            self.rollouts.open(step)
        history, samples = [_attached(checkpoint, name) if checkpoint else b"" for name in ATTACHED]
        self.step_log.open(step, history, samples)
        self._exits.callback(self.step_log.metrics.close)
        logged = newest_lines(Path(self.config.run.dir) / METRICS)
        self.grader.scorer.resume(logged[-1] if logged else {})
        print(f"resumed from step {step}" if checkpoint else "starting from scratch", flush=True)
        began_with = checkpoint.state.get("grading", 1) if checkpoint else RULES
        if began_with != RULES and self.config.method != "sft":
            print(
                f"answers are graded by rules {RULES} from here on: until step {step} it was by {began_with}",
                flush=True,
            )
        self.step_log.clock.mark("resume")
        return ResumedRun(step, dict(checkpoint.state["reward_norm"]) if checkpoint else {})

    def _restore(self, source: FoundCheckpoint) -> None:
        """Loads a checkpoint, and the logs of what was sampled ahead of it. Raises CorruptCheckpoint."""
        self.rollouts.open(source.step, source.ahead)
        self.learner.load(source)

    def load_model(self) -> None:
        """For a loop that trains nothing: the model as it is goes into the engines. Raises as
        `check_first_sync`."""
        with self.phases("sync"):
            if not self.config.loads_policy:
                assert self.fleet is not None
                self.fleet.open_pretrained()
                return
            self.sampler.rest()
            self.sampler.load(self.learner.weights(0))
            self.check_first_sync(0)

    def check_first_sync(self, version: int) -> None:
        """Compares engine and policy after the first load, that of `version`. Raises RuntimeError if they are
        not the same model."""
        self.probe.check_first_sync(self.sampler, version)
        self.step_log.clock.mark("sync")

    @property
    def train_rows(self) -> Sequence[int]:
        """Indices of the training rows that are used."""
        return self.stream.rows

    @property
    def left_out(self) -> int:
        """How many training rows are not used."""
        return self.rows.left_out(self.config.train_split)

    def _say_what_is_asked(self) -> None:
        """Prompt and form of answer decide what is learned: they are said at the start."""
        trained = self.config.evaluation.benchmarks and PromptForm.read(self.config.model.path)
        rows = "the model's own, from its training" if trained else "the rows' own"
        prompt = {"rows": rows, "none": "none"}.get(self.config.data.system_prompt, "")
        prompt = prompt or repr(self.config.data.system_prompt)
        opening = self.ranks.first(RankProcess.opening)
        opened = f", {opening} is opened by the chat template" if opening else ""
        form = self.config.rewards.answer
        print(f"asks: system message {prompt}; answers as {form}: {FORMS[form].expected}{opened}", flush=True)

    def begin(self, step: int, total: int) -> None:
        """Before every step."""
        self.step_log.begin(step, total)

    def score(self, traces: Sequence[Trace], dataset: Dataset | None = None) -> list[Outcome]:
        """`CompletionGrader.score`."""
        return self.grader.score(traces, dataset)

    def log_graded(
        self, step: int, traces: list[Trace], outcomes: list[Outcome], waiting: Sequence[Trace] = ()
    ) -> GradedStep:
        """Logs a step's graded completions, before the weights change; and with them those of later steps so
        far, as `Graded.waiting`."""
        stats = self.grader.scorer.stats().items()
        kept = {name: value for name, value in stats if not name.startswith("perf/")}
        graded = GradedStep(traces, outcomes, kept, waiting=waiting)
        self.rollouts.write(step, graded, self.checkpoints.retention.floor)
        return graded

    def ask_teacher(self, step: int, graded: GradedStep, members: Sequence[int]) -> GradedStep:
        """Has the teacher judge the members of a step's completions, and logs what it says: a restart does
        not ask again."""
        traces = [graded.traces[i] for i in members]
        scored = self.learner.logprobs(traces, self.config.train_split, old=False, reference=True)
        assert scored.reference is not None
        teacher = [np.zeros(0, np.float32)] * len(graded.traces)
        for i, values in zip(members, scored.reference, strict=True):
            teacher[i] = values
        judged = replace(graded, teacher=teacher)
        self.rollouts.write(step, judged, self.checkpoints.retention.floor)
        return judged

    @staticmethod
    def due(every: int, step: int, total: int) -> bool:
        """Whether something done every `every` steps is due; the last step always is. 0: never."""
        return bool(every) and (step % every == 0 or step == total)

    def log(
        self,
        step: int,
        stats: dict[str, float],
        traces: Sequence[Trace],
        shown: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Writes the step's metrics, and the samples to show. Comes before the save: its step is always
        logged. traces: all that was trained on, for the utilization."""
        times = self.step_log.end()
        self.saving.stepped(times["time/step_s"])
        # the loop's own before an evaluation's
        stats = self.grader.scorer.stats() | stats | {"data/left_out": self.left_out}
        parts = self.checkpoints.metrics() | self.rollouts.metrics()
        if self.fleet:
            parts |= self.fleet.metrics()
        self.step_log.write(step, stats, times, parts, traces, self.grader.suspects, shown)

    def save(
        self, step: int, total: int, updates: int, loop_state: dict[str, float], score: float | None = None
    ) -> None:
        """Saves the run's state after a step, if a save is due. updates: optimizer steps so far. loop_state:
        what the loop needs for its next step. score: the step's evaluation."""
        ahead = needed_logs(self.config, step, total)
        position = RunPosition(step, loop_state, updates, self.learner.skipped, score, ahead)
        with self.phases("checkpoint"):
            self.saving.maybe_save(position, last=step == total)

    def finish(self, step: int, updates: int, loop_state: dict[str, float]) -> None:
        """Waits until the last checkpoint is committed, exports the weights, writes the report."""
        with self.phases("checkpoint"):
            self.saving.finish(RunPosition(step, loop_state, updates, self.learner.skipped))
        if self.fleet:
            self.fleet.close()  # before the export, which workers need not wait for
        if self.config.checkpoint.export_hf != "never":
            with self.phases("export"):
                export_weights(self.config, self.checkpoints, self.train_set)
        self.phases.finish()
        self.step_log.metrics.close()
        print(last_line(self.config.run.dir), flush=True)

    def mark(self, status: str) -> None:
        """Writes for other processes how the run ended, if the disk allows it."""
        with contextlib.suppress(OSError):
            self.phases.finish(status)


def needed_logs(config: RunConfig, step: int, total: int) -> range:
    """Steps whose rollout logs a checkpoint of `step` needs: weights that are gone have sampled what is in
    them. Where completions are carried over, the log of a step has those of later ones."""
    if config.carries_over:
        return range(step, min(step + 1, total))
    return range(step + 1, min(step + config.rollout.staleness, total) + 1)


def _attached(source: FoundCheckpoint, name: str) -> bytes:
    names = {entry["name"] for entry in source.manifest["files"]}
    return source.local(name).read_bytes() if name in names else b""
