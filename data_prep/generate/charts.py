"""Bar charts and line charts with a scale: a value, differences, sums, extremes, counts above a value."""

from __future__ import annotations

import random

from data_prep.generate.scene import COLORS, PALE, Problem, Scene, lettered

NAMES = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
BARS = {1: 3, 2: 4, 3: 5, 4: 6, 5: 7}
PARTS = {1: 1, 2: 1, 3: 2, 4: 2, 5: 4}
"""Into how many parts the distance between two ticks is divided; a value falls on a whole part."""


def make(rng: random.Random, difficulty: int) -> Problem:
    """A chart whose values can be read exactly: faint lines cross it wherever a value may be."""
    bars, parts = BARS[difficulty], PARTS[difficulty]
    tick = rng.choice((1, 2, 5, 10)) * (parts if parts > 1 else 1)
    ticks = rng.randint(4, 5 if parts == 4 else 6)
    levels = [rng.randint(1, ticks * parts) for _ in range(bars)]
    values = [level * tick // parts for level in levels]
    names = list(NAMES[:bars])
    scene = Scene.sized(rng, (60 + 36 * bars, 60 + 6 * ticks * parts if parts > 1 else 150))
    _draw(scene, rng, names, levels, ticks, parts, tick)
    kinds = ("value", "highest", "difference", "sum", "above", "lowest", "range")
    kind = rng.choice(kinds[:2] if difficulty == 1 else kinds[:4] if difficulty < 4 else kinds[2:])
    # A question must have one answer.
    if kind == "highest" and values.count(max(values)) > 1:
        kind = "sum"
    if kind == "lowest" and values.count(min(values)) > 1:
        kind = "sum"
    i, j = rng.sample(range(bars), 2)
    if kind == "difference" and values[i] == values[j]:
        kind = "sum"
    match kind:
        case "value":
            question, answer = f"What is the value for {names[i]}?", str(values[i])
        case "highest":
            answer = names[values.index(max(values))]
            question, answer = lettered(rng, "Which day has the highest value?", answer, names)
        case "lowest":
            answer = names[values.index(min(values))]
            question, answer = lettered(rng, "Which day has the lowest value?", answer, names)
        case "difference":
            high, low = (i, j) if values[i] >= values[j] else (j, i)
            question = f"By how much is the value for {names[high]} greater than the value for {names[low]}?"
            answer = str(values[high] - values[low])
        case "above":
            limit = rng.choice(values)
            question = f"How many days have a value above {limit}?"
            answer = str(sum(v > limit for v in values))
        case "range":
            question = "What is the difference between the highest and the lowest value?"
            answer = str(max(values) - min(values))
        case _:
            question = f"What is the sum of the values for {names[i]} and {names[j]}?"
            answer = str(values[i] + values[j])
    return Problem(scene, kind, question, answer, values)


def _draw(
    scene: Scene, rng: random.Random, names: list[str], levels: list[int], ticks: int, parts: int, tick: int
) -> None:
    left, right = 3.2 * scene.font, scene.width - 0.6 * scene.font
    bottom, top = scene.height - 1.8 * scene.font, scene.font
    step = (bottom - top) / (ticks * parts)
    for level in range(ticks * parts + 1):
        y = bottom - level * step
        whole = level % parts == 0
        scene.line((left, y), (right, y), color=(190, 190, 190) if whole else (228, 228, 228))
        if whole:
            scene.text(left - 1.5 * scene.font, y, level // parts * tick)
    scene.line((left, top), (left, bottom), (right, bottom), width=1.5)
    color = COLORS[rng.choice(sorted(COLORS))]
    wide = (right - left) / len(names)
    ends = [(left + (i + 0.5) * wide, bottom - level * step) for i, level in enumerate(levels)]
    if rng.random() < 0.5:
        for x, y in ends:
            scene.polygon(
                (x - wide * 0.3, y),
                (x + wide * 0.3, y),
                (x + wide * 0.3, bottom),
                (x - wide * 0.3, bottom),
                color=color,
            )
    else:
        for x, _ in ends:
            scene.line((x, top), (x, bottom), color=PALE)
        scene.line(*ends, color=color, width=2)
        for x, y in ends:
            scene.ellipse(x, y, max(3.0, scene.font / 4), color)
    for (x, _), name in zip(ends, names, strict=True):
        scene.text(x, bottom + 0.9 * scene.font, name)
