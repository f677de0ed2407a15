"""What a training loop stands on: workers, data, grading, metrics, checkpoints, notices; opened and closed together."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from trainer import config as configuration
from trainer.algorithm.records import Outcome, Sample
from trainer.checkpoint.manager import CheckpointError, Checkpoints, Found, export_hf
from trainer.config import ConfigError, RunConfig
from trainer.data.dataset import Dataset
from trainer.data.schema import question
from trainer.engine.worker_group import Workers
from trainer.hardware.flops import Shape, peak_flops
from trainer.node.precheck import precheck
from trainer.node.preemption import EXIT_CONFIG, EXIT_ERROR, EXIT_NODE_LOST, EXIT_PREEMPTED, EXIT_STORAGE, Notice
from trainer.observe.metrics import Metrics, Phases
from trainer.observe.report import write_report
from trainer.observe.step_stats import throughput, utilisation
from trainer.rewards.scorer import Scorer
from trainer.storage.storage import StorageError

SYNC_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""Mean |log-probability difference| of engine and policy above which the first sync is taken for broken."""


ATTACHED = ("metrics.jsonl", "samples.jsonl")
"""Append-only files of the run that travel with a checkpoint, so that a new node has the curves."""


CHANGES_STATE = "update"
"""The phase after which the weights are no longer those of the step before."""

STEP_MEMORY = 8
"""Steps whose slowest is what a step is taken to need when a notice leaves little time."""


@dataclass(frozen=True)
class Position:
    """Where the run stands between two steps: what a checkpoint of this moment holds besides the ranks' shards."""

    step: int
    norm: dict[str, float]
    updates: int
    score: float | None = None


class Preempted(Exception):
    """The node was told to go away, or a person pressed Ctrl-C; raised between phases."""


class Session:
    """Use as a context manager. The loop calls the methods in the order in which they stand here."""

    def __init__(self, config: RunConfig, total_updates: Callable[[RunConfig, int], int]) -> None:
        """total_updates: of (config, rows): optimizer steps of the whole run, for the learning-rate schedule."""
        self.config = config
        self.datasets: dict[tuple[str, str], Dataset] = {}
        self.train_set = self.dataset(config.data.path, config.data.split)
        Path(config.run.dir).mkdir(parents=True, exist_ok=True)
        self.notice = Notice(exit_at_deadline=True)
        self.phases = Phases(config.run.dir, self._on_boundary)
        self.phases.note(message="loading model and engine")
        self.rewards = Scorer(config.rewards)
        self.checkpoints = Checkpoints(config, self.train_set.fingerprint)
        rows = len(self.train_set)
        self.workers = Workers(config, total_updates(config, min(rows, config.data.max_samples or rows)))
        self._peak_flops = peak_flops(self.workers.facts[0]["device_name"])
        self._image_token_id = self.workers.facts[0]["image_token_id"]
        self._shape = Shape.load(model_folder(config)) if self._peak_flops else None
        self.metrics: Metrics
        self._step_times: deque[float] = deque(maxlen=STEP_MEMORY)
        self._stepped_at = time.monotonic()
        self._position: Position | None = None
        self._told = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.rewards.close()
        self.checkpoints.close()
        if hasattr(self, "metrics"):
            self.metrics.close()

    def dataset(self, path: str, split: str) -> Dataset:
        """A split, opened once."""
        if (path, split) not in self.datasets:
            self.datasets[path, split] = Dataset(path, split)
        return self.datasets[path, split]

    def usable_rows(self) -> list[int]:
        """Indices of the rows whose prompt fits `data.prompt_max_tokens`; says how many do not."""
        rows = list(range(len(self.train_set)))[: self.config.data.max_samples or None]
        limit = self.config.data.prompt_max_tokens
        usable = [row for row, n in zip(rows, self.workers.prompt_lengths(rows), strict=True) if n <= limit]
        self.left_out = len(rows) - len(usable)
        if self.left_out:
            print(f"data: {self.left_out} of {len(rows)} rows left out: prompts over {limit} tokens", flush=True)
        return usable

    def resume(self, norm: dict[str, float]) -> int:
        """Takes over the newest whole checkpoint and returns its step; 0 for a fresh start. Fills `norm`."""

        def load(found: Found) -> None:
            self.workers.all("load", found)  # all of them, before any goes on: one may find its files damaged
            self.workers.all("loaded", found.state["updates"])
            norm.update(found.state["reward_norm"])

        with self.phases("resume"):
            restored = self.checkpoints.restore(load)
        if restored is None and self.config.checkpoint.resume == "must":
            raise ConfigError(
                "checkpoint.resume is `must` and there is no committed checkpoint: check run.id and remote"
            )
        step = restored[0].step if restored else 0
        history, shown = (_attached(restored[0], name) if restored else b"" for name in ATTACHED)
        self.metrics = Metrics(self.config.run.dir, self.config, step, history, shown)
        print(f"resumed from step {step}" if restored else "starting afresh", flush=True)
        return step

    def check_first_sync(self) -> None:
        """Compares engine and policy on fixed prompts. Raises RuntimeError if they are not the same model."""
        gaps = self.workers.all("probe")
        mean, worst = max(g["mean"] for g in gaps), max(g["max"] for g in gaps)
        limit = self.config.rollout.sync_tolerance or SYNC_TOLERANCE[self.config.model.dtype]
        print(f"weight sync: engine and policy differ by {mean:.1e} nats (mean), {worst:.1e} (max)", flush=True)
        if not mean <= limit:
            raise RuntimeError(
                f"after the weight sync engine and policy differ by {mean:.2e} nats per token (limit {limit:.0e}): the "
                "engine does not hold the policy's weights; training on it would be noise. See docs/failures.md"
            )

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

    @staticmethod
    def due(every: int, step: int, total: int) -> bool:
        """Whether something done every `every` steps is due; the last step always is. 0: never."""
        return bool(every) and (step % every == 0 or step == total)

    def log(
        self, step: int, stats: dict[str, float], samples: list[Sample], shown: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Writes the step's metrics, and the samples to show. Comes before the save: its step is always logged."""
        times = self.phases.take()
        self._step_times.append(times["time/step_s"])
        self._stepped_at = time.monotonic()
        stats = stats | self.rewards.stats() | {"data/left_out": self.left_out}
        stats |= throughput(stats, times, self.workers.world_size) | self.checkpoints.metrics() | times
        if self._peak_flops and self._shape:
            stats |= utilisation(self.config, self._shape, self._peak_flops, self._image_token_id, samples, times)
        self.metrics.log(step, stats)
        if shown:
            self.metrics.samples(step, list(shown))
        print(one_line(step, stats), flush=True)

    def maybe_save(self, step: int, total: int, norm: dict[str, float], updates: int, score: float | None) -> None:
        """Between two steps: goes on with the save under way, and starts one if it is due."""
        self._position = Position(step, dict(norm), updates, score)
        self._advance()
        if self.checkpoints.due(step, self._step_times[-1] if self._step_times else 0.0, last=step == total):
            self._save(self._position)
        elif (late := self.checkpoints.to_send()) is not None:
            self.workers.all("send", late)

    def _save(self, at: Position) -> None:
        checkpoints = self.checkpoints
        attach = [Path(self.config.run.dir) / name for name in ATTACHED]
        checkpoints.begin(at.step, {"updates": at.updates, "reward_norm": at.norm}, score=at.score, attach=attach)
        try:
            stalls = self.workers.all("save", at.step, checkpoints.local_steps(), checkpoints.sends)
            checkpoints.stall_s = max(stalls)
        except CheckpointError as error:
            checkpoints.failed(error)

    def _advance(self) -> None:
        if self.checkpoints.busy:
            try:
                self.checkpoints.advance(self.workers.all("save_status"))
            except CheckpointError as error:
                self.checkpoints.failed(error)

    def finish(self, step: int, total: int, norm: dict[str, float], updates: int) -> None:
        """Waits until the last checkpoint is committed, exports the weights, writes the report."""
        with self.phases("checkpoint"):
            while self.checkpoints.safe != step:
                self.maybe_save(step, total, norm, updates, None)
                while self.checkpoints.busy:
                    self._advance()
                    time.sleep(0.05)
        if self.config.checkpoint.export_hf != "never":
            with self.phases("export"):
                self.export()
        self.phases.finish()
        self.metrics.close()
        print(f"report: {write_report(self.config.run.dir)}", flush=True)

    def export(self) -> Path:
        """Writes the newest checkpoint as a Hugging Face model folder, and pushes it beside the checkpoints."""
        found = self.checkpoints.find()
        assert found is not None
        out = export_hf(found, Path(self.config.run.dir) / "hf", model_folder(self.config), self.config.model.dtype)
        if self.checkpoints.storage:
            for path in sorted(out.iterdir()):
                self.checkpoints.storage.put(path, f"hf/{path.name}")
        print(f"weights: {out}", flush=True)
        return out

    # --- a notice

    def _on_boundary(self, phase: str) -> None:
        """After every phase: commits what is written, and after a notice decides whether to go on to the step's end."""
        if phase == CHANGES_STATE:
            self._position = None
        self._advance()
        if (reason := self.notice.poll()) is not None and not self._goes_on(phase):
            raise Preempted(reason)

    def _goes_on(self, phase: str) -> bool:
        """After a notice: whether the step under way can be finished and saved in what is left of it.

        One decision for all ranks: a notice on any node reaches this process, and the ranks do what it calls.
        """
        if phase == "checkpoint" or self.notice.reason == "interrupted" or not self._step_times:
            return False
        rest_s = max(0.0, max(self._step_times) - (time.monotonic() - self._stepped_at))
        left_s = self.notice.left_s()
        if not self.checkpoints.fits(left_s - rest_s):
            return False
        if not self._told:
            self._told = True
            plan = f"finishing the step (about {rest_s:.1f} s) and saving it ({self.checkpoints.write_s:.1f} s)"
            print(f"notice: {self.notice.reason}, {left_s:.0f} s left: {plan}", flush=True)
        return True

    def flush(self) -> None:
        """After a notice: saves where the run stands if that fits, and lets the store commit what it can."""
        checkpoints, at = self.checkpoints, self._position
        try:
            while (left_s := self.notice.left_s()) > 0:
                self._advance()
                unsaved = at is not None and at.step != checkpoints.last_begun and checkpoints.in_flight is None
                if at is not None and unsaved and checkpoints.fits(left_s):
                    self._save(at)
                elif checkpoints.busy:
                    time.sleep(0.05)
                elif (late := checkpoints.to_send()) is not None:
                    self.workers.all("send", late)
                elif not checkpoints.busy:
                    break
        except StorageError as error:
            print(error, file=sys.stderr, flush=True)
        self.mark("interrupted" if self.notice.reason == "interrupted" else "preempted")

    def mark(self, status: str) -> None:
        """Tells other processes how the run ended, where the disk takes it."""
        with contextlib.suppress(OSError):
            self.phases.finish(status)


def _attached(found: Found, name: str) -> bytes:
    names = {entry["name"] for entry in found.manifest["files"]}
    return found.local(name).read_bytes() if name in names else b""


def model_folder(config: RunConfig) -> Path:
    """The local folder of the pretrained model; a hub id is looked up in the hub's cache."""
    if Path(config.model.path).is_dir():
        return Path(config.model.path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(config.model.path, revision=config.model.revision or None, local_files_only=True))


def one_line(step: int, stats: dict[str, float]) -> str:
    """The step in one line of the log."""
    parts = [f"step {step}"]
    for label, name, form in (
        ("reward", "reward/mean", ".3f"),
        ("acc", "reward/accuracy", ".3f"),
        ("loss", "loss/total", ".4f"),
        ("loss", "sft/loss", ".4f"),
        ("kl", "kl/mean", ".4f"),
        ("len", "tokens/response_mean", ".1f"),
        ("mismatch", "mismatch/logprob_abs_mean", ".1e"),
        ("eval", "eval/accuracy", ".3f"),
        ("s", "time/step_s", ".2f"),
    ):
        if name in stats:
            parts.append(f"{label} {stats[name]:{form}}")
    return "  ".join(parts)


# --- the process ------------------------------------------------------------------------------------------------------


def main(train: Callable[[RunConfig, Session], None], total_updates: Callable[[RunConfig, int], int]) -> None:
    """Command line of a loop: `--config run.yaml`. Exits with a code of trainer/node/preemption.py."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--config", required=True, help="resolved configuration of the run (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one value")
    arguments = parser.parse_args()
    code = _run(train, total_updates, arguments.config, arguments.set)
    if code == EXIT_PREEMPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the interpreter takes seconds to tear down torch, and the notice is running out
    sys.exit(code)


def _run(train: Any, total_updates: Any, path: str, overrides: list[str]) -> int:
    session: Session | None = None
    try:
        config = configuration.override(configuration.load(path), overrides)
        configuration.validate(config)
        precheck(config)
        connect(config)
        session = Session(config, total_updates)
        with session:
            try:
                train(config, session)
            except Preempted as notice:
                session.flush()
                step = session.checkpoints.committed or 0
                print(f"stopping: {notice}; the run goes on from step {step}", file=sys.stderr, flush=True)
                return session.notice.exit_code
        return 0
    except KeyboardInterrupt:
        if session is not None:
            session.mark("interrupted")
        return 130
    except Exception as error:
        code, text = explain(error)
        print(text, file=sys.stderr, flush=True)
        if session is not None:
            session.mark("failed")
        return code
    finally:
        if ray.is_initialized():
            ray.shutdown()
        if session is not None:
            session.notice.close()  # last: until here it ends the process before the provider does


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and what to print: one line for what a person can change, the traceback for a defect."""
    if isinstance(error, ConfigError):
        message = str(getattr(error, "cause", None) or error).strip()
        return EXIT_CONFIG, f"error: {message}"
    cause = getattr(error, "cause", None) or error  # of what a worker raised
    full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, StorageError) or full:
        return EXIT_STORAGE, f"error: {error}"
    if isinstance(error, ray.exceptions.ActorDiedError | ray.exceptions.NodeDiedError | ConnectionError):
        return EXIT_NODE_LOST, f"error: a worker or node was lost: {str(error).splitlines()[0]}"
    return EXIT_ERROR, "".join(traceback.format_exception(error))


def connect(config: RunConfig) -> None:
    """Joins the Ray cluster at RAY_ADDRESS, or starts one on this machine."""
    common: dict[str, Any] = {"log_to_driver": bool(os.environ.get("SPOTRL_WORKER_LOGS")), "logging_level": "WARNING"}
    root = str(Path(__file__).resolve().parent.parent)
    common["runtime_env"] = {"env_vars": {"PYTHONPATH": root}}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**common)
        return
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 is for background work; training is not
    workers = config.placement.workers_per_node * config.placement.threads_per_worker
    if config.placement.device == "cpu":
        common["num_gpus"] = 0
    ray.init(num_cpus=max(workers, os.cpu_count() or 1), include_dashboard=False, **common)
