"""The command line of launch.py: reads it, names files from where the person stands, and calls the
command."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from recipes import command_line, commands, recipe_files
from trainer.config import ConfigError
from trainer.config.bucket_address import BucketAddress
from trainer.errors import OF_THE_DISK
from trainer.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_STORAGE

DESCRIPTION = """SpotRL: recipes for post-training vision-language models, and where to run them.

python3 launch.py list                                  every recipe: model, GPUs, hours, dollars, places
python3 launch.py demo                                  the whole pipeline on this machine, without a GPU
python3 launch.py plan grpo-qwen2.5-vl-72b-mathv60k     memory, disk, time and dollars, before you rent
python3 launch.py up grpo-qwen2.5-vl-7b-mathv60k --target skypilot-runpod --bucket s3://mine
"""
WORKER = "rollout-worker"
"""What the command line calls one machine that samples for a run: a view of that run's recipe."""
ROOT = Path(__file__).resolve().parents[1]


def parser() -> argparse.ArgumentParser:
    return command_line.parser(DESCRIPTION)


def main(arguments: list[str]) -> int:
    """Runs one command and returns the exit code. Configuration errors are one line and exit 2."""
    if not arguments:
        parser().print_help(sys.stderr)
        return EXIT_CONFIG
    try:
        args = parsed(arguments)
        os.chdir(ROOT)  # files of yours were named from where you stand
        if getattr(args, "recipe", "") == WORKER and "set" in args:
            from recipes.drivers import fleet_launch

            given = args.set, getattr(args, "bucket", ""), getattr(args, "target", None)
            args.recipe, args.set = fleet_launch.of_run(*given)
        return commands.call(args)
    except ConfigError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        print(f"launch.py: the disk is full or fails: {error}", file=sys.stderr)
        return EXIT_STORAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The arguments of a command, with absolute paths and a bucket that can be one. Raises ConfigError."""
    declared = command_line.COMMANDS.get(arguments[0]) if arguments else None
    # argparse leaves no option to a command's own parser, so the rest of a passed-on command never meets it.
    passes_on = bool(declared and declared.passes_on)
    cut = 1 if passes_on else arguments.index("--") if "--" in arguments else len(arguments)
    args = parser().parse_args(arguments[:cut])
    args.arguments = arguments[cut:] if passes_on else []
    args.flags = [] if passes_on else arguments[cut + 1 :]

    if args.flags and "takeover" not in args:
        raise ConfigError(
            f"`{args.command}` starts no platform that {' '.join(args.flags)} could be passed on to"
        )
    if "bucket" in args:
        # Given and empty is a variable that is not set, and no wish to do without.
        args.bucket = "" if args.bucket is None else BucketAddress.parse(args.bucket, "--bucket").url
    if "set" in args:
        args.recipe, args.set = recipe_files.expand(getattr(args, "recipe", args.command), args.set)
        if args.command in ("evaluate", "serve") and Path(args.recipe).is_dir():
            args.recipe = str(Path(args.recipe).absolute())
        if args.command == "evaluate":
            args.benchmarks = ",".join(recipe_files.from_here(args.benchmarks.split(",")))
    for name in ("manifest", "calibrate", "out"):
        if given := getattr(args, name, None):
            setattr(args, name, given.absolute())
    if args.command == "report":
        args.runs = [str(Path(run).absolute()) if Path(run).is_dir() else run for run in args.runs]
    if args.command == "data":
        args.arguments = recipe_files.from_here(args.arguments)
    return args
