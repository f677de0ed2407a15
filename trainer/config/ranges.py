"""The range of a numeric field, stated where the field stands, and the one loop that checks all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from trainer.system.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """What a number may be. Every bound is optional; `above` and `below` leave the bound itself out."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)


def ranged_field(
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with a default and a range; of a tuple, every element must be in it."""
    return field(default=default, metadata={"range": Range(least, above, most, below)})


def check_ranges(config: Any, where: str = "") -> None:
    """Raises ConfigError naming the first field of a dataclass tree that is out of its range, or not
    finite."""
    for f in fields(config):
        value, allowed = getattr(config, f.name), f.metadata.get("range")
        if is_dataclass(value):
            check_ranges(value, f"{where}{f.name}.")
        elif allowed is not None:
            for number in value if isinstance(value, tuple) else (value,):
                if number not in allowed:
                    raise ConfigError(f"{where}{f.name} is {value}: it must be {allowed}")
