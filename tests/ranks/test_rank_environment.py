"""The variables that a rank starts with."""

from __future__ import annotations

import os
import subprocess
import sys

from trainer import config as c
from trainer.ranks import environment


def test_this_torch_takes_the_allocators_settings():
    """One that it does not know would end every rank at its start."""
    check = "import os, torch; torch._C._accelerator_setAllocatorSettings(os.environ['PYTORCH_ALLOC_CONF'])"
    env = os.environ | {"PYTORCH_ALLOC_CONF": environment.allocator_setting()}
    done = subprocess.run([sys.executable, "-c", check], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "expandable_segments:True" in environment.allocator_setting()


def test_no_block_of_page_locked_memory_is_kept_that_was_not_rounded():
    """torch finds a kept block by the power of two above its size and gives it to any tensor of the same: one
    that was not rounded is too small for some, and an update's copy ended the process beyond it."""
    options = dict(option.split(":") for option in environment.allocator_setting().split(","))
    kept = float(options.get("pinned_max_cached_size_mb", "inf"))
    rounded = min(kept, float(options.get("pinned_max_round_threshold_mb", "inf")))
    assert kept <= rounded and kept.is_integer()


def test_an_older_torch_is_not_asked_for_what_it_may_not_know(monkeypatch):
    monkeypatch.setattr(environment, "version", lambda package: "2.11.0+cu130")
    assert environment.allocator_setting() == "expandable_segments:True"


def test_what_a_gpu_rank_gets_and_a_cpu_rank_does_not():
    gpu = environment.rank_environment(c.RunConfig())
    assert gpu["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1" and "VLLM_BATCH_INVARIANT" not in gpu
    exact = environment.rank_environment(c.RunConfig(run=c.Run(deterministic="cuda")))
    assert exact["VLLM_BATCH_INVARIANT"] == "1" and exact["CUBLAS_WORKSPACE_CONFIG"]
    cpu = environment.rank_environment(c.RunConfig(placement=c.Placement(device="cpu")))
    assert "PYTORCH_ALLOC_CONF" not in cpu
    assert cpu["RAY_ROTATION_MAX_BYTES"] == "0", "what a rank writes when it dies must reach a file"
