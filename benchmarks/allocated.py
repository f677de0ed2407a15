"""What recipes allocate on a device that computes nothing, phase by phase, beside what the plan says:
`python -m benchmarks.allocated RECIPE...`, or without a name those of `SHOWN`.

Needs the GPU environment and no GPU (tests/nullgpu): memory is address space there, so one rank of a recipe
runs at its true shape; its peers are only believed in. Load, the engine's build, sync, sleep, scoring and
updates are the trainer's own code, in the order of a run. Figures are what the device gave away at most
(`allocated`, with what torch keeps of earlier tensors and what fragments), and what tensors took (`tensors`).
The CUDA context and NCCL's buffers are not on this device: the plan is shown without them. The engine is
eager: CUDA graphs are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipes.plan import hub_config, memory
from recipes.presets import get
from recipes.recipe.resolved import MemoryPlan
from recipes.recipe.spec import Recipe
from trainer.config.budget import logprob_tokens
from trainer.config.run_folder import write_whole
from trainer.ranks.environment import rank_environment

ROOT = Path(__file__).parents[1]
OUT = Path(__file__).with_suffix(".json")
PYTHON = ROOT / ".venvs/gpu/bin/python"
SHOWN = tuple(f"grpo-qwen2.5-vl-{size}-mathv60k" for size in ("3b", "7b", "32b", "72b"))
DEVICE = {"NULLGPU_COPY": "65536", "NULLGPU_NCCL": "alone", "OMP_NUM_THREADS": "1"}
GIB = 2**30
PHASES = ("load", "rollout", "sync", "logprobs", "update")
"""Phases of the plan that are played; an update ends with the optimizer's step."""


NOT_THERE = ("CUDA context", "NCCL's communicators")
"""Parts of the plan that this device has not."""


@dataclass(frozen=True)
class Allocated:
    """GiB of one GPU at the peak of a phase, without the CUDA context and NCCL's buffers."""

    planned: float
    """The plan of the day on which it was allocated."""
    tensors: float
    allocated: float
    """With what torch keeps of earlier tensors and what fragments."""


def allocated_by_phase(recipe: str) -> dict[str, Allocated]:
    """By phase of the plan, where `update` holds the optimizer's step; {} of a recipe that was not run."""
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    phases = known.get(recipe, {}).get("phases", {})
    return {name: Allocated(**gib) for name, gib in phases.items()}


def planned(need: MemoryPlan) -> dict[str, float]:
    """GiB of the same phases as planned, without what this device has not."""
    found = {}
    for phase in need.phases:
        found[phase.name] = (phase.total - absent(phase.parts)) / GIB
    found["update"] = max(found["update"], found.pop("optimizer step"))
    return found


def absent(parts: dict[str, float]) -> float:
    """Bytes of a phase that this device has not."""
    return sum(parts.get(name, 0.0) for name in NOT_THERE)


def planned_now(recipe: Recipe) -> dict[str, float]:
    """GiB of each phase that is played, as planned."""
    need = memory.plan_memory(recipe)
    assert need is not None
    found = planned(need)
    return {name: found[name] for name in PHASES if name in found}


def table() -> list[str]:
    """GiB of each phase, a line each."""
    lines = ["| recipe | phase | planned | tensors | with what torch keeps |", "|---|---|---|---|---|"]
    for name in json.loads(OUT.read_text()):
        for phase, one in allocated_by_phase(name).items():
            gib = f"{one.planned:.1f} | {one.tensors:.1f} | {one.allocated:.1f}"
            lines.append(f"| {name} | {phase} | {gib} |")
    return lines


class Meter:
    """Peaks of the device and of torch's tensors, by phase."""

    def __init__(self) -> None:
        from tests.nullgpu import counts

        self.device = counts.library()
        self.found: dict[str, dict[str, float]] = {}
        self.asleep = 0
        """Bytes of what sleeps of an engine, which torch counts on."""

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Measures the body; a phase that comes again is the larger of both. What torch keeps of the phase
        before is given back first: where memory is short it would be."""
        import torch

        torch.cuda.empty_cache()
        self.device.nullgpu_forget_peak(0)
        torch.cuda.reset_peak_memory_stats()
        yield
        known = self.found.get(name, {"allocated": 0.0, "tensors": 0.0})
        given = self.device.nullgpu_peak_bytes(0)
        tensors = min(torch.cuda.max_memory_allocated() - self.asleep, given)
        peaks = {"allocated": given / GIB, "tensors": tensors / GIB}
        self.found[name] = {kind: round(max(known[kind], peak), 2) for kind, peak in peaks.items()}
        now = {
            "used": self.device.nullgpu_used_bytes(0),
            "reserved": torch.cuda.memory_reserved(),
            "held": torch.cuda.memory_allocated(),
        }
        after = {kind: round(size / GIB, 2) for kind, size in now.items()}
        print(f"{name}: peaks {peaks}, then {after}", file=sys.stderr, flush=True)


def play(name: str) -> dict[str, dict[str, float]]:
    """Runs in the process on the device, as rank 0."""
    import torch
    import torch.distributed as dist

    recipe = memory.with_rows(get(name))
    shape = hub_config.shape(recipe.config.model)
    assert shape is not None
    config = recipe.config
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(config.placement.world_size)}
    believe_in_peers()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=config.placement.world_size)

    from tests.rehearsal.models import VOCABULARY, model_config
    from tests.rehearsal.rows import longest, to_learn
    from trainer.learning import policy as learning
    from trainer.learning.learner_part import ShardedWeights
    from trainer.sampling.vllm_engine import Engine
    from trainer.weights import in_process

    learning.init_distributed("cuda")
    load_model = learning._load_model
    learning._load_model = lambda config, ds_config, empty: load_model(config, ds_config, True)
    folder = Path(tempfile.mkdtemp())
    model_config(shape).save_pretrained(folder)
    ours = replace(config, model=replace(config.model, path=str(folder)))
    meter = Meter()
    with meter.phase("load"):
        banned = list(range(VOCABULARY, shape.vocabulary))
        policy = learning.Policy(ours, shape, banned, torch.device("cuda", 0), 100)
    policy.states.offload()
    engine_config, prompter = of_engine(ours, shape)
    with meter.phase("engine's start"):
        before = torch.cuda.memory_allocated()
        used = meter.device.nullgpu_used_bytes(0)
        engine = Engine(engine_config, prompter, 1)
        asleep = torch.cuda.memory_allocated() - before
    engine.sleep()
    torch.cuda.empty_cache()
    left = (meter.device.nullgpu_used_bytes(0) - used) / GIB
    meter.found["engine asleep"] = {"allocated": round(left, 2)}

    scored = longest(recipe, shape, logprob_tokens(config, shape))
    learnt = longest(recipe, shape, config.algorithm.micro_batch_tokens)
    batch = scored.micro_batch()
    item = to_learn(config, learnt.micro_batch(), learnt.completions)
    for version in range(2):  # Adam's moments are there from the first step on
        policy.states.offload()
        with meter.phase("sync"):
            used = meter.device.nullgpu_used_bytes(0)
            engine.wake_weights()
            meter.asleep = asleep - (meter.device.nullgpu_used_bytes(0) - used)  # the cache sleeps on
            weights = ShardedWeights(version, policy, config.rollout.sync_bucket_bytes)
            in_process.push_weights(weights, engine)
        meter.asleep = 0
        with meter.phase("rollout"):
            engine.wake_cache()
        engine.sleep()
        meter.asleep = asleep
        policy.states.reload()
        with meter.phase("logprobs"):
            policy.logprobs([batch], True, policy.reference is not None)
        with meter.phase("update"):
            policy.update([item, item], 2, config.algorithm.kl_coef)
    return meter.found


def of_engine(config: Any, shape: Any) -> tuple[Any, Any]:
    """The engine's configuration and prompter: the model of this shape with the tiny model's tokens."""
    from transformers import AutoConfig, AutoProcessor

    from examples.demo import tiny_model
    from tests.rehearsal.models import model_class, model_config
    from trainer.data.processor import Prompter

    model = model_config(shape)
    tiny = Path(tempfile.mkdtemp()) / "tiny"
    tiny_model.build(tiny, 0, "tiny", model.model_type)
    model.architectures = [model_class(shape).__name__]
    known = AutoConfig.from_pretrained(tiny)
    for token in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        if hasattr(known, token):
            setattr(model, token, getattr(known, token))
    folder = Path(tempfile.mkdtemp())
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(tiny).save_pretrained(folder)
    changed = replace(
        config,
        model=replace(config.model, path=str(folder), revision=""),
        rollout=replace(config.rollout, eager=True),
    )
    return changed, Prompter(changed.model)


def believe_in_peers() -> None:
    """Groups of ranks on the host are torch's fake ones, as those on the device are."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    assert fake_pg.FakeStore  # its import registers the backend
    new_group = dist.new_group

    def believed(ranks: Any = None, *args: Any, backend: Any = None, **keywords: Any) -> Any:
        return new_group(ranks, *args, backend="fake" if backend == "gloo" else backend, **keywords)

    queue: Any = MessageQueue
    queue.create_from_process_group = staticmethod(lambda *args, **keywords: None)
    torch_distributed: Any = dist
    torch_distributed.new_group = believed


def played(name: str) -> dict[str, dict[str, float]]:
    """The phases of one rank, from a process of its own."""
    card = "H100" if get(name).cluster.gpu.startswith("H100") else "A100"
    command = [sys.executable, "-m", "tests.nullgpu", "--card", card, str(PYTHON), "-W", "ignore"]
    command += ["-m", "benchmarks.allocated", "--rank", name]
    env = os.environ | rank_environment(get(name).config) | DEVICE
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Plays recipes and writes each one's figures at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "recipes", nargs="*", default=SHOWN, metavar="RECIPE", help="or `table`: what is known, as Markdown"
    )
    parser.add_argument(
        "--rank", metavar="RECIPE", help="what the device runs: one rank, to its standard output"
    )
    asked = parser.parse_args()
    if asked.rank:
        print(json.dumps(play(asked.rank)))
        return
    if asked.recipes == ["table"]:
        print("\n".join(table()))
        return
    for name in asked.recipes:
        found = played(name)
        for phase, gib in planned_now(get(name)).items():
            found[phase]["planned"] = round(gib, 2)
        known = json.loads(OUT.read_text()) if OUT.exists() else {}
        phases = {phase: found[phase] for phase in PHASES}
        left = found["engine asleep"]["allocated"]
        known[name] = {"gpu": get(name).cluster.gpu, "engine_asleep_gib": left, "phases": phases}
        write_whole(OUT, (json.dumps(dict(sorted(known.items())), indent=1) + "\n").encode())
        print(name, found, flush=True)


if __name__ == "__main__":
    main()
