"""`launch.py evaluate`: what a recipe becomes on published benchmarks."""

from __future__ import annotations

import difflib
import json
import shlex
from pathlib import Path

from recipes.presets import RECIPES
from recipes.presets.own_data import DATA_FILES
from trainer.config import ConfigError
from trainer.hardware import model_shapes

BENCHMARKS = {
    "mathvista": "mathvista",
    "mathverse": "mathverse",
    "mathvision": "mathvision",
    "mmmu-pro": "mmmu-pro",
    "geometry3k": "geometry3k-test",
    "gsm8k": "gsm8k-test",
    "math-500": "math-500",
}
"""By name, what `data prepare` calls their rows."""
FALLBACK = "grpo-qwen2.5-vl-3b-mathv60k"
"""Its machine, one 80 GB GPU, for a model that no recipe trains."""


PROMPTS = {
    "ours": [],
    "published": ["data.system_prompt=published", "rewards.answer=any"],
}
"""What a model is asked with: as it was trained or is to be, or in each benchmark's own words, with the
answer wherever it stands."""


def evaluation_overrides(
    names: str,
    samples: int,
    temperature: float | None,
    limit: int,
    prompt: str = "ours",
    mapping: str = "",
    fleet: bool = False,
) -> list[str]:
    """The overrides that turn any recipe into an evaluation. Raises ConfigError for an unknown benchmark.

    names: of `BENCHMARKS`, or files of rows. mapping: role=column of the files' columns. fleet: rollout
    workers sample.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    own = [name for name in chosen if name not in BENCHMARKS and is_own(name)]
    for name in chosen:
        if name not in BENCHMARKS and name not in own:
            near = difflib.get_close_matches(name, BENCHMARKS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(BENCHMARKS)}"
            raise ConfigError(f"unknown benchmark {name}: {hint}")
    if not chosen:
        raise ConfigError(f"--benchmarks: name some of {', '.join(BENCHMARKS)}, separated by commas")
    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    if mapping and not own:
        raise ConfigError("--map names columns of a file of your own, and --benchmarks names none")
    source = " ".join(BENCHMARKS.get(name) or shlex.quote(name) for name in chosen)
    source += f" --limit {limit}" if limit else ""
    source += " --evaluation --split test" if own else ""
    source += f" --map {shlex.quote(mapping)}" if mapping else ""
    return [
        f"data.source={json.dumps(source)}",
        "data.split=test",
        "data.max_samples=0",
        "evaluation.benchmarks=true",
        f"evaluation.pass_rate_samples={samples}",
        f"evaluation.temperature={temperature}",
        "evaluation.top_p=1.0",
        "evaluation.samples_per_prompt=1",
        "evaluation.every_steps=0",
        "algorithm.kl_coef=0",
        "algorithm.teacher=",
        *([] if fleet else ["fleet.workers=off", "sample=null"]),
        "method=grpo",
        "lora.qlora=false",
        "optimizer.zero_stage=3",
        *PROMPTS[prompt],
    ]


def is_own(name: str) -> bool:
    """Whether a benchmark is a file or folder of rows: a line has a question, an answer, and what else `data
    prepare` knows; the column `source` makes categories."""
    return name.endswith(DATA_FILES) or Path(name).is_dir()


def recipe_of(model: str) -> tuple[str, list[str]]:
    """The recipe whose machine suits a model: the one that trains it or one of its shape, else `FALLBACK`."""
    paths = {model, model_shapes.known_as(model) or model}
    recipe = next((name for name, make in RECIPES.items() if make().config.model.path in paths), FALLBACK)
    return recipe, [f"model.path={model}"]
