"""What a training loop stands on: workers, data, grading, metrics, checkpoints, notices; opened and closed together."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from data_prep.shards import Dataset
from trainer import config as configuration
from trainer.checkpoint import CheckpointError, Checkpoints, Found, export_hf
from trainer.cluster import Workers
from trainer.config import ConfigError, RunConfig
from trainer.flops import Shape, peak_flops
from trainer.metrics import Metrics, Phases
from trainer.precheck import precheck
from trainer.preempt import EXIT_CONFIG, EXIT_ERROR, EXIT_NODE_LOST, EXIT_STORAGE, Notice
from trainer.records import Outcome, Sample
from trainer.report import write_report
from trainer.rewards.pool import Rewards
from trainer.storage import StorageError
from trainer.telemetry import throughput, utilisation

SYNC_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""Mean |log-probability difference| of engine and policy above which the first sync is taken for broken."""


ATTACHED = ("metrics.jsonl", "samples.jsonl")
"""Append-only files of the run that travel with a checkpoint, so that a new node has the curves."""


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
        self.notice = Notice()
        self.phases = Phases(config.run.dir, self._on_boundary)
        self.phases.note(message="loading model and engine")
        self.rewards = Rewards(config.rewards)
        self.checkpoints = Checkpoints(config, self.train_set.fingerprint)
        rows = len(self.train_set)
        self.workers = Workers(config, total_updates(config, min(rows, config.data.max_samples or rows)))
        self._peak_flops = peak_flops(self.workers.facts[0]["device_name"])
        self._image_token_id = self.workers.facts[0]["image_token_id"]
        self._shape = Shape.load(model_folder(config)) if self._peak_flops else None
        self.metrics: Metrics
        self._step_time_s = 0.0
        self._begun = time.monotonic()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.rewards.close()
        self.checkpoints.close()
        self.notice.close()
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
            self.workers.all("restore", found, found.state["updates"])
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
        """Grades answers against the labels of their rows."""
        dataset = dataset or self.train_set
        rows = {s.row: dataset[s.row] for s in samples}
        labels = [rows[s.row] for s in samples]
        return self.rewards.score(
            [s.text for s in samples], [row.answer for row in labels], [row.answer_type for row in labels]
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
        self._step_time_s = times["time/step_s"]
        stats = stats | self.rewards.stats() | {"data/left_out": self.left_out}
        stats |= throughput(stats, times, self.workers.world_size) | self.checkpoints.metrics() | times
        if self._peak_flops and self._shape:
            stats |= utilisation(self.config, self._shape, self._peak_flops, self._image_token_id, samples, times)
        self.metrics.log(step, stats)
        if shown:
            self.metrics.samples(step, list(shown))
        print(one_line(step, stats), flush=True)

    def maybe_save(self, step: int, total: int, norm: dict[str, float], updates: int, score: float | None) -> None:
        """Goes on with the save under way, or starts one if it is due (or a notice leaves just enough time for it)."""
        checkpoints = self.checkpoints
        self._advance()
        urgent = self.notice.poll() is not None and checkpoints.fits(self.notice.remaining_s())
        if not checkpoints.due(step, self._step_time_s, last=step == total or urgent):
            return
        state = {"updates": updates, "reward_norm": dict(norm)}
        attach = [Path(self.config.run.dir) / name for name in ATTACHED]
        checkpoints.begin(step, state, score=score, attach=attach)
        try:
            checkpoints.stall_s = max(self.workers.all("save", step, checkpoints.local_steps()))
        except CheckpointError as error:
            checkpoints.failed(error)

    def _advance(self) -> None:
        if self.checkpoints.in_flight is None:
            return
        try:
            self.checkpoints.advance(self.workers.all("save_status"))
        except CheckpointError as error:
            self.checkpoints.failed(error)

    def finish(self, step: int, total: int, norm: dict[str, float], updates: int) -> None:
        """Waits until the last checkpoint is committed, exports the weights, writes the report."""
        with self.phases("checkpoint"):
            while self.checkpoints.committed != step:
                self.maybe_save(step, total, norm, updates, None)
                self.checkpoints.finish(lambda: self.workers.all("save_status"))
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

    def flush(self) -> None:
        """After a notice: lets the save under way commit, if it does within what is left of the notice."""
        while self.checkpoints.busy and self.notice.remaining_s() > 0.5:
            self._advance()
            self.checkpoints.poll()
            time.sleep(0.1)
        self.phases.finish("interrupted" if self.notice.reason == "interrupted" else "preempted")

    def _on_boundary(self) -> None:
        if (reason := self.notice.poll()) is not None:
            raise Preempted(reason)


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
    """Command line of a loop: `--config run.yaml`. Exits with a code of trainer/preempt.py."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--config", required=True, help="resolved configuration of the run (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one value")
    arguments = parser.parse_args()
    sys.exit(_run(train, total_updates, arguments.config, arguments.set))


def _run(train: Any, total_updates: Any, path: str, overrides: list[str]) -> int:
    session: Session | None = None
    try:
        config = configuration.override(configuration.load(path), overrides)
        configuration.validate(config)
        precheck(config)
        connect(config)
        session = Session(config, total_updates)
        with session:
            train(config, session)
        return 0
    except Preempted as notice:
        assert session is not None
        session.flush()
        print(f"stopping: {notice}; the run goes on from step {session.checkpoints.committed or 0}", file=sys.stderr)
        return session.notice.exit_code
    except KeyboardInterrupt:
        if session is not None:
            session.phases.finish("interrupted")
        return 130
    except Exception as error:
        code, text = explain(error)
        print(text, file=sys.stderr, flush=True)
        if session is not None:
            session.phases.finish("failed")
        return code
    finally:
        if ray.is_initialized():
            ray.shutdown()


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and what to print: one line for what a person can change, the traceback for a defect."""
    if isinstance(error, ConfigError):
        message = str(getattr(error, "cause", None) or error).strip()
        return EXIT_CONFIG, f"error: {message}"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
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
