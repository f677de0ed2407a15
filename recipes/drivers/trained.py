"""What `evaluate` and `serve` are given: a run with its exported weights, a model's folder, or its name on
the hub."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from recipes import run_record
from recipes.drivers import shared_record, sight
from recipes.presets import RECIPES, benchmarks, resolve
from recipes.recipe_files import is_python
from trainer import config as run_config
from trainer.config import ConfigError, RunConfig
from trainer.config.run_folder import CONFIG
from trainer.config.run_store import EXPORTED, RunStore
from trainer.hardware import model_shapes

SHARED = ("local", "slurm", "pbs")
"""Targets that see this machine's files."""
KEPT = ("model", "rollout", "rewards", "placement", "cluster", "storage", "site", "setup")
"""Sections of a run's overrides that its evaluation keeps: its data, schedule and checkpoints are another
thing."""

ASKED = "asked.json"
"""Lies beside weights that a run exported (trainer/data/asked.py)."""


@dataclass(frozen=True)
class Trained:
    """A run."""

    config: RunConfig
    overrides: list[str]
    """That put its weights in the place of its model's, and say where its bucket is."""


def evaluated(name: str, bucket: str, target: str | None) -> tuple[str, list[str]]:
    """(recipe, overrides) of what is evaluated. Raises ConfigError."""
    if name in RECIPES or is_python(name):
        return name, []
    run = of_run(name, bucket, target)
    if run is None:
        return benchmarks.recipe_of(model(name))
    if run_record.known(name) and run.config.method == "grpo":
        record = run_record.load(name)
        own = [text for text in record.overrides if text.partition("=")[0].partition(".")[0].strip() in KEPT]
        return record.recipe, [*own, *_asked(run.config), *run.overrides, f"run.name={record.run_id}"]
    recipe, own = benchmarks.recipe_of(run.config.model.path)
    device, seen = _device(run.config), _seen(run.config)
    return recipe, [*own, *device, *seen, *run.overrides, f"run.name={Path(name).name}"]


def untrained(name: str, bucket: str, target: str | None) -> bool:
    """Whether this is a model that neither a run nor a recipe of ours trains. Raises ConfigError."""
    trained_here = name in RECIPES or is_python(name) or (Path(name) / ASKED).is_file()
    return not trained_here and of_run(name, bucket, target) is None


def served(name: str, bucket: str, target: str | None) -> list[str]:
    """Overrides of the recipe `serve`. Raises ConfigError."""
    run = of_run(name, bucket, target)
    if run is None:
        return [f"model.path={model(name)}", f"run.name={Path(name).name}"]
    return [
        f"model.path={run.config.model.path}",
        f"run.name={Path(name).name}",
        *_device(run.config),
        *_seen(run.config),
        f"rollout.max_tokens={run.config.rollout.max_tokens}",
        *run.overrides,
    ]


def _device(config: RunConfig) -> list[str]:
    """The environment of a run without a GPU; the recipe's own for any other."""
    return ["setup=cpu"] if config.placement.device == "cpu" else []


def _seen(config: RunConfig) -> list[str]:
    """What the model was trained to see, so that it sees the same."""
    model, longest = config.model, config.data.prompt_max_tokens
    fields = [
        f"model.{name}={getattr(model, name)}" for name in ("revision", "dtype", "min_pixels", "max_pixels")
    ]
    return [*fields, f"data.prompt_max_tokens={longest}", *_asked(config)]


def _asked(config: RunConfig) -> list[str]:
    """What the model was trained to be asked, so that it is asked the same."""
    return [
        f"data.system_prompt={json.dumps(config.data.system_prompt)}",
        f"rewards.answer={config.rewards.answer}",
    ]


def of_run(name: str, bucket: str, target: str | None) -> Trained | None:
    """The run of that name, with its weights from here where the target sees them, else from its bucket; None
    where it is no run. Raises ConfigError where it has no weights."""
    if bucket and "/" not in name and not run_record.known(name):
        with contextlib.suppress(ConfigError):  # an earlier version's run, whose stream has its configuration
            shared_record.adopt(name, bucket)
    known = run_record.known(name)
    name = run_record.load(name).run_id if known else name  # of its folder, too
    folders = [Path(name), run_record.RUNS / name, run_record.RUNS / name / run_record.PULLED]
    exported = [folder / EXPORTED for folder in folders]
    whole = next((path.absolute() for path in exported if (path / "config.json").is_file()), None)
    adapter = next((path.absolute() for path in exported if (path / "adapter_config.json").is_file()), None)
    url = sight.url_of(name, bucket) if known or "/" not in name else ""
    if not (whole or adapter or url or known):
        return None
    config = _config(name, bucket, folders)
    here = (
        [f"model.path={whole}", "model.revision="]
        if whole
        else [f"storage.weights={adapter}"]
        if adapter
        else []
    )
    stored = []
    if url:
        store = RunStore(url)
        stored = [f"storage.weights={store.exported}", f"storage.bucket={store.bucket}"]
    if not (found := here if target in SHARED and here else stored or here):
        raise ConfigError(
            f"run {name} has no bucket and no {run_record.RUNS / name / EXPORTED}: "
            "a run exports them at its end"
        )
    if found is stored and _is_folder_of_a_desk(config.model.path):
        config = _shaped(name, url, config)
        found = [*found, f"model.path={config.model.path}", "model.revision="]
    return Trained(config, found)


def _is_folder_of_a_desk(path: str) -> bool:
    """Whether a model is named by a folder, which may be another desk's or a node's."""
    return "${" not in path and not model_shapes.is_hub_id(path)


def _shaped(name: str, url: str, config: RunConfig) -> RunConfig:
    """The configuration of a run that began with a folder of its desk, with the model's shape from the
    bucket: that of the exported weights, or of the base that an adapter changes. Raises ConfigError."""
    store = RunStore(url)
    folder = run_record.RUNS / name / run_record.PULLED / "base"
    key = run_record.load(name).uploads.get("model.path", "") if run_record.known(name) else ""
    found = shared_record.fetched_shape(store.exported, folder, "")
    if not found and key:  # an adapter
        found = shared_record.fetched_shape(f"{store.bucket}/{key}", folder, key)
    if found:
        return run_config.override(config, [f"model.path={found}"])
    if (Path(config.model.path).expanduser() / "config.json").is_file():
        return config
    raise ConfigError(
        f"run {name} began with {config.model.path}, which is not here, "
        f"and {store.exported} has no config.json: a run writes it at its end (checkpoint.export_hf)"
    )


def _config(name: str, bucket: str, folders: list[Path]) -> RunConfig:
    """The configuration of a run: with the desk's paths if it was launched from here, else as the run saved
    it."""
    if run_record.known(name):
        record = run_record.load(name)
        return resolve(record.recipe, record.overrides).config
    saved = next((folder for folder in folders if (folder / CONFIG).is_file()), None)
    if saved is None and not bucket:  # a folder of a run with nothing but its weights
        exported = [folder / EXPORTED for folder in folders]
        whole = next((path.absolute() for path in exported if (path / "config.json").is_file()), "")
        return run_config.override(RunConfig(), [f"model.path={whole}"])
    return run_config.load(str((saved or sight.files(name, bucket)) / CONFIG))


def model(name: str) -> str:
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
        " list`, `launch.py status`"
    )
