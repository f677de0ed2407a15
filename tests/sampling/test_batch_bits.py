"""Whether a completion's bits depend on who shares its batch: pairs of batches through vLLM's matrix
product for CPUs."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module")
def ops():
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    import vllm._custom_ops as ops

    return ops


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (64, 192), (128, 384), (896, 896)])
def test_in_fp32_a_row_is_the_same_alone_and_among_others(ops, inputs, outputs):
    """The widths of the tests' models and of the demo."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        weight = torch.randn(outputs, inputs)
        product = ops.create_onednn_mm(weight.t(), 32)
        rows = torch.randn(100, inputs)
        alone = torch.cat([ops.onednn_mm(product, row[None].clone(), None) for row in rows])
        for shared in (2, 3, 7, 8, 16, 31, 33, 64, 100):
            assert torch.equal(ops.onednn_mm(product, rows[:shared].clone(), None), alone[:shared]), shared
        shuffled = torch.randperm(100)
        assert torch.equal(ops.onednn_mm(product, rows[shuffled], None), alone[shuffled])
    finally:
        torch.set_num_threads(threads)
