"""How a command of launch.py is declared: once, above the function that it calls. recipes/commands.py has
them all."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Argument:
    """One argument of a command, as argparse takes it."""

    names: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """Arguments of which one must be given."""

    arguments: tuple[Argument, ...]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: what `--help` says of it, its arguments, and what it does."""

    name: str
    help: str
    arguments: tuple[Argument | Choice, ...]
    example: str
    passes_on: bool
    """All that stands after its name goes to another program as it is."""
    run: Function


COMMANDS: dict[str, Command] = {}
"""By name, in the order of their declarations, which is that of `--help`."""


def argument(*names: str, **options: Any) -> Argument:
    """An argument with argparse's own options."""
    return Argument(names, options)


def one_of(*arguments: Argument) -> Choice:
    """Arguments that exclude each other, one of which must be given."""
    return Choice(arguments)


RECIPE = argument("recipe", help="its name, see `list`, or a file: FILE.yaml, FILE.py:FUNCTION")
TARGET = argument("--target", help="where: see docs/targets.md; default: the cheapest that can")
SET = argument(
    "--set",
    action="append",
    default=[],
    metavar="A.B=C",
    help="override a field, or all of @FILE.yaml; an unknown one is refused (docs/options.md)",
)
RUN = argument("run", help="id of a run: see `status`, and `runs` for those in a bucket")
STORED = argument("--bucket", help="of a run that was not launched from here")
DRY_RUN = argument("--dry-run", action="store_true", help="show what would run, start nothing")
TAKEOVER = argument(
    "--takeover", action="store_true", help="end the run of this id that is alive, and replace it"
)
LAUNCH = (
    argument("--run-id", default="", help="our own id, under which it saves and resumes; default: a new one"),
    argument("--bucket", help="s3://, gs:// or r2:// URL that checkpoints are pushed to"),
    argument("--reproducible", action="store_true", help="refuse a dirty git tree"),
    argument(
        "--keep-untracked",
        action="store_true",
        help="keep the contents of untracked files in runs/RUN/manifest.json, not just names and hashes",
    ),
)
REMOTE = (
    argument("--hosts", default="", help="machines for the target ssh: [user@]address[:port],..."),
    argument("--detach", action="store_true", help="do not follow the logs"),
)
STARTED = (TARGET, SET, *LAUNCH, TAKEOVER, *REMOTE, DRY_RUN)
"""What every command that starts a recipe takes."""


def command(
    name: str, help: str, *arguments: Argument | Choice, example: str = "", passes_on: bool = False
) -> Callable[[Function], Function]:
    """Declares the function below it as a command. It gets the parsed arguments and returns the exit code."""

    def declare(run: Function) -> Function:
        declared = Command(
            name=name, help=help, arguments=arguments, example=example, passes_on=passes_on, run=run
        )
        COMMANDS[name] = declared
        return run

    return declare


def parser(description: str) -> argparse.ArgumentParser:
    """The parser of all commands that are declared."""
    form = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(prog="launch.py", description=description, formatter_class=form)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for declared in COMMANDS.values():
        about = declared.help[0].upper() + declared.help[1:] + "."
        shown = (
            f"example:\n  python3 launch.py {declared.name} {declared.example}" if declared.example else None
        )
        own = commands.add_parser(
            declared.name, help=declared.help, description=about, epilog=shown, formatter_class=form
        )
        for one in declared.arguments:
            if isinstance(one, Argument):
                own.add_argument(*one.names, **one.options)
                continue
            group = own.add_mutually_exclusive_group(required=True)
            for each in one.arguments:
                group.add_argument(*each.names, **each.options)
    return top
