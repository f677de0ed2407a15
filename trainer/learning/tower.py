"""What a vision tower derives from its images' grids, made on the CPU.

The tower would make it from a grid on its own device, and read that about ten times, each time waiting for
the GPU. It takes what is made before (transformers' `vision_utils`); the grid itself may stay on the CPU
then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from trainer.algorithm.batching import sent


def places(tower: Any, grid: Tensor, device: torch.device) -> dict[str, Tensor | int]:
    """Arguments of `get_image_features` for images of `grid`, int [images, 3] on the CPU: where each patch
    stands, the images' bounds and longest; of Qwen2.5-VL its windows too, of Qwen3-VL what its position table
    is read with."""
    bounds = get_vision_cu_seqlens(grid)
    found: dict[str, Any] = {
        "position_ids": get_vision_position_ids(grid, tower.spatial_merge_size),
        "cu_seqlens": bounds,
        "max_seqlen": int(bounds.diff().max()),
    }
    if hasattr(tower, "window_size"):
        index, bounds = get_vision_window_index(
            grid, tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
        found |= {
            "window_index": index,
            "cu_window_seqlens": bounds,
            "max_window_seqlen": int(bounds.diff().max()),
        }
    if hasattr(tower, "num_grid_per_side"):
        found["interp_indices"], found["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.spatial_merge_size,
        )
    out: dict[str, Tensor | int] = {}
    for k, v in found.items():
        out[f"image_{k}"] = sent(v, device) if isinstance(v, Tensor) else v
    return out
