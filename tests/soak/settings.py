"""What the short and the long form have in common."""

from __future__ import annotations

from pathlib import Path

from examples.demo.tiny_model import Family
from tests.families import dtype
from trainer import config as c

LONGEST, PROMPT_TOKENS = 3_000, 3_500
DEEP_BF16 = 0.2
"""Tolerance of a random Qwen3.5 of 24 layers: bf16 alone puts engine and policy 0.11 nats apart, and a lost
layer in the middle 0.4 (benchmarks/bf16_depth.json)."""
PROMPTS, GROUP = 4, 4


def settings(folder: Path, model: Path, data: Path, name: str, family: Family = "qwen2_5_vl") -> c.RunConfig:
    """Two CPU ranks, an engine each; `folder` holds reward.py. Where there are experts, the engine's choices
    are replayed."""
    side = 28 if family == "qwen2_5_vl" else 32
    return c.RunConfig(
        run=c.Run(name=name, dir=str(folder / name / "run")),
        model=c.Model(
            path=str(model),
            dtype=dtype(family),
            gradient_checkpointing=True,
            min_pixels=4 * side**2,
            max_pixels=1280 * side**2,
        ),
        # Images are kept up to the limit: one that the first steps reach, or a cache that fills would look
        # like a leak.
        data=c.Data(path=str(data), prompt_max_tokens=PROMPT_TOKENS, episodes=10**6, image_cache_gib=0.125),
        rollout=c.Rollout(
            prompts_per_step=PROMPTS,
            samples_per_prompt=GROUP,
            max_tokens=LONGEST,
            kv_cache_gib=0.5,
            sleep_level=0,
            sync_tolerance=DEEP_BF16 if dtype(family) == "bf16" else 0.0,
        ),
        algorithm=c.Algorithm(
            samples_per_update=PROMPTS * GROUP // 2,
            kl_coef=0.01,
        ),
        # No weight stays gathered between two uses, as none of a model above DeepSpeed's limits does.
        optimizer=c.Optimizer(learning_rate=1e-6, live_parameters=0),
        rewards=c.Rewards(function=f"{folder / 'reward.py'}:reward", workers=1),
        evaluation=c.Evaluation(every_steps=3, temperature=1.0),  # greedy, a completion might never end
        checkpoint=c.Checkpoint(every_steps=2, export_hf="never"),
        placement=c.Placement(workers_per_node=2, device="cpu"),
        logging=c.Logging(tensorboard=False, samples_per_step=PROMPTS * GROUP, samples_every_steps=1),
        guards=c.Guards(end=""),
    )
