"""A model as deep as a real one whose completions are as long as a test needs: most of them short, a few very long.

One attention head of the first layer finds `CALL` in the prompt, another finds `STAY` in the completion, and each
writes a residual dimension that no other layer writes. The head's rows of the end token and of `STAY` are fitted to
read them: without `STAY` a completion ends with a probability of about 1/mean at every token, with it never, and only
behind a prompt with `CALL` is `STAY` sampled. Engine and policy load these weights as they load any, and the engine
samples the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from examples.demo import tiny_model
from trainer.config import Model
from trainer.data.processor import Prompter
from trainer.data.schema import Row

WIDTH, VISION_DEPTH = 64, 4
CALL, STAY = "@", "#"
"""Tokens of one character each that no row's question has (but those that are to have them)."""
FLAGS = {CALL: (60, 62, 14), STAY: (61, 63, 15)}
"""Of each: its dimension of the embedding, the one where an attention head notes it, and the head's rotary frequency,
the slowest two, so that a prompt's distance does not matter."""
ONE, STRENGTH = 59, 6.0
"""A dimension that is the same for all tokens, a constant to the head; it and the flags are this strong."""
PROBABLE, NEVER = 1 / 150, 1e-13
"""Of `STAY` per token behind `CALL`; and of what is not to happen."""
COMPLETION = 200
"""Tokens of the random completions that lengths are fitted on."""


def build(
    out: Path, layers: int, vocabulary: int, mean_tokens: int, rows: Sequence[Row], positions: int = 8192
) -> Path:
    """Writes the model: 28 layers are those of 3B to 7B, 36 of 3B; a vocabulary above the tokenizer's is padding, which
    is never sampled, and decides how many tokens make a chunk of logits. Lengths are fitted on prompts of `rows`."""
    shape = tiny_model.Shape(WIDTH, 2 * WIDTH, layers, 2, 1, WIDTH, 2 * WIDTH, VISION_DEPTH, False)
    tiny_model.SHAPES["soak"] = shape
    tiny_model.build(out, 0, "soak")  # ty: ignore[invalid-argument-type]
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(out)
    torch.manual_seed(0)
    model.resize_token_embeddings(vocabulary, mean_resizing=False)
    model.config.text_config.max_position_embeddings = positions
    model.save_pretrained(out)  # the prompter reads the vocabulary's size
    with torch.no_grad():
        note_flags(model, tokenizer)
        fit_head(model, out, rows, mean_tokens)
    model.save_pretrained(out)
    return out


def note_flags(model: Qwen2_5_VLForConditionalGeneration, tokenizer: AutoTokenizer) -> None:
    """Keeps the flags' dimensions to themselves, and lets the first layer's two heads copy each to its note."""
    text, dims = model.model.language_model, [ONE, *(d for a, b, _ in FLAGS.values() for d in (a, b))]
    text.embed_tokens.weight[:, dims] = 0
    text.embed_tokens.weight[:, ONE] = STRENGTH
    merger = model.model.visual.merger.mlp[-1]
    merger.weight[dims], merger.bias[dims] = 0, 0
    for layer in text.layers:
        layer.self_attn.o_proj.weight[dims] = 0
        layer.mlp.down_proj.weight[dims] = 0
    first = text.layers[0].self_attn
    for part in (first.q_proj, first.k_proj, first.v_proj):
        part.weight.zero_()
        part.bias.zero_()
    first.o_proj.weight.zero_()
    for head, (token, (flag, note, frequency)) in enumerate(FLAGS.items()):
        (i,) = tokenizer.encode(token, add_special_tokens=False)
        text.embed_tokens.weight[i, flag] = STRENGTH
        first.q_proj.bias[head * tiny_model.HEAD + frequency] = 1
        first.k_proj.weight[frequency, flag] = 40  # the norm makes the flag 5.6: 39 nats above all other keys
        first.v_proj.weight[head, flag] = 1
        first.o_proj.weight[note, head * tiny_model.HEAD + head] = 0.7


def fit_head(model: Qwen2_5_VLForConditionalGeneration, out: Path, rows: Sequence[Row], mean_tokens: int) -> None:
    """Ridge regression of the rows of `STAY` and the end token onto the log-odds that they are to have."""
    prompter = Prompter(Model(path=str(out)))
    ids = {t: prompter.tokenizer.encode(t, add_special_tokens=False)[0] for t in FLAGS}
    head, end = model.lm_head.weight, prompter.eos_token_id
    hidden, called, stayed = [], [], []
    for row in rows:
        prompt, completion = prompter.encode(row), torch.randint(len(prompter.tokenizer) - 14, (COMPLETION,))
        completion[COMPLETION // 2] = ids[STAY]
        tokens = torch.tensor([prompt.token_ids + completion.tolist()])
        images = {} if prompt.grid_thw is None else {
            "pixel_values": prompt.pixel_values, "image_grid_thw": prompt.grid_thw,
            "mm_token_type_ids": (tokens == prompter.image_token_id).int()}  # fmt: skip
        states = model.model(input_ids=tokens, **images).last_hidden_state[0, -COMPLETION - 1 : -1]
        # The first token follows what no other does: it counts like a tenth of them.
        hidden += [states, states[:1].expand(COMPLETION // 10, -1)]
        called += [ids[CALL] in prompt.token_ids] * sum(map(len, hidden[-2:]))
        stayed += [i > COMPLETION // 2 for i in range(COMPLETION)] + [False] * (COMPLETION // 10)
    x, call, stay = torch.cat(hidden).double(), torch.tensor(called), torch.tensor(stayed)
    head[:, [ONE, *(note for _, note, _ in FLAGS.values())]] = 0
    others = torch.ones(len(head), dtype=torch.bool)
    others[prompter.banned_token_ids() + [ids[STAY], end]] = False
    rest = (x @ head[others].double().t()).logsumexp(-1)
    for token, p in (
        (ids[STAY], torch.where(call & ~stay, PROBABLE, NEVER)),
        (end, torch.where(stay, NEVER, 1 / mean_tokens)),
    ):
        head[token] = ridge(x, rest + p.double().logit()).float()


def ridge(x: Tensor, y: Tensor) -> Tensor:
    """[n, d], [n] -> [d]."""
    return torch.linalg.solve(x.T @ x + torch.eye(x.shape[1], dtype=x.dtype), x.T @ y)
