"""Plane figures drawn to scale: angles, perimeters, areas, right triangles, and shapes of two rectangles."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from data_prep.generate.scene import COLORS, Point, Problem, Scene

KINDS = {
    1: ("perimeter", "angle"),
    2: ("angle", "area", "triangle_area"),
    3: ("triangle_area", "hypotenuse", "leg"),
    4: ("corner_area", "corner_perimeter", "leg"),
    5: ("corner_area", "root", "trapezoid"),
}
"""Difficulty -> kinds of question."""
TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (20, 21, 29), (12, 35, 37), (28, 45, 53))


def make(rng: random.Random, difficulty: int) -> Problem:
    """One figure with its sizes written beside it."""
    kind = rng.choice(KINDS[difficulty])
    scene = Scene.sized(rng, (260, 200))
    largest = {1: 12, 2: 20, 3: 30, 4: 30, 5: 30}[difficulty]
    a, b = _lengths(rng, 4, largest)
    match kind:
        case "angle":
            return _angle(rng, scene)
        case "perimeter" | "area":
            _figure(rng, scene, [(0, 0), (a, 0), (a, b), (0, b)], {0: a, 1: b}, range(4))
            answer = 2 * (a + b) if kind == "perimeter" else a * b
            return Problem(scene, kind, f"What is the {kind} of the rectangle?", str(answer), [a, b])
        case "triangle_area":
            a += a % 2
            _figure(rng, scene, [(0, 0), (a, 0), (0, b)], {0: a, 2: b}, [0])
            return Problem(scene, kind, "What is the area of the triangle?", str(a * b // 2), [a, b])
        case "hypotenuse" | "leg":
            factor, triple = rng.randint(1, difficulty + 1), rng.choice(TRIPLES)
            a, b, c = (side * factor for side in triple)
            sides = {0: a, 1: "x", 2: b} if kind == "hypotenuse" else {0: a, 1: c, 2: "x"}
            _figure(rng, scene, [(0, 0), (a, 0), (0, b)], sides, [0])
            answer = str(c if kind == "hypotenuse" else b)
            return Problem(scene, kind, "How long is the side marked x?", answer, [a, b, c])
        case "root":
            while math.isqrt(a * a + b * b) ** 2 == a * a + b * b:
                a, b = _lengths(rng, 4, largest)
            _figure(rng, scene, [(0, 0), (a, 0), (0, b)], {0: a, 1: "x", 2: b}, [0])
            question = "How long is the side marked x? Give the exact value."
            return Problem(scene, kind, question, root(a * a + b * b), [a, b])
        case "trapezoid":
            top = max(3, round(a * rng.uniform(0.4, 0.75)))
            _figure(rng, scene, [(0, 0), (a, 0), (top, b), (0, b)], {0: a, 2: top, 3: b}, [0, 3])
            area = (a + top) * b
            answer = str(area // 2) if area % 2 == 0 else f"{area / 2:.1f}"
            return Problem(scene, kind, "What is the area of the trapezoid?", answer, [a, b, top])
    a, b = _lengths(rng, 8, largest)
    c = max(3, round(a * rng.uniform(0.35, 0.65)))
    d = max(3, round(b * rng.uniform(0.35, 0.65)))
    corners = [(0, 0), (a, 0), (a, d), (c, d), (c, b), (0, b)]
    _figure(rng, scene, corners, {0: a, 1: d, 4: c, 5: b}, [0, 1, 2, 4, 5])
    if kind == "corner_area":
        size = "area"
        answer = a * d + c * (b - d)
    else:
        size = "perimeter"
        answer = 2 * (a + b)
    question = f"All corners of the figure are right angles. What is its {size}?"
    return Problem(scene, kind, question, str(answer), [a, b, c, d])


def root(square: int) -> str:
    """The square root in lowest terms, in LaTeX."""
    factor = max(k for k in range(1, math.isqrt(square) + 1) if square % (k * k) == 0)
    return f"{factor if factor > 1 else ''}\\sqrt{{{square // factor**2}}}"


def _lengths(rng: random.Random, low: int, high: int) -> tuple[int, int]:
    """Two lengths of which neither is more than 2.5 times the other."""
    first = rng.randint(low, high)
    return first, rng.randint(max(low, math.ceil(first / 2.5)), min(high, int(first * 2.5)))


def _angle(rng: random.Random, scene: Scene) -> Problem:
    """A triangle with two known angles."""
    first = rng.randint(35, 80)
    second = rng.randint(35, min(100, 145 - first))
    third = 180 - first - second
    far = math.sin(math.radians(second)) / math.sin(math.radians(third))
    top = (far * math.cos(math.radians(first)), far * math.sin(math.radians(first)))
    corners = _figure(rng, scene, [(0, 0), (1, 0), top], {}, ())
    names = [f"{first}°", f"{second}°", "x"]
    middle = (sum(x for x, _ in corners) / 3, sum(y for _, y in corners) / 3)
    for (x, y), name, angle in zip(corners, names, (first, second, third), strict=True):
        away = 1.35 * scene.font / math.sin(math.radians(angle / 2))
        reach = math.dist((x, y), middle)
        share = min(0.62, away / reach)
        scene.text(x + share * (middle[0] - x), y + share * (middle[1] - y), name)
    return Problem(scene, "angle", "How many degrees is the angle marked x?", str(third), [first, second])


def _figure(
    rng: random.Random, scene: Scene, corners: Sequence[Point], sides: dict[int, Any], square: Any
) -> list[Point]:
    """Draws a figure as large as fits, perhaps mirrored, with a text beside each side i -> i + 1 that
    has one.

    `square` are the corners with a mark for a right angle. Returns the corners in pixels.
    """
    flip_x, flip_y = rng.random() < 0.5, rng.random() < 0.5
    xs, ys = zip(*corners, strict=True)
    wide, high = max(xs), max(ys)
    low = min(xs)
    margin = 2.6 * scene.font
    scale = min((scene.width - 2 * margin) / (wide - low), (scene.height - 2 * margin) / high) * rng.uniform(
        0.85, 1
    )
    left, top = (scene.width - (wide - low) * scale) / 2, (scene.height - high * scale) / 2
    points: list[Point] = []
    for x, y in corners:
        x, y = (wide - x if flip_x else x - low), (y if flip_y else high - y)
        points.append((left + x * scale, top + y * scale))
    turn = (-1 if flip_x else 1) * (-1 if flip_y else 1)
    scene.polygon(*points, color=COLORS["blue"], width=max(1.5, scene.font / 9))
    for i, text in sides.items():
        (x0, y0), (x1, y1) = points[i], points[(i + 1) % len(points)]
        length = math.dist((x0, y0), (x1, y1))
        steep = abs(y1 - y0) / length  # a long text needs more room beside a steep side
        away = scene.font * (1.1 + 0.28 * steep * len(str(text))) * turn / length
        scene.text((x0 + x1) / 2 - (y1 - y0) * away, (y0 + y1) / 2 + (x1 - x0) * away, text)
    for i in square:
        (x, y), arm = points[i], 0.6 * scene.font
        arms = []
        for u, v in (points[i - 1], points[(i + 1) % len(points)]):
            share = arm / math.dist((x, y), (u, v))
            arms.append(((u - x) * share, (v - y) * share))
        (px, py), (qx, qy) = arms
        scene.line((x + px, y + py), (x + px + qx, y + py + qy), (x + qx, y + qy))
    return points
