"""Lengths of rows: those of the processor, computed once, and what follows from them."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from tests.families import VISION
from trainer.config import ConfigError, Model, Split, override
from trainer.data.dataset import Dataset
from trainer.data.lengths import cached_lengths, measure_lengths, usable_rows
from trainer.data.processor import Prompter
from trainer.data.reader import ENTRY_BYTES, ByteCache


def test_any_slice_has_the_processors_lengths(small_config, mixed_dataset):
    prompter, dataset = Prompter(small_config.model), Dataset(mixed_dataset, "train")
    prompts = [len(prompter.token_ids(row)) for row in dataset]
    solutions = [len(prompter.tokenizer(row.solution)["input_ids"]) + 1 for row in dataset]
    assert len(set(prompts)) > 3
    for start, stop in ((0, 64), (3, 5), (10, 10), (63, 64)):
        lengths = measure_lengths(prompter, dataset, start, stop, solutions=True)
        assert lengths[:, 0].tolist() == prompts[start:stop]
        assert lengths[:, 1].tolist() == solutions[start:stop]
    assert measure_lengths(prompter, dataset, 0, 4, solutions=False)[:, 1].tolist() == [0] * 4


def test_the_key_changes_with_whatever_lengths_depend_on(small_config):
    base = Prompter(small_config.model)
    assert Prompter(small_config.model).fingerprint() == base.fingerprint()
    assert Prompter(replace(small_config.model, max_pixels=4 * 784)).fingerprint() != base.fingerprint()
    base.tokenizer.add_tokens(["triangle"])
    assert Prompter(small_config.model).fingerprint() != base.fingerprint()


def test_lengths_are_computed_once_and_a_damaged_file_is_replaced(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return np.array([[3, 4]], np.int32)

    for _ in range(3):
        assert cached_lengths(["key"], compute, tmp_path).tolist() == [[3, 4]]
    assert len(calls) == 1
    cached_lengths(["other"], compute, tmp_path)
    assert len(calls) == 2
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    assert cached_lengths(["key"], compute, tmp_path).tolist() == [[3, 4]] and len(calls) == 3


def test_sequences_that_the_model_cannot_read_are_refused(tiny_model):
    prompter = Prompter(Model(path=str(tiny_model)))
    prompter.check_longest(4096)
    with pytest.raises(ConfigError, match="are 4097 together, and the model reads 4096: lower"):
        prompter.check_longest(4097)


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
@pytest.mark.parametrize("column", ["messages", "solution"])
def test_a_row_whose_text_names_a_vision_token_is_named_before_anything_is_loaded(
    small_config, mixed_dataset, monkeypatch, token, column
):
    prompter, dataset = Prompter(small_config.model), Dataset(mixed_dataset, "train")
    (table,) = dataset.tables(["id", "source", "messages", "images", "solution"], 3, 4)
    row = table.to_pylist()[0]
    if column == "solution":
        row["solution"] = f"It says {token}."
    else:
        row["messages"][-1]["content"].append({"type": "text", "text": f"What is {token}?"})
    monkeypatch.setattr(dataset, "tables", lambda *_: [pa.Table.from_pylist([row], schema=table.schema)])
    with pytest.raises(ConfigError, match=f"row {row['id']}: .* in its text"):
        measure_lengths(prompter, dataset, 3, 4, solutions=True)


def test_rows_are_chosen_by_their_lengths(small_config, capsys):
    lengths = np.array([[300, 0], [301, 5], [10, 20], [10, 0], [290, 30]], np.int32)
    assert usable_rows(small_config, lengths, Split("d", "train")) == [0, 2, 3, 4]
    assert "1 of 5 rows of train left out: 1 prompts over 300 tokens" in capsys.readouterr().out
    sft = override(replace(small_config, method="sft"), ["sft.max_tokens=310"])
    assert usable_rows(sft, lengths, Split("d", "train")) == [2]
    out = capsys.readouterr().out
    assert "1 prompts over 300 tokens, 2 no solution, 1 over 310 tokens with their solution" in out
    with pytest.raises(ConfigError, match="SFT needs worked solutions"):
        usable_rows(sft, lengths[:1], Split("d", "train"))


def test_images_per_row_come_from_the_manifest_or_from_the_chats(mixed_dataset):
    dataset = Dataset(mixed_dataset, "train")
    assert dataset.manifest.images_per_row == {"train": 1, "test": 1} and dataset.images_per_row == 1
    older = Dataset(mixed_dataset, "train", manifest=replace(dataset.manifest, images_per_row={}))
    assert older.images_per_row == 1


def test_a_cache_holds_no_more_bytes_than_it_may():
    cache, made = ByteCache(10 * 1000), []

    def ask(key, size):
        return cache.get(key, lambda: made.append(key) or bytes(size), len)

    for key in range(20):
        ask(key, 1000 - ENTRY_BYTES)
        assert cache.held_bytes <= 10_000
    assert cache.held_bytes == 10_000
    ask(10, 1000 - ENTRY_BYTES)
    assert len(made) == 20, "the last ten are held"
    ask(20, 1000 - ENTRY_BYTES)
    ask(10, 1000 - ENTRY_BYTES)
    assert made[20:] == [20], "what was used stays, what was not goes"
    assert len(ask("large", 50_000)) == 50_000 and cache.held_bytes == 10_000


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
