"""Makes a prepared dataset of sources: unpack and check the images, check every row, split, write,
manifest last.

The rows are read three times: to see which images are wanted, for the checks, and to write them. A line costs
microseconds, and so memory holds neither texts nor images.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

from data_prep.checks.overlap import mark_overlaps
from data_prep.checks.split import groups_of, validation_groups
from data_prep.checks.tokens import image_token_side, text_token_counter
from data_prep.checks.validate import UNASKABLE, CheckedRow, References, Settings, judge, mark_repeats
from data_prep.ingest.archive import Refused
from data_prep.ingest.checking import warm_up
from data_prep.ingest.image_store import ImageStore
from data_prep.ingest.images import ImageFacts
from data_prep.ingest.wanted import Wanted
from data_prep.sources.row_source import BadRow, Candidate, Source
from data_prep.write import statistics
from data_prep.write.preview import Samples, write_preview
from data_prep.write.shards import SplitWriter, clear, fingerprint, others_in, write_manifest
from trainer.config import ConfigError
from trainer.data.dataset import MANIFEST, read_manifest
from trainer.data.schema import SYSTEM_PROMPT, TEXT_SYSTEM_PROMPT, Manifest, Row, question_text, row_id_of
from trainer.rewards.grading.kinds import reading

Progress = Callable[[str, int, int], None]
"""(stage, done, total): called often; total 0 where it is not known."""
BATCH_ROWS = 512


def _quiet(stage: str, done: int, total: int) -> None:
    pass


class _OpenSource:
    """A source with its images, and with what the checks found of its rows."""

    images: ImageStore

    def __init__(self, source: Source, settings: Settings) -> None:
        self.source = source
        self.settings = settings
        self.image_bytes = source.image_bytes()
        self.wanted = Wanted(())
        self.refused = Refused()
        self.unused = 0
        self.row_count = 0
        self.references = 0
        """Number of references to images."""
        self.judged: list[CheckedRow] = []
        self.problems: list[BadRow] = []

    def find_wanted(self) -> None:
        """First reading: which images the rows name."""
        paths: set[str] = set()
        for row in self.rows():
            self.row_count += 1
            if isinstance(row, Candidate):
                self.references += len(row.images)
                paths.update(row.images)
        self.wanted = Wanted(paths)

    def open_images(self, work_dir: Path) -> None:
        """Opens the images, after the source's files are hashed: images of a former run count if these
        are equal."""
        key = json.dumps([self.source.files, dataclasses.asdict(self.settings.limits)], sort_keys=True)
        self.images = ImageStore(work_dir, self.settings.limits, hashlib.sha256(key.encode()).hexdigest())

    def rows(self) -> Iterator[Candidate | BadRow]:
        return islice(self.source.rows(), self.settings.limit or None)

    def facts(self, row: Candidate) -> list[ImageFacts | None | str]:
        """Facts of the row's images; None for a missing image, a reason for one that cannot be read."""
        facts: list[ImageFacts | None | str] = []
        for path in row.images:
            member = self.wanted.member(path)
            refused = "" if member else self.refused.reason(path)
            if member == "" or member in self.images.conflicting:
                facts.append(f"image_ambiguous: several images are named {path}")
            elif refused:
                facts.append(f"image_refused: {path}: {refused}")
            else:
                facts.append(self.images.facts(member or ""))
        return facts

    def read(self, row: Candidate) -> list[bytes]:
        return [self.images.read(self.wanted.member(path) or "") for path in row.images]


def prepare(
    sources: Sequence[Source],
    out_dir: str | Path,
    name: str,
    settings: Settings = Settings(),  # noqa: B008 - frozen
    workers: int = 0,
    on_progress: Progress = _quiet,
    overwrite: bool = False,
    exclude: Sequence[str] = (),
    work_dir: str | Path = "",
) -> Manifest:
    """Prepares `sources` as one dataset in a local directory; does nothing if it holds this very dataset.

    workers: decoding processes; 0: one per core. exclude: prepared evaluation sets; rows with an image that
    one of them nearly has are left out. work_dir: of the unpacked images, removed at the end; default: inside
    `out_dir`. Raises ConfigError for another dataset there without `overwrite`, too little disk, or no row
    that can be used.
    """
    out = Path(out_dir)
    workers = workers or len(os.sched_getaffinity(0))
    if (out / MANIFEST).exists():
        former = read_manifest(out)
        if former.name == name and former.settings == _asked(sources, settings, exclude):
            return former
        if not overwrite:
            raise ConfigError(
                f"{out} holds a dataset made otherwise: choose another --out, or pass --overwrite"
            )
    elif others := others_in(out):
        raise ConfigError(
            f"{out} holds {others[0]} and is no dataset's folder: give --out a new or an empty folder"
        )
    out.mkdir(parents=True, exist_ok=True)
    work = Path(work_dir) if work_dir else out / ".work"
    opened = [_OpenSource(source, settings) for source in sources]
    warm_up()
    for origin in opened:
        origin.find_wanted()
    described = _asked(sources, settings, exclude)
    for number, origin in enumerate(opened):
        origin.open_images(work / str(number))
    check_disk(opened, out, work)
    for origin in opened:
        _unpack(origin, workers, on_progress)
    with closing(References(workers)) as references:
        _judge_all(opened, settings, references, on_progress)
        kept = list(chain.from_iterable(origin.judged for origin in opened))
        mark_repeats(kept, references.same)

    images = _UnpackedImages(opened)
    overlaps = mark_overlaps(kept, images.facts, exclude, images.read)
    clear(out)
    if settings.evaluation:
        _keep_as_published(kept, chain.from_iterable(origin.problems for origin in opened))
    if all(row.reason for row in kept):
        _nothing_left(opened, out)
    groups = _assign_splits(kept, images.facts, settings)
    rows = _rows_of_splits(kept)
    samples = Samples(rows)
    manifest = _write(opened, out, name, described, rows, samples, on_progress)
    stats = statistics.collect(kept, images.facts, groups)
    refused = chain.from_iterable(origin.refused.members for origin in opened)
    images_known = stats["images"]
    images_known["unused"] = sum(origin.unused for origin in opened)
    images_known["refused"] = list(map(list, islice(refused, 1000)))
    images_known["resumed"] = sum(origin.images.resumed for origin in opened)
    stats["overlaps"] = overlaps
    stats["notes"] = dict(sum((origin.source.notes for origin in opened), Counter()))
    manifest = dataclasses.replace(manifest, statistics=stats)
    write_preview(out, manifest, samples)
    write_manifest(out, manifest)
    for origin in opened:
        origin.images.close(remove=True)
    shutil.rmtree(work, ignore_errors=True)
    return manifest


class _UnpackedImages:
    """The images of all sources, by their sha256."""

    def __init__(self, opened: Sequence[_OpenSource]) -> None:
        self.facts: dict[str, ImageFacts] = {}
        self._places: dict[str, tuple[ImageStore, str]] = {}
        for origin in opened:
            for member, image in origin.images.stored.items():
                self.facts[image.facts.sha256] = image.facts
                self._places[image.facts.sha256] = origin.images, member

    def read(self, sha256: str) -> bytes:
        store, member = self._places[sha256]
        return store.read(member)


def _asked(sources: Sequence[Source], settings: Settings, exclude: Sequence[str]) -> dict[str, Any]:
    """The settings as the manifest holds them: no path of this machine, so that equal data has an equal
    fingerprint."""
    described = json.loads(json.dumps(dataclasses.asdict(settings)))
    if not settings.sft:
        del described["sft"]  # the same data keeps the fingerprint that it had before this option
    if os.path.isdir(settings.tokenizer):
        described["tokenizer"] = Path(settings.tokenizer).name
    described["sources"] = []
    for source in sources:  # the weight is of an earlier version, and equal data keeps its fingerprint
        entry = {"name": source.name, "revision": source.revision, "files": source.files, "weight": 1.0}
        described["sources"].append(entry)
    described["exclude"] = [read_manifest(path).fingerprint for path in exclude]
    return described


def check_disk(opened: Sequence[_OpenSource], out: Path, work: Path) -> None:
    """Raises ConfigError if the unpacked images and the shards, where rows share images, cannot fit."""
    unpack = 0
    shards = 0
    for origin in opened:
        size = origin.image_bytes
        already_unpacked = sum(image.size for image in origin.images.stored.values())
        unpack += max(0, size - already_unpacked)
        rows_per_image = max(1.0, origin.references / max(1, len(origin.wanted)))
        shards += int(size * rows_per_image) + 4096 * origin.row_count
    work.mkdir(parents=True, exist_ok=True)
    same_disk = os.stat(out).st_dev == os.stat(work).st_dev
    needs = {out: shards + unpack} if same_disk else {out: shards, work: unpack}
    for place, need in needs.items():
        free = shutil.disk_usage(place).free
        if need > free:
            raise ConfigError(
                f"{place} has {free / 2**30:.1f} GiB free, "
                f"the preparation needs up to {need / 2**30:.1f} GiB: free some, "
                "or choose another --out (and --work for the unpacked images)"
            )


def _unpack(origin: _OpenSource, workers: int, on_progress: Progress) -> None:
    if not len(origin.wanted):
        return
    total = len(origin.wanted)
    stage = f"images of {origin.source.name}"
    seen = 0

    def follow(images: int, _: int) -> None:
        nonlocal seen
        seen += images
        on_progress(stage, min(seen, total), total)

    origin.unused = origin.images.fill(
        lambda: origin.source.members(origin.refused, origin.wanted), origin.wanted, workers, follow
    )
    on_progress(stage, total, total)


def _judge_all(
    opened: Sequence[_OpenSource], settings: Settings, references: References, on_progress: Progress
) -> None:
    """Second reading: every row's checks, in batches for the tokenizer."""
    count_tokens = text_token_counter(settings.tokenizer)
    has_images = any(len(origin.wanted) for origin in opened)
    image_side = image_token_side(settings.tokenizer if has_images else "")
    total = sum(origin.row_count for origin in opened)
    done = 0
    for origin in opened:
        rows = origin.rows()
        while batch := list(islice(rows, BATCH_ROWS)):
            origin.problems += [row for row in batch if isinstance(row, BadRow)]
            candidates = [complete(row, settings.sft) for row in batch if isinstance(row, Candidate)]
            counts = count_tokens([row.messages for row in candidates])
            answers = references.check(candidates)
            for row, reference, tokens in zip(candidates, answers, counts, strict=True):
                origin.judged.append(judge(row, reference, origin.facts(row), tokens, settings, image_side))
            done += len(batch)
            on_progress("rows checked", done, total)


def complete(row: Candidate, sft: bool = False) -> Candidate:
    """The row with a system prompt, ours if its source has none. With `sft` the row stays the same."""
    if sft or row.messages and row.messages[0]["role"] == "system":
        return row
    prompt = SYSTEM_PROMPT if row.images else TEXT_SYSTEM_PROMPT
    return dataclasses.replace(row, messages=[{"role": "system", "content": prompt}, *row.messages])


def _assign_splits(
    rows: list[CheckedRow], facts: dict[str, ImageFacts], settings: Settings
) -> dict[str, Any]:
    """Gives every kept row its split. Returns the statistics of the groups."""
    kept = [row for row in rows if not row.reason]
    looks = {sha: facts[sha].look for row in kept for sha in row.images}
    keys = groups_of([row.images for row in kept], [row.question for row in kept], looks)

    free = [key for row, key in zip(kept, keys, strict=True) if not row.split]
    chosen = validation_groups(free, settings.validation, settings.split_seed)
    train = set()
    for row, key in zip(kept, keys, strict=True):
        row.split = row.split or ("validation" if key in chosen else "train")
        if row.split == "train":
            train.add(key)

    near_train: Counter[str] = Counter()
    for row, key in zip(kept, keys, strict=True):
        if row.split != "train" and key in train:
            near_train[row.split] += 1
    sizes = Counter(keys)
    return {"count": len(sizes), "largest": max(sizes.values()), "rows_near_train": dict(near_train)}


def _keep_as_published(rows: list[CheckedRow], problems: Iterable[BadRow]) -> None:
    """Keeps all rows that can be asked, whatever the checks say. Raises ConfigError that names the others."""
    unaskable = [row for row in rows if row.reason.partition(":")[0] in UNASKABLE]
    lost = [f"row {row.index} ({row.reason})" for row in (*problems, *unaskable)]
    if lost:
        shown = lost[:3] + (["..."] if len(lost) > 3 else [])
        raise ConfigError(
            f"{len(lost)} rows of this evaluation set cannot be asked, "
            f"and a score without them is no score of it: {'; '.join(shown)}"
        )
    for row in rows:
        row.found = row.reason.partition(":")[0]
        row.reason = ""


def _nothing_left(opened: Sequence[_OpenSource], out: Path) -> NoReturn:
    """Writes the quarantine file and says why there is no dataset, with the first rows as they were read."""
    reasons = _write(opened, out, "", {}, {}, Samples({}), _quiet).quarantined
    counted = ", ".join(f"{n} {reason}" for reason, n in islice(reasons.items(), 5)) or "there are no rows"
    first = ""
    with open(out / "quarantine.jsonl", encoding="utf-8") as quarantine:
        for line in islice(quarantine, 3):
            first += f"\n  {line.strip()[:500]}"
    raise ConfigError(
        f"no row can be used: {counted}; all of them are in {out}/quarantine.jsonl, the first are{first}"
    )


def _rows_of_splits(judged: list[CheckedRow]) -> dict[str, int]:
    """Number of rows that each split keeps, `train` first."""
    counts = Counter[str]()
    for row in judged:
        counts[row.split] += not row.reason
    counts = +counts  # without splits that keep no row
    return dict(sorted(counts.items(), key=lambda count: (count[0] != "train", count[0])))


def _written(row: Candidate, result: CheckedRow, origin: _OpenSource) -> Row:
    """A kept row as its shard holds it."""
    return Row(
        id=row_id_of(row.source, row.messages, result.images),
        source=row.source,
        messages=row.messages,
        images=origin.read(row),
        answer=row.answer,
        answer_type=result.answer_type,
        solution=row.solution,
        reading=reading(row.answer, question_text(row.messages)),
        extra=row.extra,
    )


def _write(
    opened: Sequence[_OpenSource],
    out: Path,
    name: str,
    described: dict[str, Any],
    rows: dict[str, int],
    samples: Samples,
    on_progress: Progress,
) -> Manifest:
    """Third reading: writes kept rows to shards, the others to the quarantine file."""
    writers = {split: SplitWriter(out, split) for split in rows}
    counts = dict.fromkeys(rows, 0)
    total = sum(origin.row_count for origin in opened)
    done = 0
    with open(out / "quarantine.jsonl", "w", encoding="utf-8", errors="backslashreplace") as file:
        quarantined: Counter[str] = Counter()

        def set_aside(reason: str, **row: Any) -> None:
            kind, _, detail = reason.partition(": ")
            quarantined[kind] += 1
            record = {"reason": kind, "detail": detail, **row}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

        for origin in opened:
            verdicts = iter(origin.judged)
            for item in origin.rows():
                done += 1
                if done % BATCH_ROWS == 0 or done == total:
                    on_progress("rows written", done, total)
                if isinstance(item, BadRow):
                    reason = f"{item.reason}: {item.detail}"
                    set_aside(reason, source=origin.source.name, index=item.index, raw=item.raw)
                    continue
                row = complete(item, origin.settings.sft)
                result = next(verdicts)
                if result.reason:
                    question = question_text(row.messages)[:2000]
                    shown = {"question": question, "answer": row.answer, "images": row.images}
                    set_aside(result.reason, source=row.source, index=row.index, **shown)
                    continue
                written = _written(row, result, origin)
                writers[result.split].add(written)
                samples.offer(result.split, counts[result.split], written)
                counts[result.split] += 1
    files = []
    images_per_row = {}
    for split, writer in writers.items():
        files += writer.close()
        images_per_row[split] = writer.images_per_row
    revisions = {origin.source.revision for origin in opened}
    return Manifest(
        name=name,
        revision=",".join(sorted(filter(None, revisions))),
        rows=counts,
        files=files,
        images_per_row=images_per_row,
        quarantined=dict(quarantined.most_common()),
        settings=described,
        fingerprint=fingerprint(files, described),
    )
