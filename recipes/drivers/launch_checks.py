"""Every check before anything is rented: of the recipe alone, then of programs, buckets and servers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.drivers import bucket_access, launched_run, uploads
from recipes.plan import cost, memory, prices, sizing
from recipes.platforms import programs
from recipes.platforms.targets import target_named
from recipes.presets import own_data
from recipes.recipe.resolved import ResolvedRecipe
from recipes.recipe.spec import Recipe
from recipes.records import manifest, run_process, run_record
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError
from trainer.config.bucket_address import is_address
from trainer.config.never_sent import is_secret
from trainer.config.run_store import RunStore
from trainer.system.redaction import secret_in_text

MOST_BYTES = 1 << 20
"""Largest file that is searched for a secret: secrets are small."""


def check_launch(run: ResolvedRecipe, reproducible: bool) -> None:
    """Everything that can be known without asking anybody, keys aside. Raises ConfigError with the change to
    make."""
    recipe, platform = run.recipe, target_named(run.target)
    _check_data(run)
    if recipe.cluster.gpus_per_node and recipe.kind in ("train", "sample"):
        _check_memory(run)
    _check_hourly(run)
    if platform.runs_here:
        if len(str(Path.cwd()).split()) > 1:
            raise ConfigError(
                f"this checkout lies in {str(Path.cwd())!r}, and Ray starts nothing below a path with a"
                " blank: move it"
            )
        uploads.check_model_folder(recipe)
    platform.check_machines(recipe)
    if recipe.kind == "sample" and not recipe.storage.bucket:
        raise ConfigError(
            "a rollout worker speaks with its run through the bucket alone: give --bucket of the run"
        )
    if recipe.saves and not recipe.storage.bucket:
        _check_without_bucket(run)
    if reproducible and not manifest.run_git("rev-parse", "HEAD").strip():
        raise ConfigError(
            "--reproducible wants a commit to go back to, and this folder is no git checkout: clone one"
        )
    if reproducible and (dirty := manifest.dirty_files()):
        raise ConfigError(f"--reproducible wants a clean git tree: commit or drop {', '.join(dirty[:4])}")


def check_keys(run: ResolvedRecipe, secrets: Mapping[str, str]) -> None:
    """Raises ConfigError where the run would lack a key of its bucket or of a tracker, or would send one to
    its machines in a file. secrets: those that were found, by name."""
    bucket_access.check_credentials(run.recipe, run.target, secrets)
    if run.recipe.config.logging.wandb == "online" and "WANDB_API_KEY" not in secrets:
        raise ConfigError(
            "logging.wandb is online and there is no token: export WANDB_API_KEY, or set it to offline"
        )
    check_sent_tree(run.target, secrets)


def check_sent_tree(target: str, secrets: Mapping[str, str]) -> None:
    """Raises ConfigError naming a file with a secret that would be copied to the machines of `target`: every
    platform leaves out the names of secrets (`trainer/config/never_sent.txt`), and not a secret in a file of
    another name. secrets: the tokens of this launch by name, which are looked for too."""
    if not target_named(target).copies_tree:
        return
    for name in manifest.changed_files() + manifest.untracked_files():
        fault = ""
        if is_secret(name):  # left out, but SkyPilot's patterns do not look into hidden folders
            fault = "has a secret's name in a hidden folder" if name.startswith(".") and "/" in name else ""
        elif not name.startswith("tests/"):  # keys there are of the tests
            holds = _secret_in_file(Path(name), secrets)
            fault = f"holds {holds}" if holds else ""
        if fault:
            raise ConfigError(
                f"{name} {fault}, and the repository is copied to the machines of {target}: move it out"
                f" of {Path.cwd()}"
            )


def _secret_in_file(path: Path, secrets: Mapping[str, str]) -> str:
    """What secret a file holds; "" if none is seen, and for what cannot be read: it is not sent either."""
    try:
        if path.is_file() and path.stat().st_size <= MOST_BYTES:
            return secret_in_text(path.read_bytes(), secrets)
    except OSError:
        pass
    return ""


def check_outside(run: ResolvedRecipe, record: RunRecord, task: str, env: dict[str, str]) -> None:
    """What only others can tell: programs and buckets. task: text of the main file. Raises ConfigError with
    the change to make."""
    recipe, platform = run.recipe, target_named(run.target)
    platform.check_program()
    platform.check(recipe, record, task)
    if recipe.storage.weights:
        bucket_access.check_weights(recipe.storage.weights, env)
    if recipe.kind == "train" and is_address(recipe.config.data.path):
        _check_rows(recipe, env)
    if recipe.storage.bucket and recipe.uses_bucket:
        bucket_access.probe_bucket(recipe.storage.bucket, env)


def _check_data(run: ResolvedRecipe) -> None:
    recipe = run.recipe
    files = own_data.source_files(recipe.config.data.source) if recipe.config.data.source else []
    if files and not target_named(run.target).shared_files:
        raise ConfigError(
            f"data.source names {files[0]}, and the nodes of {run.target} do not have it: put the rows into a"
            f" bucket, `python3 launch.py data prepare {files[0]} --out s3://...`, and set data.path to that"
        )
    own_data.check_there(recipe)
    if recipe.uploads and not recipe.storage.bucket:
        raise ConfigError(
            f"{recipe.uploads[0].local} goes to the nodes of {run.target} through a bucket: give --bucket"
        )


def _check_rows(recipe: Recipe, env: dict[str, str]) -> None:
    """Raises ConfigError where a bucket has no prepared rows, or too few for a step."""
    data = recipe.config.data
    if not bucket_access.can_open(data.path, env):
        return  # the node says it
    rows = own_data.rows_of_manifest(bucket_access.read_text(data.path, "manifest.json", env), data.split)
    if rows is None:
        raise ConfigError(f"{data.path} has no split {data.split}: set data.split")
    cost.steps_of(replace(recipe, dataset=replace(recipe.dataset, rows=rows)))


def _check_without_bucket(run: ResolvedRecipe) -> None:
    recipe, platform = run.recipe, target_named(run.target)
    if platform.asks_bucket:
        raise ConfigError(
            f"{run.target} throws its machines away, so checkpoints need a bucket: give --bucket s3://..."
        )
    if recipe.cluster.nodes > 1 and not (platform.shared_files or recipe.config.checkpoint.shared_files):
        raise ConfigError(
            "a new node could not resume without the others' files, so several nodes need a bucket: give"
            " --bucket s3://..., or --set checkpoint.shared_files=true where all of them see the run's"
            " directory"
        )


def _check_hourly(run: ResolvedRecipe) -> None:
    known = cost.node_prices(run.recipe, run.target, prices.sky_catalogs())
    most = run.recipe.budget.max_hourly_usd
    if most and known and known[0][0] > most:
        usd, gpu, spot = known[0]
        raise ConfigError(
            f"budget.max_hourly_usd is {most:g}, and the cheapest node of {run.target} costs {usd:.2f} per"
            f" hour ({run.recipe.cluster.gpus_per_node} x {gpu}, {'spot' if spot else 'on demand'}): raise"
            " it, or take fewer GPUs"
        )


def _check_memory(run: ResolvedRecipe) -> None:
    for gpu in target_named(run.target).gpus_for(run.recipe):
        need = memory.plan_memory(run.recipe, gpu)
        if need and not need.fits:
            advice = sizing.advice(run.recipe, gpu)
            raise ConfigError(
                f"{run.recipe.name} does not fit {gpu}: {need.problem}; cheapest change: {advice}"
            )


@dataclass(frozen=True)
class EarlierLaunch:
    """What is known of an earlier launch of a run that may not have ended."""

    what: str
    """It in words, or why it cannot be told whether it lives."""
    sure: bool
    """Whether it is known to be alive."""


def earlier_launch(record: RunRecord, env: dict[str, str]) -> EarlierLaunch | None:
    """An earlier launch of this run that has not ended, or of which that cannot be told; None: there is none.

    Two attempts at once never write to one checkpoint (trainer/checkpoint/attempt.py); but both cost.
    """
    before = run_record.load_record(record.run_id) if run_record.is_known(record.run_id) else None
    here = run_process.process_of(record.run_id) if before and target_named(before.target).runs_here else 0
    if here:
        return EarlierLaunch(f"process {here} on this machine", sure=True)
    answer = launched_run.ask_platform(before) if before and not before.ended_s else None
    if answer and answer.known and answer.whole and not answer.ended_s:
        return EarlierLaunch(answer.text, sure=True)
    if not record.bucket or not bucket_access.can_open(record.bucket, env):
        return None  # `bucket_access.unverified` says so
    root = RunStore.in_bucket(record.bucket, record.run_id).root
    done = bucket_access.run_storage(root, env=env, module="trainer.checkpoint")
    if done.returncode:
        return EarlierLaunch(programs.last_line(done.stderr, f"exit code {done.returncode}"), sure=False)
    attempt_seen = json.loads(done.stdout)
    # our own `down` has ended it
    if attempt_seen["alive"] is False or (before and before.ended_s > attempt_seen["seen_unix_s"]):
        return None
    seen_s = time.time() - attempt_seen["seen_unix_s"]
    attempt = f"attempt {attempt_seen['attempt']} on {attempt_seen['host']}"
    if attempt_seen["alive"] is None:
        return EarlierLaunch(
            f"{attempt} has not ended, and the store does not tell when it was seen", sure=False
        )
    return EarlierLaunch(f"{attempt}, seen {seen_s:.0f} s ago", sure=True)
