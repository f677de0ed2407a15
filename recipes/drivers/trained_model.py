"""What `evaluate` and `serve` are given: a run with its exported weights, a model's folder, or its name on
the hub."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.drivers import fetched_runs, shared_record
from recipes.presets import RECIPES, benchmarks, resolve
from recipes.recipe.recipe_files import is_python
from recipes.records import run_record
from recipes.records.trust import NotTrusted
from trainer import config as run_config
from trainer.config import ConfigError, RunConfig
from trainer.config.run_folder import CONFIG
from trainer.config.run_store import EXPORTED, RunStore
from trainer.hardware import model_shapes

SHARED = ("local", "slurm", "pbs")
"""Targets that see this machine's files."""
KEPT = ("model", "rollout", "turns", "rewards", "placement", "cluster", "storage", "site", "setup")
"""Sections of a run's overrides that its evaluation keeps: its data, schedule and checkpoints are another
thing."""

ASKED = "asked.json"
"""Lies beside weights that a run exported (trainer/data/prompt_form.py)."""


@dataclass(frozen=True)
class TrainedRun:
    """A run."""

    config: RunConfig
    overrides: list[str]
    """That put its weights in the place of its model's, and say where its bucket is."""


def what_to_evaluate(name: str, bucket: str, target: str | None) -> tuple[str, list[str]]:
    """(recipe, overrides) of what is evaluated. Raises ConfigError."""
    if name in RECIPES or is_python(name):
        return name, []
    run = of_run(name, bucket, target)
    if run is None:
        return benchmarks.recipe_of(model_address(name))
    if run_record.is_known(name) and run.config.method == "grpo":
        record = run_record.load_record(name)
        own = [line for line in record.overrides if line.partition("=")[0].partition(".")[0].strip() in KEPT]
        return record.recipe, [*own, *_asked(run.config), *run.overrides, f"run.name={record.run_id}"]
    recipe, own = benchmarks.recipe_of(run.config.model.path)
    return recipe, [*own, *_seen(run.config), *run.overrides, f"run.name={Path(name).name}"]


def is_foreign_model(name: str, bucket: str, target: str | None) -> bool:
    """Whether this is a model that neither a run nor a recipe of ours trains. Raises ConfigError."""
    trained_here = name in RECIPES or is_python(name) or (Path(name) / ASKED).is_file()
    return not trained_here and of_run(name, bucket, target) is None


def what_to_serve(name: str, bucket: str, target: str | None) -> list[str]:
    """Overrides of the recipe `serve`. Raises ConfigError."""
    run = of_run(name, bucket, target)
    if run is None:
        return [f"model.path={model_address(name)}", f"run.name={Path(name).name}"]
    return [
        f"model.path={run.config.model.path}",
        f"run.name={Path(name).name}",
        *_seen(run.config),
        f"rollout.max_tokens={run.config.rollout.max_tokens}",
        *run.overrides,
    ]


def _seen(config: RunConfig) -> list[str]:
    """What the model was trained to see, so that it sees the same, and the environment of a run without a
    GPU."""
    model = config.model
    turns = [f"turns.{option}={value}" for option, value in asdict(config.turns).items()]
    return [
        *(["setup=cpu"] if config.placement.device == "cpu" else []),
        f"model.revision={model.revision}",
        f"model.dtype={model.dtype}",
        f"model.min_pixels={model.min_pixels}",
        f"model.max_pixels={model.max_pixels}",
        f"data.prompt_max_tokens={config.data.prompt_max_tokens}",
        *turns,
        *_asked(config),
    ]


def _asked(config: RunConfig) -> list[str]:
    """What the model was trained to be asked, so that it is asked the same."""
    return [
        f"data.system_prompt={json.dumps(config.data.system_prompt)}",
        f"rewards.answer={config.rewards.answer}",
    ]


def adopt_where_shared(name: str, bucket: str, trust: bool) -> None:
    """Takes the record of a run from its bucket where it has one. Raises NotTrusted."""
    if not bucket or "/" in name or run_record.is_known(name):
        return
    try:
        shared_record.adopt_run(name, bucket, trust)
    except NotTrusted:
        raise
    except ConfigError:  # an earlier version's run, whose stream has its configuration
        return


def of_run(name: str, bucket: str, target: str | None) -> TrainedRun | None:
    """The run of that name, with its weights from here where the target sees them, else from its bucket; None
    where it is no run. Raises ConfigError where it has no weights."""
    known = run_record.is_known(name)
    name = run_record.load_record(name).run_id if known else name  # of its folder, too
    folders = [Path(name), run_record.RUNS / name, run_record.RUNS / name / run_record.PULLED]
    whole = _exported_with("config.json", folders)
    adapter = _exported_with("adapter_config.json", folders)
    url = fetched_runs.url_of(name, bucket) if known or "/" not in name else ""
    if not (whole or adapter or url or known):
        return None
    config = _config(name, bucket, folders)

    here = [f"storage.weights={adapter}"] if adapter else []
    if whole:
        here = [f"model.path={whole}", "model.revision="]
    stored = []
    if url:
        store = RunStore(url)
        stored = [f"storage.weights={store.exported}", f"storage.bucket={store.bucket}"]
    settings = here if here and target in SHARED else stored or here
    if not settings:
        raise ConfigError(
            f"run {name} has no bucket and no {run_record.RUNS / name / EXPORTED}: "
            "a run exports them at its end"
        )
    # A folder may be another desk's, or a node's.
    if settings is stored and "${" not in config.model.path and not model_shapes.is_hub_id(config.model.path):
        config = _shaped(name, url, config)
        settings = [*settings, f"model.path={config.model.path}", "model.revision="]
    return TrainedRun(config, settings)


def _exported_with(file: str, folders: list[Path]) -> Path | None:
    """The first folder of exported weights that holds this file, below one of `folders`."""
    for folder in folders:
        if (folder / EXPORTED / file).is_file():
            return (folder / EXPORTED).absolute()
    return None


def _shaped(name: str, url: str, config: RunConfig) -> RunConfig:
    """The configuration of a run that began with a folder of its desk, with the model's shape from the
    bucket: that of the exported weights, or of the base that an adapter changes. Raises ConfigError."""
    store = RunStore(url)
    folder = run_record.RUNS / name / run_record.PULLED / "base"
    key = run_record.load_record(name).uploads.get("model.path", "") if run_record.is_known(name) else ""
    shape = shared_record.fetched_shape(store.exported, folder, "")
    if not shape and key:  # an adapter
        shape = shared_record.fetched_shape(f"{store.bucket}/{key}", folder, key)
    if shape:
        return run_config.override(config, [f"model.path={shape}"])
    if (Path(config.model.path).expanduser() / "config.json").is_file():
        return config
    raise ConfigError(
        f"run {name} began with {config.model.path}, which is not here, "
        f"and {store.exported} has no config.json: a run writes it at its end (checkpoint.export_hf)"
    )


def _config(name: str, bucket: str, folders: list[Path]) -> RunConfig:
    """The configuration of a run: with the desk's paths if it was launched from here, else as the run saved
    it."""
    if run_record.is_known(name):
        record = run_record.load_record(name)
        return resolve(record.recipe, record.overrides).config
    for folder in folders:
        if (folder / CONFIG).is_file():
            return run_config.load(str(folder / CONFIG))
    if bucket:
        return run_config.load(str(fetched_runs.run_files(name, bucket) / CONFIG))
    # A folder that holds nothing but a run's weights.
    whole = _exported_with("config.json", folders) or ""
    return run_config.override(RunConfig(), [f"model.path={whole}"])


def model_address(name: str) -> str:
    """The path or hub id of a model. Raises ConfigError."""
    if (Path(name) / "config.json").is_file():
        return str(Path(name).absolute())
    if (Path(name) / "adapter_config.json").is_file():
        raise ConfigError(
            f"{name} is an adapter: give the run that trained it, or --set storage.weights={name}"
        )
    if name.count("/") == 1 and model_shapes.is_hub_id(name):
        return name
    raise ConfigError(
        f"{name} is no recipe, run with weights, folder of a model or OWNER/NAME of the hub: see `launch.py"
        " list`, `python3 launch.py status`"
    )
