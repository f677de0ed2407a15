"""What an untrained Instruct model scores when it is asked in our form, and in a published one.

    python -m benchmarks.answer_forms        # SmolLM2-135M-Instruct, greedy; writes answer_forms.json

Questions are sums of the family chain_sum, asked as `data.system_prompt` says: our system message, whose
answers are boxes in an `<answer>` block; and none, with the words of GSM8K's published evaluation at the
question, whose answers may stand anywhere. Every completion is graded in every form.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from data_prep.generate.families import Families
from examples.pretrained import smollm2
from trainer.config import Model, Rewards
from trainer.data.processor import Prompter
from trainer.data.prompts import PromptWording
from trainer.data.schema import reference_of
from trainer.rewards.grading.forms import FORMS
from trainer.rewards.scorer import Scorer

ASKED = {"ours": PromptWording("ours", "block"), "published": PromptWording("published", "any")}
SOURCE = "gsm8k-test"
"""The benchmark whose published words are used."""


def completions(folder: Path, chats: list[list[dict]], tokens: int, batch: int) -> list[str]:
    """Greedy completions of chats, by transformers, without padding tokens and the end."""
    prompter = Prompter(Model(path=str(folder)))
    tokenizer = prompter.tokenizer
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = []
    for start in range(0, len(chats), batch):
        prompts = prompter.texts(chats[start : start + batch])
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        texts += tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def graded(texts: list[str], references: list[str], form: str) -> dict[str, int]:
    """Verdicts of completions in one form, counted."""
    with Scorer(Rewards(answer=form, workers=1, max_timeout_rate=1.0, max_error_rate=1.0)) as scorer:
        outcomes = scorer.score(texts, references, ["task"] * len(texts))
    return dict(Counter(outcome.verdict for outcome in outcomes))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="a model folder (default: SmolLM2, fetched)")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48, help="longest completion (%(default)s)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    rows = list(
        Families({"chain_sum": 1.0}, options.rows, difficulty=(1, 2), evaluation=True, validation=0.5).rows()
    )
    references = [reference_of(row.answer, row.extra) for row in rows]
    result: dict = {
        "model": Path(options.model).name or "SmolLM2-135M-Instruct",
        "questions": f"{len(rows)} of chain_sum, difficulty 1 and 2, greedy, {options.tokens} tokens at most",
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.model or f"{scratch}/model")
        if not options.model:
            smollm2.main(["--out", str(folder)])
        for name, prompting in ASKED.items():
            chats = [prompting.asked(row.messages, SOURCE) for row in rows]
            texts = completions(folder, chats, options.tokens, options.batch)
            result[name] = {
                "form": prompting.answer,
                "verdicts": {form: graded(texts, references, form) for form in FORMS},
                "examples": texts[:2],
            }
            shares = {
                form: counts.get("correct", 0) / len(rows)
                for form, counts in result[name]["verdicts"].items()
            }
            result[name]["accuracy"] = shares
            print(f"asked as {name}: {shares}", flush=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
