"""trackio and MLflow: their own stores are read back. Skipped where they are not installed."""

from dataclasses import replace

import pytest

from trainer.config import ConfigError, Logging, Run, RunConfig
from trainer.observe.optional_trackers import RUN_TAG, ForgivingTracker, MLflow, Trackio, import_tracker


def config(**logging) -> RunConfig:
    return replace(RunConfig(), run=Run(name="mine", id="mine-1"), logging=Logging(**logging))


def attempts(tracker, made: RunConfig) -> None:
    """Two attempts of a run: the second resumes from step 1."""
    first = tracker(made, 0)
    first.log(1, {"reward/mean": 0.5})
    first.close()
    second = tracker(made, 1)
    second.log(2, {"reward/mean": 0.75, "loss/total": float("nan")})
    second.close()


def test_mlflow_has_both_attempts_in_one_run(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    attempts(MLflow, config(mlflow=uri))
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("spotrl")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.75)]
    assert run.data.tags[RUN_TAG] == "mine-1" and run.data.params["run.name"] == "mine"


def test_trackio_has_both_attempts_in_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    attempts(Trackio, config(trackio="mine"))
    logged = SQLiteStorage.get_logs("mine", "mine-1")
    assert [(row["step"], row["reward/mean"]) for row in logged] == [(1, 0.5), (2, 0.75)]


def test_a_tracker_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match="logging.mlflow is set and no_such_tracker is not installed"):
        import_tracker("no_such_tracker", "logging.mlflow")


def test_a_service_that_fails_is_told_once_and_stops_nothing(capsys):
    calls = []

    def fails():
        calls.append(1)
        raise OSError("no route to host")

    ask = ForgivingTracker("MLflow")
    assert ask(fails) is None and ask(fails) is None
    assert len(calls) == 1
    assert (
        capsys.readouterr().out
        == "MLflow does not take metrics (no route to host): metrics.jsonl has them all\n"
    )
