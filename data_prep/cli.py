"""The command line of data preparation. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.options import GENERATED, NAMES, TASK_FAMILIES, parser
from trainer.config import ConfigError
from trainer.system.errors import OF_THE_DISK, UNWRITABLE, StorageError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_STORAGE

if TYPE_CHECKING:
    from data_prep.prepare import Progress
    from trainer.data.schema import Manifest


def main(arguments: Sequence[str]) -> int:
    """Runs one command.

    Exit code 0, 2 for what cannot work, 35 for a hub or store that stays away (a line on stderr), 130:
    Ctrl-C.
    """
    options = parser().parse_args(arguments)
    try:
        match options.command:
            case "prepare":
                return prepare(options)
            case "from-run":
                return _from_run(options)
        return _with_dataset(options)
    except ConfigError as error:
        print(f"data_prep: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except StorageError as error:
        print(f"data_prep: {error}", file=sys.stderr)
        return EXIT_STORAGE
    except OSError as error:
        if error.errno not in (*OF_THE_DISK, *UNWRITABLE):
            raise
        place = error.filename or "the disk"
        what = "give --out (and --work) a folder that can be written and has room"
        print(
            f"data_prep: {place}: {error.strerror}: {what}; SPOTRL_CACHE and HF_HOME where HOME is read-only",
            file=sys.stderr,
        )
        return EXIT_CONFIG if error.errno in UNWRITABLE else EXIT_STORAGE
    except KeyboardInterrupt:
        print("data_prep: interrupted; the same command resumes from here", file=sys.stderr)
        return EXIT_INTERRUPTED


def _from_run(options: argparse.Namespace) -> int:
    """The rollout log of a run as rows."""
    from data_prep import from_run

    out = options.out or f"data/{Path(options.run).name}.jsonl"
    counts = from_run.write(options.run, options.bucket, out, options.tokens)
    print(f"{out}: {_listed(counts)}")
    return 0


def _with_dataset(options: argparse.Namespace) -> int:
    """The commands for datasets that are prepared already."""
    from data_prep import show
    from trainer.data.dataset import Dataset, read_manifest

    match options.command:
        case "show":
            dataset = Dataset(
                options.dataset, options.split or next(iter(read_manifest(options.dataset).rows))
            )
            if options.mask and not options.tokenizer:
                raise ConfigError(
                    "--mask needs the model whose chat template is used: give --tokenizer MODEL"
                )
            shown = show.mask if options.mask else show.row
            for index in range(options.row, min(options.row + options.n, len(dataset))):
                print(shown(dataset, index, options.tokenizer, options.min_pixels, options.max_pixels))
        case "stats":
            print(show.stats(options.dataset))
        case "preview":
            from data_prep.write.preview import write_preview

            print(write_preview(options.dataset))
        case "check-reward":
            from trainer.rewards.search import check_reward

            dataset = Dataset(
                options.dataset, options.split or next(iter(read_manifest(options.dataset).rows))
            )
            print("\n".join(check_reward(dataset, options.n, options.function)))
        case "verify":
            for split, rows in read_manifest(options.dataset).rows.items():
                Dataset(options.dataset, split).verify()
                print(f"{split}: {rows:,} rows, all shards as in the manifest")
        case "overlap":
            from data_prep.checks.overlap import overlap_report

            print(
                json.dumps(overlap_report(options.dataset, options.evaluation), indent=2, ensure_ascii=False)
            )
        case "mix":
            from data_prep.write.derive import mix

            _summary(
                mix(show.source_parts(options.parts), options.out, Path(options.out).name, options.seed),
                options.out,
            )
        case "filter":
            from data_prep.write.derive import keep_by_rate, read_rates

            rates = read_rates(options.rates) if options.rates else None
            manifest, counts = keep_by_rate(options.dataset, options.out, *_range(options.pass_rate), rates)
            print(_listed(counts))
            _summary(manifest, options.out)
        case "worked":
            from data_prep.write.derive import with_completions

            manifest, unsolved = with_completions(options.dataset, options.out, options.log)
            print(f"without a correct completion: {unsolved:,} rows, left out")
            _summary(manifest, options.out)
        case "export":
            from data_prep.write.export import export

            rows = export(options.dataset, options.to, options.out)
            print(f"{options.out}: {_listed(rows, '{}.parquet {:,}')} rows")
    return 0


def _range(text: str) -> tuple[float, float]:
    low, dots, high = text.partition("..")
    try:
        ends = float(low), float(high)
    except ValueError:
        ends = 1.0, 0.0
    if not dots or not 0 <= ends[0] <= ends[1] <= 1:
        raise ConfigError(f"--pass-rate {text}: give two shares such as 0.1..0.9")
    return ends


def prepare(options: argparse.Namespace) -> int:
    """Prepares one dataset, at a URL by way of a local directory that is removed afterwards."""
    from data_prep import show
    from data_prep.sources.source import BadRecord, split_name

    if options.list:
        print(show.catalog())
        return 0
    if not options.sources:
        raise ConfigError(
            f"name a source: a file, a folder, OWNER/NAME on the hub, or one of {', '.join(NAMES)}, "
            f"generated, {TASK_FAMILIES}FAMILY"
        )
    if not 0 <= options.validation < 1:
        raise ConfigError(f"--validation {options.validation}: give a share from 0 to below 1")
    try:
        split_name(options.split)
    except BadRecord as error:
        raise ConfigError(f"--split: {error.args[1]}") from None
    parts = show.source_parts(options.sources)
    name = options.name or "-".join(_name_of(source) for source, _ in parts)
    where = options.out or f"data/{name}"
    at_url = "://" in where and not where.startswith("file://")
    local = _staging(where) if at_url else Path(where.removeprefix("file://"))
    if at_url:
        from data_prep.write.upload import remote_manifest

        former = remote_manifest(where)
        if former and not options.overwrite and not (local / "manifest.json").exists():
            raise ConfigError(
                f"{where} holds a dataset already ({former.name}): pass --overwrite to replace it"
            )
    with _Bars() as bars:
        manifest = _prepare_local(options, parts, name, local, bars.show)
        if at_url and manifest:
            from data_prep.write.upload import upload

            upload(local, where, bars.show)
    if manifest:
        _summary(manifest, where)
    if at_url and manifest:
        shutil.rmtree(local)
    return 0


def _name_of(source: str) -> str:
    """The name of a dataset, by its source."""
    return TASK_FAMILIES[:-1] if source.startswith(TASK_FAMILIES) else Path(source).stem.lower()


def _staging(url: str) -> Path:
    """Where a dataset for a URL is made first: the same place for the same URL, so that a second start
    continues."""
    cache = Path(os.environ.get("SPOTRL_CACHE", "~/.cache/spotrl/data")).expanduser()
    return cache / f"staging-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def _prepare_local(
    options: argparse.Namespace,
    parts: Sequence[tuple[str, float]],
    name: str,
    out: Path,
    show_progress: Progress,
) -> Manifest | None:
    """None after a dry run."""
    from data_prep import show
    from data_prep.checks.validate import Settings
    from data_prep.prepare import prepare as run
    from data_prep.sources.catalog import CATALOG
    from trainer.images.decoding import ImageLimits

    kinds = set()
    learned = set()
    for source, _ in parts:
        entry = CATALOG.get(source)
        kinds.add(entry.evaluation if entry else options.evaluation)
        learned.add(entry.sft if entry else options.sft)
    if len(kinds) > 1:
        raise ConfigError("training and evaluation sets are prepared apart: two commands")
    evaluation = options.evaluation or kinds.pop()
    if len(learned) > 1 or (learned == {True} and evaluation):
        raise ConfigError(
            "sets for supervised training alone (--sft) are prepared apart from the others: two commands"
        )
    sources = []
    for source, weight in parts:
        opened = _sources(source, options, name if len(parts) == 1 else "", evaluation, show_progress)
        for one in opened:
            one.weight = weight
        sources += opened
        if source not in CATALOG and not _is_drawn(source):
            print(show.detected(opened), file=sys.stderr)
    if options.dry_run:
        return None
    settings = Settings(
        limits=ImageLimits(min_side=options.min_side),
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
        max_tokens=options.max_tokens,
        tokenizer=options.tokenizer,
        validation=0.0 if evaluation else options.validation,
        split_seed=options.split_seed,
        limit=options.limit,
        evaluation=evaluation,
        sft=learned.pop(),
    )
    return run(
        sources,
        out,
        name,
        settings,
        workers=options.workers,
        on_progress=show_progress,
        overwrite=options.overwrite,
        exclude=options.exclude,
        work_dir=options.work,
    )


def _sources(
    source: str, options: argparse.Namespace, name: str, evaluation: bool, show: Progress
) -> Sequence[Any]:
    """One SOURCE of the command line: a name of the catalog, a file or folder, or a repository of the hub."""
    from data_prep.ingest.hub import Repository
    from data_prep.sources import catalog, records
    from data_prep.sources.own import own
    from data_prep.sources.text_files import text_form

    if _is_drawn(source):
        return [_drawn(source, options, evaluation)]
    if source in catalog.CATALOG:
        entry = catalog.CATALOG[source]
        return catalog.sources(
            source, Repository(entry.repo, options.revision or entry.revision, options.mirror), show
        )
    mapping = _mapping(options.map)
    text = text_form(options.encoding, options.delimiter)
    if Path(source).exists():
        return own(source, name, options.images, mapping, options.split, evaluation, options.sft, text)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source) and Path(source).suffix not in records.ENDINGS:
        repository = Repository(source, options.revision, options.mirror)
        return catalog.any_repository(repository, mapping, show, options.split, evaluation, options.sft, text)
    raise ConfigError(
        f"no file, folder or dataset {source!r}: the names are {', '.join(NAMES)}, generated, "
        f"{TASK_FAMILIES}FAMILY; on the hub "
        "a dataset is OWNER/NAME"
    )


def _is_drawn(source: str) -> bool:
    """Whether a source's problems are drawn here, so that `--rows` and `--difficulty` say which."""
    return source == GENERATED or source.startswith(TASK_FAMILIES)


def _drawn(source: str, options: argparse.Namespace, evaluation: bool) -> Any:
    """A source of drawn problems. Raises ConfigError if rows, difficulty or families are not known."""
    low, dots, high = options.difficulty.partition("..")
    ends = (low, high if dots else low)
    if not set(ends) <= set("12345") or ends[0] > ends[1] or options.rows < 1:
        raise ConfigError(
            f"--rows {options.rows} --difficulty {options.difficulty}: give at least one row, and a "
            "difficulty or two ends, such as 3 or 1..5"
        )
    asked = (options.rows, options.seed, (int(ends[0]), int(ends[1])), options.validation, evaluation)
    if source != GENERATED:
        from data_prep.generate.families import Families, weights_of

        return Families(weights_of(source), *asked)
    from data_prep.generate.source import FAMILIES, LARGE, Generated

    families = tuple(options.families.split(",")) if options.families else tuple(FAMILIES)
    if unknown := sorted(set(families) - FAMILIES.keys() - LARGE.keys()):
        raise ConfigError(f"--families {unknown[0]}: the families are {', '.join(FAMILIES | LARGE)}")
    return Generated(*asked, families)


def _mapping(text: str) -> dict[str, str]:
    from data_prep.sources.forms import ROLES

    mapping = {}
    for pair in filter(None, text.split(",")):
        role, equals, column = pair.strip().partition("=")
        if not equals or not column or role not in ROLES:
            raise ConfigError(f"--map {pair}: write ROLE=COLUMN, with a role of {', '.join(ROLES)}")
        mapping[role] = column
    return mapping


def _listed(counts: Mapping[str, int], form: str = "{}: {:,}") -> str:
    return ", ".join(form.format(name, count) for name, count in counts.items())


def _summary(manifest: Manifest, where: str) -> None:
    rows = _listed(manifest.rows, "{} {:,}")
    size = manifest.size_bytes / 2**20
    print(f"{manifest.name}: {rows} rows, {len(manifest.files)} shards, {size:,.1f} MiB in {where}")
    for reason, count in manifest.quarantined.items():
        print(f"  left out: {count:>7,}  {reason}")
    stats = manifest.statistics
    if stats:
        from data_prep import show

        print(show.answers(manifest))
        for finding, count in stats["found"].items():
            print(f"  kept as published: {count:>7,}  {finding}")
    if stats and stats["images"]["refused"]:
        print(
            f"  refused from the archive: {len(stats['images']['refused']):,} members, listed in the manifest"
        )
    if stats:
        frames = stats["images"].get("with_more_frames", 0)
        notes = stats.get("notes", {}) | {
            "images with more frames or pages, of which the first is taken": frames
        }
        for note, count in notes.items():
            if count:
                print(f"  note: {count:,} {note}")
        for split, count in stats["groups"]["rows_near_train"].items():
            near = "have an image that train nearly has (the source's own split)"
            print(f"  note: {count:,} rows of {split} {near}")
        for overlap in stats["overlaps"]:
            touched = sum(overlap["evaluation_rows_touched"].values())
            excluded = f"{overlap['rows_excluded']:,} rows left out"
            print(f"  {overlap['set']}: {excluded}, with images of {touched:,} of its rows")
    print(
        f"  fingerprint {manifest.fingerprint[:16]}; see preview.html and quarantine.jsonl beside the shards"
    )


class _Bars:
    """Progress bars on a terminal; one line per finished stage elsewhere."""

    def __enter__(self) -> _Bars:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._rich = Progress(*columns, console=console) if console.is_terminal else None
        self._tasks: dict[str, Any] = {}
        if self._rich:
            self._rich.start()
        return self

    def show(self, stage: str, done: int, total: int) -> None:
        if self._rich:
            if stage not in self._tasks:
                self._tasks[stage] = self._rich.add_task(stage, total=total or None)
            self._rich.update(self._tasks[stage], completed=done)
        elif total and done >= total and stage not in self._tasks:
            self._tasks[stage] = True
            print(f"{stage}: done ({total:,})", file=sys.stderr)

    def __exit__(self, *_: object) -> None:
        if self._rich:
            self._rich.stop()
