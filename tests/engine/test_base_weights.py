"""Base weights under ZeRO-3: each node downloads its share of the files, and every rank has what transformers loads."""

import json
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save

from tests.data_prep import hub_server

PARTS = 3


def published(hub, folder, rename=lambda key: key, drop=()) -> dict[str, bytes]:
    """A model of a folder as a hub has it: an index and three files. Returns these."""
    tensors = {rename(key): tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    parts = [f"model-0000{i + 1}-of-0000{PARTS}.safetensors" for i in range(PARTS)]
    place = {key: parts[i * PARTS // len(tensors)] for i, key in enumerate(sorted(tensors))}
    files = {
        part: save({key: tensors[key].contiguous() for key in place if place[key] == part and key not in drop})
        for part in parts
    }
    index = {"metadata": {}, "weight_map": {key: part for key, part in place.items() if key not in drop}}
    hub.add("owner/model", files | {"model.safetensors.index.json": json.dumps(index).encode(), "config.json": b"{}"})
    return files


def of(config, folder, hub, dtype="fp32"):
    return replace(
        config,
        run=replace(config.run, name="owner/model"),
        model=replace(config.model, path=str(folder), dtype=dtype),
        checkpoint=replace(config.checkpoint, remote=hub.url),
    )


def old_names(key: str) -> str:
    """As Qwen2.5-VL's files have them."""
    return key.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


@pytest.mark.parametrize(
    ("family", "dtype", "rename"),
    [
        ("qwen2_5_vl", "bf16", old_names),
        ("qwen3_vl", "fp32", str),
        ("qwen3", "fp32", str),
        pytest.param("qwen2", "bf16", str, marks=pytest.mark.long),
        pytest.param("llama", "fp32", str, marks=pytest.mark.long),
    ],
)
def test_each_node_downloads_its_share_and_every_rank_has_its_slices(
    run_ranks, family_model, small_config, family, dtype, rename
):
    with hub_server.serve() as hub:
        folder = family_model(family)
        files = published(hub, folder, rename)
        first, second = run_ranks("filled", of(small_config, folder, hub, dtype))
    assert first["different"] == second["different"] == []
    assert first["same_names"] and second["same_names"]
    one, two, three = (len(files[name]) for name in sorted(files))
    assert sorted(first["files"].values()) == sorted([one, three]) and list(second["files"].values()) == [two]


def test_what_the_files_lack_and_what_cannot_be_had_is_said_on_every_rank(run_ranks, family_model, small_config):
    folder = family_model("qwen2")
    with hub_server.serve() as hub:
        published(hub, folder, drop={"model.norm.weight"})
        for result in run_ranks("filled", of(small_config, folder, hub)):
            assert "owner/model has no model.norm.weight (1 are missing)" in result["error"]
    with hub_server.serve() as hub:
        files = published(hub, folder)
        hub.repos["owner/model"][hub.heads["owner/model"]].pop(sorted(files)[1])
        for result in run_ranks("filled", of(small_config, folder, hub)):
            assert "rank 1 cannot read the weights of owner/model" in result["error"]
            assert "has no model-00002-of-00003.safetensors" in result["error"]
