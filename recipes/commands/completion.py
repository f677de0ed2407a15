"""Names that a shell completes on the command line; the shell's own part is Click's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem


class NameType(click.ParamType):
    """A name that a shell completes from lists; whether there is such a one, the command says."""

    def __init__(self, name: str, *lists: Callable[[], Iterable[str]], folders: bool = False) -> None:
        """lists: functions that return the names. folders: it may be a folder, named from where the person
        stands."""
        self.name = name
        self.lists = lists
        self.folders = folders

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name, or the whole path of a folder."""
        return os.path.abspath(value) if self.folders and os.path.isdir(value) else value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The names that begin as what was typed; where there is none, files."""
        names = [name for listed in self.lists for name in listed()]
        found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]


def recipe_names() -> Iterable[str]:
    from recipes.presets import RECIPES

    return RECIPES


def target_names() -> Iterable[str]:
    from recipes.platforms.targets import TARGETS

    return TARGETS


def run_ids() -> Iterable[str]:
    """The runs that were launched from here, newest first."""
    from recipes.records import run_record

    return [record.run_id for record in run_record.newest_first()]


def option_names() -> list[str]:
    """`section.key=` of every option of a recipe and its run."""
    from recipes.recipe import spec
    from trainer.config import RunConfig

    recipe = spec.Recipe(name="any", description="", sample=spec.SampleGroup())
    sections = ("cluster", "sample", "dataset", "storage", "budget", "site")
    parts = {name: getattr(recipe, name) for name in sections}
    parts |= {one.name: getattr(recipe.config, one.name) for one in fields(RunConfig)}
    keys = []
    for name, part in parts.items():
        keys += [f"{name}.{one.name}=" for one in fields(part)] if is_dataclass(part) else [f"{name}="]
    return keys
