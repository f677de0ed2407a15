"""What launch.py's commands have in common: `--help` in panels on one screen, files that are named from where
the person stands, what may stand after `--`, and the options that several commands take."""

from __future__ import annotations

import difflib
import inspect
import io
import os
import re
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

from trainer.system.errors import ConfigError
from trainer.system.own_file import GIVEN_IN

WORKER = "rollout-worker"
"""What the command line calls one machine that samples for a run: a view of that run's recipe."""
LATER = "after the first week"
PANELS = ("decide", "run", "look", "after", LATER)
"""Panels of the commands, in the order of `--help`."""
EXAMPLES = ("up grpo-qwen2.5-vl-7b-mathv60k --target skypilot-runpod --bucket s3://mine",)
MOST_COLUMNS = 100
Rows = list[tuple[str, str]]


def page(about: list[str], panels: dict[str, Rows], examples: tuple[str, ...] = ()) -> str:
    """A page of `--help`. panels: left and right of their rows, by title; an empty one is not shown."""
    from rich.console import Console
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    width = min(MOST_COLUMNS, shutil.get_terminal_size().columns)
    # Click takes the colors out where they go to no terminal.
    console = Console(file=io.StringIO(), width=width, force_terminal=True, highlight=False, markup=False)
    for paragraph in about:
        console.print(paragraph)
    left = max(len(row[0]) for rows in panels.values() for row in rows)
    for title, rows in panels.items():
        if rows:
            console.print(Rule(Text(title, "bold"), align="left", style="dim"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="cyan", width=min(left, width // 3))
        for row in rows:
            table.add_row(*row)
        console.print(table, end="")
    if examples:
        console.print(Rule(Text("examples", "bold"), align="left", style="dim"))
        for line in examples:
            console.print(Text(f"python3 launch.py {line}"), soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return re.sub(r" +(?=\n)", "", console.file.getvalue())


class NameType(click.ParamType):
    """A name that a shell completes from lists; the command says whether there is one of that name."""

    def __init__(self, name: str, *lists: Callable[[], Iterable[str]], folders: bool = False) -> None:
        """folders: it may be a folder, named from where the person stands."""
        self.name = name
        self.lists = lists
        self.folders = folders

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return os.path.abspath(value) if self.folders and os.path.isdir(value) else value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        names = [name for listed in self.lists for name in listed() if name.startswith(incomplete)]
        return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def recipe_names() -> Iterable[str]:
    from recipes.presets import RECIPES

    return RECIPES


def run_ids() -> Iterable[str]:
    """The runs that were launched from here, newest first."""
    from recipes.records import run_record

    return [record.run_id for record in run_record.newest_first()]


class Argument(click.Argument):
    """An argument that `--help` explains."""

    def __init__(self, names: list[str], help: str, **options: Any) -> None:
        super().__init__(names, **options)
        self.about = help


class Command(click.Command):
    """A command of launch.py; its first sentence stands in the list of all."""

    def __init__(self, *given: Any, panel: str, examples: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(*given, **options)
        self.panel = panel
        self.examples = tuple(f"{self.name} {example}" for example in examples)
        self.starts = any(parameter.name == "takeover" for parameter in self.params)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Own arguments and options first, then those of every launch."""
        own, launches = Rows(), Rows()
        for parameter in self.get_params(ctx):
            if isinstance(parameter, Argument):
                own.append((parameter.metavar or parameter.human_readable_name.upper(), parameter.about))
            elif record := parameter.get_help_record(ctx):
                (launches if self.starts and parameter.name in LAUNCH_NAMES else own).append(record)
        about = [ctx.get_usage(), *_paragraphs(self.help or "")]
        panels = {"arguments and options": own, "of every launch": launches}
        formatter.write(page(about, panels, self.examples))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """What stands after `--` goes to the platform of commands that start one, as `flags`."""
        cut = args.index("--") if "--" in args else len(args)
        flags = args[cut + 1 :]
        if flags and not self.starts:
            raise ConfigError(
                f"`{self.name}` starts no platform that {' '.join(flags)} could be passed on to"
            )
        left = super().parse_args(ctx, args[:cut])
        if self.starts:
            ctx.params["flags"] = tuple(flags)
        return left

    def invoke(self, ctx: click.Context) -> Any:
        """Calls the function in the checkout; files were named from where the person stands."""
        given = ctx.params
        if "overrides" in given:
            from recipes.recipe import recipe_files

            recipe = given.get("recipe", self.name)
            recipe, given["overrides"] = recipe_files.expand_paths(recipe, list(given["overrides"]))
            if "recipe" in given:
                given["recipe"] = recipe
        os.environ[GIVEN_IN] = os.getcwd()
        os.chdir(ctx.obj)
        if given.get("recipe") == WORKER and "overrides" in given:
            from recipes.drivers import fleet_launch

            where = given.get("bucket", ""), given.get("target"), given.get("trust", False)
            given["recipe"], given["overrides"] = fleet_launch.of_run(given["overrides"], *where)
        return super().invoke(ctx)


class PassedOn(Command):
    """A command whose arguments all go to another program as they are."""

    def __init__(self, *given: Any, files: bool = False, **options: Any) -> None:
        """files: some arguments name files, from where the person stands."""
        super().__init__(*given, **options)
        self.files = files

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Takes no option for its own."""
        from recipes.recipe import recipe_files

        ctx.params["arguments"] = recipe_files.from_here(args) if self.files else list(args)
        return []


class Group(click.Group):
    """All commands, in panels."""

    command_class = Command

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One screen."""
        panels: dict[str, Rows] = {panel: [] for panel in PANELS}
        for name, command in self.commands.items():
            assert isinstance(command, Command)
            panels[command.panel].append((name, command.get_short_help_str(MOST_COLUMNS)))
        usage = f"{ctx.get_usage()}   (`COMMAND --help` explains one)"
        formatter.write(page([usage, *_paragraphs(self.help or "")], panels, EXAMPLES))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name. Raises ConfigError that names the nearest one."""
        command = super().get_command(ctx, cmd_name)
        if command or ctx.resilient_parsing or cmd_name.startswith("-"):
            return command
        near = difflib.get_close_matches(cmd_name, self.commands, n=1)
        hint = f"did you mean {near[0]}?" if near else "see `python3 launch.py --help`"
        raise ConfigError(f"unknown command {cmd_name}: {hint}")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def launch() -> None:
    """SpotRL: recipes for post-training vision-language models, and where to run them.

    `up` starts any recipe of `list` (`up gpu-check`), and `evaluate` scores one; `demo`, `preflight` and
    `serve` start the recipe of their name."""


def _paragraphs(text: str) -> list[str]:
    """The paragraphs of a docstring, each on one line."""
    return [" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n") if paragraph]


def _bucket(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str:
    """The address of a bucket that can be one; "" where none is given. Given and empty is a variable that is
    not set, and no wish to do without."""
    if value is None:
        return ""
    from trainer.config.bucket_address import BucketAddress

    return BucketAddress.parse(value, "--bucket").url


def files_from_here(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    """Names separated by commas, of which those of files become whole paths."""
    from recipes.recipe import recipe_files

    return ",".join(recipe_files.from_here(value.split(",")))


Decorator = Callable[[Any], Any]


def options(*declared: Decorator) -> Decorator:
    """Several options as one decorator, in their order."""

    def declare(function: Any) -> Any:
        for option in reversed(declared):
            function = option(function)
        return function

    return declare


def bucket(help: str) -> Decorator:
    """`--bucket`, checked."""
    return click.option("--bucket", callback=_bucket, metavar="URL", help=help)


FILE = click.Path(resolve_path=True)
"""A file that is named from where the person stands."""
RECIPE = click.argument(
    "recipe",
    cls=Argument,
    type=NameType("recipe", recipe_names),
    help="its name, see `list`, or a file: FILE.yaml, FILE.py:FUNCTION",
)
RUN = click.argument(
    "run",
    cls=Argument,
    type=NameType("run", run_ids),
    help="its id: see `status`, and `runs` for those in a bucket",
)
RUN_OR_FOLDER = NameType("run", run_ids, folders=True)
ONE_RUN = click.argument("run", cls=Argument, type=RUN_OR_FOLDER, help="id of a run, or its folder")
STORED = bucket("of a run that was not launched from here")
TRUST = click.option(
    "--trust", is_flag=True, help="run what the bucket says of somebody else's launch without asking"
)
TARGET = click.option(
    "--target", metavar="NAME", help="where: see docs/targets.md; default: the cheapest that can"
)
SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="A.B=C",
    help="override a field, or all of @FILE.yaml (docs/reference.md)",
)
DRY_RUN = click.option("--dry-run", is_flag=True, help="show what would run, start nothing")
TAKEOVER = click.option(
    "--takeover", is_flag=True, help="end the run of this id that is alive, and replace it"
)
RUN_ID = click.option(
    "--run-id", default="", metavar="ID", help="under which it saves and resumes; default: a new one"
)
CHECKPOINTS = bucket("s3://, gs:// or r2://, that checkpoints are pushed to")
RECORDED = options(
    RUN_ID, CHECKPOINTS, click.option("--reproducible", is_flag=True, help="refuse a dirty git tree")
)
REMOTE = options(
    click.option(
        "--hosts",
        default="",
        metavar="HOST,...",
        help="machines for the target ssh: [user@]address[:port],...",
    ),
    click.option("--detach", is_flag=True, help="do not follow the logs"),
)
LAUNCH = options(TARGET, SET, RECORDED, TAKEOVER, REMOTE, TRUST, DRY_RUN)
"""What every command that starts a recipe takes."""
LAUNCH_NAMES = {parameter.name for parameter in click.command(LAUNCH(lambda: 0)).params}
FLEET = options(
    click.option(
        "--fleet", default="", metavar="4xL40S:spot", help="machines that sample for it (docs/fleet.md)"
    ),
    click.option("--yes", is_flag=True, help="start without asking, whatever it costs"),
)
