"""Small details in a large picture: numbers and dots of about 8 pixels in frames on 1,600 x 1,200.

A model that sees the picture in a third of its pixels cannot read them; cut out and enlarged it can (the tool
`zoom`, docs/turns.md).
"""

from __future__ import annotations

import math
import random

from data_prep.generate.scene import BLACK, COLORS, Problem, Scene

SIZE = (1600, 1200)
"""Pixels of a picture."""
CELL = 200
"""Side of the square that a frame has for itself, pixels."""
FRAME = 24
"""Radius of a frame, pixels; of a triangle that of the circle through its corners is larger."""
TEXT = 11
"""Height of the font of a number, pixels: its digits are 8 pixels high."""
DOT = 1.5
"""Radius of a dot, pixels."""
SHAPES = ("circle", "square", "triangle")
CORNERS = {"square": (4, math.pi / 4, 1.3), "triangle": (3, 0.0, 1.5)}
"""Corners, turn, and radius in those of FRAME."""


def make(rng: random.Random, difficulty: int) -> Problem:
    """Four to twelve frames; from difficulty 2 on some hold dots, from 4 on two are asked for at once."""
    scene = Scene(*SIZE)
    count = 2 + 2 * difficulty
    kind = rng.choice(("number", "dots", "sum")[: 1 + (difficulty > 1) + (difficulty > 3)])
    looks = rng.sample([(color, shape) for color in sorted(COLORS) for shape in SHAPES], count)
    columns = SIZE[0] // CELL
    places = rng.sample(range(columns * (SIZE[1] // CELL)), count)

    held: list[int] = []
    for number, ((color, shape), place) in enumerate(zip(looks, places, strict=True)):
        x = CELL * (place % columns) + CELL / 2 + rng.uniform(-60, 60)
        y = CELL * (place // columns) + CELL / 2 + rng.uniform(-60, 60)
        _frame(scene, shape, x, y, color)
        dotted = kind == "dots" if number < 2 else difficulty > 1 and rng.random() < 0.3
        if dotted:
            held.append(rng.randint(2, 9))
            _dots(scene, rng, x, y, held[-1])
        else:
            held.append(rng.randint(10, 999))
            scene.text(x, y, held[-1], TEXT)

    first, second = (f"{color} {shape}" for color, shape in looks[:2])
    facts = sorted(zip(looks, held, strict=True))
    match kind:
        case "number":
            return Problem(scene, kind, f"Which number is in the {first}?", str(held[0]), facts)
        case "dots":
            return Problem(scene, kind, f"How many dots are in the {first}?", str(held[0]), facts)
    question = f"What is the sum of the numbers in the {first} and the {second}?"
    return Problem(scene, kind, question, str(held[0] + held[1]), facts)


def _frame(scene: Scene, shape: str, x: float, y: float, color: str) -> None:
    if shape == "circle":
        return scene.ellipse(x, y, FRAME, COLORS[color], 3)
    corners, turn, radius = CORNERS[shape]
    points = []
    for i in range(corners):
        angle = turn + 2 * math.pi * i / corners
        points.append((x + radius * FRAME * math.sin(angle), y - radius * FRAME * math.cos(angle)))
    return scene.polygon(*points, color=COLORS[color], width=3)


def _dots(scene: Scene, rng: random.Random, x: float, y: float, count: int) -> None:
    for place in rng.sample(range(9), count):
        scene.ellipse(x + 7 * (place % 3 - 1), y + 7 * (place // 3 - 1), DOT, BLACK)
