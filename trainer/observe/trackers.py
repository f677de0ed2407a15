"""TensorBoard and Weights & Biases behind one interface: log(step, numbers), samples(step, rows), close().

Both are views of metrics.jsonl, which stays the record. A tracker whose service fails never stops a run.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from trainer import config as configuration
from trainer.config import ConfigError, RunConfig
from trainer.observe.history import read_history


class TensorBoard:
    """Scalars as event files, without the weight of torch.utils.tensorboard (4 s of imports)."""

    def __init__(self, log_dir: Path, resume_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        log_dir.mkdir(parents=True, exist_ok=True)
        if resume_step <= 0:
            for old in log_dir.glob("events.out.tfevents.*"):
                old.unlink()
        self._writer = EventFileWriter(str(log_dir))
        # TensorBoard forgets what earlier files hold from this step on.
        # getattr, since type checkers do not see classes that are generated at import.
        self._event: Any = getattr(event_pb2, "Event")  # noqa: B009
        self._summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009
        session: Any = getattr(event_pb2, "SessionLog")  # noqa: B009
        start = session(status=session.START)
        self._writer.add_event(
            self._event(wall_time=time.time(), step=max(resume_step, 0) + 1, session_log=start)
        )

    def log(self, step: int, numbers: dict[str, int | float]) -> None:
        """Writes the step's scalars and flushes."""
        values = []
        for name, value in sorted(numbers.items()):
            values.append(self._summary.Value(tag=name, simple_value=value))

        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        )
        self._writer.flush()

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Samples are in samples.jsonl and the report."""

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run with our run id, so that every attempt of a preempted run is one run there.

    Online, the service drops the steps that it has seen. Offline, every attempt leaves a directory of its own
    that holds the whole history so far: `wandb sync` of the newest one is enough.
    """

    def __init__(self, run_dir: Path, config: RunConfig, resume_step: int) -> None:
        import wandb

        mode = config.logging.wandb
        if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
            raise ConfigError(
                "logging.wandb is online, but there is no account: set WANDB_API_KEY or logging.wandb=offline"
            )
        self._wandb = wandb
        self._run_dir = run_dir
        self._run = self._start(config, mode, resume_step)
        if self._run.offline and resume_step > 0:
            self._replay()

    def _start(self, config: RunConfig, mode: str, resume_step: int) -> Any:
        run_id = re.sub(r"[^A-Za-z0-9_.-]", "-", config.run_id)
        if mode == "offline":
            return self._init(config, run_id, mode="offline")
        try:
            return self._init(config, run_id, mode="online", resume="allow" if resume_step > 0 else None)
        except (self._wandb.errors.CommError, TimeoutError) as error:
            reason = str(error).splitlines()[0]
            print(f"W&B cannot be reached ({reason}): this attempt is logged offline", flush=True)
            # W&B's service holds on to the id of the failed start; `wandb sync --id` joins the two later
            return self._init(config, f"{run_id}-offline-from-{resume_step}", mode="offline")

    def _init(self, config: RunConfig, run_id: str, **options: Any) -> Any:
        wandb = self._wandb
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, init_timeout=30, finish_timeout=60
        )
        return wandb.init(
            project=config.logging.wandb_project,
            name=config.run.name,
            id=run_id,
            dir=str(self._run_dir),
            config=configuration.to_dict(config),
            settings=settings,
            **options,
        )

    def _replay(self) -> None:
        for record in read_history(self._run_dir):
            self.log(record["step"], {k: v for k, v in record.items() if "/" in k})

    def log(self, step: int, numbers: dict[str, int | float]) -> None:
        """Hands the step to W&B's own process."""
        self._run.log(dict(numbers), step=step)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Logs the step's samples as a table, and their images with the verdict under each."""
        columns: list[str | int] = ["row", "question", "completion", "ground_truth", "verdict"]
        columns += ["reward", "advantage", "tokens"]
        data: list[Any] = [list(map(row.get, columns)) for row in rows]
        logged: dict[str, Any] = {"samples": self._wandb.Table(columns=columns, data=data)}
        images = []
        for row in rows:
            caption = f"row {row.get('row')}: {row.get('verdict')}"
            for path in row["images"]:
                images.append(self._wandb.Image(str(self._run_dir / path), caption=caption))
        if images:
            logged["images"] = images
        self._run.log(logged, step=step)

    def close(self) -> None:
        """Ends the W&B run; waits at most `finish_timeout` for a slow service."""
        self._run.finish()
