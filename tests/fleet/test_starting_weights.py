"""What a worker begins anew with when its trainer does, before the first checkpoint."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from trainer.config import ConfigError, Model, RunConfig, override
from trainer.fleet.fleet_records import Anchor
from trainer.fleet.weight_mirror import fill_from_anchor, load_pretrained

MODEL = Anchor("model", 0, "")


@pytest.fixture
def config(tiny_model):
    return RunConfig(model=Model(path=str(tiny_model), dtype="bf16"))


@pytest.mark.parametrize("rank", [0, 4])
def test_the_pretrained_model_comes_back(config, rank):
    """Into the tensors that the mirror and the engine's next weights go by."""
    config = override(config, [f"lora.rank={rank}"])
    model = load_pretrained(config)
    begun = {name: tensor.clone() for name, tensor in model.merged()}
    tensors = dict(model.tensors)
    for name, tensor in tensors.items():
        if not rank or ".lora_" in name:
            tensor.add_(1.0)
    assert not all(torch.equal(tensor, begun[name]) for name, tensor in model.merged())
    fill_from_anchor(model, config, MODEL)
    assert all(torch.equal(tensor, begun[name]) for name, tensor in model.merged())
    assert all(model.tensors[name] is tensor for name, tensor in tensors.items())


def test_a_model_that_could_not_be_read_again_is_read_before_anything_else(config, tmp_path):
    model = load_pretrained(config)
    begun = {name: tensor.clone() for name, tensor in model.tensors.items()}
    with pytest.raises(ConfigError, match="nowhere"):
        fill_from_anchor(model, override(config, [f"model.path={tmp_path}/nowhere"]), MODEL)
    assert not model.whole
    fill_from_anchor(model, config, MODEL)
    assert model.whole and all(torch.equal(model.tensors[name], tensor) for name, tensor in begun.items())


MEASURED = """
import resource, sys, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from trainer.config import Model, RunConfig
from trainer.fleet.weight_mirror import fill_from_anchor, load_pretrained
from trainer.fleet.fleet_records import Anchor

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

if sys.argv[2] == "make":
    shape = Qwen2Config(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, vocab_size=1000)
    Qwen2ForCausalLM(shape).to(torch.bfloat16).save_pretrained(sys.argv[1])
else:
    config = RunConfig(model=Model(path=sys.argv[1], dtype="bf16"))
    before = resident_mib()
    model = load_pretrained(config)
    for tensor in model.tensors.values():
        tensor.add_(1.0)
    one = sum(tensor.nbytes for tensor in model.tensors.values()) / 2**20
    first = peak_mib()
    fill_from_anchor(model, config, Anchor("model", 0, ""))
    print(one, first - before, peak_mib() - before)
"""


@pytest.mark.long
def test_reading_it_again_takes_no_second_copy_of_host_memory(tmp_path):
    def run(what: str) -> str:
        command = [sys.executable, "-c", MEASURED, str(tmp_path / "model"), what]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout

    run("make")
    one, first, again = map(float, run("measure").split())
    print(f"a model of {one:.0f} MiB: {first:.0f} MiB at the first reading, {again:.0f} at the second")
    assert one > 700 and again < first + 0.25 * one
