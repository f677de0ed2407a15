"""What the command line prints about sources and prepared datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from data_prep.checks.tokens import image_token_side, text_token_counter
from data_prep.ingest.images import image_tokens
from data_prep.sources.catalog import CATALOG
from data_prep.sources.own_files import RecordSource
from data_prep.sources.text_files import recognize
from trainer.config import ConfigError
from trainer.data.dataset import Dataset
from trainer.data.schema import Manifest, Row, question_text
from trainer.images.decoding import image_size
from trainer.rewards.grading.kinds import in_words, reading


def catalog() -> str:
    """All named datasets with repository, number of rows, license, and what was checked."""
    lines = []
    for name, entry in CATALOG.items():
        kind = "evaluation" if entry.evaluation else "training"
        rows = f"{entry.rows:,} rows" if entry.rows else "rows not stated"
        license = entry.license or "not read here: look before use"
        commit = entry.revision or "main, named in the manifest"
        lines.append(f"{name:<12}{kind}: {entry.about}")
        lines.append(f"{'':<12}{entry.repo}, {rows}, license {license}")
        lines.append(f"{'':<12}commit: {commit}; checked: {entry.checked}")
    lines.append(f"{'generated':<12}training: geometry, counting; five difficulties (--rows, --seed)")
    lines.append(f"{'':<12}drawn here; checked: every kind of question by an independent solver (tests)")
    return "\n".join(lines)


def detected(sources: Sequence[RecordSource]) -> str:
    """How own data will be read: form, and the column of each role with a value."""
    lines = []
    for source in sources:
        files = ", ".join(path.name for path, _ in source.tables[:4])
        more = f" and {len(source.tables) - 4} more" if len(source.tables) > 4 else ""
        lines.append(f"{files}{more}: read as {source.form.name}")
        for path, _ in source.tables:
            if path.suffix != ".parquet" and (unusual := recognize(path, source.text).unusual(path)):
                lines.append(f"  {path.name}: {unusual}")
        for role, column, value in source.describe():
            arrow = "<-" if value else ":"
            lines.append(f"  {role:<9} {arrow} {column:<24} {value}".rstrip())
        places = list(map(str, source.roots))
        if source.beside:
            places.append(f"paths from {source.beside}")
        if "images" in source.form.columns or "chat" in source.form.columns:
            lines.append(f"  images are looked for in the records, {', '.join(places)}")
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()


def row(dataset: Dataset, index: int, tokenizer: str, min_pixels: int, max_pixels: int) -> str:
    """One row as the model sees it, with its sizes in tokens and what supervised training learns."""
    item = dataset[index]
    lines = [f"row {index} of {dataset.split}: {item.id}, {item.source}"]
    images = iter(item.images)
    side = image_token_side(tokenizer)
    for message in item.messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            text = part.get("text", "")
            if part["type"] == "image":
                text = _image(next(images), min_pixels, max_pixels, side)
            lines.append(f"  {message['role']:<10}{text}")
    lines.append(f"  reference answer: {item.answer} ({item.answer_type})")
    question = question_text(item.messages)
    lines.append(f"  read as: {in_words(item.reading or reading(item.answer, question))}")
    if item.solution:
        lines.append(f"  solution: {item.solution}")
    if item.extra:
        lines.append(f"  extra: {item.extra}")
    lines.append(f"  tokens: {_tokens(item, tokenizer, min_pixels, max_pixels, side)}")
    return "\n".join(lines)


def mask(dataset: Dataset, index: int, model: str, min_pixels: int, max_pixels: int) -> str:
    """One row token by token as supervised training reads it: `+` is learned, the rest is context."""
    from trainer.config import Model
    from trainer.data.processor import Prompter

    prompter = Prompter(Model(path=model, min_pixels=min_pixels, max_pixels=max_pixels))
    item = dataset[index]
    solution = prompter.solution_ids(item) if item.solution else []
    earlier = set(prompter.learned_positions(item))
    marked = []
    for position, token in enumerate(prompter.token_ids(item)):
        marked.append(("+" if position in earlier else " ", token))
    for token in solution:
        marked.append(("+", token))
    count = len(earlier) + len(solution)
    lines = [
        f"row {index} of {dataset.split}: {item.id}, {len(marked) - count} tokens of context, {count} learned"
    ]
    for (sign, token), run in groupby(marked):
        repeats = len(list(run))
        times = f" x {repeats}" if repeats > 1 else ""
        lines.append(f"{sign} {token:>6} {prompter.tokenizer.decode([token])!r}{times}")
    return "\n".join(lines)


def _image(data: bytes, min_pixels: int, max_pixels: int, side: int) -> str:
    width, height = image_size(data, "")
    tokens = image_tokens(width, height, min_pixels, max_pixels, side)
    return f"[image {width}x{height}, {len(data):,} bytes, {tokens} tokens]"


def _tokens(item: Row, tokenizer: str, min_pixels: int, max_pixels: int, side: int) -> str:
    of_images = 0
    for data in item.images:
        width, height = image_size(data, item.id)
        of_images += image_tokens(width, height, min_pixels, max_pixels, side)
    if not tokenizer:
        return f"{of_images} of images (--tokenizer MODEL counts the text)"
    count = text_token_counter(tokenizer)
    prompt = count([item.messages])[0] + of_images - len(item.images)
    shown = f"prompt {prompt} ({of_images} of images)"
    if item.solution:
        chat = [*item.messages, {"role": "assistant", "content": item.solution}]
        whole = count([chat])[0] + of_images - len(item.images)
        shown += f"; supervised: {prompt} masked, about {whole - prompt} learned from"
    return shown


def rejected_answers(manifest: Manifest) -> list[str]:
    """The reference answers that the grader cannot use, a line for each type."""
    lines = []
    for kind, bad in manifest.statistics.get("rejected_answers", {}).items():
        examples = ", ".join(repr(example[:40]) for example in bad["examples"])
        lines.append(f"  rejected as {kind}: {bad['rows']:,}, e.g. {examples}")
    return lines


def weighted(texts: Sequence[str]) -> list[tuple[str, float]]:
    """(path, weight) of each `PATH` or `PATH=WEIGHT`. Raises ConfigError for a weight that is no number."""
    parts = []
    for text in texts:
        path, equals, weight = text.rpartition("=")
        if Path(text).exists() or not equals:
            parts.append((text, 1.0))
            continue
        try:
            value = float(weight)
        except ValueError:
            value = 0.0
        if not 0 < value < 1000:
            raise ConfigError(f"{text}: after = stands a weight above 0 and below 1000, such as 0.5 or 2")
        parts.append((path, value))
    return parts


def listed(counts: Mapping[str, int], form: str = "{}: {:,}") -> str:
    """Counts on one line."""
    return ", ".join(form.format(name, count) for name, count in counts.items())


def summary(manifest: Manifest, where: str) -> None:
    """Prints what a preparation made, and what it left out."""
    rows = listed(manifest.rows, "{} {:,}")
    size = manifest.size_bytes / 2**20
    print(f"{manifest.name}: {rows} rows, {len(manifest.files)} shards, {size:,.1f} MiB in {where}")
    for reason, count in manifest.quarantined.items():
        print(f"  left out: {count:>7,}  {reason}")
    if stats := manifest.statistics:
        print(f"reference answers: {listed(stats['answer_types'])}", *rejected_answers(manifest), sep="\n")
        for finding, count in stats["found"].items():
            print(f"  kept as published: {count:>7,}  {finding}")
        frames = "images with more frames or pages, of which the first is taken"
        notes = stats.get("notes", {}) | {
            "members of the archive refused, listed in the manifest": len(stats["images"]["refused"]),
            frames: stats["images"].get("with_more_frames", 0),
        }
        near = "have an image that train nearly has, or its text question (the source's own split)"
        for split, count in stats["groups"]["rows_near_train"].items():
            notes[f"rows of {split} {near}"] = count
        for note, count in notes.items():
            if count:
                print(f"  note: {count:,} {note}")
        for overlap in stats["overlaps"]:
            touched = sum(overlap["evaluation_rows_touched"].values())
            excluded = f"{overlap['rows_excluded']:,} rows left out"
            print(f"  {overlap['set']}: {excluded}, with images of {touched:,} of its rows")
    print(
        f"  fingerprint {manifest.fingerprint[:16]}; see preview.html and quarantine.jsonl beside the shards"
    )
