"""The command line of data preparation. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import ConfigError

if TYPE_CHECKING:
    from data_prep.prepare import Progress
    from data_prep.sources.source import Source
    from trainer.data.schema import Manifest

NAMES = {
    "mathv60k": "MathV60K (VerMulti): visual math, 65,118 rows, 2.4 GB of images",
    "mathv-geo": "the geometry part of the same repository",
    "geometry3k": "geometry problems with diagrams, free-form answers",
    "gsm8k": "grade-school word problems, text only",
    "math": "competition problems (Hendrycks MATH), text only",
    "mathvista": "MathVista testmini, for evaluation",
}
DATASETS = f"""
datasets:
{chr(10).join(f"  {name:<12}{about}" for name, about in NAMES.items())}
"""
EPILOG = f"""{DATASETS}
from nothing to a run:
  uv run launch.py data prepare geometry3k --out data/geometry3k      # 1. download, check, convert
  uv run launch.py data preview data/geometry3k                       # 2. look at samples: open preview.html
  less data/geometry3k/quarantine.jsonl                               #    and at what was left out, and why
  uv run launch.py data prepare mathvista --out data/mathvista        # 3. what you will evaluate on
  uv run launch.py data overlap data/geometry3k data/mathvista        #    does the training set know it?
  uv run launch.py data verify data/geometry3k                        # 4. after copying: is every shard whole?
  uv run launch.py up RECIPE --set data.path=data/geometry3k          # 5. train on it

Every command explains itself: `data prepare --help`. Inside an environment, `python -m data_prep` is the same.
The format, the checks and the reasons in quarantine.jsonl are in docs/data.md.
"""
EXAMPLES = f"""{DATASETS}
examples:
  uv run launch.py data prepare geometry3k --out data/geometry3k
  uv run launch.py data prepare mathv60k --out s3://bucket/mathv60k --tokenizer Qwen/Qwen2.5-VL-7B-Instruct
  uv run launch.py data prepare mathv60k --out data/mathv60k --exclude data/mathvista   # not on what is evaluated
  uv run launch.py data prepare mathv60k --jsonl my_message.jsonl --images my_img.tar.gz --out data/mine
  uv run launch.py data prepare gsm8k --revision COMMIT --out data/gsm8k                # the same again, months later
  HF_ENDPOINT=https://my-mirror.example uv run launch.py data prepare gsm8k --out data/gsm8k

An interrupted preparation is repeated with the same command: downloads go on where they stopped, images that were
unpacked and checked are not touched again. Rows that fail a check are in OUT/quarantine.jsonl, each with its reason.
"""


def parser() -> argparse.ArgumentParser:
    """All options, with what they mean."""
    top = argparse.ArgumentParser(
        prog="launch.py data",
        description="Downloads, checks and converts datasets to one format: Parquet shards with the images inside.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    make = commands.add_parser("prepare", help="download, check and convert a dataset",
                               description="Downloads a dataset, checks every row and image, writes shards.",
                               epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    make.add_argument("name", metavar="NAME", help="one of: " + ", ".join(NAMES))
    make.add_argument("--out", required=True, metavar="DIR|URL", help="local directory, or s3:// gs:// r2:// prefix")
    where = make.add_argument_group("where it comes from")
    where.add_argument("--revision", default="", help="branch, tag or commit on the hub (default: main, and the commit "
                       "that it meant is saved in the manifest)")  # fmt: skip
    where.add_argument("--mirror", default="", metavar="DIR", help="folder with OWNER/REPO/FILE instead of the hub")
    where.add_argument("--jsonl", default="", help="a *_message.jsonl of your own in MathV60K's format")
    where.add_argument("--images", default="", help="its images: .tar.gz, .tar, .zip or a folder")
    checks = make.add_argument_group("what is kept")
    checks.add_argument("--tokenizer", default="", metavar="MODEL", help="count the text's tokens too, with this "
                        "model's tokenizer and chat template: directory, hub id, or id@revision")  # fmt: skip
    checks.add_argument("--max-tokens", type=int, default=4096, help="longest prompt, images included (%(default)s)")
    checks.add_argument("--min-pixels", type=int, default=4 * 28 * 28, help="model.min_pixels of the run (%(default)s)")
    checks.add_argument("--max-pixels", type=int, default=1280 * 28 * 28, help="model.max_pixels (%(default)s)")
    checks.add_argument("--min-side", type=int, default=28, help="shortest side of an image, pixels (%(default)s)")
    checks.add_argument("--exclude", action="append", default=[], metavar="DIR|URL", help="prepared evaluation set: "
                        "rows with an image that it nearly has are left out; repeatable")  # fmt: skip
    checks.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N rows of the source")
    split = make.add_argument_group("train and validation (where the source has no splits)")
    split.add_argument("--validation", type=float, default=0.02, help="share of the rows (%(default)s); 0 for none")
    split.add_argument("--split-seed", type=int, default=0, help="another split of the same data")
    how = make.add_argument_group("how")
    how.add_argument("--workers", type=int, default=0, help="processes that decode images (default: one per core)")
    how.add_argument("--work", default="", metavar="DIR", help="for unpacked images (default: inside OUT)")
    how.add_argument("--overwrite", action="store_true", help="replace another dataset in OUT")
    for name, where, about, more in (
        ("preview", "DIR", "write DIR/preview.html: samples with their images, and tables",
         "Sources, answer types, image sizes, prompt lengths and the reasons for leaving rows out, on one page that "
         "needs no network. `prepare` writes it too."),
        ("verify", "DIR|URL", "read every shard and compare its hash with the manifest",
         "Exit code 2 and the shard's name if one is damaged: fetch or prepare it again."),
    ):  # fmt: skip
        commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}. {more}").add_argument(
            "dataset", metavar=where, help="a prepared dataset"
        )
    both = commands.add_parser(
        "overlap",
        help="images and sources that a dataset shares with an evaluation set",
        description="Prints, as JSON, how many rows have an image that the evaluation set nearly has, by source. "
        "`prepare --exclude EVALUATION` leaves such rows out.",
    )
    both.add_argument("dataset", metavar="DIR", help="the prepared training set")
    both.add_argument("evaluation", metavar="EVALUATION", help="a prepared evaluation set")
    return top


def main(arguments: Sequence[str]) -> int:
    """Runs one command. Exit code 0, 2 for a configuration that cannot work (one line on stderr), 130 for Ctrl-C."""
    options = parser().parse_args(arguments)
    try:
        match options.command:
            case "prepare":
                return prepare(options)
            case "preview":
                from data_prep.write.preview import write_preview

                print(write_preview(options.dataset))
            case "verify":
                return verify(options.dataset)
            case "overlap":
                from data_prep.checks.overlap import overlap_report

                print(json.dumps(overlap_report(options.dataset, options.evaluation), indent=2, ensure_ascii=False))
    except ConfigError as error:
        print(f"data_prep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("data_prep: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def verify(dataset: str) -> int:
    """Checks all splits of a prepared dataset."""
    from trainer.data.dataset import Dataset, read_manifest

    for split, rows in read_manifest(dataset).rows.items():
        Dataset(dataset, split).verify()
        print(f"{split}: {rows:,} rows, all shards as in the manifest")
    return 0


def prepare(options: argparse.Namespace) -> int:
    """Prepares one dataset, at a URL by way of a local directory that is removed afterwards."""
    if options.name not in NAMES:
        raise ConfigError(f"no dataset {options.name!r}: choose one of {', '.join(NAMES)}")
    if bool(options.jsonl) != bool(options.images):
        raise ConfigError("--jsonl and --images belong together: give both")
    if not 0 <= options.validation < 1:
        raise ConfigError(f"--validation {options.validation}: give a share from 0 to below 1")
    at_url = "://" in options.out and not options.out.startswith("file://")
    local = _staging(options.out) if at_url else Path(options.out.removeprefix("file://"))
    if at_url:
        from data_prep.write.upload import remote_manifest

        former = remote_manifest(options.out)
        if former and not options.overwrite and not (local / "manifest.json").exists():
            raise ConfigError(f"{options.out} holds a dataset already ({former.name}): pass --overwrite to replace it")
    with _Bars() as bars:
        manifest = _prepare_local(options, local, bars.show)
        if at_url:
            from data_prep.write.upload import upload

            upload(local, options.out, bars.show)
    if at_url:
        shutil.rmtree(local)
    _summary(manifest, options.out)
    return 0


def _staging(url: str) -> Path:
    """Where a dataset for a URL is made first: the same place for the same URL, so that a second start goes on."""
    cache = Path(os.environ.get("SPOTRL_CACHE", "~/.cache/spotrl/data")).expanduser()
    return cache / f"staging-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def _prepare_local(options: argparse.Namespace, out: Path, show: Progress) -> Manifest:
    from data_prep.checks.validate import Settings
    from data_prep.ingest.images import ImageLimits
    from data_prep.prepare import prepare as run

    settings = Settings(
        limits=ImageLimits(min_side=options.min_side),
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
        max_tokens=options.max_tokens,
        tokenizer=options.tokenizer,
        validation=options.validation,
        split_seed=options.split_seed,
        limit=options.limit,
    )
    return run(
        _sources(options, show),
        out,
        options.name,
        settings,
        workers=options.workers,
        on_progress=show,
        overwrite=options.overwrite,
        exclude=options.exclude,
        work_dir=options.work,
    )


def _sources(options: argparse.Namespace, show: Progress) -> Sequence[Source]:
    if options.jsonl:
        from data_prep.sources import mathv60k

        return [mathv60k.local(options.jsonl, options.images, options.name)]
    from data_prep.ingest.hub import Repository
    from data_prep.sources.catalog import CATALOG

    entry = CATALOG[options.name]
    return entry.sources(Repository(entry.repo, options.revision, options.mirror), show)


def _summary(manifest: Manifest, where: str) -> None:
    rows = ", ".join(f"{split} {count:,}" for split, count in manifest.rows.items())
    size = sum(file["bytes"] for file in manifest.files) / 2**20
    print(f"{manifest.name}: {rows} rows, {len(manifest.files)} shards, {size:,.1f} MiB in {where}")
    for reason, count in manifest.quarantined.items():
        print(f"  left out: {count:>7,}  {reason}")
    stats = manifest.statistics
    if stats and stats["images"]["refused"]:
        print(f"  refused from the archive: {len(stats['images']['refused']):,} unsafe members")
    for split, count in stats["groups"]["rows_near_train"].items() if stats else ():
        print(f"  note: {count:,} rows of {split} have an image that train nearly has (the source's own split)")
    for overlap in stats["overlaps"] if stats else ():
        touched = sum(overlap["evaluation_rows_touched"].values())
        print(f"  {overlap['set']}: {overlap['rows_excluded']:,} rows left out, sharing {touched:,} of its images")
    print(f"  fingerprint {manifest.fingerprint[:16]}; see preview.html and quarantine.jsonl beside the shards")


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
        """Draws one stage."""
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
