"""Which GPUs are ours, however they are named."""

from __future__ import annotations

import pytest

from trainer.hardware.visible_gpus import gpu_names, gpu_variable, visible_positions

IDS = [
    ["GPU-5f3c0a11-aaaa", "MIG-11110000-aaaa", "MIG-11112222-aaaa"],
    ["GPU-5f3c7b22-bbbb"],
    ["GPU-77aa0c33-cccc", "MIG-33330000-cccc"],
    ["GPU-90de0d44-dddd"],
]


@pytest.mark.parametrize(
    ("listed", "positions"),
    [
        ("2,3", [2, 3]),
        ("2, 3", [2, 3]),
        ("GPU-77aa0c33-cccc,GPU-90de0d44-dddd", [2, 3]),
        ("GPU-90, GPU-77aa", [3, 2]),
        ("GPU-5f3c", []),  # a prefix of two
        ("gpu-90DE", [3]),
        ("MIG-11112222-aaaa", [0]),
        ("MIG-11112222-aaaa,MIG-11110000-aaaa,MIG-3333", [0, 0, 2]),
        ("MIG-GPU-77aa0c33-cccc/1/0", [2]),
        ("", []),
        ("-1", []),
        ("0,-1,2", [0]),
        ("1,9,2", [1]),
        ("1,,2", [1]),
        ("1,1", []),
        ("NoDevFiles", []),
        ("²", []),
    ],
)
@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_gpus_are_found_by_whatever_names_them(variable, listed, positions):
    assert visible_positions(IDS, {variable: listed}) == positions
    assert gpu_variable({variable: listed}) == variable


def test_without_a_list_all_are_ours():
    assert visible_positions(IDS, {}) == [0, 1, 2, 3]
    assert gpu_names({}) is None and gpu_names({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert gpu_names({"CUDA_VISIBLE_DEVICES": " 2, GPU-9 "}) == ["2", "GPU-9"]
    assert gpu_variable({}) == "CUDA_VISIBLE_DEVICES"
