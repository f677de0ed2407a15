"""What the plan assumes of a card, measured on one: memory that is not the model's, rates of decoding and
training, and four steps of 3B beside their plan.

A figure that names a constant of the plan is reported where it is off.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.plan import memory, step_seconds
from recipes.presets import get
from tests.conftest import ROOT
from tests.gpu.conftest import changed
from tests.gpu.job_memory import children_bytes
from tests.learning.loads import FEW, MANY
from trainer import config as c
from trainer.config.run_folder import read_progress
from trainer.hardware.gpus import GPUS, peak_flops
from trainer.hardware.model_shapes import shape_of

GIB = 2**30
ROOM_OF_TWO_SAVES = 100 * GIB
"""Free disk: a checkpoint of this model is 34 GiB."""


def card() -> str:
    """This card's name in the plan; "" where it has none."""
    name = torch.cuda.get_device_name()
    gib = torch.cuda.get_device_properties(0).total_memory / GIB
    known = [gpu for gpu in GPUS if re.search(rf"\b{GPUS[gpu].driver}\b", name)]
    return min(known, key=lambda gpu: abs(GPUS[gpu].memory_gib - gib), default="")


class Watch(threading.Thread):
    """Reads, twice a second, the job's host memory and the GPU's, by the phase that a run is in."""

    def __init__(self, folder: str) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.host = 0
        self.host_before_a_save = 0
        self.gpu: dict[str, list[float]] = defaultdict(list)
        """GiB in use, by phase."""
        self.over = threading.Event()

    def run(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not self.over.wait(0.5):
            used = children_bytes()
            self.host = max(self.host, used)
            if not any(Path(self.folder).glob("checkpoints/step-*")):
                self.host_before_a_save = max(self.host_before_a_save, used)
            phase = read_progress(self.folder).get("phase", "start")
            self.gpu[phase].append(pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB)


def test_a_process_before_its_model(run_ranks, gpu_config, figure):
    """CUDA's context and the workspaces of matrix products."""
    gib = run_ranks("context", gpu_config, timeout_s=120)[0]["gib"]
    figure("a process before its model", gib, "GiB", planned=memory.CONTEXT / GIB, constant="CONTEXT")


def test_communicators(run_ranks, gpu_config, figure):
    """NCCL's buffers for the groups of ranks that a run makes."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    config = changed(gpu_config, placement={"workers_per_node": torch.cuda.device_count()})
    gib = max(rank["gib"] for rank in run_ranks("communicators", config, timeout_s=300))
    figure("NCCL's communicators", gib, "GiB", planned=memory.COMMUNICATORS / GIB, constant="COMMUNICATORS")


@pytest.mark.timeout(1200)
def test_seconds_of_a_decode_step(run_ranks, gpu_config, three_billion, figure):
    """The tiny model's steps are all host work; what 3B's take beyond that is memory traffic."""
    rollout = {
        "max_tokens": 256,
        "prompts_per_step": MANY // 8,
        "samples_per_prompt": 8,
    }
    tiny = run_ranks("decoding", changed(gpu_config, rollout=rollout), timeout_s=300)[0]
    sequence = max(0.0, (tiny["many"] - tiny["few"]) / (MANY - FEW))
    step = tiny["few"] - FEW * sequence
    figure(
        "a decode step's host work", step, "s", planned=step_seconds.ENGINE_STEP_S, constant="ENGINE_STEP_S"
    )
    figure("each sequence of it", sequence, "s", planned=step_seconds.SEQUENCE_S, constant="SEQUENCE_S")

    share = 0.4
    config = changed(
        gpu_config,
        model={"path": str(three_billion)},
        rollout=rollout | {"gpu_memory_utilization": share},
    )
    large = run_ranks("decoding", config, timeout_s=600)[0]
    figure(f"3B shape: a decode step of {FEW} sequences", large["few"], "s")
    if not (name := card()):
        return
    shape = shape_of(str(three_billion))
    traffic = shape.matmul_parameters * 2 / (GPUS[name].hbm_gb_per_s * 1e9)
    reached = traffic / (large["few"] - step - FEW * sequence)
    figure("decoding: share of memory bandwidth", reached, "", planned=step_seconds.DECODE, constant="DECODE")
    total = torch.cuda.get_device_properties(0).total_memory
    cache = large["cache_tokens"] * shape.kv_bytes_per_token(2)
    workspace = (share * total - shape.parameters * 2 - cache) / GIB
    planned = memory.ENGINE_WORKSPACE / GIB
    figure("an engine's workspace", workspace, "GiB", planned=planned, constant="ENGINE_WORKSPACE")


@pytest.mark.timeout(2400)
def test_rates_of_three_billion_parameters(run_ranks, three_billion, gpu_config, figure):
    """Packs of 4,096 tokens against the GPU's peak, generating against bare vLLM, a sync."""
    longest = 512
    config = changed(
        gpu_config,
        model={"path": str(three_billion), "gradient_checkpointing": True},
        rollout={"max_tokens": longest, "gpu_memory_utilization": 0.4},
    )
    ours = run_ranks("rates", config, timeout_s=1200)[0]
    theirs = run_ranks("bare", config, timeout_s=600)[0]
    mine, bare = ours["tokens"] / ours["seconds"]["rollout"], theirs["tokens"] / theirs["seconds"]
    figure("3B shape: generated by ours", mine, "tokens/s")
    figure("3B shape: ours against bare vLLM (aim 0.97)", mine / bare, "")
    figure("3B shape: sync (aim 0.5)", ours["seconds"]["sync"], "s")
    if peak := peak_flops(torch.cuda.get_device_name()):
        most = ours["seconds"]["update"] * peak
        figure("3B shape: MFU of an update (aim 0.5)", ours["model_flops"] / most, "")
        reached = ours["hardware_flops"] / most
        what = "3B shape: share of the peak in an update, recomputation counted"
        figure(what, reached, "", planned=step_seconds.MATMUL, constant="MATMUL")


@pytest.mark.timeout(1200)
def test_updates_of_a_policy_alone(tmp_path, run_ranks, three_billion, gpu_config, figure):
    """Ten updates of 3B's shape without an engine, its states' way to the host and back, and its first save:
    a bare card without vLLM can be asked."""
    longest = 512
    saves = shutil.disk_usage(tmp_path).free > ROOM_OF_TWO_SAVES / 2
    config = changed(
        gpu_config,
        model={"path": str(three_billion), "gradient_checkpointing": True},
        rollout={"max_tokens": longest},
        checkpoint={"every_steps": 1 if saves else 1000},
    )
    found = run_ranks("alone", config, timeout_s=900)[0]
    later = found["updates"][2:]
    update = sum(later) / len(later)
    figure("3B shape alone: an update of 8 packs", update, "s")
    figure("3B shape alone: the first update", found["updates"][0], "s")
    figure("3B shape alone: states to the host", found["away"], "s")
    figure("3B shape alone: states back", found["back"], "s")
    if saves:
        figure("3B shape alone: the first save holds up", found["save"], "s")
        figure("3B shape alone: the first save is written", found["written"], "s")
    figure("3B shape alone: memory of tensors at most", found["gib"], "GiB")
    if peak := peak_flops(torch.cuda.get_device_name()):
        figure("3B shape alone: MFU of an update", found["model_flops"] / update / peak, "")


@pytest.mark.timeout(2000)
def test_three_billion_parameters(tmp_path, run_ranks, three_billion, gpu_config, figure):
    """Three steps of the trainer: memory of host and card, and seconds, beside the plan. A disk with room for
    two checkpoints sees a save beside the next step."""
    longest = 512
    saves = shutil.disk_usage(tmp_path).free > ROOM_OF_TWO_SAVES
    config = c.override(
        gpu_config,
        [
            f"model.path={three_billion}",
            "run.max_steps=3",
            "rollout.prompts_per_step=16",
            f"rollout.max_tokens={longest}",
            "rollout.samples_per_prompt=8",
            "rollout.gpu_memory_utilization=0.4",
            "model.gradient_checkpointing=true",
            f"checkpoint.every_steps={1 if saves else 3}",
            "checkpoint.keep_last=1",
        ],
    )
    path = tmp_path / "run.yaml"
    path.write_text(c.dump(config))
    watch = Watch(config.run.dir)
    watch.start()
    command = [sys.executable, "-m", "trainer.loops.grpo", "--config", str(path)]
    print("three steps of 3B", flush=True)
    done = subprocess.run(command, cwd=ROOT)
    watch.over.set()
    watch.join()
    assert done.returncode == 0

    recipe = get("grpo-qwen2.5-vl-3b-mathv60k")
    facts = replace(recipe.dataset, prompt_tokens=128, answer_tokens=longest)
    recipe = replace(recipe, config=config, dataset=facts)
    # not the last step: nothing is sampled after it, so it syncs no weights
    last = json.loads(Path(config.run.dir, "metrics.jsonl").read_text().splitlines()[-2])
    name = card()
    need = memory.plan_memory(recipe, name) if name else None
    seconds = {}
    if need:
        step = step_seconds.step_time(recipe, name, 100.0, need)
        seconds = {"rollout": step.rollout, "update": step.update, "sync": step.sync, "step": step.total}
        stall = step_seconds.stall_seconds(recipe, need, GPUS[name])
        if saves:
            figure("3B shape: a save holds up", last["perf/checkpoint_stall_s"], "s", planned=stall)
    for phase in ("rollout", "update", "sync", "step"):
        figure(f"3B shape: {phase}", last[f"time/{phase}_s"], "s", planned=seconds.get(phase))
    figure("3B shape: rollout", last["perf/rollout_tokens_per_s"], "tokens/s")
    figure("3B shape: training", last["perf/train_tokens_per_s"], "tokens/s")
    figure("3B shape: host memory before the first save", watch.host_before_a_save / GIB, "GiB")
    planned_host = need.host_bytes / GIB if need else None
    host = watch.host / GIB
    if saves:
        figure("3B shape: host memory at most, a save after every step", host, "GiB", planned=planned_host)

    policys = [
        phase.parts
        for phase in memory.memory_phases(config, shape_of(config.model.path), 0.0)
        if phase.name in ("logprobs", "update", "optimizer step")
    ]
    outside = ("CUDA context", "engine's graphs")  # not torch's
    peak = max(sum(v for part, v in parts.items() if part not in outside) for parts in policys) / GIB
    figure("3B shape: peak memory of the policy", last["perf/peak_memory_gib"], "GiB", planned=peak)
    figure("3B shape: GPU memory free between tensors, at most", last["perf/fragments_gib_max"], "GiB")
    context = run_ranks("context", gpu_config, timeout_s=120)[0]["gib"]
    assert watch.gpu["update"], "no update was seen: it was over within half a second"
    beside = max(watch.gpu["update"]) - last["perf/peak_memory_gib"] - context
    what = "3B shape: what stays of a sleeping engine, with torch's own reserve"
    planned = memory.ENGINE_ASLEEP / GIB
    figure(what, beside, "GiB", planned=planned, constant="ENGINE_ASLEEP")
    assert last["perf/peak_memory_gib"] == pytest.approx(peak, rel=0.1)
