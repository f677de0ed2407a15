"""Graphs on a grid: values, intercepts, zeros, slopes, extremes, crossings, and one function of another."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from data_prep.generate.scene import COLORS, Problem, Scene

REACH = 6
"""Both axes go from -REACH to REACH."""
KINDS = {
    1: ("value", "intercept"),
    2: ("value", "zero", "intercept"),
    3: ("slope", "vertex", "value"),
    4: ("slope", "vertex", "larger_zero"),
    5: ("crossing", "composed", "zero_sum"),
}
SLOPES = (Fraction(-2), Fraction(-1), Fraction(-1, 2), Fraction(1), Fraction(1, 2), Fraction(2))
"""Slopes of the two lines that cross."""
Function = Callable[[Fraction], Fraction]


def make(rng: random.Random, difficulty: int) -> Problem:
    """One or two graphs; every point that is asked for lies on a crossing of the grid."""
    kind = rng.choice(KINDS[difficulty])
    scene = Scene.sized(rng, (300, 300))
    match kind:
        case "vertex" | "larger_zero" | "zero_sum":
            return _parabola(rng, scene, kind)
        case "crossing" | "composed":
            return _two_lines(rng, scene, kind)
    if kind == "slope":
        run = rng.randint(1, 3) if difficulty == 3 else rng.randint(2, 5)
        rise = rng.choice([r for r in range(-5, 6) if r])
        x, y = (
            rng.randint(-REACH, REACH - run),
            rng.randint(max(-REACH, -REACH - rise), min(REACH, REACH - rise)),
        )
        slope = Fraction(rise, run)
        _axes(scene)
        _graph(scene, lambda t: y + slope * (t - x), "blue")
        for point in ((x, y), (x + run, y + rise)):
            scene.ellipse(*_at(scene, *point), max(3.5, scene.font / 3.5), COLORS["blue"])
        return Problem(scene, kind, "What is the slope of the line?", str(slope), [str(slope), x, y])
    slope = rng.choice((-1, 1)) if difficulty == 1 else rng.choice((-3, -2, -1, 1, 2, 3))
    zero = rng.randint(-4, 4)
    while abs(slope * zero) > REACH:
        zero = rng.randint(-4, 4)
    bent = kind == "value" and difficulty == 3
    line: Function = (lambda t: abs(slope * (t - zero)) - 3) if bent else lambda t: slope * (t - zero)
    _axes(scene)
    _graph(scene, line, "blue")
    facts = [slope, zero, bent]
    if kind == "intercept":
        return Problem(
            scene, kind, "At which value of y does the line cross the y-axis?", str(-slope * zero), facts
        )
    if kind == "zero":
        return Problem(scene, kind, "At which value of x does the line cross the x-axis?", str(zero), facts)
    x = rng.choice([x for x in range(-REACH, REACH + 1) if abs(line(Fraction(x))) <= REACH])
    return Problem(scene, kind, f"The graph shows f. What is f({x})?", str(line(Fraction(x))), facts)


def _parabola(rng: random.Random, scene: Scene, kind: str) -> Problem:
    half = rng.randint(1, 2)
    up = rng.choice((-1, 1))
    middle = rng.randint(-REACH + half + 1, REACH - half - 1)
    bottom = -up * half * half if kind != "vertex" else rng.randint(-4, 4)
    _axes(scene)
    _graph(scene, lambda t: up * (t - middle) ** 2 + bottom, "purple")
    facts = [up, middle, bottom]
    if kind == "vertex":
        question = f"What is the {'smallest' if up > 0 else 'largest'} value of y that the curve reaches?"
        return Problem(scene, kind, question, str(bottom), facts)
    if kind == "larger_zero":
        question = "The curve crosses the x-axis twice. What is the larger of the two values of x?"
        return Problem(scene, kind, question, str(middle + half), facts)
    question = "The curve crosses the x-axis twice. What is the sum of the two values of x?"
    return Problem(scene, kind, question, str(2 * middle), facts)


def _two_lines(rng: random.Random, scene: Scene, kind: str) -> Problem:
    one, other = rng.sample(SLOPES, 2)
    x, y = rng.randint(-4, 4), rng.randint(-4, 4)

    def f(t: Fraction) -> Fraction:
        return y + one * (t - x)

    def g(t: Fraction) -> Fraction:
        return y + other * (t - x)

    _axes(scene)
    _graph(scene, f, "blue")
    _graph(scene, g, "red")
    facts = [str(one), str(other), x, y]
    drawn = "The blue line is f, the red line is g."
    if kind == "crossing":
        return Problem(scene, kind, f"{drawn} For which x is f(x) = g(x)?", str(x), facts)

    def shown(value: Fraction) -> bool:
        return value.denominator == 1 and abs(value) <= REACH

    def can_be_read(start: int) -> bool:
        middle = g(Fraction(start))
        return shown(middle) and shown(f(middle))

    starts = list(filter(can_be_read, range(-REACH, REACH + 1)))
    if not starts:  # the crossing itself always lies on the grid
        return Problem(scene, "crossing", f"{drawn} For which x is f(x) = g(x)?", str(x), facts)
    start = rng.choice(starts)
    return Problem(scene, kind, f"{drawn} What is f(g({start}))?", str(f(g(Fraction(start)))), facts)


def _at(scene: Scene, x: Any, y: Any) -> tuple[float, float]:
    unit_x, unit_y = scene.width / (2 * REACH + 1.6), scene.height / (2 * REACH + 1.6)
    return scene.width / 2 + float(x) * unit_x, scene.height / 2 - float(y) * unit_y


def _axes(scene: Scene) -> None:
    for i in range(-REACH, REACH + 1):
        scene.line(_at(scene, i, -REACH), _at(scene, i, REACH), color=(210, 210, 210))
        scene.line(_at(scene, -REACH, i), _at(scene, REACH, i), color=(210, 210, 210))
    scene.line(_at(scene, -REACH - 0.5, 0), _at(scene, REACH + 0.5, 0), width=1.5)
    scene.line(_at(scene, 0, -REACH - 0.5), _at(scene, 0, REACH + 0.5), width=1.5)
    size = max(11.0, 0.75 * scene.font)
    for i in range(-REACH, REACH + 1, 2):
        if i:
            scene.text(*_at(scene, i, -0.42), i, size)
            scene.text(*_at(scene, -0.45, i), i, size)
    scene.text(*_at(scene, REACH + 0.5, 0.4), "x", size)
    scene.text(*_at(scene, 0.4, REACH + 0.5), "y", size)


def _graph(scene: Scene, function: Function, color: str) -> None:
    """Draws what lies on the grid; a line's ends are where it leaves it."""
    shown = []
    for step in range(-60 * REACH, 60 * REACH + 1):
        t = Fraction(step, 60)
        value = function(t)
        if abs(value) <= REACH:
            shown.append(_at(scene, t, value))
    scene.line(*shown, color=COLORS[color], width=max(2.0, scene.font / 8))
