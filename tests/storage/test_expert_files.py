"""Experts as files hold them: there and back, for each way to lay them out."""

from __future__ import annotations

import pytest
import torch

from trainer.storage.expert_files import TensorPlace, tensor_place, written_tensors

PREFIX = "model.layers.7.mlp.experts"
COUNT = 3
HIDDEN = 4
WIDTH = 5


def parameters():
    numbers = torch.arange(COUNT * 2 * WIDTH * HIDDEN, dtype=torch.float32)
    return {
        f"{PREFIX}.gate_up_proj": numbers.view(COUNT, 2 * WIDTH, HIDDEN),
        f"{PREFIX}.down_proj": -numbers[: COUNT * HIDDEN * WIDTH].view(COUNT, HIDDEN, WIDTH),
        "model.layers.7.mlp.gate.weight": numbers[: COUNT * HIDDEN].view(COUNT, HIDDEN),
    }


@pytest.mark.parametrize("layout", ["", "apart", "together", "transposed"])
@pytest.mark.parametrize("piece", [7, 1000])
def test_what_is_written_is_read_back(layout, piece):
    files = {}
    for name, values in parameters().items():
        flat = values.flatten()
        for key, shape, read in written_tensors(
            name, tuple(values.shape), lambda a, b, flat=flat: flat[a:b], layout
        ):
            total = torch.Size(shape).numel()
            parts = [read(at, min(at + piece, total)) for at in range(0, total, piece)]
            files[key] = torch.cat(parts).view(shape)
    filled = {name: torch.zeros_like(values) for name, values in parameters().items()}
    for key, values in files.items():
        found = tensor_place(key, layout)
        found.inside(filled[found.name]).copy_(values)
    assert all(torch.equal(filled[name], values) for name, values in parameters().items())
    assert len(files) == (3 * COUNT + 1 if layout == "apart" else 3)


def test_places_by_hand():
    whole = parameters()
    up = tensor_place(f"{PREFIX}.2.up_proj.weight", "apart")
    assert up == TensorPlace(f"{PREFIX}.gate_up_proj", expert=2, half=1)
    assert torch.equal(up.inside(whole[up.name]), whole[up.name][2, WIDTH:])
    down = tensor_place(f"{PREFIX}.0.down_proj.weight", "apart")
    assert torch.equal(down.inside(whole[down.name]), whole[down.name][0])
    turned = tensor_place(f"{PREFIX}.down_proj", "transposed")
    assert turned.inside(whole[turned.name]).shape == (COUNT, WIDTH, HIDDEN)
    assert tensor_place("model.layers.7.mlp.gate_proj.weight", "apart") == TensorPlace(
        "model.layers.7.mlp.gate_proj.weight"
    )
