"""The matrix of parity tests: all families that are trained, in all their layouts. A new row of the trainer's
`FAMILIES` is a case of each of them without a further line."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from trainer.hardware import architectures

FAMILIES = tuple(architectures.FAMILIES)
VISION = tuple(name for name in FAMILIES if architectures.FAMILIES[name].tower)

BOUNDS = {"fp32": (1e-4, 1e-5), "bf16": (0.25, 0.02)}
"""Largest and mean |log-prob difference| of engine and policy, by the type that both compute in."""


def dtype(family: str) -> str:
    """The type in which vLLM computes a family on CPUs: gated delta-net layers in bf16 only."""
    return "bf16" if family in FAMILIES and architectures.FAMILIES[family].gated_delta else "fp32"


def reroutes(family: str) -> bool:
    """Whether engine and policy choose other experts for a few tokens, as they do in bf16: of a small model
    these are far apart."""
    return family in FAMILIES and bool(architectures.FAMILIES[family].experts) and dtype(family) == "bf16"


def matrix(cases: Iterable[tuple[Any, ...]], quick: Collection[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test: those in `quick` as they are, all others marked long."""
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.long) for case in cases]


def loader(family: str) -> Any:
    """transformers' class that loads a model of the family."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if family in VISION else AutoModelForCausalLM
