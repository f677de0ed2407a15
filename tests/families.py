"""The families that parity tests run on: all that are trained. Each row of the trainer's `FAMILIES` is a case
of them."""

from __future__ import annotations

from typing import Any

from trainer.hardware import architectures

FAMILIES = tuple(architectures.FAMILIES)
VISION = tuple(name for name in FAMILIES if architectures.FAMILIES[name].tower)


def loader(family: str) -> Any:
    """transformers' class that loads a model of the family."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if family in VISION else AutoModelForCausalLM
