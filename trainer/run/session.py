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
from trainer.checkpoint.export import export_adapter, export_hf
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.reader import FoundCheckpoint
from trainer.checkpoint.rollout_archive import GradedStep
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.config import ConfigError, RunConfig, by_model
from trainer.config.run_folder import METRICS, newest_lines
from trainer.config.run_store import EXPORTED
from trainer.data.dataset import Dataset
from trainer.data.prompt_form import LOOKED_AT, PromptForm
from trainer.data.prompt_stream import PromptStream
from trainer.data.reader import Datasets
from trainer.data.schema import Row, question_text
from trainer.fleet.head import FleetSampler
from trainer.hardware.gpus import peak_flops
from trainer.hardware.model_shapes import shape_of
from trainer.learning.distributed import DistributedLearner
from trainer.learning.learner import Learner
from trainer.node.watch.preemption import PreemptionNotice
from trainer.node.watch.run_lock import RunLock
from trainer.observe.guards import guards_of, shortened_completion
from trainer.observe.history import read_history
from trainer.observe.metrics import Metrics
from trainer.observe.node_monitor import NodeStats
from trainer.observe.phases import Phases
from trainer.observe.report import last_line
from trainer.observe.start_clock import StartClock
from trainer.observe.step_profile import StepProfiles
from trainer.observe.step_stats import one_line, throughput, utilisation
from trainer.ranks.process import RankProcess
from trainer.ranks.ranks import Ranks
from trainer.ranks.ray_ranks import RayRanks
from trainer.rewards.completion_facts import facts_of_row
from trainer.rewards.grading import RULES
from trainer.rewards.grading.forms import FORMS
from trainer.rewards.scorer import Scorer
from trainer.rewards.trial import try_at_start
from trainer.rewards.unusable_rewards import describe_largest_reward, refuse_unusable
from trainer.run.probe import Probe
from trainer.run.rows import Rows
from trainer.run.saving import ATTACHED, RunPosition, Saving
from trainer.sampling.colocated import Colocated
from trainer.sampling.sampler import Sampler
from trainer.storage import hub
from trainer.system.errors import StorageError
from trainer.turns.counts import names_of, usual_failure
from trainer.turns.environments import environment_of, tools_of


@dataclass(frozen=True)
class ResumedRun:
    """Where a run goes on."""

    step: int
    """The last step that is done; 0 for a fresh start."""
    loop_state: dict[str, float]
    """What the loop left in the checkpoint for its next step; empty for a fresh start."""


class Session:
    """Use as a context manager. The loop calls the methods in the order below.

    The constructor works in stages. One that fails undoes those before it, and the run's folder says how it
    ended.
    """

    learner: Learner
    """The policy's, where one is loaded."""
    sampler: Sampler
    fleet: FleetSampler
    """The sampler, where `fleet.workers` is not off."""
    metrics: Metrics

    def __init__(
        self, config: RunConfig, total_updates: Callable[[RunConfig, int], int], ranks: Ranks | None = None
    ) -> None:
        """total_updates: (config, rows) -> optimizer steps of the whole run, for the learning-rate schedule.

        ranks: those that are there already; None: Ray places them.
        """
        self.config = config
        self.clock = StartClock()
        self.clock.mark("launch")
        with contextlib.ExitStack() as stages:
            self._claim_run(stages)
            self._open_stores(stages)
            self._measure_rows(ranks)
            self._load(stages, total_updates)
            self._stages = stages.pop_all()

    def _claim_run(self, stages: contextlib.ExitStack) -> None:
        """Takes the run's folder for this process."""
        self.datasets = Datasets(self.config)
        self.train_set = self.datasets[self.config.train_split]
        self.lock = RunLock(self.config.run.dir, "driver")
        stages.callback(self.lock.close)
        self.lock.take(wait=True)
        self.notice = PreemptionNotice(exit_at_deadline=True)
        self.phases = Phases(self.config.run.dir, lambda phase: self.saving.on_boundary(phase))
        self.phases.note(message="loading model and engine")
        stages.push(self._mark_failed_start)

    def _mark_failed_start(self, kind: type[BaseException] | None, *_: object) -> None:
        """Marks the run as failed if the session cannot be made: its `progress.json` would say "running"."""
        if kind is not None and not hasattr(self, "_stages"):
            self.mark("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")

    def _open_stores(self, stages: contextlib.ExitStack) -> None:
        """Opens the grader, the rollout log and the checkpoints."""
        self.rewards = Scorer(self.config.rewards)
        stages.callback(self.rewards.close)
        try_at_start(self.config.rewards, self.config.turns, self.train_set[0])
        self.held = of_this_job(self.config)
        held = self.held
        if "task" in self.train_set.manifest.statistics.get("answer_types", ()):
            self.rewards.open_families()
        self.rollouts = RolloutLog(self.config, self.train_set.fingerprint, attempt=held)
        stages.callback(self.rollouts.close)
        self.checkpoints = Checkpoints(
            self.config, self.train_set.fingerprint, attempt=held, logs=self.rollouts
        )
        stages.callback(self.checkpoints.close)

    def _measure_rows(self, ranks: Ranks | None) -> None:
        """Places the ranks and has them measure the rows. What is wrong with rows ends the run before models
        load."""
        config = self.config
        self.ranks = ranks or RayRanks(config)
        self.rows = Rows(config, self.ranks, self.datasets)
        train_rows = self.rows.usable(config.train_split)
        if config.evaluation.every_steps and config.method == "sft":
            self.rows.usable(config.evaluation_split)
        elif config.evaluation.every_steps:
            self.rows.lengths(config.evaluation_split)
        levels = self.train_set.difficulties() if config.data.curriculum else {}
        if config.data.curriculum and not levels:
            raise ConfigError(
                "data.curriculum goes from level to level, and no row states its difficulty: prepare"
                " `generated` or `reasoning-gym:FAMILY`, or set it to 0"
            )
        size = config.rows_per_step
        if config.evaluation.pass_rate_samples:  # there are blocks of rows instead of steps
            size = max(1, min(size, len(train_rows)))
        self.stream = PromptStream(train_rows, size, config.run.seed, levels)
        self.clock.mark("place")

    def _load(self, stages: contextlib.ExitStack, total_updates: Callable[[RunConfig, int], int]) -> None:
        """Loads policy, reference and engine on every rank."""
        config = self.config
        self._newest = self.checkpoints.find()  # before the model: every rank fetches its files beside that
        device_name = ""
        learner = None
        if config.loads_policy:
            self.ranks.start()
            learner = DistributedLearner(config, self.ranks)
            learner.start(total_updates(config, len(self.stream.rows)), self._newest)
            self.learner = learner
            self.probe = Probe(config, self.rows, learner)
            device_name = learner.facts.device_name
        if config.method == "grpo":
            self.sampler = self._make_sampler(stages)
        self.clock.mark("load")

        if config.method == "grpo":
            self._say_what_is_asked()
        self._peak_flops = peak_flops(device_name)
        measured = by_model(config) if self._peak_flops else []
        self._shapes = [shape for one in measured if (shape := shape_of(str(hub.model_folder(one))))]
        form = FORMS[config.rewards.answer].expected
        self.guards = guards_of(config, form)
        self._causes: dict[str, str] = {}
        self.nodes = NodeStats(config.run.dir)
        self.saving = Saving(config.run.dir, self.checkpoints, learner, self.notice)
        record = partial(self.ranks.all, RankProcess.record)
        self.profiles = StepProfiles(config, record, partial(self.ranks.all, RankProcess.recorded))

    def _make_sampler(self, stages: contextlib.ExitStack) -> Sampler:
        """Engines in the learner's ranks, or a fleet of workers."""
        config = self.config
        if config.fleet.workers == "off":
            colocated = Colocated(config, self.ranks)
            colocated.start()
            return colocated
        admission = self.probe.admission_test() if config.loads_policy else None
        fleet = FleetSampler(
            config, self.ranks, self.held, self.datasets, self.checkpoints, admission, self.phases.sampled
        )
        stages.callback(fleet.leave)
        self.fleet = fleet
        return fleet

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if isinstance(error, ConfigError | RuntimeError):
            self._say_what_stands()
        self._stages.close()

    def _say_what_stands(self) -> None:
        """Prints which checkpoint is older than the alarms that the guards had given before an error."""
        trouble = self.checkpoints.retention.trouble
        if not trouble:
            return
        try:
            good = self.checkpoints.retention.from_before_the_trouble()
        except StorageError:
            return  # the error that ends the run is printed anyway
        run = self.config.run_id
        if good:
            command = f"python3 launch.py resume {run} --before {trouble}"
            said = f"the checkpoint of step {good} is from before it: `{command}`"
        else:
            said = "no checkpoint is from before it: start a new run"
        print(f"guards: trouble since step {trouble}; {said}", flush=True)

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
        found = restored[0] if restored else None
        step = found.step if found else 0
        if found is None:
            self.rollouts.open(step)
        history, shown = [_attached(found, name) if found else b"" for name in ATTACHED]
        self.metrics = Metrics(self.config.run.dir, self.config, step, history, shown)
        self._stages.callback(self.metrics.close)
        self.guards.remember(read_history(self.config.run.dir))
        self.checkpoints.retention.trouble = self.guards.trouble_since
        logged = newest_lines(Path(self.config.run.dir) / METRICS)
        self.rewards.resume(logged[-1] if logged else {})
        print(f"resumed from step {step}" if found else "starting from scratch", flush=True)
        began_with = found.state.get("grading", 1) if found else RULES
        if began_with != RULES and self.config.method != "sft":
            print(
                f"answers are graded by rules {RULES} from here on: until step {step} it was by {began_with}",
                flush=True,
            )
        self.clock.mark("resume")
        return ResumedRun(step, dict(found.state["reward_norm"]) if found else {})

    def _restore(self, found: FoundCheckpoint) -> None:
        """Loads a checkpoint, and the logs of what was sampled ahead of it. Raises CorruptCheckpoint."""
        self.rollouts.open(found.step, found.ahead)
        self.learner.load(found)

    def load_model(self) -> None:
        """For a loop that trains nothing: the model as it is goes into the engines. Raises as
        `check_first_sync`."""
        with self.phases("sync"):
            if not self.config.loads_policy:
                self.fleet.open_pretrained()
                return
            self.sampler.rest()
            self.sampler.load(self.learner.weights(0))
            self.check_first_sync(0)

    def check_first_sync(self, version: int) -> None:
        """Compares engine and policy after the first load, that of `version`. Raises RuntimeError if they are
        not the same model."""
        self.probe.check_first_sync(self.sampler, version)
        self.clock.mark("sync")

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
        self.phases.begin(step, total)
        self.profiles.begin(step)

    def score(self, traces: Sequence[Trace], dataset: Dataset | None = None) -> list[Outcome]:
        """Grades completions against the reference answers of their rows, or as their environment scored
        them.

        Raises ConfigError, naming it, for a reward that is not a finite number.
        """
        dataset = dataset or self.train_set
        rows: dict[int, Row] = {}
        references = []
        answer_types = []
        questions = []
        facts: list[dict[str, Any]] = []
        for trace in traces:
            # A row's completions are many, and reading it reads its images.
            if trace.row not in rows:
                rows[trace.row] = dataset[trace.row]
            row = rows[trace.row]
            references.append(row.reference)
            answer_types.append(row.answer_type)
            questions.append(question_text(row.messages))
            if self.config.rewards.own:
                ids = (
                    {"completion_ids": trace.tokens[trace.learned].tolist()} if self.rewards.wants_ids else {}
                )
                facts.append(facts_of_row(row) | ids)
        completions = [trace.text for trace in traces]
        environment = environment_of(self.config.turns)
        if environment is not None and environment.scores:
            outcomes = self.rewards.scored_elsewhere(completions, [trace.score for trace in traces])
        else:
            outcomes = self.rewards.score(completions, references, answer_types, questions, facts)
        refuse_unusable(self.config.rewards, traces, outcomes)
        if dataset is self.train_set:
            self._causes = self._suspects(traces, outcomes)
        return outcomes

    def _suspects(self, traces: Sequence[Trace], outcomes: Sequence[Outcome]) -> dict[str, str]:
        """What the guards of rewards, tools and the engine would name, by guard."""
        unsound = [trace for trace in traces if not trace.sound]
        causes = {"reward": describe_largest_reward(self.config.rewards, traces, outcomes)}
        named = ", ".join(names_of(tools_of(self.config.turns)))
        failure = usual_failure(traces)
        if failure:
            causes["tools"] = f"{named or self.config.turns.environment}: {failure}"
        if unsound:
            causes["engine"] = f"row {unsound[0].row}, completion {shortened_completion(unsound[0].text)!r}"
        return causes

    def log_graded(
        self, step: int, traces: list[Trace], outcomes: list[Outcome], waiting: Sequence[Trace] = ()
    ) -> GradedStep:
        """Logs a step's graded completions, before the weights change; and with them those of later steps so
        far, as `Graded.waiting`."""
        stats = {name: value for name, value in self.rewards.stats().items() if not name.startswith("perf/")}
        graded = GradedStep(traces, outcomes, stats, waiting=waiting)
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
        logged.

        traces: all that was trained on, for the utilization.
        """
        times = self.phases.take()
        self.profiles.end()
        self.saving.stepped(times["time/step_s"])
        # the loop's own before an evaluation's
        stats = self.rewards.stats() | stats | {"data/left_out": self.left_out}
        gpus = self.config.placement.nodes * self.config.processes_per_node
        stats |= throughput(stats, times, gpus) | times
        stats |= self.checkpoints.metrics() | self.rollouts.metrics()
        if self.config.fleet.workers != "off":
            stats |= self.fleet.metrics()
        if not self.clock.told:
            print(self.clock.tell(), flush=True)
            stats |= self.clock.metrics()
        if self._peak_flops and len(self._shapes) == len(by_model(self.config)):
            image = self.learner.facts.image_token_id
            stats |= utilisation(self.config, self._shapes, self._peak_flops, image, traces, times)
        stats |= self.nodes.take()
        self.metrics.log(step, stats)
        alarms = self.guards.look(step, stats, traces[0].text if traces else "", self._causes)
        self.checkpoints.retention.trouble = self.guards.trouble_since
        for alarm in alarms:
            if alarm.end:
                raise ConfigError(f"{alarm.text}; the run ends: guards.end names this guard")
            print(f"warning: {alarm.text}", flush=True)
        if shown:
            self.metrics.samples(step, list(shown))
        print(one_line(step, stats), flush=True)

    def save(
        self, step: int, total: int, updates: int, loop_state: dict[str, float], score: float | None = None
    ) -> None:
        """Saves the run's state after a step, if a save is due.

        updates: optimizer steps so far. loop_state: what the loop needs for its next step. score: the step's
        evaluation.
        """
        ahead = needed_logs(self.config, step, total)
        position = RunPosition(step, loop_state, updates, self.learner.skipped, score, ahead)
        with self.phases("checkpoint"):
            self.saving.maybe_save(position, last=step == total)

    def finish(self, step: int, updates: int, loop_state: dict[str, float]) -> None:
        """Waits until the last checkpoint is committed, exports the weights, writes the report."""
        with self.phases("checkpoint"):
            self.saving.finish(RunPosition(step, loop_state, updates, self.learner.skipped))
        if self.config.fleet.workers != "off":
            self.fleet.close()  # before the export, which workers need not wait for
        if self.config.checkpoint.export_hf != "never":
            with self.phases("export"):
                self.export()
        self.phases.finish()
        self.metrics.close()
        print(last_line(self.config.run.dir), flush=True)

    def export(self) -> Path:
        """Writes the newest checkpoint as a Hugging Face model folder, or its adapter as peft's, and pushes
        it beside the checkpoints."""
        found = self.checkpoints.find()
        out = Path(self.config.run.dir) / EXPORTED
        assert found is not None
        if self.config.lora.rank:
            export_adapter(found, out, self.config)
        else:
            # its weights are the base model's, of which this node may have a share
            if self.config.model.freeze_vision:
                hub.fetch_files(self.config, hub.weight_files(self.config))
            export_hf(found, out, hub.model_folder(self.config), self.config.model.dtype)
        looked_at = range(min(LOOKED_AT, len(self.train_set)))
        asked = PromptForm.of(self.train_set[row].messages for row in looked_at)
        if asked:
            asked.write(out)
        if self.checkpoints.storage:
            for path in sorted(out.iterdir()):
                self.checkpoints.storage.put(path, f"{EXPORTED}/{path.name}")
        print(f"weights: {out}", flush=True)
        return out

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


def _attached(found: FoundCheckpoint, name: str) -> bytes:
    names = {entry["name"] for entry in found.manifest["files"]}
    return found.local(name).read_bytes() if name in names else b""
