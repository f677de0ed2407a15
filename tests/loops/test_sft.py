"""Supervised fine-tuning as a real process: Ray, ZeRO-3 ranks, checkpoints, export."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainer import config as c

ROOT = Path(__file__).parent.parent.parent
ROWS = 16


def sft(config, folder, *overrides):
    folder.mkdir(exist_ok=True)
    config = replace(config, run=replace(config.run, dir=str(folder / "run")))
    config = c.override(config, list(overrides))
    (folder / "run.yaml").write_text(c.dump(config))
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "trainer.loops.sft", "--config", str(folder / "run.yaml")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    path = folder / "run" / "metrics.jsonl"
    return done, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def config(small_config):
    return replace(
        small_config,
        method="sft",
        run=replace(small_config.run, max_steps=4),
        algorithm=c.Algorithm(micro_batch_tokens=400),
        sft=c.SFT(batch_size=ROWS, epochs=9, max_tokens=300),
        optimizer=c.Optimizer(learning_rate=2e-3),
        rewards=c.Rewards(workers=1),
        checkpoint=c.Checkpoint(every_steps=2, export_hf="end"),
    )


def reference_losses(config, rows_of_step, learning_rates):
    """The same run with plain transformers and torch, one sequence at a time; where Adam amplifies rounding.

    Adam moves a weight by g / (|g| + 1e-8): where |g| is of the size of that constant, the rounding of g in
    float32 (1e-9 and less, plain torch's own against float64 too) is not small beside it. Such weights are
    returned as a mask.
    """
    import peft
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    from trainer.data.dataset import Dataset

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(config.model.path, dtype=torch.float32)
    if config.lora.rank:
        torch.manual_seed(config.run.seed)
        model = peft.get_peft_model(model, peft.LoraConfig(**config.lora.peft()))
    trained = [p for p in model.parameters() if p.requires_grad]
    processor = AutoProcessor.from_pretrained(config.model.path)
    dataset = Dataset(config.data.path, "train")
    adam = torch.optim.AdamW(trained, betas=config.optimizer.betas, weight_decay=0.0)
    losses, unsteady = [], [torch.zeros_like(p, dtype=torch.bool) for p in trained]
    for rows, rate in zip(rows_of_step, learning_rates, strict=True):
        for group in adam.param_groups:
            group["lr"] = rate
        adam.zero_grad()
        total, tokens = 0.0, 0
        for row in (dataset[i] for i in rows):
            picked = solution_logprobs(model, processor, config, row)
            (-picked.sum()).backward()
            total, tokens = total - float(picked.sum().detach()), tokens + len(picked)
        for p, mask in zip(trained, unsteady, strict=True):
            if p.grad is not None:
                p.grad /= tokens
                mask |= (p.grad != 0) & (p.grad.abs() < 1e-7)
        torch.nn.utils.clip_grad_norm_(trained, config.optimizer.max_grad_norm)
        adam.step()
        losses.append(total / tokens)
    return losses, model, unsteady


def held_out_loss(model, config):
    """The loss of plain transformers, one sequence at a time, over all tokens of the solutions."""
    from transformers import AutoProcessor

    from trainer.data.dataset import Dataset

    processor = AutoProcessor.from_pretrained(config.model.path)
    total = 0.0
    tokens = 0
    for row in Dataset(config.data.path, "test"):
        logprobs = solution_logprobs(model, processor, config, row)
        total, tokens = total - float(logprobs.sum().detach()), tokens + len(logprobs)
    return total / tokens


def solution_logprobs(model, processor, config, row):
    """[tokens of the solution and the end token]"""
    from trainer.images.decoding import decode_image

    prompt = processor.apply_chat_template(row.messages, add_generation_prompt=True)
    images = {"images": [decode_image(data, row.id) for data in row.images]} if row.images else {}
    size = {"shortest_edge": config.model.min_pixels, "longest_edge": config.model.max_pixels}
    inputs = processor(
        text=[prompt + row.solution + "<|im_end|>"],
        return_tensors="pt",
        **images,
        **({"images_kwargs": {"size": size}} if images else {}),
    )
    answer = len(processor.tokenizer(row.solution)["input_ids"]) + 1
    return (
        model(**inputs)
        .logits[0, :-1]
        .log_softmax(-1)
        .gather(1, inputs["input_ids"][0, 1:, None])[-answer:, 0]
    )


@pytest.mark.slow
def test_it_is_the_run_that_plain_torch_makes(config, tmp_path):
    """Two ranks, rows with and without images: losses of every step and the exported weights."""
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    from trainer.data.prompt_stream import PromptStream

    done, lines = sft(config, tmp_path / "a", "evaluation.every_steps=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert "batch: 16 rows per optimizer step = 8 per rank x 2 x 1 nodes" in done.stdout
    before, *lines = lines
    stream = PromptStream(range(64), config.sft.batch_size, config.run.seed)
    rows = [[p.row for p in stream.batch(step)] for step in range(1, 5)]
    losses, model, unsteady = reference_losses(config, rows, [2e-3] * 4)
    assert [line["sft/loss"] for line in lines] == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]
    held = [line["eval/loss"] for line in (before, *lines) if "eval/loss" in line]
    assert (
        len(held) == 3
        and held[-1] == pytest.approx(held_out_loss(model, config), rel=1e-4)
        and held[-1] < held[0]
    )
    assert lines[-1]["loss/token_accuracy"] > lines[0]["loss/token_accuracy"] < 0.1
    steps = sorted(p.name for p in (tmp_path / "a" / "run" / "checkpoints").glob("step-*"))
    assert json.loads((tmp_path / "a" / "run" / "checkpoints" / steps[-1] / "manifest.json").read_text())[
        "manifest"
    ]["score"] == pytest.approx(-held[-1])

    exported = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        tmp_path / "a" / "run" / "hf", dtype=torch.float32
    )
    start = Qwen2_5_VLForConditionalGeneration.from_pretrained(config.model.path, dtype=torch.float32)
    AutoProcessor.from_pretrained(tmp_path / "a" / "run" / "hf")
    for (name, weight), b, s, mask in zip(
        exported.named_parameters(), model.parameters(), start.parameters(), unsteady, strict=True
    ):
        difference, way = weight - b, b - s
        gap = difference[~mask].norm() / way[~mask].norm().clamp(min=1e-6)
        assert gap < 3e-4, name  # of the distance that the tensor went
        assert difference.norm() / way.norm().clamp(min=1e-6) < 1e-2, name
        assert mask.float().mean() < 0.1 or "bias" in name, name  # few


@pytest.mark.long
def test_adapters_learn_what_plain_peft_learns(config, tmp_path):
    """Two ranks, gradient checkpointing: losses of every step, and the exported adapter."""
    import peft
    from transformers import Qwen2_5_VLForConditionalGeneration

    from trainer.data.prompt_stream import PromptStream

    config = replace(config, lora=c.LoRA(rank=4, alpha=16))
    done, lines = sft(config, tmp_path / "a", "model.gradient_checkpointing=true")
    assert done.returncode == 0, done.stderr[-3000:]
    stream = PromptStream(range(64), config.sft.batch_size, config.run.seed)
    rows = [[p.row for p in stream.batch(step)] for step in range(1, 5)]
    losses, model, unsteady = reference_losses(config, rows, [2e-3] * 4)
    assert [line["sft/loss"] for line in lines] == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]
    start = Qwen2_5_VLForConditionalGeneration.from_pretrained(config.model.path, dtype=torch.float32)
    exported = peft.PeftModel.from_pretrained(start, str(tmp_path / "a" / "run" / "hf"))
    mine = {name: p for name, p in exported.named_parameters() if "lora_" in name}
    theirs = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert mine.keys() == theirs.keys()
    for (name, p), mask in zip(theirs.items(), unsteady, strict=True):
        assert (mine[name] - p)[~mask].norm() < 1e-3 * p[~mask].norm(), name


@pytest.mark.long
def test_one_rank_learns_the_same_and_a_resumed_run_goes_on_bit_for_bit(config, tmp_path):
    whole, lines = sft(config, tmp_path / "two")
    assert whole.returncode == 0, whole.stderr[-3000:]
    single, one = sft(
        config, tmp_path / "one", "placement.workers_per_node=1", "algorithm.micro_batch_tokens=200"
    )
    assert single.returncode == 0, single.stderr[-3000:]
    assert [x["sft/loss"] for x in one] == pytest.approx([x["sft/loss"] for x in lines], rel=1e-4)

    first, _ = sft(config, tmp_path / "cut", "run.max_steps=2")
    again, resumed = sft(config, tmp_path / "cut")
    assert first.returncode == again.returncode == 0, again.stderr[-3000:]
    assert "resumed from step 2" in again.stdout
    compared = ("sft/loss", "grad/norm", "optim/lr", "tokens/step", "entropy/mean")
    for now, then in zip(resumed, lines, strict=True):
        assert {name: now[name] for name in compared} == {name: then[name] for name in compared}


@pytest.mark.long
def test_a_run_goes_on_at_another_stage_and_with_another_number_of_ranks(config, tmp_path):
    whole, lines = sft(config, tmp_path / "whole", "optimizer.zero_stage=2")
    first, _ = sft(config, tmp_path / "cut", "optimizer.zero_stage=1", "run.max_steps=2")
    again, resumed = sft(config, tmp_path / "cut", "optimizer.zero_stage=3", "placement.workers_per_node=1")
    assert whole.returncode == first.returncode == again.returncode == 0, again.stderr[-3000:]
    assert "resumed from step 2" in again.stdout and "under ZeRO-3" in again.stdout
    assert [x["sft/loss"] for x in resumed] == pytest.approx([x["sft/loss"] for x in lines], rel=1e-4)
