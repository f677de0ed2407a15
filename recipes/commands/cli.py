"""The command line of launch.py: runs one command, and makes one line and an exit code of what it refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from click.shell_completion import shell_complete

from recipes.commands.main_commands import launch
from trainer.system.errors import OF_THE_DISK, UNWRITABLE, ConfigError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_STORAGE

ROOT = Path(__file__).resolve().parents[2]
COMPLETE = "_SPOTRL_COMPLETE"
"""The variable by which a shell asks for completions."""


def main(arguments: list[str]) -> int:
    """Runs one command and returns the exit code. Configuration errors are one line and exit 2."""
    if instruction := os.environ.pop(COMPLETE, ""):  # by the shell, for a line
        os.chdir(ROOT)
        return shell_complete(launch, {}, "spotrl", COMPLETE, instruction)
    if not arguments:
        click.echo(launch.get_help(click.Context(launch, info_name="launch.py")), err=True)
        return EXIT_CONFIG
    try:
        with launch.make_context("launch.py", list(arguments), obj=ROOT) as context:
            return launch.invoke(context)
    except click.exceptions.Exit as done:  # after --help
        return done.exit_code
    except click.UsageError as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        path = error.ctx.command_path if error.ctx else "launch.py"
        print(f"launch.py: {message[0].lower()}{message[1:]}; see `python3 {path} --help`", file=sys.stderr)
        return EXIT_CONFIG
    except ConfigError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except OSError as error:
        if error.filename and error.errno in UNWRITABLE:
            cure = "name a folder that this user can write, or run a checkout of your own (runs/ is in it)"
            print(f"launch.py: {error.filename}: {error.strerror}: {cure}", file=sys.stderr)
            return EXIT_CONFIG
        if error.errno not in OF_THE_DISK:
            raise
        print(f"launch.py: the disk is full or fails: {error}", file=sys.stderr)
        return EXIT_STORAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run() -> None:
    """The command `spotrl` of an installation."""
    sys.exit(main(sys.argv[1:]))
