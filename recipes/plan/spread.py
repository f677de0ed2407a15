"""How far a run may lie from its plan: the spread of step time, of completions' length, of starts and of
failures.

Each pair is what 90% of the draws lie between, as multiples of the planned figure; draws are lognormal.
"""

from __future__ import annotations

import math
import random

STEP = (1 / 1.3, 1.3)
"""Step time of a text model: published steps lie within this factor of their plan (docs/planned.md)."""
VISION_STEP = (1 / 1.3, 2.6)
"""Step time of a vision model: other trainers' published steps took 1.8 to 2.6 times our plan of them, and an
H100's own step of 3B what the plan says of the code that it ran (docs/planned.md)."""
PUBLISHED_VISION_END = 8.5
"""The slowest published step of a vision model beside its plan (docs/planned.md): eight images a prompt, and
its host was the limit."""
SEVERAL_NODES = 1.9
"""How many times longer a step of supervised training takes on several nodes than its parts add up to: the
middle of Qwen's published steps on two servers, 1.6 to 2.4 times at every length alike, so it is not their
network. No reason is published (docs/planned.md)."""
SEVERAL_NODES_STEP = (1 / SEVERAL_NODES, 1.3)
"""Step time of supervised training on several nodes. At the lower end nothing is lost between nodes."""
COMPLETIONS = (0.8, 3.0)
"""Mean length of completions in RL, cut off at `rollout.max_tokens` (assumption): they grow in training."""
START = (0.7, 2.0)
"""Launch to first step, and back after a loss (assumption)."""
FAILED_START = 0.1
"""Chance that a start has to be made again: a host with a fault, an image that does not come (assumption)."""
NODE_LIFE_S = 6300 * 3600.0
"""Mean time between failures of a node of eight GPUs on demand: 419 in 54 days of 16,384 GPUs (Llama 3,
arXiv 2407.21783)."""
LENGTHS = (0.5, 1.0, 2.0, 4.0)
"""Multiples of the assumed completion at which a step's time is planned; between them it is interpolated."""
_NORMAL_90 = 1.645


def step_bounds(vision: bool, several_nodes: bool) -> tuple[float, float]:
    """The pair for step time. several_nodes: of supervised training."""
    if several_nodes:
        return SEVERAL_NODES_STEP
    return VISION_STEP if vision else STEP


def published_end(vision: bool) -> float:
    """How many times the plan the slowest published step takes."""
    return PUBLISHED_VISION_END if vision else STEP[1]


def draw_luck(
    bounds: tuple[float, float], stretch: tuple[float, ...], rng: random.Random
) -> tuple[float, float, int]:
    """The luck of one run: a step's and a start's time as multiples of what is planned, and starts that fail.
    bounds: of step time. stretch: a step's time at each of LENGTHS, as a multiple; () where the length of
    completions is the data's."""
    step = draw_within(bounds, rng)
    if stretch:
        step *= interpolated(stretch, draw_within(COMPLETIONS, rng))
    start = draw_within(START, rng)
    failed = 0
    while rng.random() < FAILED_START:
        failed += 1
    return step, start, failed


def draw_within(bounds: tuple[float, float], rng: random.Random) -> float:
    """A lognormal draw that lies within the bounds nine times in ten."""
    low, high = map(math.log, bounds)
    return math.exp(rng.gauss((low + high) / 2, (high - low) / 2 / _NORMAL_90))


def interpolated(stretch: tuple[float, ...], length: float) -> float:
    """A step's time where completions are `length` times as long as assumed; the ends hold beyond them."""
    length = max(LENGTHS[0], min(length, LENGTHS[-1]))
    upper = next(i for i, at in enumerate(LENGTHS) if at >= length)
    if upper == 0:
        return stretch[0]
    low, high = LENGTHS[upper - 1], LENGTHS[upper]
    share = (length - low) / (high - low)
    return stretch[upper - 1] + share * (stretch[upper] - stretch[upper - 1])
