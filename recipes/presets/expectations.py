"""What recipes promise: bands by step, each with its source. `launch.py compare RUN --expected` holds a run
against them."""

from __future__ import annotations

from dataclasses import replace

from recipes.recipe.spec import Recipe
from trainer.config import Band, Expected

EASYR1 = "EasyR1's baselines (assets/baselines.md), Geometry3K on 8 x H100, its own scorer"
NEMO = "NeMo-RL's check of its own nightly recipe: reward of step 200 above 0.9, its own scorer"
CARD = "the plan: no recipe takes more than 90% of a card"
SPREAD = 0.05
"""About 2.5 standard deviations of an accuracy near 0.4 over the 601 test rows of Geometry3K."""


def around(metric: str, step: int, value: float, spread: float, source: str) -> Band:
    """A band at one step alone: a published figure that says nothing of the steps between."""
    return Band(metric=metric, steps=(step,), low=(value - spread,), high=(value + spread,), source=source)


def at_most(metric: str, last_step: int, high: float, source: str, window: int = 1) -> Band:
    """An upper edge for a whole run."""
    return Band(metric=metric, steps=(0, last_step), high=(high, high), window=window, source=source)


def geometry3k(before: float, after: float, step_s: float) -> Expected:
    """EasyR1's table: accuracy on the test split before and after 60 steps, and seconds a step.

    step_s: its slowest figure; faster is no departure.
    """
    return Expected(
        bands=(
            around("eval/accuracy", 0, before, SPREAD, EASYR1),
            around("eval/accuracy", 60, after, SPREAD, EASYR1),
            at_most("time/step_s", 60, step_s, EASYR1, window=5),
            at_most("perf/peak_memory_gib", 60, 72.0, CARD),
        ),
        not_promised=(
            "our grader is not theirs (verl publishes 65.4% for the same model and data by another one), the"
            " curve between the first and the last step, and dollars. Not run on a GPU yet"
        ),
    )


def clevr() -> Expected:
    """NeMo-RL's own assertion."""
    return Expected(
        bands=(Band(metric="reward/mean", steps=(200,), low=(0.9,), source=NEMO),),
        not_promised=(
            "seconds and dollars; whether generated scenes are as easy as CLEVR's. Not run on a GPU yet"
        ),
    )


MATHV60K = Expected(
    not_promised=(
        "a curve: no accuracy before and after GRPO on MathV60K is published. Memory, hours and dollars are"
        " those of the plan"
    )
)
MMK12 = Expected(
    not_promised=(
        "a curve on its own rows. Published by MM-Eureka for this setting, by its own scorer: MathVista 68.2"
        " to 73.0, MathVerse 47.9 to 50.3, MathVision 25.4 to 26.9"
        " (`python3 launch.py evaluate RUN --benchmarks`)"
    )
)


def of_changed(recipe: Recipe, base: Recipe) -> Recipe:
    """`recipe`, made from `base` by overrides, without the promises that no longer concern it.

    Another model, another teacher or other data is another run. On other machines seconds and memory are
    others. Whatever else is changed, a learning rate say, is what the bands are there to catch.
    """
    config, before = recipe.config, base.config
    if config.expected != before.expected:
        return recipe
    same_model = config.model.path == before.model.path
    same_teacher = config.algorithm.teacher == before.algorithm.teacher
    same_data = (config.data.path, config.data.source) == (before.data.path, before.data.source)
    if not (same_model and same_teacher and same_data):
        return replace(recipe, config=replace(config, expected=Expected()))
    if recipe.cluster == base.cluster:
        return recipe
    kept = [band for band in config.expected.bands if not band.metric.startswith(("time/", "perf/", "cost/"))]
    expected = replace(config.expected, bands=tuple(kept))
    return replace(recipe, config=replace(config, expected=expected))
