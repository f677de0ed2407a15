"""What a run writes about itself while it runs, and how it is read back. Its files:
trainer/config/run_folder.py. A line is written with one system call, so a SIGKILL loses at most the line it
tears. Names and units of metrics: docs/metrics.md."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import config as configuration
from trainer.config import ConfigError, RunConfig
from trainer.config.run_folder import ATTEMPTS, CONFIG, METRICS, SAMPLES, write_whole
from trainer.observe.history import last_step, read_history, truncate_metrics

IMAGE_SIDE = 448
"""Longest side of a kept sample image, in pixels."""
NAME = re.compile(r"[a-z0-9_]+/[A-Za-z0-9_.@-]+")


class Metrics:
    """Writes the metrics and samples of one run to every place the configuration asks for. Lives in the
    driver."""

    def __init__(
        self,
        run_dir: str | Path,
        config: RunConfig,
        resume_step: int = 0,
        history: bytes = b"",
        samples: bytes = b"",
    ) -> None:
        """Opens the run's files, to resume after `resume_step` (0: a fresh start, which drops an earlier
        run's lines). history, samples: metrics.jsonl and samples.jsonl as saved with the checkpoint, for a
        new node whose disk lacks the lines up to `resume_step`; the samples' images are not restored. Raises
        ConfigError when W&B is asked to be online without an account."""
        self.run_dir = Path(run_dir)
        self.config = config
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._images = self.run_dir / "samples"
        path = self.run_dir / METRICS
        if history and last_step(path, resume_step) < resume_step:
            write_whole(path, history)
            if samples:
                write_whole(self.run_dir / SAMPLES, samples)
        truncate_metrics(path, resume_step)
        truncate_metrics(self.run_dir / SAMPLES, resume_step)
        if resume_step <= 0:
            (self.run_dir / ATTEMPTS).unlink(missing_ok=True)
        write_whole(self.run_dir / CONFIG, configuration.dump(config).encode())
        start = {"resume_step": resume_step, "unix_s": time.time(), "host": socket.gethostname()}
        _append(self.run_dir / ATTEMPTS, start | {"pid": os.getpid()})
        self._trackers: list[Any] = []
        if config.logging.tensorboard:
            self._trackers.append(TensorBoard(self.run_dir / "tensorboard", resume_step))
        if config.logging.wandb != "disabled":
            self._trackers.append(WeightsAndBiases(self.run_dir, config, resume_step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line. Several lines of one step are merged by the readers, the later value of a name
        winning. Raises ValueError for a name that is not `section/name`, TypeError for a value that is not a
        number."""
        numbers = {}
        line: dict[str, Any] = {"step": int(step), "time/unix_s": time.time()}
        for name, value in values.items():
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"metric name {name!r}: write it as section/name_unit, as in docs/metrics.md"
                )
            numbers[name] = _number(name, value)
            line[name] = _json_number(numbers[name])
        _append(self.run_dir / METRICS, line)
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Writes completions with their grades. Each row: row, question, completion (the text), ground_truth,
        verdict, reward, advantage, tokens (of the completion), and image_pngs: encoded images (PNG, JPEG or
        WebP), kept at no more than IMAGE_SIDE pixels. An episode of several turns also has dialog: [reply,
        observation, reply, ...], and shown: how many of the last images each observation showed."""
        written = []
        for row in rows:
            record: dict[str, Any] = {"step": int(step)} | row
            pictures = record.pop("image_pngs", [])
            record["images"] = [self._keep_image(data) for data in pictures]
            for key in ("reward", "advantage"):
                if key in record:
                    record[key] = _json_number(_number(key, record[key]))
            _append(self.run_dir / SAMPLES, record)
            written.append(record)
        for tracker in self._trackers:
            tracker.samples(step, written)

    def _keep_image(self, data: bytes) -> str:
        """Stores an image under its content's hash; returns its path relative to the run directory."""
        self._images.mkdir(exist_ok=True)
        stem = hashlib.sha256(data).hexdigest()[:16]
        for known in self._images.glob(stem + ".*"):
            return f"samples/{known.name}"
        data, suffix = thumbnail(data, IMAGE_SIDE)
        write_whole(self._images / f"{stem}{suffix}", data)
        return f"samples/{stem}{suffix}"

    def history(self) -> bytes:
        """All lines so far, to be saved with a checkpoint so that the curves survive the loss of the node's
        disk."""
        path = self.run_dir / METRICS
        return path.read_bytes() if path.exists() else b""

    def close(self) -> None:
        """Flushes and closes every tracker. The files of this module need no closing."""
        while self._trackers:
            self._trackers.pop().close()


def thumbnail(data: bytes, side: int) -> tuple[bytes, str]:
    """An image scaled down to at most `side` pixels, as the policy sees it, and its file suffix. A small
    image is kept as it is if a browser shows it the same way."""
    from trainer.images.decoding import open_image, to_rgb

    with open_image(data) as image:
        kind = (image.format or "").lower()
        plain = image.mode in ("RGB", "L", "P") and not image.has_transparency_data and not image.getexif()
        if max(image.size) <= side and kind in ("png", "jpeg", "webp", "gif") and plain:
            return data, f".{kind}"
        small = to_rgb(image)
        small.thumbnail((side, side))
        out = io.BytesIO()
        small.save(out, "JPEG", quality=88)
        return out.getvalue(), ".jpeg"


def _append(path: Path, record: dict[str, Any]) -> None:
    line = json.dumps(record, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        while line:
            line = line[os.write(descriptor, line) :]
    finally:
        os.close(descriptor)


def _number(name: str, value: Any) -> int | float:
    if hasattr(value, "item"):  # a 0-dimensional tensor or NumPy scalar
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}: metrics are numbers")
    return value


def _json_number(value: int | float) -> int | float | str:
    """JSON has no NaN: non-finite numbers become the words that JavaScript and Python's float() both read."""
    return value if math.isfinite(value) else json.dumps(float(value))


# --- TensorBoard and Weights & Biases -------------------------------------------------------------------
#
# Both are views of metrics.jsonl, which stays the record. One whose service fails never stops a run.


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
        values = [self._summary.Value(tag=name, simple_value=numbers[name]) for name in sorted(numbers)]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Samples are in samples.jsonl and the report."""

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run with our run id, so that every attempt of a preempted run is one run there. Online, the
    service drops the steps that it has seen. Offline, every attempt leaves a directory of its own that holds
    the whole history so far: `wandb sync` of the newest one is enough."""

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
            for record in read_history(run_dir):
                self.log(record["step"], {k: v for k, v in record.items() if "/" in k})

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
