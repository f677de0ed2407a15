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
