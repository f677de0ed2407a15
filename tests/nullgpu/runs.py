"""A run of a tiny model on the device, as a node starts it: its configuration, its end, its counts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.presets import get
from tests.nullgpu import counts, null_device
from tests.nullgpu.null_device import PYTHON
from trainer import config as configuration
from trainer.config import RunConfig

VOCABULARY = 151936


def tiny(model: Path, data: Path, folder: Path) -> RunConfig:
    """Two steps of a tiny model in bf16 on one card, with every phase of a step."""
    c = configuration
    return RunConfig(
        run=c.Run(name="null", dir=str(folder), max_steps=2),
        model=c.Model(path=str(model), dtype="bf16", min_pixels=784),
        data=c.Data(path=str(data), prompt_max_tokens=300),
        rollout=c.Rollout(
            prompts_per_step=4,
            samples_per_prompt=2,
            max_tokens=16,
            gpu_memory_utilization=0.05,
            sleep_level=2,
            # Tokens are not sampled here, so that engine and policy cannot agree.
            sync_tolerance=1e9,
        ),
        algorithm=c.Algorithm(micro_batch_tokens=400, kl_coef=0.01),
        optimizer=c.Optimizer(learning_rate=1e-3),
        checkpoint=c.Checkpoint(every_steps=1, export_hf="never"),
        placement=c.Placement(workers_per_node=1, device="cuda"),
        logging=c.Logging(tensorboard=False, samples_per_step=0),
    )


def of_recipe(
    name: str, model: Path, data: Path, folder: Path, ranks: int, options: Sequence[str]
) -> RunConfig:
    """Two steps of a recipe with all its options but the sizes of model, step and completions."""
    changed = [
        f"run.dir={folder}",
        "run.id=recipe",
        "run.max_steps=2",
        f"model.path={model}",
        "model.revision=",
        f"data.path={data}",
        "rollout.prompts_per_step=4",
        "rollout.max_tokens=64",
        f"rollout.tensor_parallel={ranks}",
        "rollout.gpu_memory_utilization=0.05",
        "rollout.sync_tolerance=1e9",
        "algorithm.samples_per_update=0",
        "evaluation.every_steps=0",
        "checkpoint.remote=",
        "checkpoint.export_hf=never",
        "placement.nodes=1",
        f"placement.workers_per_node={ranks}",
        "logging.tensorboard=false",
        *options,
    ]
    return configuration.override(get(name).config, changed)


def of_true_vocabulary(tiny: Path, out: Path) -> Path:
    """The tiny model with as many rows of embeddings as Qwen2.5-VL-3B has, and its longest sequence."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tiny, dtype="bfloat16")
    model.resize_token_embeddings(VOCABULARY)
    model.config.text_config.max_position_embeddings = 128000
    shutil.copytree(tiny, out)
    model.save_pretrained(out)
    return out


@dataclass(frozen=True)
class Done:
    """A run that ended."""

    code: int
    said: str
    """Standard output and error of its driver."""
    metrics: list[dict]
    """By step."""
    ranks: list[counts.Recorded]


def run(
    config: RunConfig,
    folder: Path,
    *,
    loop: str = "grpo",
    devices: int = 1,
    timeout_s: float = 900,
    **settings: object,
) -> Done:
    """Runs a loop to its end. settings: of the device."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(configuration.dump(config))
    command = [PYTHON, "-m", f"trainer.loops.{loop}", "--config", path]
    record = folder / "counts"
    done = null_device.run(
        command, devices=devices, record=record, settings=settings, timeout_s=timeout_s, check=False
    )
    metrics = Path(config.run.dir) / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    ranks = [one for one in counts.read(record) if one.rank is not None]
    return Done(done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines], ranks)
