"""A run directory as the trainer leaves it, written through Metrics and Phases with made-up numbers."""

import io
import math
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw

from trainer.config import RunConfig, override
from trainer.observe.metrics import Metrics
from trainer.observe.phases import Phases

ROOT = Path(__file__).parents[2]


def run_script(body: str, *args: str, prefix: tuple[str, ...] = (), **kwargs) -> subprocess.CompletedProcess:
    """Runs Python code in the repository, without W&B's variables."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | kwargs.pop("env", {})
    command = [*prefix, sys.executable, "-c", textwrap.dedent(body), *args]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, **kwargs
    )


def picture(circles: int, size: int = 160) -> bytes:
    image = Image.new("RGB", (size, size), "white")
    draw = ImageDraw.Draw(image)
    for i in range(circles):
        x, y = 15 + 48 * (i % 3), 20 + 48 * (i // 3)
        draw.ellipse((x, y, x + 36, y + 36), fill=("#c0392b", "#2980b9", "#27ae60")[i % 3])
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def values(step: int, steps: int, draw: random.Random) -> dict[str, float]:
    share = 1 - math.exp(-3 * step / steps)
    accuracy = min(1.0, 0.2 + 0.6 * share + draw.gauss(0, 0.04))
    fmt = min(1.0, 0.6 + 0.4 * share + draw.gauss(0, 0.01))
    length = 40 - 12 * share + draw.gauss(0, 1)
    rollout, update = draw.gauss(1.1, 0.05), draw.gauss(0.7, 0.03)
    return {
        "reward/mean": accuracy + 0.5 * fmt,
        "reward/std": 0.6 - 0.2 * share,
        "reward/accuracy": accuracy,
        "reward/format": fmt,
        "reward/timeout_rate": 0.0,
        "reward/error_rate": 0.0,
        "reward/no_answer_rate": 1 - fmt,
        "loss/total": draw.gauss(0, 0.01),
        "loss/policy": draw.gauss(0, 0.01),
        "kl/mean": 0.02 * share + abs(draw.gauss(0, 5e-4)),
        "entropy/mean": 1.1 - 0.5 * share,
        "ratio/mean": 1 + draw.gauss(0, 1e-3),
        "ratio/clip_fraction": abs(draw.gauss(0.01, 0.004)),
        "grad/norm": math.exp(draw.gauss(-0.3, 0.35)),
        "optim/lr": 1e-4,
        "mismatch/logprob_abs_mean": 2e-7 * math.exp(draw.gauss(0, 0.2)),
        "mismatch/logprob_abs_max": 3e-6 * math.exp(draw.gauss(0, 0.3)),
        "mismatch/kl": 1e-12,
        "tokens/prompt_mean": 120.0,
        "tokens/prompt_max": 140,
        "tokens/response_mean": length,
        "tokens/response_min": length * 0.4,
        "tokens/response_max": min(64.0, length * 1.7),
        "tokens/truncated_fraction": 0.1 * (1 - share),
        "group/zero_std_fraction": 0.2 + 0.3 * share,
        "time/rollout_s": rollout,
        "time/grade_s": 0.05,
        "time/update_s": update,
        "time/sync_s": 0.12,
        "time/checkpoint_s": 0.4 if step % 10 == 0 else 0.0,
        "time/step_s": rollout + update + 0.25,
        "perf/rollout_tokens_per_s": 2000 + draw.gauss(0, 60),
        "perf/train_tokens_per_s": 9000 + draw.gauss(0, 200),
        "perf/peak_memory_gib": 2.1,
    }


def write_run(
    run_dir: Path,
    steps: int,
    *,
    overrides: tuple[str, ...] = ("logging.tensorboard=false",),
    resume_step: int = 0,
) -> None:
    """Steps resume_step+1 .. steps, an evaluation at 0 and every tenth, samples every fifth."""
    config = override(RunConfig(), ["run.name=written", *overrides])
    metrics = Metrics(run_dir, config, resume_step)
    phases = Phases(run_dir, total_steps=steps)
    if resume_step == 0:
        metrics.log(0, {"eval/accuracy": 0.21, "eval/format": 0.6})
    for step in range(resume_step + 1, steps + 1):
        draw = random.Random(step)
        phases.begin(step)
        with phases("rollout"):
            pass
        metrics.log(step, values(step, steps, draw))
        if step % 10 == 0:
            accuracy = 0.21 + 0.55 * (1 - math.exp(-3 * step / steps)) + draw.gauss(0, 0.01)
            metrics.log(step, {"eval/accuracy": accuracy, "eval/format": 0.9})
        if step % 5 == 0:
            metrics.samples(step, [sample(step, k, draw) for k in range(4)])
    phases.finish()
    metrics.close()


def sample(step: int, k: int, draw: random.Random) -> dict:
    count = 1 + (step + k) % 9
    verdict = ("correct", "wrong", "no_answer", "correct")[k]
    said = count if verdict == "correct" else count + 1
    box = f"<answer> $\\boxed{{{said}}}$ </answer>" if verdict != "no_answer" else ""
    return {
        "row": 17 * step + k,
        "question": "How many circles are in the picture?",
        "image_pngs": [picture(count)],
        "completion": f"<think> I count {said} circles, row by row. </think>{box}",
        "ground_truth": str(count),
        "verdict": verdict,
        "reward": 1.5 if verdict == "correct" else 0.5 if box else 0.0,
        "advantage": draw.gauss(0, 1),
        "tokens": 20 + k,
    }
