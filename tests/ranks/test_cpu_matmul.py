"""The override computes what torch computes, wherever it stands in."""

import os
import subprocess
import sys

import pytest
import torch

from trainer.ranks import cpu_matmul
from trainer.ranks.environment import rank_environment

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
