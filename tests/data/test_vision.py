"""What policy and engine read of a row."""

from dataclasses import replace

import pytest

from tests.families import VISION
from trainer.data.processor import Prompter


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("pixels", [(784, 1280 * 784), (4 * 784, 4 * 784), (64 * 784, 1280 * 784)])
def test_ids_from_headers_are_the_processors(small_config, family_model, mixed_dataset, family, pixels):
    """With and without images, and with images that are resized down and up."""
    from trainer.data.dataset import Dataset

    path = str(family_model(family))
    prompter = Prompter(replace(small_config.model, path=path, min_pixels=pixels[0], max_pixels=pixels[1]))
    dataset = Dataset(mixed_dataset, "train")
    two = replace(
        dataset[1], messages=dataset[1].messages + dataset[2].messages, images=[dataset[1].images[0]] * 2
    )
    rows = [dataset[0], dataset[1], dataset[2], two]
    encoded = [prompter.encode(row).token_ids for row in rows]
    assert [prompter.token_ids(row) for row in rows] == encoded
    chats, images, ids = ([getattr(row, name) for row in rows] for name in ("messages", "images", "id"))
    assert prompter.lengths(chats, images, ids) == list(map(len, encoded))
    assert len(set(map(len, encoded))) > 2
