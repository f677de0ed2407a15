"""Buckets as this machine reaches them: what it finds out before anything is rented, and what it cannot."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from pathlib import Path

from recipes.platforms import programs
from recipes.platforms.targets import target_named
from recipes.recipe.spec import Recipe
from trainer.config import ConfigError
from trainer.config.bucket_address import BucketAddress, is_address
from trainer.system.exit_codes import EXIT_STORAGE

GOOGLE_KEY = "GOOGLE_SERVICE_ACCOUNT_KEY"


def bucket_addresses(recipe: Recipe) -> dict[str, BucketAddress]:
    """Every address that the recipe's nodes read or write, by the field that names it. Raises ConfigError."""
    given = {
        "storage.bucket": recipe.storage.bucket,
        "storage.weights": recipe.storage.weights,
        "data.path": recipe.config.data.path,
        "evaluation.path": recipe.config.evaluation.path,
    }
    return {field: BucketAddress.parse(text, field) for field, text in given.items() if is_address(text)}


def check_credentials(recipe: Recipe, target: str, secrets: Collection[str]) -> None:
    """Raises ConfigError where a node of the target could not open one of the recipe's buckets.

    secrets: names of the tokens that this machine has for the run.
    """
    on_gcp = target_named(target).cloud == "gcp"
    for address in bucket_addresses(recipe).values():
        match address.scheme:
            case "s3" if "AWS_ACCESS_KEY_ID" not in secrets:
                wanted = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            case "r2" if "R2_ACCESS_KEY_ID" not in secrets:
                wanted = "R2_ACCOUNT_ID, R2_ACCESS_KEY_ID, R2_SECRET_ACCESS_KEY"
            case "gs" if GOOGLE_KEY not in secrets and not on_gcp:
                wanted = (
                    f"{GOOGLE_KEY} (the key's JSON): machines of {target} have no Google account of their own"
                )
            case _:
                continue
        raise ConfigError(f"no credentials for {address.url}: export {wanted}")


def unverified(recipe: Recipe, secrets: Collection[str]) -> list[str]:
    """A line for each bucket that this machine has no key for and that the nodes may be able to open."""
    if GOOGLE_KEY in secrets:
        return []
    return [
        f"NOT VERIFIED: {address.url} ({field}). There is no {GOOGLE_KEY} here, "
        "so the machines' own account is the first to try it, when they are paid for, "
        "and another desk's run of this id would not be seen. Try it with "
        f"`gcloud storage ls gs://{address.bucket}`, or export the key's JSON"
        for field, address in bucket_addresses(recipe).items()
        if address.scheme == "gs"
    ]


def can_open(address: str, env: dict[str, str]) -> bool:
    """Whether this machine has what it takes to look into the bucket; without a key, Google's it cannot."""
    return not address.startswith("gs://") or GOOGLE_KEY in env


def probe_bucket(bucket: str, env: dict[str, str]) -> None:
    """Puts, lists, reads and deletes an object in the bucket, before anything is rented. Raises
    ConfigError."""
    if can_open(bucket, env):
        _storage("probe", bucket, env)


def check_weights(url: str, env: dict[str, str]) -> None:
    """Raises ConfigError where a run has exported nothing that could be served or scored, before anything is
    rented."""
    if not is_address(url) or not can_open(url, env):
        return  # the node's step says it
    listed = _storage("ls", url, env)
    if not {line.split()[-1] for line in listed.splitlines()} & {"config.json", "adapter_config.json"}:
        raise ConfigError(
            f"no exported weights at {url}: a run writes them at its end (checkpoint.export_hf), "
            "see `python3 launch.py status`"
        )


def read_text(url: str, name: str, env: dict[str, str]) -> str:
    """A small file of a bucket. Raises ConfigError where it is not there."""
    return _storage("cat", url, env, name)


def _storage(command: str, url: str, env: dict[str, str], *more: str) -> str:
    """What a command of the store prints. Raises ConfigError with its last line."""
    done = run_storage(command, url, *more, env=env)
    if done.returncode:
        raise ConfigError(programs.last_line(done.stderr, "it said nothing"))
    return done.stdout


def run_storage(
    *words: str, env: dict[str, str], module: str = "trainer.storage", timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE WORDS`, which has failed where it does not answer in time."""
    argv = [find_python(), "-m", module, *words]
    try:
        return subprocess.run(
            argv, env=os.environ | env, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        reason = f"the bucket has not answered in {timeout_s:g} s"
        return subprocess.CompletedProcess(argv, EXIT_STORAGE, "", reason)


def find_python() -> str:
    """The Python that talks to object stores: of an environment that is here, else of a small new one. Raises
    ConfigError where that cannot be made."""
    for name in ("desk", "cpu", "test"):
        if (Path(".venvs") / name / ".stamp").exists():
            return f".venvs/{name}/bin/python"
    if subprocess.run(["bash", "trainer/shell/setup.sh", "desk"]).returncode:
        raise ConfigError(
            "the environment that talks to the bucket could not be made: the lines above say why"
        )
    return ".venvs/desk/bin/python"
