"""Tables of numbers: one cell, sums and differences, the largest of a column, counts under a condition."""

from __future__ import annotations

import random
from typing import Any

from data_prep.generate.scene import BLACK, GRAY, PALE, Problem, Scene, lettered

ROWS = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jill")
COLUMNS = ("Apples", "Books", "Cards", "Dolls", "Eggs", "Flags")
SIZE = {1: (2, 2), 2: (3, 3), 3: (5, 3), 4: (7, 4), 5: (10, 5)}
"""Rows and columns of numbers per difficulty."""
HIGHEST = {1: 9, 2: 20, 3: 50, 4: 99, 5: 999}


def make(rng: random.Random, difficulty: int) -> Problem:
    """A table with names on the left and things above."""
    rows, columns = SIZE[difficulty]
    names, things = rng.sample(ROWS, rows), rng.sample(COLUMNS, columns)
    values = []
    for _ in names:
        values.append([rng.randint(0, HIGHEST[difficulty]) for _ in things])
    scene = Scene.sized(rng, (62 * (columns + 1), 24 * (rows + 1)))
    _draw(scene, names, things, values)
    kinds = ("cell", "sum", "largest", "difference", "count", "total")
    kind = rng.choice(kinds[:2] if difficulty == 1 else kinds[:4] if difficulty < 4 else kinds[1:])
    i, other = rng.sample(range(rows), 2)
    j = rng.randrange(columns)
    column = [row[j] for row in values]
    thing = things[j].lower()
    if kind == "largest" and column.count(max(column)) > 1:
        kind = "sum"
    if kind == "difference" and column[i] == column[other]:
        kind = "sum"
    match kind:
        case "cell":
            question, answer = f"How many {thing} does {names[i]} have?", str(values[i][j])
        case "sum":
            question = f"How many {thing} do {names[i]} and {names[other]} have together?"
            answer = str(column[i] + column[other])
        case "largest":
            asked = f"Who has the most {thing}?"
            question, answer = lettered(rng, asked, names[column.index(max(column))], names)
        case "difference":
            high, low = (i, other) if column[i] >= column[other] else (other, i)
            question = f"How many more {thing} does {names[high]} have than {names[low]}?"
            answer = str(column[high] - column[low])
        case "count":
            limit = rng.choice(column)
            question = f"How many people have more than {limit} {thing}?"
            answer = str(sum(value > limit for value in column))
        case _:
            question, answer = f"How many {thing} are there in total?", str(sum(column))
    return Problem(scene, kind, question, answer, [names, things, values])


def _draw(scene: Scene, names: list[str], things: list[str], values: list[list[int]]) -> None:
    wide, high = scene.width / (len(things) + 1), scene.height / (len(names) + 1)
    size = max(11.0, min(wide / 5.2, high / 2.2))
    scene.polygon((0, 0), (scene.width, 0), (scene.width, high), (0, high), color=PALE)
    lines: list[list[Any]] = [["", *things]]
    for name, line in zip(names, values, strict=True):
        lines.append([name, *line])
    for i, row in enumerate(lines):
        for j, text in enumerate(row):
            scene.text((j + 0.5) * wide, (i + 0.5) * high, text, size)
        scene.line((0, i * high), (scene.width, i * high), color=GRAY if i > 1 else BLACK)
    for j in range(1, len(things) + 1):
        scene.line((j * wide, 0), (j * wide, scene.height), color=GRAY)
    scene.polygon(
        (0, 0), (scene.width - 1, 0), (scene.width - 1, scene.height - 1), (0, scene.height - 1), width=1
    )
