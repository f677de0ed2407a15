"""Reading clocks with two hands: the time, a later time, and the minutes between two clocks."""

from __future__ import annotations

import math
import random

from data_prep.generate.scene import BLACK, COLORS, GRAY, WHITE, Problem, Scene

STEP = {1: 30, 2: 5, 3: 1, 4: 1, 5: 1}
"""Minutes between the times that are shown, per difficulty."""
FORMAT = "Answer as H:MM on a 12-hour clock."


def make(rng: random.Random, difficulty: int) -> Problem:
    """One clock, or two side by side from difficulty 4 on."""
    step = STEP[difficulty]
    shown = rng.randrange(0, 720, step)
    if difficulty < 3:
        kind = "time"
    elif difficulty == 3:
        kind = rng.choice(("time", "later"))
    else:
        kind = rng.choice(("later", "earlier", "between"))

    two = kind == "between"
    least: tuple[float, float] = (200, 150)
    if step == 1:
        least = (480, 240) if two else (220, 220)
    scene = Scene.sized(rng, least)
    radius = min(scene.width / (4 if two else 2), scene.height / 2) * rng.uniform(0.86, 0.94)
    numbered = difficulty < 5 or rng.random() < 0.5
    _clock(scene, scene.width / (4 if two else 2), scene.height / 2, radius, shown, step == 1, numbered)
    if two:
        other = (shown + rng.randrange(1, 720)) % 720
        _clock(scene, scene.width * 3 / 4, scene.height / 2, radius, other, True, numbered)
        question = (
            "The left clock shows when a trip starts, the right clock when it ends, "
            "less than 12 hours later. How many minutes does the trip take?"
        )
        return Problem(scene, kind, question, str((other - shown) % 720), [shown, other])
    if kind == "time":
        return Problem(scene, kind, f"What time does the clock show? {FORMAT}", clock_time(shown), [shown])
    minutes = rng.randint(5, 55) if difficulty < 5 else rng.randint(61, 600)
    later = (shown + (minutes if kind == "later" else -minutes)) % 720
    if kind == "later":
        asked = f"What time will it be {minutes} minutes after the time on the clock?"
    else:
        asked = f"What time was it {minutes} minutes before the time on the clock?"
    return Problem(scene, kind, f"{asked} {FORMAT}", clock_time(later), [shown])


def clock_time(minutes: int) -> str:
    """Minutes since 12:00 -> `H:MM`."""
    return f"{minutes // 60 or 12}:{minutes % 60:02d}"


def _clock(scene: Scene, x: float, y: float, radius: float, shown: int, ticks: bool, numbered: bool) -> None:
    def at(turn: float, share: float) -> tuple[float, float]:
        angle = 2 * math.pi * turn
        return x + radius * share * math.sin(angle), y - radius * share * math.cos(angle)

    scene.ellipse(x, y, radius, BLACK, max(1.5, radius / 40))
    for minute in range(60):
        if minute % 5 == 0:
            scene.line(at(minute / 60, 0.9), at(minute / 60, 0.99), width=max(1.5, radius / 45))
        elif ticks:
            scene.line(at(minute / 60, 0.94), at(minute / 60, 0.99), color=GRAY, width=max(1.0, radius / 90))
    scene.line((x, y), at(shown / 720, 0.45), width=max(3.0, radius / 18))
    scene.line((x, y), at(shown % 60 / 60, 0.93), color=COLORS["blue"], width=max(1.5, radius / 40))
    for hour in range(1, 13) if numbered else ():  # over the minute hand, whose end stays visible
        scene.ellipse(*at(hour / 12, 0.76), max(8.0, radius / 10), WHITE)
        scene.text(*at(hour / 12, 0.76), hour, max(11.0, radius / 6.5))
    scene.ellipse(x, y, max(3.0, radius / 22))
