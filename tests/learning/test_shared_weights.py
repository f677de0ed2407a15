"""Base weights under ZeRO-3: each node downloads its share of the files, and every rank has what transformers
loads."""

from dataclasses import replace

import pytest

from tests.data_prep import hub_server


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
        ("qwen3_vl_moe", "fp32", str),
        ("qwen3_moe", "bf16", str),
        ("qwen3_5_moe", "fp32", str),
        pytest.param("qwen2", "bf16", str, marks=pytest.mark.long),
        pytest.param("llama", "fp32", str, marks=pytest.mark.long),
    ],
)
def test_each_node_downloads_its_share_and_every_rank_has_its_slices(
    run_ranks, family_model, small_config, family, dtype, rename
):
    folder = family_model(family)
    files = hub_server.in_parts(folder, 3, rename)
    with hub_server.serve() as hub:
        hub.add("owner/model", files)
        first, second = run_ranks("filled_weights", of(small_config, folder, hub, dtype))
    assert first["different"] == second["different"] == []
    assert first["same_names"] and second["same_names"]
    one, two, three = (len(files[name]) for name in sorted(files) if name.endswith(".safetensors"))
    assert sorted(first["files"].values()) == sorted([one, three]) and list(second["files"].values()) == [two]


def test_what_the_files_lack_and_what_cannot_be_had_is_said_on_every_rank(
    run_ranks, family_model, small_config
):
    folder, lost = family_model("qwen2"), "model-00002-of-00003.safetensors"
    with hub_server.serve() as hub:
        hub.add(
            "owner/model",
            hub_server.in_parts(folder, 3, lambda key: key.replace("model.norm", "model.other")),
        )
        for result in run_ranks("filled_weights", of(small_config, folder, hub)):
            assert "owner/model has no model.norm.weight (1 are missing)" in result["error"]
    with hub_server.serve() as hub:
        files = hub_server.in_parts(folder, 3)
        hub.add("owner/model", {name: data for name, data in files.items() if name != lost})
        for result in run_ranks("filled_weights", of(small_config, folder, hub)):
            assert (
                f"rank 1 cannot read the weights of owner/model: owner/model has no {lost}" in result["error"]
            )
            assert result["type"] == "ConfigError", "another start would not find it either"
    with hub_server.serve() as hub:
        hub.add("owner/model", files | {"model.safetensors.index.json": b"{}"})
        for result in run_ranks("filled_weights", of(small_config, folder, hub)):
            assert "rank 0 cannot read the weights of owner/model" in result["error"]
            assert "is no index of weights" in result["error"]


def test_every_rank_is_told_whether_another_start_may_help(run_ranks, family_model, small_config):
    """A hub that is away for a while, and one that refuses: what one rank meets ends all of them alike."""
    folder = family_model("qwen2")
    index = "model.safetensors.index.json"
    second = "model-00002-of-00003.safetensors"
    with hub_server.serve() as hub:
        hub.add("owner/model", hub_server.in_parts(folder, 3))
        for name, status, rank, kind in (
            (index, 0, 0, "StorageError"),
            (second, 503, 1, "StorageError"),
            (second, 403, 1, "ConfigError"),
        ):
            hub.fails = {name: status}
            for result in run_ranks("filled_weights", of(small_config, folder, hub)):
                assert f"rank {rank} cannot read the weights of owner/model: {name}" in result["error"]
                assert result["type"] == kind and "\n" not in result["error"]
