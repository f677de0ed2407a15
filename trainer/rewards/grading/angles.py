"""Angles in degrees and in radians: `60°` is `\\frac{\\pi}{3}`, and `\\frac{\\pi}{3} \\text{ rad}`."""

from __future__ import annotations

import re

MAX_CHARS = 200
_DEGREES = ("°", "degrees", "degree", "deg")
_RADIANS = ("radians", "radian", "rad")
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}", re.ASCII)
_NEVER = re.compile(r"[=<>,:°]")


def in_radians(reference: str, answer: str) -> tuple[str, str] | None:
    """Both cleaned angles in radians, if one is in degrees and the other in radians; else None.

    What holds pi and no unit is in radians.
    """
    if len(reference) > MAX_CHARS or len(answer) > MAX_CHARS:
        return None
    if _bare(reference, _DEGREES) is not None:
        first, second = _from_degrees(reference), _radians(answer)
    else:
        first, second = _radians(reference), _from_degrees(answer)
    return (first, second) if first and second else None


def _bare(angle: str, units: tuple[str, ...]) -> str | None:
    """An angle without its unit; None for one that has another unit, or none."""
    for name in units:
        bare = angle.removesuffix(name).rstrip()
        if bare and bare != angle and not _NEVER.search(bare) and not _WORD.search(bare):
            return bare
    return None


def _from_degrees(angle: str) -> str:
    bare = _bare(angle, _DEGREES)
    return f"({bare})\\pi/180" if bare else ""


def _radians(angle: str) -> str:
    bare = _bare(angle, _RADIANS)
    if bare is not None:
        return bare
    has_pi = "\\pi" in angle and not _NEVER.search(angle) and not _WORD.search(angle)
    return angle if has_pi else ""
