"""Counting shapes: by shape, by color, by both, and differences of two counts."""

from __future__ import annotations

import math
import random
from collections import Counter

from data_prep.generate.scene import COLORS, Problem, Scene

SHAPES = ("circle", "square", "triangle", "star")
CELLS = {1: (4, 3), 2: (5, 3), 3: (6, 4), 4: (7, 5), 5: (9, 6)}
"""Columns and rows of places per difficulty; at most four of five are taken."""


def make(rng: random.Random, difficulty: int) -> Problem:
    """Shapes in colors, apart from each other."""
    columns, rows = CELLS[difficulty]
    scene = Scene.sized(rng, (30 * columns, 30 * rows))
    shapes = rng.sample(SHAPES, min(4, 1 + difficulty))
    colors = rng.sample(sorted(COLORS), min(4, 1 + difficulty))
    count = rng.randint(2 + 2 * difficulty, columns * rows * 4 // 5)
    things = [(rng.choice(shapes), rng.choice(colors)) for _ in range(count)]
    cell = min(scene.width / columns, scene.height / rows)
    for (shape, color), place in zip(things, rng.sample(range(columns * rows), count), strict=True):
        size = cell * rng.uniform(0.3, 0.38)
        x = (place % columns + 0.5) * scene.width / columns + rng.uniform(-0.08, 0.08) * cell
        y = (place // columns + 0.5) * scene.height / rows + rng.uniform(-0.08, 0.08) * cell
        _draw(scene, shape, x, y, size, color)
    kind, question, answer = _ask(rng, difficulty, shapes, colors, things)
    return Problem(scene, kind, question, str(answer), sorted(things))


def _ask(
    rng: random.Random, difficulty: int, shapes: list[str], colors: list[str], things: list[tuple[str, str]]
) -> tuple[str, str, int]:
    shape, color = rng.choice(shapes), rng.choice(colors)
    of_shape = Counter(shape for shape, _ in things)
    of_color = Counter(color for _, color in things)
    both = things.count((shape, color))
    kinds = ["shape", "color", "both", "either", "more"]
    kind = rng.choice(kinds[: 2 if difficulty == 1 else 3 if difficulty == 2 else 5])
    match kind:
        case "shape":
            return kind, f"How many {shape}s are there?", of_shape[shape]
        case "color":
            return kind, f"How many {color} shapes are there?", of_color[color]
        case "both":
            return kind, f"How many {color} {shape}s are there?", both
        case "either":
            either = of_shape[shape] + of_color[color] - both
            return kind, f"How many shapes are {color}, or {shape}s, or both?", either
    first, second = rng.sample(colors, 2)
    if of_color[first] == of_color[second]:
        return "color", f"How many {first} shapes are there?", of_color[first]
    if of_color[first] < of_color[second]:
        first, second = second, first
    more = of_color[first] - of_color[second]
    return kind, f"How many more {first} shapes than {second} shapes are there?", more


def _draw(scene: Scene, shape: str, x: float, y: float, size: float, color: str) -> None:
    if shape == "circle":
        return scene.ellipse(x, y, size, COLORS[color])
    corners = {"square": 4, "triangle": 3, "star": 10}[shape]
    turn = math.pi / 4 if shape == "square" else 0.0
    points = []
    for i in range(corners):
        radius = size * (0.42 if shape == "star" and i % 2 else 1.1)
        angle = turn + 2 * math.pi * i / corners
        points.append((x + radius * math.sin(angle), y - radius * math.cos(angle)))
    return scene.polygon(*points, color=COLORS[color])
