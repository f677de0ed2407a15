"""trackio and MLflow, for those who have them installed: the same metrics under the same names.

Neither is in the locked environments: `uv pip install --python .venvs/gpu/bin/python trackio mlflow`. Like
the other trackers they are views of metrics.jsonl. A service that fails is told once and never stops a run.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from trainer import config as configuration
from trainer.config import ConfigError, RunConfig

RUN_TAG = "spotrl.run_id"
"""Tag of an MLflow run: every attempt of a run logs to the same one."""
MOST_CHARS = 500
"""Longest parameter that MLflow's servers take."""


def import_tracker(module: str, option: str) -> ModuleType:
    """The module of a tracker. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ConfigError(
            f"{option} is set and {module} is not installed: `uv pip install --python"
            f" .venvs/gpu/bin/python {module}` on the node that runs the head, or leave {option} empty"
        ) from None


class ForgivingTracker:
    """Calls a service. After the first failure it prints a warning and makes no further calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failed = False

    def __call__(self, call: Callable[[], Any]) -> Any:
        if self.failed:
            return None
        try:
            return call()
        except Exception as error:
            self.failed = True
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"{self.name} does not take metrics ({reason}): metrics.jsonl has them all", flush=True)
            return None


class Trackio:
    """A trackio run with our run id: a resumed attempt goes on in it."""

    def __init__(self, config: RunConfig, resume_step: int) -> None:
        trackio = import_tracker("trackio", "logging.trackio")
        self._ask = ForgivingTracker("trackio")
        resume = "allow" if resume_step > 0 else "never"
        self._run = self._ask(
            lambda: trackio.init(
                project=config.logging.trackio,
                name=config.run_id,
                config=configuration.to_dict(config),
                resume=resume,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        )

    def log(self, step: int, numbers: dict[str, int | float]) -> None:
        """Logs the step's numbers."""
        self._ask(lambda: self._run.log(dict(numbers), step=step))

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Samples are in samples.jsonl and the report."""

    def close(self) -> None:
        """Ends the trackio run, after everything is written."""
        self._ask(lambda: self._run.finish())


class MLflow:
    """An MLflow run in the experiment `logging.wandb_project`, tagged with our run id."""

    def __init__(self, config: RunConfig, resume_step: int) -> None:
        mlflow = import_tracker("mlflow", "logging.mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._ask = ForgivingTracker("MLflow")
        self._run_id = self._ask(lambda: self._open(mlflow, config, resume_step))

    def _open(self, mlflow: ModuleType, config: RunConfig, resume_step: int) -> str:
        """The id of the run: that of an earlier attempt where this one resumes."""
        self._client = mlflow.MlflowClient(tracking_uri=config.logging.mlflow)
        name = config.logging.wandb_project
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        if resume_step > 0:
            wanted = f"tags.`{RUN_TAG}` = '{config.run_id}'"
            found = self._client.search_runs([experiment], wanted, order_by=["attributes.start_time DESC"])
            if found:
                return found[0].info.run_id
        tags = {RUN_TAG: config.run_id}
        run = self._client.create_run(experiment, run_name=config.run.name, tags=tags)
        params = []
        for section, values in configuration.to_dict(config).items():
            for key, value in values.items() if isinstance(values, dict) else [("", values)]:
                full = f"{section}.{key}" if key else section
                params.append(self._entities.Param(full, str(value)[:MOST_CHARS]))
        self._client.log_batch(run.info.run_id, params=params[:100])
        return run.info.run_id

    def log(self, step: int, numbers: dict[str, int | float]) -> None:
        """Logs the step's numbers; those that are not finite are left out, which servers refuse."""
        now_ms = int(time.time() * 1000)
        metrics = []
        for name, value in numbers.items():
            if math.isfinite(value):
                metrics.append(self._entities.Metric(name, float(value), now_ms, step))
        self._ask(lambda: self._client.log_batch(self._run_id, metrics=metrics))

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Samples are in samples.jsonl and the report."""

    def close(self) -> None:
        """Marks the run as finished; a later attempt goes on in it all the same."""
        self._ask(lambda: self._client.set_terminated(self._run_id))
