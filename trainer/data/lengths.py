"""The length of every row, computed in parallel before anything is loaded, and kept on disk.

The prompt filter, the learning-rate schedule, and the dealing of samples to ranks all follow from these
numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trainer.config import ConfigError, RunConfig, Split
from trainer.config.run_folder import write_whole
from trainer.data.dataset import Dataset, cache_folder, chat_messages
from trainer.data.processor import Prompter

VERSION = 3
"""Version of the way in which `measure_lengths` counts; a part of the cache's key."""


def measure_lengths(
    prompter: Prompter, dataset: Dataset, start: int, stop: int, solutions: bool
) -> np.ndarray:
    """Tokens of rows `start` to `stop`, [rows, 2] int32: the prompt with its image tokens, and the worked
    solution. The second column is 0 without a solution, and everywhere unless `solutions`, which only
    supervised training needs. Image headers are read, but nothing is decoded."""
    columns = ["id", "source", "messages", "images"]
    if solutions:
        columns.append("solution")
    parts = []
    for table in dataset.tables(columns, start, stop):
        chats = []
        images = []
        messages = table.column("messages").to_pylist()
        sources = table.column("source").to_pylist()
        for stored, source, row in zip(messages, sources, table.column("images"), strict=True):
            chats.append(dataset.prompting.asked(chat_messages(stored), source))
            images.append([image["bytes"].as_py() for image in row.values or ()])
        part = np.zeros((table.num_rows, 2), np.int32)
        part[:, 0] = prompter.lengths(chats, images, table.column("id").to_pylist())
        if solutions:
            texts = [prompter.solution_text(text) for text in table.column("solution").to_pylist()]
            token_ids = prompter.tokenizer(texts, add_special_tokens=False)["input_ids"]
            row_ids = table.column("id").to_pylist()
            for row, (ids, text) in enumerate(zip(token_ids, texts, strict=True)):
                prompter.check_vision_tokens(ids, 0, row_ids[row])
                part[row, 1] = len(ids) + 1 if text else 0  # with the end token
        parts.append(part)
    return np.concatenate(parts) if parts else np.zeros((0, 2), np.int32)


def cached_lengths(key: object, compute: Callable[[], np.ndarray], folder: Path | None = None) -> np.ndarray:
    """Values of `compute()`, or those that an earlier run on this node computed under an equal key. A damaged
    file is replaced."""
    folder = folder or cache_folder() / "lengths"
    digest = hashlib.sha256(json.dumps([VERSION, key], sort_keys=True).encode()).hexdigest()
    path = folder / f"{digest[:32]}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):
        return np.load(path, allow_pickle=False)

    values = compute()
    # A full or read-only disk costs the next start some seconds, but does not stop this one.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        data = io.BytesIO()
        np.save(data, values)
        write_whole(path, data.getvalue())
    return values


def usable_rows(config: RunConfig, lengths: np.ndarray, split: Split) -> list[int]:
    """Indices of the rows that can be trained on. Prints how many rows of the split are left out, and why.
    The prompt must fit. With SFT there must be a solution, and both together must fit. `lengths` [rows, 2]
    come from `measure_lengths`. Raises ConfigError if no row has a solution."""
    prompts = lengths[:, 0]
    solutions = lengths[:, 1]
    fits = prompts <= config.data.prompt_max_tokens
    reasons = {f"prompts over {config.data.prompt_max_tokens} tokens": int((~fits).sum())}
    if config.method == "sft":
        solved = fits & (solutions > 0)
        if not solved.any():
            raise ConfigError(
                f"{split.path} has no `solution` in split {split.name}: SFT needs worked solutions"
            )
        whole = solved & (prompts + solutions <= config.sft.max_tokens)
        reasons["no solution"] = int((fits & ~solved).sum())
        reasons[f"over {config.sft.max_tokens} tokens with their solution"] = int((solved & ~whole).sum())
        fits = whole
    if not fits.all():
        why = [f"{count} {reason}" for reason, count in reasons.items() if count]
        left_out = f"{int((~fits).sum())} of {len(lengths)} rows of {split.name} left out"
        print(f"data: {left_out}: {', '.join(why)}", flush=True)
    return np.flatnonzero(fits).tolist()
