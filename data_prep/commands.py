"""The command line of data preparation. Heavy imports wait until a command needs them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from data_prep.command_options import (
    DATASET,
    EPILOG,
    EXAMPLES,
    GENERATED,
    NAMES,
    OUT,
    PIXELS,
    PREPARE,
    SPLIT,
    DataGroup,
    argument,
    flag,
    needed,
    option,
)
from trainer.config import ConfigError
from trainer.system.errors import OF_THE_DISK, UNWRITABLE, StorageError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_STORAGE
from trainer.system.own_file import looked_in

if TYPE_CHECKING:
    from data_prep.prepare import Progress
    from trainer.data.dataset import Dataset
    from trainer.data.schema import Manifest


@click.group(
    cls=DataGroup,
    no_args_is_help=False,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
def data() -> None:
    """Downloads, checks and converts datasets to one format: Parquet shards with the images."""


def main(arguments: Sequence[str]) -> int:
    """Runs one command.

    Exit code 0, 2 for what cannot work, 35 for a hub or store that stays away (a line on stderr), 130:
    Ctrl-C.
    """
    try:
        with data.make_context("launch.py data", list(arguments)) as context:
            data.invoke(context)
        return 0
    except click.exceptions.Exit as done:  # after --help
        return done.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "launch.py data"
        reason = " ".join(error.format_message().split()).rstrip(".")
        print(f"data_prep: {reason}; see `python3 {path} --help`", file=sys.stderr)
        return EXIT_CONFIG
    except (ConfigError, StorageError) as error:
        print(f"data_prep: {error}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_STORAGE
    except OSError as error:
        if error.errno not in (*OF_THE_DISK, *UNWRITABLE):
            raise
        place = error.filename or "the disk"
        hint = "give --out (and --work) a folder that can be written and has room"
        print(
            f"data_prep: {place}: {error.strerror}: {hint}; SPOTRL_CACHE and HF_HOME where HOME is read-only",
            file=sys.stderr,
        )
        return EXIT_CONFIG if error.errno in UNWRITABLE else EXIT_STORAGE
    except KeyboardInterrupt:
        print("data_prep: interrupted; the same command resumes from here", file=sys.stderr)
        return EXIT_INTERRUPTED


@data.command(epilog=EXAMPLES, params=[*PREPARE])
def prepare(**given: Any) -> None:
    """Download, check and convert your own data, or a published set.

    Reads sources, checks every row and image, writes shards. For a URL a local directory comes first."""
    from data_prep import show
    from data_prep.sources.row_source import BadRecord, split_name

    options = SimpleNamespace(**given)
    if options.list:
        print(show.catalog())
        return
    if not options.sources:
        raise ConfigError(
            f"name a source: a file, a folder, OWNER/NAME on the hub, or one of {', '.join(NAMES)}, generated"
        )
    if not 0 <= options.validation < 1:
        raise ConfigError(f"--validation {options.validation}: give a share from 0 to below 1")
    try:
        split_name(options.split)
    except BadRecord as error:
        raise ConfigError(f"--split: {error.args[1]}") from None
    name = options.name or "-".join(Path(source).stem.lower() for source in options.sources)
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
        manifest = _prepare_local(options, name, local, bars.show)
        if at_url and manifest:
            from data_prep.write.upload import upload

            upload(local, where, bars.show)
    if manifest:
        show.summary(manifest, where)
        if at_url:
            shutil.rmtree(local)


ROW = option("--row", "first row shown (0)", default=0)
SHOWN = option("-n count", "rows shown", default=3)
TOKENS = option("--tokenizer", "count the text's tokens too", "MODEL")
MASK = flag("--mask", "every token by MODEL's template; + marks what SFT learns")


@data.command("show", params=[DATASET, SPLIT, ROW, SHOWN, TOKENS, MASK, *PIXELS])
def show_rows(
    dataset: str, split: str, row: int, count: int, mask: bool, tokenizer: str, **pixels: int
) -> None:
    """Print rows: the chat, image sizes, tokens, reference answer, what is learned from."""
    from data_prep import show

    rows = _split_of(dataset, split)
    if mask and not tokenizer:
        raise ConfigError("--mask needs the model whose chat template is used: give --tokenizer MODEL")
    for index in range(row, min(row + count, len(rows))):
        print((show.mask if mask else show.row)(rows, index, tokenizer, **pixels))


@data.command(params=[DATASET])
def verify(dataset: str) -> None:
    """Read every shard and compare its hash with the manifest.

    Exit code 2 and the shard's name if one is damaged: fetch or prepare it again."""
    from trainer.data.dataset import Dataset, read_manifest

    for split, rows in read_manifest(dataset).rows.items():
        Dataset(dataset, split).verify()
        print(f"{split}: {rows:,} rows, all shards as in the manifest")


FUNCTION = option("--function", "a reward function of yours", "FILE.py:NAME")


@data.command(params=[DATASET, FUNCTION, SPLIT, option("-n count", "rows tried", default=200)])
def check_reward(dataset: str, function: str, split: str, count: int) -> None:
    """Search for replies that earn without the answer, and name the rows that pay.

    Tries spans of questions, constant replies, several values at once, and edits of reference answers."""
    from trainer.rewards import search

    print("\n".join(search.check_reward(_split_of(dataset, split), count, function)))


@data.command(params=[DATASET, argument("evaluation", "a prepared evaluation set", "EVALUATION")])
def overlap(dataset: str, evaluation: str) -> None:
    """Images and sources that a dataset shares with an evaluation set.

    Prints JSON. `prepare --exclude EVALUATION` leaves such rows out."""
    from data_prep.checks.overlap import overlap_report

    print(json.dumps(overlap_report(dataset, evaluation), indent=2, ensure_ascii=False))


WEIGHTED = "DIR=2 takes its training rows twice, DIR=0.5 half of them"
PARTS = argument("parts", WEIGHTED, "DIR[=WEIGHT]", nargs=-1, required=True)


@data.command("mix", params=[PARTS, option("--seed", "of the order (0)", default=0), OUT])
def mix_datasets(parts: tuple[str, ...], seed: int, out: str) -> None:
    """Join prepared datasets by weights.

    Training rows are shuffled, others joined as they are."""
    from data_prep import show
    from data_prep.write.derive import mix

    show.summary(mix(show.weighted(parts), out, Path(out).name, seed), out)


BOUNDS = needed("--pass-rate", "both ends included: 0.1..0.9", metavar="LOW..HIGH")
RATES = option("--rates", 'lines of {"id", "pass_rate"} (default: the rates that came with the rows)', "FILE")


@data.command("filter", params=[DATASET, BOUNDS, RATES, OUT])
def keep_useful(dataset: str, pass_rate: str, rates: str, out: str) -> None:
    """Keep training rows by their pass rate.

    Rows that are always or never solved teach nothing."""
    from data_prep import show
    from data_prep.write.derive import keep_by_rate, read_rates

    manifest, counts = keep_by_rate(dataset, out, *_range(pass_rate), read_rates(rates) if rates else None)
    print(show.listed(counts))
    show.summary(manifest, out)


LOG = needed("--log", "samples.jsonl or pass_rates.jsonl of a run on DIR", metavar="FILE")


@data.command(params=[DATASET, LOG, OUT])
def worked(dataset: str, log: str, out: str) -> None:
    """Solved rows with a run's correct completions, for supervised training (method: sft)."""
    from data_prep import show
    from data_prep.write.derive import with_completions

    manifest, unsolved = with_completions(dataset, out, log)
    print(f"without a correct completion: {unsolved:,} rows, left out")
    show.summary(manifest, out)


def _split_of(path: str, split: str) -> Dataset:
    """A split of a prepared dataset, the first unless one is named."""
    from trainer.data.dataset import Dataset, read_manifest

    return Dataset(path, split or next(iter(read_manifest(path).rows)))


def _range(text: str) -> tuple[float, float]:
    low, dots, high = text.partition("..")
    try:
        ends = float(low), float(high)
    except ValueError:
        ends = 1.0, 0.0
    if not dots or not 0 <= ends[0] <= ends[1] <= 1:
        raise ConfigError(f"--pass-rate {text}: give two shares such as 0.1..0.9")
    return ends


def _staging(url: str) -> Path:
    """Where a dataset for a URL is made first: the same place for the same URL, so that a second start
    continues."""
    cache = Path(os.environ.get("SPOTRL_CACHE", "~/.cache/spotrl/data")).expanduser()
    return cache / f"staging-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def _prepare_local(
    options: SimpleNamespace, name: str, out: Path, show_progress: Progress
) -> Manifest | None:
    """None after a dry run."""
    from data_prep import show
    from data_prep.checks.validate import Settings
    from data_prep.prepare import prepare as run
    from data_prep.sources.catalog import CATALOG
    from trainer.images.decoding import ImageLimits

    entries = [CATALOG.get(source, options) for source in options.sources]
    kinds = {entry.evaluation for entry in entries}
    learned = {entry.sft for entry in entries}
    if len(kinds) > 1:
        raise ConfigError("training and evaluation sets are prepared apart: two commands")
    evaluation = options.evaluation or kinds.pop()
    if len(learned) > 1 or (learned == {True} and evaluation):
        raise ConfigError(
            "sets for supervised training alone (--sft) are prepared apart from the others: two commands"
        )
    sources = []
    for source in options.sources:
        own_name = name if len(options.sources) == 1 else ""
        opened = _sources(source, options, own_name, evaluation, show_progress)
        sources += opened
        if source not in CATALOG and source != GENERATED:
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
    source: str, options: SimpleNamespace, name: str, evaluation: bool, show: Progress
) -> Sequence[Any]:
    """One SOURCE of the command line: a name of the catalog, a file or folder, or a repository of the hub."""
    from data_prep.ingest.hub_files import Repository
    from data_prep.sources import catalog, file_records
    from data_prep.sources.own_files import Given, own
    from data_prep.sources.text_files import text_form

    if source == GENERATED:
        return [_drawn(options, evaluation)]
    if source in catalog.CATALOG:
        entry = catalog.CATALOG[source]
        return catalog.sources(
            source, Repository(entry.repo, options.revision or entry.revision, options.mirror), show
        )
    form = text_form(options.encoding, options.delimiter)
    given = Given(_mapping(options.map), options.split, evaluation, options.sft, form)
    if Path(source).exists():
        return own(source, name, options.images, given)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source) and Path(source).suffix not in file_records.ENDINGS:
        repository = Repository(source, options.revision, options.mirror)
        return catalog.any_repository(repository, given, show)
    raise ConfigError(
        f"no file, folder or dataset {source!r}{looked_in(source)}: the names are {', '.join(NAMES)},"
        f" generated; on the hub a dataset is OWNER/NAME"
    )


def _drawn(options: SimpleNamespace, evaluation: bool) -> Any:
    """A source of drawn problems. Raises ConfigError if rows, difficulty or families are not known."""
    low, dots, high = options.difficulty.partition("..")
    ends = (low, high if dots else low)
    if not set(ends) <= set("12345") or ends[0] > ends[1] or options.rows < 1:
        raise ConfigError(
            f"--rows {options.rows} --difficulty {options.difficulty}: give at least one row, and a "
            "difficulty or two ends, such as 3 or 1..5"
        )
    drawn = (options.rows, options.seed, (int(ends[0]), int(ends[1])), options.validation, evaluation)
    from data_prep.generate.generated_source import FAMILIES, LARGE, Generated

    families = tuple(options.families.split(",")) if options.families else tuple(FAMILIES)
    if unknown := sorted(set(families) - FAMILIES.keys() - LARGE.keys()):
        raise ConfigError(f"--families {unknown[0]}: the families are {', '.join(FAMILIES | LARGE)}")
    return Generated(*drawn, families)


def _mapping(text: str) -> dict[str, str]:
    from data_prep.sources.forms import ROLES

    mapping = {}
    for pair in filter(None, text.split(",")):
        role, equals, column = pair.strip().partition("=")
        if not equals or not column or role not in ROLES:
            raise ConfigError(f"--map {pair}: write ROLE=COLUMN, with a role of {', '.join(ROLES)}")
        mapping[role] = column
    return mapping


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
