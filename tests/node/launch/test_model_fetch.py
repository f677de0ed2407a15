"""A hub model's weights are downloaded beside Ray's start, where the start reads them."""

import json
from dataclasses import replace

import huggingface_hub
import pytest

from tests.data_prep import hub_server
from trainer import config as c
from trainer.node.launch import model_fetch
from trainer.storage import hub as hub_files

FILES = {"config.json": b"{}", "consolidated.safetensors": b"another format", "tokenizer.json": b"{}"}


def config(folder, **algorithm):
    return c.RunConfig(
        run=c.Run(name="r", dir=str(folder / "run")),
        model=c.Model(path="owner/model"),
        algorithm=c.Algorithm(**algorithm),
        checkpoint=c.Checkpoint(remote=f"file://{folder}/store"),
    )


@pytest.mark.parametrize("parts", [1, 2])
def test_only_the_weights_that_are_read_are_downloaded(tmp_path, monkeypatch, parts):
    names = [f"model-{i}.safetensors" for i in range(parts)] if parts > 1 else ["model.safetensors"]
    files = FILES | {name: name.encode() * 200 for name in names}
    if parts > 1:
        weight_map = {f"w{i}": name for i, name in enumerate(names)}
        files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    with hub_server.serve() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add("owner/model", files)
        (folder,) = {
            path.parent for path in model_fetch.fetch_weights(config(tmp_path), cache_dir=tmp_path / "cache")
        }
        assert sorted(path.name for path in folder.glob("*.safetensors")) == names
        assert not any("consolidated" in path or "tokenizer" in path for _, path, _ in hub.requests)


@pytest.mark.parametrize("shared", [True, False])
def test_nodes_share_the_download_where_ranks_keep_slices(tmp_path, monkeypatch, shared):
    """Three of five files are the first node's; at other stages every rank reads all of them."""
    names = [f"model-{i}.safetensors" for i in range(5)]
    index = json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(names)}}).encode()
    here = config(tmp_path)
    here = here if shared else replace(here, method="sft", optimizer=c.Optimizer(zero_stage=2))
    with hub_server.serve() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add("owner/model", {"model.safetensors.index.json": index} | dict.fromkeys(names, b"w" * 2000))
        found = [model_fetch.fetch_weights(here, node, 2, tmp_path / f"cache-{node}") for node in (0, 1)]
    assert [[path.name for path in paths] for paths in found] == (
        [names[::2], names[1::2]] if shared else [names, names]
    )


def test_a_resume_that_needs_none_downloads_none(tmp_path):
    assert model_fetch.needs_base_weights(config(tmp_path, kl_coef=0.0)), "the first start"
    manifest = tmp_path / "store/r/checkpoints/step-00000002/1-abcdef/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    all_trained = config(tmp_path, kl_coef=0.0)
    assert not model_fetch.needs_base_weights(all_trained)
    assert model_fetch.needs_base_weights(config(tmp_path, kl_coef=0.01)), "for the reference"
    for other in ({"model": c.Model(path="owner/model", freeze_vision=True)}, {"lora": c.LoRA(rank=4)}):
        assert model_fetch.needs_base_weights(replace(all_trained, **other))
    assert model_fetch.needs_base_weights(
        replace(all_trained, checkpoint=replace(all_trained.checkpoint, resume="never"))
    )


def test_a_cache_without_the_weights_is_a_models_folder(tmp_path, monkeypatch):
    """For the shape of the model, and for the export of a run whose checkpoint held every weight."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with hub_server.serve() as hub:
        hub.add("owner/model", FILES | {"model.safetensors": b"w" * 2000})
        huggingface_hub.hf_hub_download("owner/model", "config.json", endpoint=hub.url)
        folder = hub_files.model_folder(config(tmp_path))
    assert (folder / "config.json").read_bytes() == b"{}" and not (folder / "model.safetensors").exists()


def test_a_model_on_this_disk_is_not_looked_for(tmp_path, monkeypatch):
    here = replace(config(tmp_path), model=c.Model(path=str(tmp_path)))
    assert not hub_files.from_hub(here) and hub_files.from_hub(config(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not hub_files.from_hub(config(tmp_path))
