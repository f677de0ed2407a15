"""The plan's assumptions about a card, put beside what was measured on one, or in its place.

`launch.py up gpu-check` measures them (tests/gpu) and writes them down; `launch.py plan --calibrate FILE`
plans with what it found. The constants stay where they are used; here is which of them a measurement may
replace, and between which bounds one is believed.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from recipes.plan import cost, memory
from recipes.recipe.resolved import GIB
from trainer.config import ConfigError
from trainer.config.run_folder import GPU_CHECK

OFF = 0.1
"""A constant that differs by more than this share of itself is worth another value."""


@dataclass(frozen=True)
class Constant:
    """One assumption of the plan that a card can answer."""

    module: ModuleType
    least: float
    most: float
    """Bounds, in `unit`, outside of which a figure is a mistake of the measurement."""
    unit: str = ""
    scale: float = 1.0
    """The constant's own units in one `unit`."""


CONSTANTS = {
    "CONTEXT": Constant(memory, 0.1, 5.0, "GiB", GIB),
    "COMMUNICATORS": Constant(memory, 0.0, 10.0, "GiB", GIB),
    "ENGINE_WORKSPACE": Constant(memory, 0.1, 20.0, "GiB", GIB),
    "ENGINE_ASLEEP": Constant(memory, 0.0, 10.0, "GiB", GIB),
    "MATMUL": Constant(cost, 0.02, 1.0),
    "DECODE": Constant(cost, 0.02, 1.0),
    "ENGINE_STEP_S": Constant(cost, 1e-5, 0.1, "s"),
    "SEQUENCE_S": Constant(cost, 0.0, 0.01, "s"),
}
"""By name, as in its module."""


@dataclass(frozen=True)
class MeasuredFigure:
    """A constant as the plan has it and as a card showed it, in the same unit."""

    name: str
    assumed: float
    value: float
    unit: str

    @property
    def believed(self) -> bool:
        """Whether the figure lies where one can."""
        return CONSTANTS[self.name].least <= self.value <= CONSTANTS[self.name].most

    @property
    def off(self) -> bool:
        """Whether the plan would be better with it."""
        return self.believed and abs(self.value - self.assumed) > OFF * max(self.assumed, 1e-12)

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        if not self.believed:
            known = CONSTANTS[self.name]
            return (
                f"{self.name}: {self.value:.3g}{unit} is outside {known.least:g} to {known.most:g}{unit} "
                "and is not taken: the measurement went wrong"
            )
        return f"{self.name}: {self.assumed:.3g} assumed, {self.value:.3g} measured{unit}"


def measured_constants(figures: dict[str, Any]) -> list[MeasuredFigure]:
    """The constants among a check's figures. figures: by name, each with `value`, and `constant` where it is
    one."""
    found = []
    for figure in figures.values():
        name = figure.get("constant", "")
        if name in CONSTANTS:  # an older plan may lack one that a newer check has
            known = CONSTANTS[name]
            assumed = getattr(known.module, name) / known.scale
            found.append(MeasuredFigure(name, assumed, float(figure["value"]), known.unit))
    return found


def read_check(path: Path) -> dict[str, Any]:
    """What a check wrote: a file, or the folder of its run. Raises ConfigError."""
    file = path / GPU_CHECK if path.is_dir() else path
    try:
        said = json.loads(file.read_text())
        figures = said["figures"]
        good = all(isinstance(figure["value"], int | float) for figure in figures.values())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; `python3 launch.py up gpu-check` writes one") from error
    except (ValueError, TypeError, KeyError, AttributeError):
        good = False
    if good and is_rehearsal(said):
        raise ConfigError(f"{file} was rehearsed on a CPU, which tells nothing of a card")
    if not good:
        raise ConfigError(
            f"{file} is no {GPU_CHECK}: give the file that `python3 launch.py up gpu-check` wrote"
        )
    return said


def is_rehearsal(said: dict[str, Any]) -> bool:
    """Whether a check ran on a CPU."""
    return "CPU" in said.get("device", "")


@contextmanager
def calibrated(found: list[MeasuredFigure]) -> Generator[None]:
    """Plans with what was measured, until the block ends."""
    before = {one.name: getattr(CONSTANTS[one.name].module, one.name) for one in found}
    try:
        for one in found:
            if one.believed:
                setattr(CONSTANTS[one.name].module, one.name, one.value * CONSTANTS[one.name].scale)
        yield
    finally:
        for name, value in before.items():
            setattr(CONSTANTS[name].module, name, value)
