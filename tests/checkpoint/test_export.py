"""Exports: what `from_pretrained` reads, streamed, from whole checkpoints only."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.synthetic import again, configure, finish, save, spoil, writers
from tests.families import FAMILIES, loader
from trainer.checkpoint import weights
from trainer.checkpoint.format import Shard
from trainer.checkpoint.hf_export import export_adapter, export_hf
from trainer.checkpoint.shard_reader import CorruptCheckpoint
from trainer.config import ConfigError


def saved_model(folder):
    """A small text model with random weights, and its folder."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    small = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(small)
    model.save_pretrained(folder)
    return model


def checkpointed(tensors, config, told, ranks=1):
    """Checkpoints of a run, the one of step 2 with these weights, cut among so many ranks."""
    checkpoints, made = again(config, told), writers(config, ranks)
    checkpoints.begin(2, {})
    for writer in made:
        shards = {}
        for name, tensor in tensors.items():
            start, stop = (rank * tensor.numel() // ranks for rank in (writer.rank, writer.rank + 1))
            piece = tensor.detach().flatten()[start:stop].clone()
            shards[name] = Shard(tuple(tensor.shape), start, stop, {"master": piece})
        writer.start(2, shards, {})
    finish(checkpoints, made)
    return checkpoints


def altered(model):
    """The model's parameters by name, all of them changed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return dict(model.named_parameters())


def test_export_writes_what_from_pretrained_reads(tmp_path, told):
    from transformers import AutoModelForCausalLM

    model = saved_model(tmp_path / "base")
    (tmp_path / "base/tokenizer_note.txt").write_text("kept")
    checkpoints = checkpointed(altered(model), configure(tmp_path), told)
    out = export_hf(checkpoints.find(), tmp_path / "hf", tmp_path / "base", "fp32", file_bytes=20_000)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert (out / "tokenizer_note.txt").exists()
    back = AutoModelForCausalLM.from_pretrained(out)
    for (name, mine), (_, theirs) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    half = export_hf(checkpoints.find(), tmp_path / "hf", tmp_path / "base", "bf16")
    assert load_file(half / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert not list(half.glob("model-*")), "the former export is gone"
    with pytest.raises(ConfigError, match=r"config\.json"):
        export_hf(checkpoints.find(), tmp_path / "hf2", tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_back_every_family(family_model, family, tmp_path, told):
    """All weights, a tower's too, under the names that `from_pretrained` knows."""
    model = loader(family).from_pretrained(family_model(family))
    found = checkpointed(altered(model), configure(tmp_path), told).find()
    out = export_hf(found, tmp_path / "hf", family_model(family), "fp32")
    back, loaded = loader(family).from_pretrained(out, output_loading_info=True)
    assert not any(loaded.values()), loaded
    for (name, mine), (_, theirs) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_every_family_are_merged(family_model, family, tmp_path, told):
    """Into the linear layers that have one; all else is the base model's, experts too."""
    from trainer.config import LoRA
    from trainer.learning import lora

    base = family_model(family)
    config = replace(configure(tmp_path), lora=LoRA(rank=3, alpha=5))
    config = replace(config, model=replace(config.model, path=str(base), dtype="fp32"))
    model = loader(family).from_pretrained(base)
    lora.inject_adapters(model, config.lora, 0)
    factors = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for factor in factors.values():
            factor.copy_(torch.randn_like(factor))
    out = export_hf(checkpointed(factors, config, told).find(), tmp_path / "hf", base, "fp32")
    back, loaded = loader(family).from_pretrained(out, output_loading_info=True)
    assert not any(loaded.values()), loaded
    rest, adapted = lora.adapters(dict(model.named_parameters()), model)
    assert adapted
    for name, weight in rest:
        merged = lora.merged_weight(weight, adapted.get(name))
        assert torch.allclose(back.get_parameter(name), merged, atol=1e-5), name


def test_export_takes_frozen_weights_from_the_base_model(tmp_path, told):
    from safetensors.torch import save_file

    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    tensors = {
        "visual.patch": torch.randn(3, 4),
        "model.layers.0.w": torch.randn(2, 2),
        "lm_head.weight": torch.ones(2),
    }
    save_file(tensors, base / "model.safetensors")
    config = configure(tmp_path)
    config = replace(config, model=replace(config.model, freeze_vision=True))
    name = "model.language_model.layers.0.w"
    checkpoints = checkpointed({name: torch.arange(4.0).view(2, 2)}, config, told)
    written = load_file(export_hf(checkpoints.find(), tmp_path / "hf", base, "fp32") / "model.safetensors")
    assert torch.equal(written.pop(name), torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    assert written.keys() == {"visual.patch", "lm_head.weight"}
    assert torch.equal(written["visual.patch"], tensors["visual.patch"])
    weight_map = dict.fromkeys(tensors, "model.safetensors") | {"visual.norm": "model-2.safetensors"}
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    # a node's share
    with pytest.raises(ConfigError, match=r"no model-2\.safetensors, which holds visual\.norm"):
        export_hf(checkpoints.find(), tmp_path / "hf", base, "fp32")


def test_an_adapter_is_exported_for_peft_and_merged_as_peft_merges(tmp_path, told):
    import peft
    from transformers import AutoModelForCausalLM

    from trainer.config import LoRA
    from trainer.learning import lora

    saved_model(tmp_path / "base")
    config = replace(configure(tmp_path), lora=LoRA(rank=3, alpha=5, rslora=True))
    config = replace(config, model=replace(config.model, path=str(tmp_path / "base"), dtype="fp32"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora.inject_adapters(model, config.lora, 0)
    factors = {n: torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad}
    found = checkpointed(factors, config, told, ranks=2).find()
    folder = export_adapter(found, tmp_path / "adapter", config)
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(folder)
    )
    named = {n.removeprefix("base_model.model."): p for n, p in loaded.named_parameters() if "lora_" in n}
    assert named.keys() == factors.keys() and all(torch.equal(named[n], v) for n, v in factors.items())
    merged = load_file(export_hf(found, tmp_path / "hf", tmp_path / "base", "fp32") / "model.safetensors")
    want = dict(loaded.merge_and_unload().named_parameters())
    assert all(
        torch.allclose(merged[name], value, atol=1e-6) for name, value in want.items() if name in merged
    )
    assert merged.keys() >= want.keys() - {"lm_head.weight"}
    whole = weights.make_model_folder(str(folder), tmp_path / "again", str(tmp_path / "base"))
    again_merged = load_file(whole / "model.safetensors")
    assert again_merged.keys() == merged.keys() and all(
        torch.equal(merged[n], again_merged[n]) for n in merged
    )
    assert weights.make_model_folder(str(whole), tmp_path / "linked", "unused").resolve() == whole, (
        "a whole model is left as it is"
    )
    (tmp_path / "base/model.safetensors").rename(tmp_path / "base/other.bin")
    with pytest.raises(ConfigError, match=r"has no model\.layers.*give the model it was trained on"):
        weights.make_model_folder(str(folder), tmp_path / "wrong", str(tmp_path / "base"))
    with pytest.raises(ConfigError, match=r"no config\.json and no adapter_config\.json"):
        weights.make_model_folder(str(tmp_path), tmp_path / "wrong", str(tmp_path / "base"))


def test_a_base_in_4_bits_is_what_training_computed_with_whatever_type_is_written(tmp_path, told):
    """A run in bf16, written in fp32."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    from trainer.config import LoRA

    saved_model(tmp_path / "base")
    config = replace(configure(tmp_path, "method=sft", "model.dtype=bf16"), lora=LoRA(rank=3, qlora=True))
    a = torch.randn(3, 32)
    b = torch.randn(32, 3)
    stem = "model.layers.0.self_attn.q_proj"
    factors = {f"{stem}.lora_{name}.default.weight": tensor for name, tensor in (("A", a), ("B", b))}
    checkpoints = checkpointed(factors, config, told)
    weight = load_file(tmp_path / "base/model.safetensors")[f"{stem}.weight"]
    four = {
        kind: (
            dequantize_4bit(
                *quantize_4bit(weight.to(kind), compress_statistics=True, quant_type="nf4")
            ).float()
        )
        for kind in (torch.bfloat16, torch.float32)
    }
    written = load_file(
        export_hf(checkpoints.find(), tmp_path / "hf", tmp_path / "base", "fp32") / "model.safetensors"
    )
    merged = four[torch.bfloat16] + config.lora.scale * b @ a
    assert torch.allclose(written[f"{stem}.weight"], merged, atol=1e-6)
    assert not torch.allclose(four[torch.bfloat16], four[torch.float32], atol=1e-6)


EXPORT = """
import resource, sys
sys.path[:0] = [{root!r}]
from trainer.checkpoint.hf_export import export_hf
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) // 1024
import threading, time
seen, stop = [], False
def watch():
    while not stop:
        seen.append(anonymous()); time.sleep(0.005)
before = anonymous()
thread = threading.Thread(target=watch); thread.start()
export_hf({source!r}, {out!r}, {model!r})
stop = True; thread.join()
print(max(seen) - before)
"""


def test_export_streams(tmp_path, told):
    """Exports 512 MiB of fp32 masters; what the process allocates stays below 250 MiB (mapped shard pages
    aside)."""
    shapes = [f"layer.{i}.weight" for i in range(2)]
    config = configure(tmp_path, "checkpoint.remote=")
    checkpointed(dict.fromkeys(shapes, torch.ones(8192, 8192)), config, told)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    source = str(tmp_path / "run/checkpoints/step-00000002")
    code = EXPORT.format(
        root=os.getcwd(), source=source, out=str(tmp_path / "hf"), model=str(tmp_path / "base")
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert int(result.stdout) < 250
    assert (tmp_path / "hf/model.safetensors").stat().st_size > 2 * 2 * 8192 * 8192


def test_a_damaged_shard_stops_an_export_and_leaves_nothing(run, tmp_path):
    config, checkpoints, ranks = run
    save(checkpoints, ranks, 2)
    found = checkpoints.find()
    for place in (tmp_path / "run", tmp_path / "remote/test"):
        spoil(place / "checkpoints/step-00000002", "flip")
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match="rank-00001"):
        export_hf(found, tmp_path / "hf", tmp_path / "base")
    assert not (tmp_path / "hf").exists()
