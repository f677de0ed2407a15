"""What the tower derives from its images' grids is made before, and nothing is read back from its device."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, AutoModelForImageTextToText

from tests.families import VISION
from trainer.learning import attention
from trainer.learning.logprobs import tower_arguments

GRIDS = [(1, 2, 2), (1, 86, 114), (1, 10, 14), (1, 44, 58), (1, 6, 6)]
"""Patches of images from 28 x 28 to 1,600 x 1,200 pixels."""


@pytest.fixture(params=VISION)
def model(family_model, request):
    return AutoModelForImageTextToText.from_pretrained(family_model(request.param)).eval()


def images(model):
    tower, grid = model.config.vision_config, torch.tensor(GRIDS)
    width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    return torch.randn(int(grid.prod(-1).sum()), width, generator=torch.Generator().manual_seed(0)), grid


def parts(features):
    return [
        *features.pooler_output,
        *(x for layer in getattr(features, "deepstack_features", ()) for x in layer),
    ]


def test_features_are_the_towers_own(model):
    attention.use_attention(model)
    pixels, grid = images(model)
    with torch.no_grad():
        own = model.model.get_image_features(pixels, grid, return_dict=True)
        ours = model.model.get_image_features(
            pixels, grid, return_dict=True, **tower_arguments(model.model.visual, grid, torch.device("cpu"))
        )
    assert len(parts(own)) == len(parts(ours)) >= len(GRIDS)
    assert all(torch.equal(a, b) for a, b in zip(parts(own), parts(ours), strict=True))


def test_nothing_is_read_from_the_device(model):
    """On the meta device there is nothing to read: an attempt raises, as it would have a GPU's queue waited
    for."""

    def whole_rows(module, query, key, value, attention_mask, max_length_q, **_):
        assert isinstance(max_length_q, int)
        return query.transpose(1, 2), None

    AttentionInterface.register("meta_flash", whole_rows)
    model.config._attn_implementation = "meta_flash"
    pixels, grid = images(model)
    model = model.to("meta")
    pixels = pixels.to("meta")
    meta = torch.device("meta")
    features = model.model.get_image_features(
        pixels, grid, return_dict=True, **tower_arguments(model.model.visual, grid, meta)
    )
    assert [len(part) for part in features.pooler_output] == (grid.prod(-1) // 4).tolist()
    with pytest.raises(RuntimeError, match="meta"):
        model.model.get_image_features(pixels, grid.to("meta"), return_dict=True)
