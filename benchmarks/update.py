"""The packed, prefix-shared update against padded ones, in CPU time, and passes over gathered weights per 72B
step.

    python benchmarks/update.py    # writes update.json; one thread per process, the contenders take turns

CPU seconds of forward and backward pass for one group of G completions behind one prompt with an image (real
lengths, a model of 16 million parameters, gradient checkpointing), padded by transformers' own forward with
one sample per pass, and packed by the trainer. The passes are the scheduler's on seeded draws of lengths;
nothing is computed for them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import processor  # noqa: E402

SIDE = 17
PROMPT = 420
COMPLETION = 400
"""Image of 17 x 17 merged tokens, prompt and completion tokens."""


def measure(kind: str, size: int) -> dict[str, float]:
    """CPU seconds of one update in this process, tokens computed, and a checksum of the gradients."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    from examples.demo import tiny_model
    from trainer.algorithm.batching import collate
    from trainer.algorithm.traces import completed_trace
    from trainer.data.processor import EncodedPrompt, mrope_positions
    from trainer.learning import blocks
    from trainer.learning.logprobs import LogprobModel
    from trainer.ranks import cpu_matmul

    torch.set_num_threads(1)
    cpu_matmul.install_matmul()
    tokenizer = tiny_model.build_tokenizer()
    config = tiny_model.build_config(tiny_model.TinyShape(384, 1024, 8, 12, 4, 256, 768, 6, False), tokenizer)
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="sdpa").train()
    blocks.recompute(blocks.blocks_of(model), random=False)
    rng, image = random.Random(0), config.image_token_id

    def text(n: int) -> list[int]:
        return [rng.randrange(400) for _ in range(n)]

    prompt = text(8) + [image] * SIDE**2 + text(PROMPT - 8 - SIDE**2)
    grid, pixels = torch.tensor([[1, 2 * SIDE, 2 * SIDE]]), torch.randn(4 * SIDE**2, 3 * 2 * 14 * 14)
    completions = [text(COMPLETION) for _ in range(size)]
    encoded = EncodedPrompt(prompt, pixels, grid)

    def places(ids, g):
        return mrope_positions(tuple(ids), tuple(map(tuple, g.tolist())), image, 2)

    scorer = LogprobModel(model, [], 1.0, False) if kind == "packed" else None

    def update() -> int:
        model.zero_grad()
        if scorer is not None:
            traces = [completed_trace(prompt, c, group=0, row=0) for c in completions]
            batch = collate(traces, lambda _: encoded, places)
            scorer(batch)[0].sum().backward()
            return batch.input_ids.numel()
        for c in completions:
            ids = torch.tensor([prompt + c])
            out = model.model(
                input_ids=ids,
                pixel_values=pixels,
                image_grid_thw=grid,
                use_cache=False,
                mm_token_type_ids=(ids == image).int(),
            )[0]
            logits = model.lm_head(out[0, PROMPT - 1 : -1])
            logits.log_softmax(-1).gather(1, torch.tensor(c)[:, None]).sum().backward()
        return size * (PROMPT + COMPLETION)

    update()
    started = time.process_time()
    tokens = update()
    seconds = time.process_time() - started
    norm = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    return {"cpu_s": seconds, "tokens": tokens, "gradient_norm": norm}


def passes_of_a_72b_step(seed: int) -> int:
    """Passes over the gathered weights: old and reference log-probabilities, then forward, recomputation and
    backward of each update. 64 prompts of 4 samples on 32 ranks, 64 samples per update, budgets 12k and
    24k."""
    from trainer.algorithm.scheduling import SampleLength, schedule_passes

    rng, samples = random.Random(seed), []
    for group in range(64):
        prompt, center = rng.randint(80, 760), rng.lognormvariate(6.3, 0.63)
        for _ in range(4):
            samples.append(
                SampleLength(group, prompt, max(8, min(8000, int(center * rng.lognormvariate(0, 0.63)))))
            )
    before = 2 * len(schedule_passes(samples, 32, 24_000)[0])
    rng.shuffle(samples)
    return before + sum(
        3 * len(schedule_passes(samples[at : at + 64], 32, 12_000)[0]) for at in range(0, 256, 64)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    found: dict[str, dict[str, list[float]]] = {}
    for i in range(options.rounds):
        for size in (4, 8):
            for kind in ("padded", "packed"):
                command = [sys.executable, __file__, "--one", kind, str(size)]
                one = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                print(f"round {i + 1}: {kind}, G={size}: {one['cpu_s']:.1f} s", flush=True)
                for name, value in one.items():
                    found.setdefault(f"{kind}, G={size}", {}).setdefault(name, []).append(value)
    out = {
        "processor": processor(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "runs": found,
        "times_faster": {
            f"G={g}": (
                statistics.median(found[f"padded, G={g}"]["cpu_s"])
                / statistics.median(found[f"packed, G={g}"]["cpu_s"])
            )
            for g in (4, 8)
        },
        "passes_of_a_72b_step": {
            "a sample a pass": 5 * 256 // 32,
            "now": [passes_of_a_72b_step(s) for s in range(20)],
        },
    }
    (ROOT / "benchmarks" / "update.json").write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps({k: out[k] for k in ("times_faster", "passes_of_a_72b_step")}))


if __name__ == "__main__":
    main()
