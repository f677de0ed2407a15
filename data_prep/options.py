"""The options of the command line, and the texts of `--help`."""

from __future__ import annotations

import argparse
from typing import Any

NAMES = (
    "mathv60k",
    "mathv-geo",
    "geometry3k",
    "geometry3k-test",
    "virl39k",
    "mmk12",
    "clevr",
    "deepscaler",
    "openmmreasoner",
    "vero",
    "alpaca",
    "gsm8k",
    "gsm8k-test",
    "math",
    "mathvista",
    "mathverse",
    "mathvision",
    "mmmu-pro",
    "math-500",
)
"""Names in the catalog, which itself takes half a second to import."""
GENERATED = "generated"
"""Name of the set whose problems are drawn by `data_prep/generate`."""
TASK_FAMILIES = "reasoning-gym:"
"""Start of a source that is drawn by the families of the package reasoning-gym."""
EPILOG = """
your own data: a file or a folder (JSONL, JSON, CSV, TSV, Parquet; images beside, inside or in archives):
  python3 launch.py data prepare mine.jsonl --dry-run              # 1. how is it read? nothing is written
  python3 launch.py data prepare mine.jsonl --map answer=gold      #    name a column that was not recognized
  python3 launch.py data prepare mine.jsonl                        # 2. check, split, convert: into data/mine
  python3 launch.py data show data/mine                            # 3. look at rows; preview.html has images
  less data/mine/quarantine.jsonl                                  #    and at what was left out, and why
  python3 launch.py up RECIPE --set data.path=data/mine            # 4. train on it

a published set:
  python3 launch.py data prepare --list                            # names, licenses, what was checked
  python3 launch.py data prepare mathv60k                          # or any repository: OWNER/NAME
  python3 launch.py data prepare mathvista                         # what you will evaluate on, all rows kept
  python3 launch.py data prepare generated --rows 20000 --difficulty 1..5 --seed 0 # drawn, not downloaded
  python3 launch.py data overlap data/geometry3k data/mathvista    # does the training set know it?
  python3 launch.py data mix data/mine=2 data/geometry3k=0.5 --out data/both
  python3 launch.py data filter data/virl39k --pass-rate 0.1..0.9 --out data/useful
  python3 launch.py evaluate RECIPE --pass-rate --set data.path=data/mine # measures rates: pass_rates.jsonl
  python3 launch.py data worked data/mine --log runs/ID/pass_rates.jsonl --out data/mine-sft
  python3 launch.py data from-run RUN --out data/run.jsonl         # what a run sampled, with rewards
  python3 launch.py data export data/mine --to trl --out data/mine-trl

Every command explains itself: `data prepare --help`. Inside an environment, `python -m data_prep` is the
same. The format, the checks and the reasons in quarantine.jsonl are in docs/data.md.
"""
EXAMPLES = f"""
forms that are recognized, by their columns:
  question and answer   question, problem, query or instruction; answer, gold, label...; image or images;
                        choices (plain, EasyR1, ViRL39K, Alpaca; a worked solution with a box or #### gives
                        the answer)
  messages              OpenAI and Qwen chats: the last reply states the answer; images as paths or data URLs
  conversations         LLaVA and ShareGPT, with image or images
  verl                  prompt, images, reward_model.ground_truth
  MathV60K              message, answer
images may be paths (relative to the file, absolute, or endings of names inside --images), bytes, base64,
data URLs, or structures of bytes and path as the datasets library writes them.

named sets: {", ".join(NAMES)}, {GENERATED}
task families with verifiers: {TASK_FAMILIES}FAMILY[=WEIGHT],... (105 of them, text only)

examples:
  python3 launch.py data prepare mine.csv --map question=text,answer=solution.value,images=photo \\
      --images photos.zip
  python3 launch.py data prepare mine.jsonl=2 geometry3k=0.5 --name both  # training rows twice; half of them
  python3 launch.py data prepare test.jsonl --evaluation --split test     # keep every row as it is
  python3 launch.py data prepare mathv60k --out s3://bucket/mathv60k --tokenizer Qwen/Qwen2.5-VL-7B-Instruct
  python3 launch.py data prepare mathv60k --exclude data/mathvista        # not on what is evaluated
  python3 launch.py data prepare reasoning-gym:chain_sum=2,countdown --rows 5000 --difficulty 1..3
  python3 launch.py data prepare gsm8k --revision COMMIT                  # the same again, months later

An interrupted preparation is repeated with the same command: downloads resume where they stopped, images that
were unpacked and checked are not touched again. Rows that fail a check are in OUT/quarantine.jsonl, each with
its reason.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="launch.py data",
        description="Downloads, checks and converts datasets to one format: Parquet shards with the images.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _prepare_parser(commands)
    _dataset_parsers(commands)
    return top


def _prepare_parser(commands: Any) -> None:
    make = commands.add_parser(
        "prepare",
        help="download, check and convert your own data, or a published set",
        description="Reads sources, checks every row and image, writes shards.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    make.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="a file, a folder, a name (--list) or OWNER/NAME on "
        "the hub; SOURCE=WEIGHT takes its training rows so often",
    )
    make.add_argument(
        "--out",
        default="",
        metavar="DIR|URL",
        help="local directory, or s3:// gs:// r2:// prefix (default: data/NAME)",
    )
    make.add_argument("--name", default="", help="of the dataset (default: that of the source)")
    make.add_argument("--list", action="store_true", help="show the named sets and end")
    make.add_argument("--dry-run", action="store_true", help="show how own data would be read and end")
    where = make.add_argument_group("how it is read")
    where.add_argument(
        "--map",
        default="",
        metavar="ROLE=COLUMN,...",
        help="roles: question, answer, images, choices, "
        "solution, system, source, split; a dot goes inside: answer=solution.value",
    )
    where.add_argument(
        "--images",
        action="append",
        default=[],
        metavar="PATH",
        help="folder or archive (.zip, .tar, .tar.gz, .tar.bz2, .tar.xz) with the images; repeatable",
    )
    where.add_argument(
        "--split",
        default="",
        help="the split of all rows (default: by file names or a split column, "
        "else train and validation by content)",
    )
    where.add_argument("--encoding", default="", help="of text files (default: recognized)")
    where.add_argument("--delimiter", default="", help="between fields of a table (default: recognized)")
    where.add_argument(
        "--revision",
        default="",
        help="branch, tag or commit on the hub (default: main, and the commit "
        "that it meant is saved in the manifest)",
    )
    where.add_argument(
        "--mirror", default="", metavar="DIR", help="folder with OWNER/REPO/FILE instead of the hub"
    )
    drawn = make.add_argument_group(f"{GENERATED} and {TASK_FAMILIES}...: problems drawn here")
    drawn.add_argument("--rows", type=int, default=10_000, help="different problems (%(default)s)")
    drawn.add_argument("--difficulty", default="1..5", metavar="LEVEL|LOW..HIGH", help="1 to 5 (%(default)s)")
    drawn.add_argument("--seed", type=int, default=0, help="of the problems (%(default)s)")
    drawn.add_argument(
        "--families",
        default="",
        metavar="NAME,...",
        help="only these: geometry, counting (both unless given), details",
    )
    checks = make.add_argument_group("what is kept")
    checks.add_argument(
        "--evaluation", action="store_true", help="an evaluation set: all rows stay as published"
    )
    checks.add_argument(
        "--sft",
        action="store_true",
        help="for supervised training (method: sft): replies are learned "
        "as they stand, and need no answer that can be graded",
    )
    checks.add_argument(
        "--tokenizer",
        default="",
        metavar="MODEL",
        help="count the text's tokens too, with this "
        "model's tokenizer and chat template: directory, hub id, or id@revision",
    )
    checks.add_argument(
        "--max-tokens", type=int, default=4096, help="longest prompt, images included (%(default)s)"
    )
    _pixels(checks)
    checks.add_argument(
        "--min-side", type=int, default=28, help="shortest side of an image, pixels (%(default)s)"
    )
    checks.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="DIR|URL",
        help="prepared evaluation set: rows with an image that it has are left out; repeatable",
    )
    checks.add_argument(
        "--limit", type=int, default=0, metavar="N", help="only the first N rows of each source"
    )
    split = make.add_argument_group("train and validation (where the source has no splits)")
    split.add_argument(
        "--validation", type=float, default=0.02, help="share of the rows (%(default)s); 0 for none"
    )
    split.add_argument("--split-seed", type=int, default=0, help="another split of the same data")
    how = make.add_argument_group("how")
    how.add_argument(
        "--workers", type=int, default=0, help="processes that decode images (default: one per core)"
    )
    how.add_argument("--work", default="", metavar="DIR", help="for unpacked images (default: inside OUT)")
    how.add_argument("--overwrite", action="store_true", help="replace another dataset in OUT")


def _pixels(parser: Any) -> None:
    parser.add_argument(
        "--min-pixels", type=int, default=4 * 28 * 28, help="model.min_pixels of the run (%(default)s)"
    )
    parser.add_argument(
        "--max-pixels", type=int, default=1280 * 28 * 28, help="model.max_pixels (%(default)s)"
    )


def _dataset_parsers(commands: Any) -> None:
    def add(name: str, about: str, more: str = "", dataset: str = "DIR|URL") -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}. {more}")
        one.add_argument("dataset", metavar=dataset, help="a prepared dataset")
        return one

    show = add("show", "print rows: the chat, image sizes, tokens, reference answer, what is learned from")
    show.add_argument("--split", default="", help="default: the first")
    show.add_argument("--row", type=int, default=0, help="first row shown (%(default)s)")
    show.add_argument("-n", type=int, default=3, help="rows shown (%(default)s)")
    show.add_argument("--tokenizer", default="", metavar="MODEL", help="count the text's tokens too")
    show.add_argument(
        "--mask", action="store_true", help="every token by MODEL's template; + marks what SFT learns"
    )
    _pixels(show)
    add("stats", "print counts: rows, sources, answer types, lengths, sizes, reasons for leaving rows out")
    add(
        "preview",
        "write DIR/preview.html: samples with their images, and tables",
        "`prepare` writes it too.",
        "DIR",
    )
    add(
        "verify",
        "read every shard and compare its hash with the manifest",
        "Exit code 2 and the shard's name if one is damaged: fetch or prepare it again.",
    )
    checked = add(
        "check-reward",
        "search for replies that earn without the answer, and name the rows that pay",
        "Tries spans of questions, constant replies, several values at once, and edits of reference answers.",
    )
    checked.add_argument("--function", default="", metavar="FILE.py:NAME", help="a reward function of yours")
    checked.add_argument("--split", default="", help="default: the first")
    checked.add_argument("-n", type=int, default=200, help="rows tried (%(default)s)")
    both = add(
        "overlap",
        "images and sources that a dataset shares with an evaluation set",
        "Prints JSON. `prepare --exclude EVALUATION` leaves such rows out.",
    )
    both.add_argument("evaluation", metavar="EVALUATION", help="a prepared evaluation set")
    mixed = commands.add_parser(
        "mix",
        help="join prepared datasets by weights",
        description="Joins prepared datasets: DIR=2 takes its training rows twice, DIR=0.5 "
        "half of them. Training rows are shuffled, others joined as they are.",
    )
    mixed.add_argument("parts", nargs="+", metavar="DIR[=WEIGHT]")
    mixed.add_argument("--seed", type=int, default=0)
    some = add(
        "filter",
        "keep training rows by their pass rate",
        "Rows that are always or never solved teach nothing.",
    )
    some.add_argument("--pass-rate", required=True, metavar="LOW..HIGH", help="both ends included: 0.1..0.9")
    some.add_argument(
        "--rates",
        default="",
        metavar="FILE",
        help='lines of {"id", "pass_rate"} (default: the rates that came with the rows)',
    )
    own = add("worked", "solved rows with a run's correct completions, for supervised training (method: sft)")
    own.add_argument(
        "--log", required=True, metavar="FILE", help="samples.jsonl or pass_rates.jsonl of a run on DIR"
    )
    run = commands.add_parser(
        "from-run",
        help="the completions of a run as rows: text, verdict, rewards, advantage",
        description="Writes one line of JSON per completion of the run's rollout log. A run "
        "keeps what a restart may need; with logging.keep_rollouts all of it.",
    )
    run.add_argument("run", metavar="RUN", help="id or folder of a run")
    run.add_argument("--bucket", default="", help="of a run that was not launched from here")
    run.add_argument("--tokens", action="store_true", help="token ids and log-probabilities, too")
    run.add_argument("--out", default="", metavar="FILE", help="default: data/RUN.jsonl")
    other = add("export", "write a dataset as another trainer loads it")
    other.add_argument("--to", required=True, choices=["trl", "verl"])
    for one in (mixed, some, own, other):
        one.add_argument("--out", required=True, metavar="DIR")
