"""Host seconds, kernel launches and host waits of a recipe's passes and of its whole step, on a device that
computes nothing: `python -m benchmarks.host_time RECIPE...`, or without a name those of `SHOWN`.

Needs the GPU environment and no GPU (tests/nullgpu). One rank of the recipe's number runs; the others are
only believed in. Seconds are CPU time of the whole process, and are put beside those of the same rows through
transformers' model alone in the same process: the ratio is what a machine tells of another.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import processor
from recipes.plan import hub_config, memory, step_seconds
from recipes.presets import get
from recipes.recipe.spec import Recipe
from trainer.config import RunConfig
from trainer.config.budget import logprob_tokens
from trainer.config.run_folder import write_whole
from trainer.hardware.gpus import gpu_named
from trainer.ranks.environment import rank_environment

ROOT = Path(__file__).parents[1]
OUT = Path(__file__).with_suffix(".json")
PYTHON = ROOT / ".venvs/gpu/bin/python"
SHOWN = (
    ("grpo-qwen2.5-vl-3b-mathv60k", 1),
    ("grpo-qwen2.5-vl-3b-mathv60k", 2),
    ("grpo-qwen2.5-vl-7b-mathv60k", 8),
    ("grpo-qwen2.5-vl-72b-mathv60k", 32),
)
"""Recipes, and numbers of ranks."""
STEPS = (("grpo-qwen2.5-vl-3b-mathv60k", 1), ("grpo-qwen2.5-vl-7b-mathv60k", 8))
"""Those of which a whole step is measured, too."""
WAITS = 8
"""Host waits of a pass at most: none for each block."""
WARM = 2
"""Times that nothing is measured of: DeepSpeed learns the order of modules, and memory is given."""
ROUNDS = 8
DEVICE = {
    "NULLGPU_COPY": "65536",
    "NULLGPU_GIB": "1024",
    "NULLGPU_NCCL": "alone",
    "OMP_NUM_THREADS": "1",
}
"""Large copies would take the host's time, which on a card they do not; transformers' model is whole on its
card, however large."""


def played(recipe: str, ranks: int) -> dict[str, Any]:
    """What the passes of one rank take, from a process of its own."""
    device = [sys.executable, "-m", "tests.nullgpu", "--devices", str(min(ranks, 8)), str(PYTHON)]
    command = [*device, "-W", "ignore", "-m", "benchmarks.host_time", "--rank", recipe, str(ranks)]
    env = os.environ | DEVICE
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def play(name: str, ranks: int) -> dict[str, Any]:
    """Runs in the process on the device: a pass that scores, one that learns, and transformers' own."""
    import torch
    import torch.distributed as dist
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from benchmarks.allocated import believe_in_peers
    from tests.rehearsal.models import VOCABULARY, model_config
    from tests.rehearsal.rows import to_learn, usual
    from trainer.algorithm.batching import pin_record
    from trainer.learning.policy import Policy, init_distributed

    recipe = memory.with_rows(get(name))
    shape = hub_config.shape(recipe.config.model)
    assert shape is not None
    folder = tempfile.mkdtemp()
    model_config(shape).save_pretrained(folder)
    config = _of_ranks(recipe.config, folder, ranks)
    rows = {
        "score": usual(recipe, shape, logprob_tokens(config, shape)),
        "learn": usual(recipe, shape, config.algorithm.micro_batch_tokens),
    }
    # A run's passes are built in a thread, in page-locked memory.
    batches = {kind: pin_record(row.micro_batch()) for kind, row in rows.items()}

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)} | rank_environment(config)
    believe_in_peers()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=ranks)
    init_distributed("cuda")
    device = torch.device("cuda", 0)
    banned = list(range(VOCABULARY, shape.vocabulary))
    policy = Policy(config, shape, banned, device, 100, empty=True)
    item = to_learn(config, batches["learn"], rows["learn"].completions)
    one_pass = policy.update

    found: dict[str, Any] = {
        "blocks": shape.layers + (shape.vision.depth if shape.vision else 0),
        "tokens": {kind: batch.input_ids.numel() for kind, batch in batches.items()},
    }
    unset_hf_deepspeed_config()  # else transformers' model would be built in shards
    work = {
        "score": lambda: policy.logprobs([batches["score"]]),
        "once": lambda: one_pass([item], 1, 0.0),
        "thrice": lambda: one_pass([item] * 3, 3, 0.0),
    }
    measured = _in_turn(work | _plain(shape, batches, device))
    once, thrice = measured.pop("once"), measured.pop("thrice")
    measured["learn"] = {key: (thrice[key] - once[key]) / 2 for key in once}
    found |= measured
    if (name, ranks) in STEPS:
        del work
        counts = {kind: len(row.completions) for kind, row in rows.items()}
        found["step"] = _whole_step(recipe, shape, policy, batches["score"], item, counts)
    return found


def _whole_step(
    recipe: Recipe, shape: Any, policy: Any, batch: Any, item: Any, counts: dict[str, int]
) -> dict[str, dict[str, float]]:
    """CPU seconds of a rank's step by phase, its second one. counts: completions of a pass, by kind.

    Prompts are text: images cost the host what decoding and patches take, beside the engine's iterations.
    """
    from benchmarks.allocated import of_engine
    from tests.nullgpu import counts as device
    from tests.rehearsal.rows import Row
    from trainer.algorithm.traces import Prompt
    from trainer.data.processor import EngineRequest
    from trainer.learning.learner_part import ShardedWeights
    from trainer.sampling.vllm_engine import Engine, OpenGroup
    from trainer.weights import in_process

    config, facts = recipe.config, recipe.dataset
    engine_config, prompter = of_engine(config, shape)
    rollout = replace(engine_config.rollout, eager=False, gpu_memory_utilization=0.05)
    policy.states.offload()
    gc.collect()
    gc.freeze()
    engine = Engine(replace(engine_config, rollout=rollout), prompter, 1)
    engine.sleep()

    ranks, samples = config.placement.world_size, config.rollout.samples_per_prompt
    completions = config.samples_per_step // ranks
    prompts = config.rollout.prompts_per_step * config.rollout.tensor_parallel // ranks
    drawn = Row(None)
    lengths = [drawn.length(facts.answer_tokens, config.rollout.max_tokens) for _ in range(prompts * samples)]
    lengths[0] = config.rollout.max_tokens  # every step of a recipe has a longest one
    group: Any = OpenGroup
    group.left = lambda self, index, _: lengths[self.prompt.group * samples + index]
    asked = [Prompt(group=number, row=number, seed=number) for number in range(prompts)]
    ids = [1 + number % 100 for number in range(facts.prompt_tokens)]

    def sync() -> None:
        policy.states.offload()
        engine.wake_weights()
        in_process.push_weights(ShardedWeights(0, policy, config.rollout.sync_bucket_bytes), engine)
        engine.wake_cache()

    def sample() -> None:
        def read(prompt: Prompt) -> EngineRequest:
            own = [*ids, 1 + prompt.row]  # no prompt is another's prefix
            return EngineRequest(own, {"prompt_token_ids": own}, 0)

        how: dict[str, Any] = {"samples_per_prompt": samples, "temperature": 1.0}
        for _ in engine.generate(asked, read, max_tokens=config.rollout.max_tokens, **how):
            pass

    def rest() -> None:
        engine.sleep()
        policy.states.reload()

    passes = {kind: math.ceil(completions / count) for kind, count in counts.items()}
    work = {
        "sync": sync,
        "rollout": sample,
        "rest": rest,
        "score": lambda: policy.logprobs([batch] * passes["score"]),
        "update": lambda: policy.update([item] * passes["learn"], passes["learn"], 0.0),
    }
    found: dict[str, dict[str, float]] = {}
    for _ in range(2):
        for phase, once in work.items():
            before = {kind: device.count(kind) for kind in ("launch", "wait")}
            began = time.process_time()
            once()
            found[phase] = {"seconds": time.process_time() - began}
            for kind, name in (("launch", "launches"), ("wait", "waits")):
                found[phase][name] = float(device.count(kind) - before[kind])
            print(phase, found[phase], file=sys.stderr, flush=True)
    found["rollout"]["tokens"] = float(sum(lengths))
    return found | {"passes": {kind: float(number) for kind, number in passes.items()}}


def _of_ranks(config: RunConfig, folder: str, ranks: int) -> RunConfig:
    return replace(
        config,
        model=replace(config.model, path=folder),
        algorithm=replace(config.algorithm, kl_coef=0.0),
        placement=replace(config.placement, nodes=1, workers_per_node=ranks),
    )


def _plain(shape: Any, batches: dict[str, Any], device: Any) -> dict[str, Callable[[], Any]]:
    """The same rows through transformers' model, with its own checkpoints where it learns: no ZeRO, no head,
    no loss."""
    import torch

    from tests.rehearsal.models import model_class, model_config
    from trainer.algorithm.batching import move_record
    from trainer.learning.logprobs import LogprobModel

    torch.set_default_dtype(torch.bfloat16)
    with device:
        hf = model_class(shape)(model_config(shape))
    torch.set_default_dtype(torch.float32)
    hf.gradient_checkpointing_enable({"use_reentrant": False})
    model = LogprobModel(hf, [], 1.0, False).to(device).train()
    recomputed = [layer for layer in hf.modules() if getattr(layer, "gradient_checkpointing", False)]
    on_device = {kind: move_record(batch, device) for kind, batch in batches.items()}

    def learn() -> None:
        model._hidden(on_device["learn"]).sum().backward()
        model.zero_grad()

    def score() -> None:
        for layer in recomputed:
            layer.gradient_checkpointing = False
        with torch.no_grad():
            model._hidden(on_device["score"])
        for layer in recomputed:
            layer.gradient_checkpointing = True

    return {"plain_score": score, "plain_learn": learn}


def _in_turn(work: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """The least CPU seconds of each, with the launches and host waits of its last time; one after the other,
    so that what slows the machine down slows all of them."""
    from tests.nullgpu import counts

    found: dict[str, dict[str, float]] = {name: {"seconds": math.inf} for name in work}
    for number in range(WARM + ROUNDS):
        for name, once in work.items():
            gc.collect()
            before = {kind: counts.count(kind) for kind in ("launch", "wait")}
            began = time.process_time()
            once()
            seconds = time.process_time() - began
            launches, waits = (float(counts.count(kind) - before[kind]) for kind in before)
            least = min(found[name]["seconds"], seconds) if number >= WARM else math.inf
            found[name] = {"seconds": least, "launches": launches, "waits": waits}
    return found


def gpu_seconds(recipe: Recipe, kind: str, tokens: int) -> float:
    """The plan's seconds of a pass on the recipe's GPU."""
    shape = hub_config.shape(recipe.config.model)
    assert shape is not None
    forwards = 1
    if kind == "learn":
        forwards = 3 + recipe.config.model.gradient_checkpointing
    return forwards * tokens * step_seconds.token_seconds(shape, gpu_named(recipe.cluster.gpu))


def table() -> list[str]:
    """The table of docs/planned.md, a line each."""
    lines = [
        "| recipe | ranks | pass | tokens | host / transformers alone | launches | waits | GPU s, planned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, found in json.loads(OUT.read_text())["passes"].items():
        name, ranks = key.split(", ")
        for kind in ("score", "learn"):
            one = found[kind]
            tokens = found["tokens"][kind]
            ratio = one["seconds"] / found[f"plain_{kind}"]["seconds"]
            gpu_s = gpu_seconds(get(name), kind, tokens)
            counts = f"{one['launches']:,.0f} | {one['waits']:.0f}"
            lines.append(
                f"| `{name}` | {ranks} | {kind} | {tokens:,} | {ratio:.2f} | {counts} | {gpu_s:.2f} |"
            )
    return lines


def main() -> None:
    """Plays the recipes and writes each result at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shown = list(dict(SHOWN))
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"{', '.join(shown)} (default: all)")
    parser.add_argument(
        "--rank",
        nargs=2,
        metavar=("RECIPE", "RANKS"),
        help="what the device runs: one rank, to its standard output",
    )
    asked = parser.parse_args()
    if asked.rank:
        print(json.dumps(play(asked.rank[0], int(asked.rank[1]))))
        return
    if unknown := set(asked.recipes) - set(shown):
        parser.error(f"not measured: {', '.join(sorted(unknown))}; choose from {', '.join(shown)}")
    chosen = [one for one in SHOWN if not asked.recipes or one[0] in asked.recipes]
    found = json.loads(OUT.read_text()) if OUT.exists() else {"passes": {}}
    for name, ranks in chosen:
        found["machine"] = processor()
        found["passes"][f"{name}, {ranks}"] = played(name, ranks)
        write_whole(OUT, (json.dumps(found, indent=1) + "\n").encode())
        print(name, ranks, json.dumps(found["passes"][f"{name}, {ranks}"]), flush=True)


if __name__ == "__main__":
    main()
