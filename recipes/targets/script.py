"""The shell that every target's task runs: the same few lines everywhere, all logic is in setup.sh and trainer/node.py.

The resolved configuration stands in the task itself, so that a generated file is whole: it names everything that the
run depends on, and ${RUN_ID}, ${BUCKET}, ${DATA}, ${MODELS} and ${RUNS} are filled in where it runs.
"""

from __future__ import annotations

import re
import shlex

import yaml

from recipes.spec import PLACEHOLDERS, Recipe
from trainer.config import RunConfig, to_dict

SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""Tokens that a run may need. They come from your environment or the engine's secret store, never from a file."""
SETTINGS = ("AWS_ENDPOINT_URL", "AWS_REGION", "NODE_OPTIONS")
"""Settings of the object store and the node launcher that may be given besides."""


def sparse_config(config: RunConfig) -> dict:
    """The configuration without the fields that have their default value."""
    default, values = to_dict(RunConfig()), to_dict(config)
    sparse: dict = {"method": values["method"]}
    for section, fields in values.items():
        if isinstance(fields, dict):
            changed = {key: value for key, value in fields.items() if value != default[section][key]}
            if changed:
                sparse[section] = changed
    return sparse


def config_text(recipe: Recipe) -> str:
    """YAML of the run's configuration, placeholders left in."""
    return yaml.dump(sparse_config(recipe.config), Dumper=_Quoting, sort_keys=False, width=1000)


class _Quoting(yaml.SafeDumper):
    """Quotes strings with a placeholder: filled in with nothing, an unquoted one would read as null."""


_Quoting.add_representer(
    str, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:str", value, '"' if "${" in value else None)
)


def fill(text: str, values: dict[str, str]) -> str:
    """`text` with ${NAME} replaced for the names in `values`."""
    return re.sub(r"\$\{(" + "|".join(PLACEHOLDERS) + r")\}", lambda m: values.get(m[1], m[0]), text)


def heredoc(text: str) -> str:
    """`text` quoted for an unquoted here-document: only our placeholders are expanded by the shell."""
    quoted = re.sub(r"([\\`$])", r"\\\1", text)
    return re.sub(r"\\\$\{(" + "|".join(PLACEHOLDERS) + r")\}", r"${\1}", quoted)


def word(argument: str) -> str:
    """One shell word; placeholders stay live inside double quotes."""
    if any("${" + name + "}" in argument for name in PLACEHOLDERS):
        return '"' + re.sub(r'(["\\`])', r"\\\1", argument) + '"'
    return shlex.quote(argument)


def preamble(work: str, bucket: bool, runs: str = "$WORK/runs") -> str:
    """Strict mode and the directories. `work` and `runs` are shell expressions; `bucket` asks for BUCKET."""
    ask = ': "${BUCKET:?the bucket that checkpoints are pushed to is missing: give BUCKET=s3://..., gs://... or r2://...}"'
    names = " ".join((*SECRETS, *SETTINGS))
    lines = [
        "set -euo pipefail",
        ': "${RUN_ID:?the id of the run is missing: give RUN_ID}"',
        ask if bucket else ': "${BUCKET:=}"',
        f'export WORK="${{WORK:-{work}}}"',
        f'export DATA="${{DATA:-$WORK/data}}" MODELS="${{MODELS:-$WORK/models}}" RUNS="${{RUNS:-{runs}}}"',
        'export HF_HOME="${HF_HOME:-$WORK/huggingface}"',
        f'for name in {names}; do [ -n "${{!name:-}}" ] || unset "$name"; done',
        'mkdir -p "$WORK" .cache',
    ]
    return "\n".join(lines) + "\n"


def setup_commands(recipe: Recipe) -> str:
    """Environment and preparation; a second run of it does nothing."""
    lines = [f"bash trainer/setup.sh {recipe.environment}"]
    if recipe.steps:
        lines.append('missing() { case "$1" in *://*) return 1 ;; *) [ ! -e "$1" ] ;; esac; }')
    for step in recipe.steps:
        command = " ".join([f".venvs/{recipe.environment}/bin/python", "-m", step.module, *map(word, step.args)])
        lines.append(f"if missing {word(step.creates)}; then {command}; fi")
    return "\n".join(lines) + "\n"


def write_config(recipe: Recipe) -> str:
    """Writes the run's configuration beside the repository."""
    return f'cat > ".cache/$RUN_ID.yaml" <<YAML\n{heredoc(config_text(recipe))}YAML\n'


def node_command(recipe: Recipe) -> str:
    """What runs once on every node."""
    flag = " --preflight" if recipe.kind == "preflight" else ""
    return f'.venvs/{recipe.environment}/bin/python -m trainer.node{flag} --config ".cache/$RUN_ID.yaml"'
