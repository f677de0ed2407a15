"""Every command line of docs, `--help` and the scripts' descriptions is one that its program takes."""

import re
import shlex
from pathlib import Path

import pytest

from data_prep import command_options, commands
from recipes.commands import command_line
from recipes.commands.main_commands import launch

ROOT = Path(__file__).parents[2]
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*FRONT, *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("*/*/README.md"))]
SCRIPTS = [
    path
    for folder in ("trainer", "recipes", "data_prep", "benchmarks", "examples", "docs", "requirements")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
STARTS = re.compile(r"(?:(?:uv run|\S*python3?) +)(launch\.py|-m +[a-z0-9_.]+|[a-z_/]+\.py)(.*)")
CUT = re.compile(r"\s#\s|\s{3,}|`|\s&&\s|\s\|\s|;|\s<<<|\s>>?\s|\n")
"""Where a command line ends in running text."""


NAMED = re.compile(r"[a-z-]+( --[a-z-]+)?|data [a-z]+")


def lines_of(text):
    """(program, words) of every command line in a text."""
    for match in STARTS.finditer(text.replace("\\\n", " ")):
        program = match[1].removeprefix("-m").strip()
        rest = match[2] if "-c '" in match[2] or "--command '" in match[2] else CUT.split(match[2])[0]
        try:
            yield program, shlex.split(rest.rstrip("`.:,)\"'| "), comments=True)
        except ValueError:
            continue


def written():
    for page in PAGES:
        for found in lines_of(page.read_text()):
            yield page.name, *found
    examples = [
        (f"launch.py {name} --help", line) for name, one in launch.commands.items() for line in one.examples
    ]
    for where, example in [*examples, *(("--help", line) for line in command_line.EXAMPLES)]:
        for found in lines_of(f"python3 launch.py {example}"):
            yield where, *found
    for text in (command_options.EPILOG, command_options.EXAMPLES):
        for found in lines_of(text):
            yield "--help", *found
    for script in SCRIPTS:
        for found in lines_of(script.read_text().partition('"""')[2].partition('"""')[0]):
            yield script.relative_to(ROOT).as_posix(), *found


WRITTEN = list(dict.fromkeys((where, program, shlex.join(words)) for where, program, words in written()))


def source_of(program):
    """The file of a script or module of ours; None: another's."""
    if program.endswith(".py"):
        return ROOT / program
    path = ROOT / program.replace(".", "/")
    return next(
        (p for p in (path.with_suffix(".py"), path / "__main__.py", path / "cli.py") if p.exists()), None
    )


def takes_data(words):
    """Raises UsageError if `data` does not take these words."""
    name, *given = [word for word in words if word not in ("--help", "-h")]
    commands.data.commands[name].make_context(name, given)


def test_they_are_found_everywhere():
    assert len(WRITTEN) > 150
    places = {where for where, _, _ in WRITTEN}
    assert {"sft.md", "--help", "benchmarks/fleet_links.py"} <= places


@pytest.mark.parametrize(("where", "program", "line"), WRITTEN, ids=[" ".join(one) for one in WRITTEN])
def test_a_written_command_line_is_taken(where, program, line):
    words = shlex.split(line)
    if "..." in words or any("{" in word for word in words):
        return  # a form, not a command
    if NAMED.fullmatch(line) and words[0] in launch.commands:
        return  # running text names a command or its option
    if program == "launch.py":
        if words[0] == "data" and len(words) > 1:
            takes_data(words[1:])
        elif words[0] != "test":
            given = [word for word in words[1:] if word not in ("--help", "-h")]
            launch.commands[words[0]].make_context(words[0], given)
        return
    if program == "data_prep":
        takes_data(words or ["prepare", "--list"])
        return
    if program in ("pip", "pytest"):
        return
    source = source_of(program)
    assert source and source.exists(), f"{where}: no {program}"
    text = source.read_text()
    for option in re.findall(r"(?<!\S)(--[a-z][a-z-]*)", line):
        assert option in text or "argparse" not in text, f"{where}: {program} has no {option}"
