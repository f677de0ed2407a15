"""Page-locked host memory as ranks set it up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from trainer.ranks.environment import allocator_setting

GROWING = """
import torch
from trainer.algorithm.batching import send_tensor
torch.set_num_threads(4)
card = torch.device("cuda", 0)
for megabytes in (1.2, 1.0, 1.9, 0.7, 60, 70, 66, 100):
    pixels = torch.rand(int(megabytes * 2**18))
    assert torch.equal(send_tensor(pixels, card).cpu(), pixels)
sizes = [int(size * 2**20) for size in (1.2, 1.9, 33, 60, 65, 120)]
for _ in range(2):
    held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    ends = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in held)
    assert all(stop <= start for (_, stop), (start, _) in zip(ends, ends[1:])), "two tensors share memory"
    del held
    sizes.reverse()
"""
LOCKED = """
import torch
from trainer.checkpoint import staging
card = torch.device("cuda", 0)
for elements in (9 << 20, 12 << 20, 9 << 20):
    memory = staging.HostMemory()
    states = torch.rand(elements).to(card)
    memory.like("a", states)
    memory.lock_behind()
    copy = memory.like("a", states).copy_(states, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(copy, states.cpu()) and not memory._warned
    memory.like("a", states[1:])  # the first one's memory goes
"""


@pytest.mark.parametrize("program", [GROWING, LOCKED])
def test_no_tensor_reaches_over_its_page_locked_memory(program):
    env = os.environ | {"PYTORCH_ALLOC_CONF": allocator_setting()}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
