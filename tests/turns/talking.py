"""A tiny model that knows a few replies by heart, so that its episodes have turns. Not a test itself."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

from tests.turns.test_built_in_tools import called
from trainer.config import Model, Turns
from trainer.data.processor import Prompter
from trainer.turns.environments import tools_of

ZOOM = called("zoom", box=[0, 0, 28, 42])
REPLIES = (
    ZOOM,
    ZOOM,
    called("zoom", box=[14, 0, 42, 42]),
    called("zoom", box=[9, 9, 9, 9]),
    "<think> I count. </think><answer> $\\boxed{3}$ </answer>",
    "<think> I count. </think><answer> $\\boxed{4}$ </answer>",
)
SHOWN = (
    "\n<|im_start|>user\n<tool_response>\nPicture 1, box [0, 0, 28, 42], in 28 x 56 pixels:<|vision_start|>"
    "<|image_pad|><|image_pad|><|vision_end|>\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
QUESTION = [{"type": "text", "text": "How many circles are there?"}, {"type": "image"}]
SHORT, LONG = 150, 80
"""Updates on short contexts of any tokens, and on whole episodes with the prompt's tools."""
IGNORED = -100


def teach(source: Path, folder: Path) -> Path:
    """Writes a model to `folder` that says one of REPLIES whatever it is asked, each about as often."""
    torch.manual_seed(0)
    dice = random.Random(0)
    prompter = Prompter(Model(path=str(source), min_pixels=784), tools_of(Turns(environment="zoom")))
    tokenizer = prompter.tokenizer
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    replies = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in REPLIES]
    opening = tokenizer("<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    shown = tokenizer(SHOWN)["input_ids"]
    (asked,) = prompter.texts([[{"role": "user", "content": QUESTION}]])
    prompt = tokenizer(asked)["input_ids"]

    def update(rows: list[list[int]], wanted: list[list[int]], rate: float) -> None:
        longest = max(map(len, rows))
        ids = [row + [tokenizer.eos_token_id] * (longest - len(row)) for row in rows]
        labels = [row + [IGNORED] * (longest - len(row)) for row in wanted]
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        model(input_ids=torch.tensor(ids), labels=torch.tensor(labels)).loss.backward()
        optimizer.step()

    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(SHORT):
        before = []
        for _ in replies:
            noise = [dice.randrange(len(tokenizer)) for _ in range(dice.randrange(1, 80))]
            before.append(noise + opening)
        rows = [context + reply for context, reply in zip(before, replies, strict=True)]
        wanted = [[IGNORED] * len(context) + reply for context, reply in zip(before, replies, strict=True)]
        update(rows, wanted, 3e-3 * (1 - step / (2 * SHORT)))
    for step in range(LONG):
        row = list(prompt)
        labels = [IGNORED] * len(prompt)
        for _ in range(3):
            reply = dice.choice(replies)
            row += reply + shown
            labels += reply + [IGNORED] * len(shown)
        update([row], [labels], 1.5e-3 * (1 - step / LONG))
    model.save_pretrained(folder)
    prompter.processor.save_pretrained(folder)
    return folder
