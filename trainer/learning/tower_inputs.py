"""What a vision tower derives from its images' grids, made on the CPU.

The tower would make it from a grid on its own device, and would read that grid about ten times, each time
waiting for the GPU. It also takes it as arguments, made by the same functions of transformers
(`vision_utils`); the grid may then stay on the CPU.
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

from trainer.algorithm.batching import send_tensor


def tower_arguments(tower: Any, grid: Tensor, device: torch.device) -> dict[str, Tensor | int]:
    """Arguments of `get_image_features` for images of `grid`, int [images, 3] on the CPU.

    They are each patch's position, the bounds of the images and the length of the longest. For Qwen2.5-VL
    they are also its attention windows, for Qwen3-VL the indices and weights with which it reads its table
    of positions.
    """
    bounds = get_vision_cu_seqlens(grid)
    computed: dict[str, Any] = {
        "position_ids": get_vision_position_ids(grid, tower.spatial_merge_size),
        "cu_seqlens": bounds,
        "max_seqlen": int(bounds.diff().max()),
    }
    if hasattr(tower, "window_size"):
        index, window_bounds = get_vision_window_index(
            grid, tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
        computed |= {
            "window_index": index,
            "cu_window_seqlens": window_bounds,
            "max_window_seqlen": int(window_bounds.diff().max()),
        }
    if hasattr(tower, "num_grid_per_side"):
        computed["interp_indices"], computed["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.spatial_merge_size,
        )
    arguments: dict[str, Tensor | int] = {}
    for name, value in computed.items():
        arguments[f"image_{name}"] = send_tensor(value, device) if isinstance(value, Tensor) else value
    return arguments
