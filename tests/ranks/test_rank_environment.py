"""The variables that a rank starts with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from trainer import config as c
from trainer.ranks import cpu_matmul, environment
from trainer.ranks.environment import rank_environment
from trainer.ranks.heap import ARENAS, SLACK_BYTES, Heap, resident_bytes


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


def holes() -> list[bytearray]:
    """Twice the slack in blocks too small for a mapping of their own, of which every eighth stays."""
    blocks = [bytearray(b"x" * (64 << 10)) for _ in range(SLACK_BYTES >> 15)]
    return blocks[::8]


def test_holes_are_given_back_when_they_are_worth_it():
    heap = Heap()
    heap.trim()
    before = resident_bytes()
    assert not heap.trim(), "nothing has grown"
    kept = holes()
    grown = resident_bytes()
    assert grown > before + SLACK_BYTES, "the C library keeps the pages"
    assert heap.trim() and resident_bytes() < grown - SLACK_BYTES
    assert all(block == b"x" * (64 << 10) for block in kept) and not heap.trim()


THREADS = """
import ctypes, sys, threading
c, barrier = ctypes.CDLL(None), threading.Barrier(6)
c.malloc.restype, c.fopen.restype = ctypes.c_void_p, ctypes.c_void_p

def hold():
    barrier.wait()
    c.malloc(100_000)
    barrier.wait()

threads = [threading.Thread(target=hold) for _ in range(6)]
[t.start() for t in threads]
[t.join() for t in threads]
out = ctypes.c_void_p(c.fopen(sys.argv[1].encode(), b"w"))
c.malloc_info(0, out)
c.fclose(out)
"""


@pytest.mark.parametrize("how", ["as Ray starts a worker", "by default"])
def test_threads_share_few_heaps(small_config, tmp_path, how):
    variables = {
        k: v for k, v in rank_environment(small_config).items() if k.startswith("MALLOC_") and "Ray" in how
    }
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | variables
    subprocess.run([sys.executable, "-c", THREADS, str(tmp_path / "info.xml")], env=env, check=True)
    heaps = (tmp_path / "info.xml").read_text().count("<heap nr=")
    assert heaps > 4 if how == "by default" else heaps <= ARENAS


SHAPES = """
import torch
from trainer.ranks import cpu_matmul
from trainer.ranks.heap import resident_bytes
held, b = cpu_matmul.install_matmul(), torch.randn(96, 112)
for rows in range(64, 664):
    torch.randn(rows, 96) @ b
    if rows in (363, 663):
        print(resident_bytes() >> 20)
"""


@pytest.fixture
def overridden():
    library = cpu_matmul.install_matmul()
    if library is None:
        pytest.skip("this torch has no oneDNN")
    yield
    library._destroy()


@pytest.mark.parametrize("shape", [(300, 200, 400), (1, 512, 512), (3, 4, 5), (0, 7, 3), (4, 0, 3)])
@pytest.mark.parametrize("layout", ["plain", "right transposed", "left transposed", "slices"])
def test_products_and_gradients_are_torchs(overridden, shape, layout):
    m, k, n = shape
    torch.manual_seed(0)
    a = torch.randn(k, m).t() if layout == "left transposed" else torch.randn(m, k)
    b = torch.randn(n, k).t() if layout == "right transposed" else torch.randn(k, n)
    if layout == "slices":
        a, b = torch.randn(m, 2 * k)[:, ::2], torch.randn(2 * k, n)[::2]
    a, b = a.requires_grad_(), b.requires_grad_()
    product = a @ b
    product.sin().sum().backward()
    exact = a.detach().double() @ b.detach().double()
    torch.testing.assert_close(product.double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(a.grad.double(), exact.cos() @ b.detach().double().t(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(b.grad.double(), a.detach().double().t() @ exact.cos(), rtol=1e-3, atol=1e-3)


def test_it_is_in_force_while_it_is_held_and_leaves_other_types_alone(overridden):
    a, b = torch.randn(256, 300), torch.randn(300, 128)
    assert torch.equal(a @ b, cpu_matmul.matmul(a, b))
    with torch.inference_mode():
        assert torch.equal(a @ b, cpu_matmul.matmul(a, b))
    assert (a.bfloat16() @ b.bfloat16()).dtype == torch.bfloat16
    assert (torch.ones(2, 3, dtype=torch.long) @ torch.ones(3, 2, dtype=torch.long)).tolist() == [
        [3, 3],
        [3, 3],
    ]


def test_torchs_own_kernel_comes_back():
    a, b = torch.randn(256, 300), torch.randn(300, 128)
    before, library = a @ b, cpu_matmul.install_matmul()
    if library is not None:
        library._destroy()
    assert torch.equal(a @ b, before)


def test_shapes_that_come_once_are_forgotten(small_config):
    """Packed passes are all of different lengths. With oneDNN's own limits these 300 keep 190 MiB."""
    env = os.environ | rank_environment(small_config)
    found = subprocess.run(
        [sys.executable, "-c", SHAPES], env=env, capture_output=True, text=True, check=True
    ).stdout
    earlier, later = map(int, found.split())
    assert later - earlier < 40
