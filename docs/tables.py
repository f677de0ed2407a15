"""Writes the pages' tables that restate code: `python docs/tables.py`; tests/test_docs.py holds them to it.

A table stands between two comments: `<!-- NAME: python docs/tables.py -->` and `<!-- end of NAME -->`. Needs
what launch.py needs: Click, msgspec, PyYAML and rich.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data_prep.command_options import DataArgument  # noqa: E402
from data_prep.commands import data  # noqa: E402
from recipes.commands.command_line import LAUNCH_NAMES, PANELS, Argument, Command  # noqa: E402
from recipes.commands.main_commands import launch  # noqa: E402
from recipes.plan import cheaper, cost  # noqa: E402
from recipes.platforms.base import Platform  # noqa: E402
from recipes.platforms.targets import TARGETS  # noqa: E402
from recipes.recipe import spec  # noqa: E402
from recipes.screens import plan_facts  # noqa: E402
from trainer import config  # noqa: E402
from trainer.node.preflight.findings import ANOTHER_MACHINE_HELPS  # noqa: E402
from trainer.system import exit_codes  # noqa: E402

COMMAND = "python docs/tables.py"
RECIPE_SECTIONS = ("cluster", "sample", "storage", "budget", "site")
SET_FIRST = (
    *("model.path", "data.source", "run.max_steps", "run.seed"),
    *("rollout.prompts_per_step", "rollout.samples_per_prompt", "rollout.max_tokens"),
    *("rollout.tensor_parallel", "algorithm.kl_coef", "algorithm.samples_per_update"),
    *("optimizer.learning_rate", "lora.rank", "sft.batch_size", "sft.epochs", "rewards.functions"),
    *("cluster.nodes", "cluster.gpus_per_node", "cluster.gpu", "storage.bucket", "budget.max_hours"),
)
"""The twenty options that people set."""
OF_A_COMMAND = ("argument or option", "what it is")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown, on one line a row."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def meanings(kind: type) -> dict[str, str]:
    """What stands under each field of a dataclass and of those that it extends, by the field's name."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        tree = ast.parse(Path(sys.modules[one.__module__].__file__ or "").read_text())
        body = next(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == one.__name__)
        for field, under in zip(body, body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant):
                found[field.target.id] = " ".join(str(under.value.value).split())
    return found


def default_of(field: Field[Any], kind: type) -> str:
    """The default as a person would write it; with choices, all of them, the default first."""
    default = field.default if field.default is not MISSING else field.default_factory()  # ty: ignore
    choices = [one for one in get_args(get_type_hints(kind)[field.name]) if isinstance(one, str)]
    if choices:
        ordered = sorted(choices, key=lambda one: one != default)
        return ", ".join(f"`{one}`" if one else "empty" for one in ordered)
    if default in ("", (), None):
        return "empty"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return f"`[{', '.join(map(str, default))}]`"
    return f"`{default}`"


def options_of(section: str, kind: type) -> list[tuple[str, ...]]:
    """A row for each option of a section."""
    about, rows = meanings(kind), []
    for field in fields(kind):
        if is_dataclass(field.default):
            continue
        allowed = field.metadata.get("range")
        limits = f" ({allowed})" if allowed and str(allowed) else ""
        meaning = about.get(field.name, "")
        rows.append((f"`{section}.{field.name}`", default_of(field, kind) + limits, meaning))
    return rows


def sections(whole: type, only: tuple[str, ...] = ()) -> Iterator[tuple[str, type]]:
    """The sections of a run or of a recipe with their classes."""
    for name, kind in get_type_hints(whole).items():
        found = [one for one in (kind, *get_args(kind)) if is_dataclass(one)]
        if found and (not only or name in only):
            yield name, found[0]  # ty: ignore


def options(whole: type, only: tuple[str, ...] = ()) -> str:
    """A heading and a table for each section."""
    head = ("option", "default (limits)", "meaning")
    parts = [f"### {name}\n\n{table(head, options_of(name, kind))}" for name, kind in sections(whole, only)]
    return "\n\n".join(parts)


def first_options() -> str:
    """The options that people set, in one table."""
    rows = {}
    for name, kind in (*sections(config.RunConfig), *sections(spec.Recipe, RECIPE_SECTIONS)):
        rows |= {row[0].strip("`"): row for row in options_of(name, kind)}
    return table(("option", "default (limits)", "meaning"), [rows[name] for name in SET_FIRST])


def codes() -> str:
    """Exit codes, what they mean and whether a platform starts the run again."""
    rows = []
    for code, meaning in exit_codes.MEANINGS.items():
        again = "yes" if code in exit_codes.RECOVER_EXIT_CODES else ""
        if code in exit_codes.FINAL_EXIT_CODES:
            again = "never"
        rows.append((str(code), meaning, again))
    return table(("code", "meaning", "started again"), rows)


def nodes(one: Platform) -> str:
    """How many nodes a run may have there."""
    return "1" if one.max_nodes == 1 else f"1–{one.max_nodes}"


def targets() -> str:
    """What every target can do."""
    rows = []
    for name, one in TARGETS.items():
        spot = "yes" if one.spot else ""
        gpus = ", ".join(one.gpus)
        rows.append((f"`{name}`", one.title, nodes(one), spot, gpus, one.note))
    return table(("target", "driven by", "nodes", "spot", "GPUs", "to know"), rows)


FACTS = {
    "`plan --json`": plan_facts.PlanFacts,
    "an offer": plan_facts.PlannedOffer,
    "`limits`": plan_facts.PlanLimits,
    "an entry of `cheaper`": cheaper.CheaperChange,
    "an entry of `hourly`": cost.HourlyPrice,
}


def facts() -> str:
    """The names that `plan --json` prints, by the object that has them."""
    parts = []
    for what, kind in FACTS.items():
        about = meanings(kind)
        rows = [(f"`{field.name}`", about.get(field.name, "")) for field in fields(kind)]
        parts.append(table((f"name in {what}", "what it is"), rows))
    return "\n\n".join(parts)


def parameters(command: click.Command) -> Iterator[tuple[str, str]]:
    """The command's own arguments and options, without those of every launch."""
    context = click.Context(command)
    starts = isinstance(command, Command) and command.starts
    for parameter in command.params:
        if isinstance(parameter, Argument | DataArgument):
            yield f"`{parameter.metavar or parameter.human_readable_name.upper()}`", parameter.about
        elif not (starts and parameter.name in LAUNCH_NAMES):
            record = parameter.get_help_record(context)
            if record:
                yield f"`{record[0]}`", record[1]


def commands() -> str:
    """Every command of launch.py with its own arguments and options, in the panels of `--help`."""
    parts = {panel: [f"### {panel}"] for panel in PANELS}
    for name, command in launch.commands.items():
        assert isinstance(command, Command)
        about = " ".join((command.help or "").split("\n\n")[0].split())
        more = " Takes the [options of every launch](#options-of-every-launch)." if command.starts else ""
        rows = list(parameters(command))
        shown = "\n\n" + table(OF_A_COMMAND, rows) if rows else ""
        parts[command.panel].append(f"#### {name}\n\n{about}{more}{shown}")
    return "\n\n".join(part for panel in parts.values() for part in panel)


def data_commands() -> str:
    """The commands of `launch.py data` with their arguments and options."""
    parts = []
    for name, command in data.commands.items():
        about = (command.help or "").partition("\n")[0]
        parts.append(f"### data {name}\n\n{about}\n\n{table(OF_A_COMMAND, list(parameters(command)))}")
    return "\n\n".join(parts)


def launches() -> str:
    """The options that every command takes which starts something."""
    up = launch.commands["up"]
    context = click.Context(up)
    records = [one.get_help_record(context) for one in up.params if one.name in LAUNCH_NAMES]
    return table(OF_A_COMMAND, [(f"`{one[0]}`", one[1]) for one in records if one])


def machine_checks() -> str:
    """The failed checks after which another machine is taken."""
    return table(("failed check", "why another machine helps"), list(ANOTHER_MACHINE_HELPS.items()))


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "reference.md": {
        "first": first_options,
        "run": lambda: options(config.RunConfig),
        "recipe": lambda: options(spec.Recipe, RECIPE_SECTIONS),
    },
    "commands.md": {"commands": commands, "data": data_commands, "launches": launches},
    "failures.md": {"codes": codes},
    "memory.md": {"facts": facts},
    "preflight.md": {"machine": machine_checks},
    "targets.md": {"targets": targets},
}


def written(page: str, text: str) -> str:
    """A page's text with its tables anew."""
    for name, make in TABLES[page].items():
        begin, end = f"<!-- {name}: {COMMAND} -->\n", f"\n<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        assert found and end in rest, f"docs/{page} has no place for {name}"
        text = before + begin + "\n" + make() + "\n" + end + rest.split(end, 1)[1]
    return text


def main() -> None:
    """Brings every page up to date."""
    for page in TABLES:
        path = ROOT / "docs" / page
        path.write_text(written(page, path.read_text()))


if __name__ == "__main__":
    main()
