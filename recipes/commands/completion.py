"""Shell completion of launch.py: what a shell loads, and the answer that it gets for a line.

The shell hands over the line up to the cursor in the variable SPOTRL_COMPLETE, and gets a candidate per line,
with a tab and what it means behind it. Without candidates it completes files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

LINE = "SPOTRL_COMPLETE"
"""The variable that makes launch.py answer a shell."""

BASH = r"""# python3 launch.py completion bash >> ~/.bashrc
_spotrl() {
    local program=("${COMP_WORDS[0]/#\~/$HOME}") value help
    if [[ ${program[0]##*/} == python* ]]; then
        [[ $COMP_CWORD -gt 1 && ${COMP_WORDS[1]} == *launch.py ]] || return 0
        program+=("${COMP_WORDS[1]/#\~/$HOME}")
    fi
    while IFS=$'\t' read -r value help; do
        [[ $value == *= ]] && compopt -o nospace
        COMPREPLY+=("$value")
    done < <(SPOTRL_COMPLETE="${COMP_LINE:0:COMP_POINT}" "${program[@]}" 2>/dev/null)
}
complete -o bashdefault -o default -o nosort -F _spotrl launch.py python python3
"""
ZSH = r"""# python3 launch.py completion zsh >> ~/.zshrc, below compinit
_spotrl() {
    local program=(${~${(Q)words[1]}}) found=() line
    if [[ ${program[1]:t} == python* ]]; then
        [[ $CURRENT -gt 2 && $words[2] == *launch.py ]] || { _python "$@" 2>/dev/null || _files; return }
        program+=(${~${(Q)words[2]}})
    fi
    for line in "${(@f)$(SPOTRL_COMPLETE="${(j: :)words[1,CURRENT]}" $program 2>/dev/null)}"; do
        [[ -n $line ]] && found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
    done
    [[ $words[CURRENT] == --*=* ]] && compset -P '*='
    if (( $#found )); then _describe -V launch.py found; else _files; fi
}
compdef _spotrl launch.py python python3
"""
FISH = r"""# python3 launch.py completion fish >> ~/.config/fish/config.fish
function __spotrl
    set -l words (commandline -opc)
    set -l program $words[1]
    string match -q 'python*' (basename $program); and set -a program $words[2]
    set -l found (env SPOTRL_COMPLETE=(commandline -cp | string collect) $program 2>/dev/null)
    if set -q found[1]
        set -l option (string match -r -- '^--[^=]*=' (commandline -ct); or echo '')
        printf '%s\n' $option$found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c launch.py -k -f -a '(__spotrl)'
for python in python python3
    complete -c $python -k -f -n 'string match -q "*launch.py" -- (commandline -opc)[2]' -a '(__spotrl)'
end
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def print_candidates(program: click.Command) -> int:
    """Prints the candidates for the line that a shell has handed over."""
    line = os.environ.pop(LINE)
    words = split_arg_string(line)
    incomplete = words.pop() if words and not line[-1].isspace() else ""
    while words and not words.pop(0).endswith("launch.py"):
        pass
    for item in ShellComplete(program, {}, "launch.py", LINE).get_completions(words, incomplete):
        if item.type == "plain":
            print(f"{item.value}\t{item.help or ''}")
    return 0


class NameType(click.ParamType):
    """A name that a shell completes from lists; whether there is such a one, the command says."""

    def __init__(self, name: str, *lists: Any, folders: bool = False) -> None:
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
        """The names that begin as what was typed."""
        names = [name for listed in self.lists for name in listed()]
        return [CompletionItem(n) for n in names if n.startswith(incomplete)]


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
