"""The options of the command line, and the texts of `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trainer.config.overrides import read_yaml

NAMES = tuple(read_yaml((Path(__file__).parent / "sources/catalog.yaml").read_text(encoding="utf-8")))
"""Names in the catalog, whose code takes half a second to import."""
GENERATED = "generated"
"""Name of the set whose problems are drawn by `data_prep/generate`."""
EPILOG = """
your own data: a file or a folder (JSONL, JSON, CSV, TSV, Parquet; images beside, inside or in archives):
  python3 launch.py data prepare mine.jsonl --dry-run              # 1. how is it read? nothing is written
  python3 launch.py data prepare mine.jsonl --map answer=gold      #    name a column that was not recognized
  python3 launch.py data prepare mine.jsonl                        # 2. check, split, convert: into data/mine
  python3 launch.py data show data/mine                            # 3. look at rows; preview.html has images
  less data/mine/quarantine.jsonl                                  #    and at what was left out, and why
  python3 launch.py up RECIPE --set data.path=data/mine            # 4. train on it

a published set, mathv60k or mathvista, say (data prepare --list names them all), or any repository:
  python3 launch.py data prepare mathv60k

The forms that are recognized, the checks and the reasons in quarantine.jsonl are in docs/data.md.
"""
EXAMPLES = f"""
named sets: {", ".join(NAMES)}, {GENERATED}

examples:
  python3 launch.py data prepare mine.csv --map question=text,answer=solution.value,images=photo \\
      --images photos.zip
  python3 launch.py data prepare test.jsonl --evaluation --split test     # keep every row as it is
  python3 launch.py data prepare mathv60k --out s3://bucket/mathv60k --tokenizer Qwen/Qwen2.5-VL-7B-Instruct
  python3 launch.py data prepare mathv60k --exclude data/mathvista        # not on what is evaluated
  python3 launch.py data prepare gsm8k --revision COMMIT                  # the same again, months later

An interrupted preparation is repeated with the same command: what was downloaded, unpacked and checked stays.
"""


class DataArgument(click.Argument):
    """An argument that `--help` explains."""

    def __init__(self, names: list[str], help: str, **options: Any) -> None:
        super().__init__(names, **options)
        self.about = help


class DataCommand(click.Command):
    """A command whose `--help` explains its arguments, too, and leaves the lines of its examples whole."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Arguments"):
            arguments = [parameter for parameter in self.params if isinstance(parameter, DataArgument)]
            formatter.write_dl([(str(parameter.metavar), parameter.about) for parameter in arguments])
        super().format_options(ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(self.epilog or "")


class DataGroup(click.Group):
    """All commands, in their own order."""

    command_class = DataCommand
    format_epilog = DataCommand.format_epilog

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def option(names: str, help: str, metavar: str | None = None, default: Any = "", **more: Any) -> click.Option:
    """An option with a value: a text that is empty unless it is given, or what the default is."""
    shown = bool(default)
    return click.Option(
        names.split(), metavar=metavar, default=default, show_default=shown, help=help, **more
    )


def needed(name: str, help: str, **more: Any) -> click.Option:
    """An option that must be given."""
    return click.Option([name], required=True, help=help, **more)


def flag(name: str, help: str) -> click.Option:
    """An option without a value."""
    return click.Option([name], is_flag=True, help=help)


def argument(name: str, help: str, metavar: str, **more: Any) -> DataArgument:
    """An argument: one word, or more by `nargs`."""
    return DataArgument([name], help, metavar=metavar, **more)


DATASET = argument("dataset", "a prepared dataset", "DIR|URL")
OUT = needed("--out", "folder of the new dataset", metavar="DIR")
SPLIT = option("--split", "default: the first")
PIXELS = (
    option("--min-pixels", "model.min_pixels of the run", default=4 * 28 * 28),
    option("--max-pixels", "model.max_pixels", default=1280 * 28 * 28),
)
SOURCES = "a file, a folder, a name (--list), or OWNER/NAME on the hub; several are joined"
ROLES = (
    "roles: question, answer, images, choices, solution, system, source, split; a dot goes inside:"
    " answer=solution.value"
)
ARCHIVES = "folder or archive (.zip, .tar, .tar.gz, .tar.bz2, .tar.xz) with the images; repeatable"
SPLITS = "of all rows (default: by file names or a split column, else train and validation by content)"
REVISION = "branch, tag or commit on the hub (default: main; its commit is saved in the manifest)"
SFT = "for supervised training (method: sft): replies are learned as they stand, and need no gradable answer"
TOKENIZER = "count the text's tokens too, by this model's chat template: directory, hub id, or id@revision"
EXCLUDE = "prepared evaluation set: rows with an image that it has are left out; repeatable"
PREPARE = (
    argument("sources", SOURCES, "SOURCE", nargs=-1),
    option("--out", "local directory, or s3:// gs:// r2:// prefix (default: data/NAME)", "DIR|URL"),
    option("--name", "of the dataset (default: that of the source)"),
    flag("--list", "show the named sets and end"),
    flag("--dry-run", "show how own data would be read and end"),
    # How it is read.
    option("--map", ROLES, "ROLE=COLUMN,..."),
    option("--images", ARCHIVES, "PATH", (), multiple=True),
    option("--split", SPLITS),
    option("--encoding", "of text files (default: recognized)"),
    option("--delimiter", "between fields of a table (default: recognized)"),
    option("--revision", REVISION),
    option("--mirror", "folder with OWNER/REPO/FILE instead of the hub", "DIR"),
    # What is drawn, of `generated`.
    option("--rows", f"different problems of {GENERATED}", default=10_000),
    option("--difficulty", "1 to 5", "LEVEL|LOW..HIGH", "1..5"),
    option("--seed", "of the problems (0)", default=0),
    option("--families", "only these: geometry, counting (both unless given), details", "NAME,..."),
    # What is kept, and in which split.
    flag("--evaluation", "an evaluation set: all rows stay as published"),
    flag("--sft", SFT),
    option("--tokenizer", TOKENIZER, "MODEL"),
    option("--max-tokens", "longest prompt, images included", default=4096),
    *PIXELS,
    option("--min-side", "shortest side of an image, pixels", default=28),
    option("--exclude", EXCLUDE, "DIR|URL", (), multiple=True),
    option("--limit", "only the first N rows of each source", "N", 0),
    option("--validation", "share of the rows, where the source has no splits; 0 for none", default=0.02),
    option("--split-seed", "another split of the same data", default=0),
    option("--workers", "processes that decode images (default: one per core)", default=0),
    option("--work", "for unpacked images (default: inside OUT)", "DIR"),
    flag("--overwrite", "replace another dataset in OUT"),
)
"""Everything that `prepare` takes."""
