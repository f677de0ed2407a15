"""The shell that every target's task runs: the same few lines everywhere; all logic is in setup.sh and
trainer/node.

The resolved configuration stands in the task itself, so that a generated file is whole: it names everything
that the run depends on, and ${RUN_ID}, ${BUCKET}, ${DATA}, ${MODELS} and ${RUNS} are filled in where it runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

import yaml

from recipes.recipe import sample_group
from recipes.recipe.spec import ASKED_BUCKET, MARKS, PLACEHOLDERS, Recipe, Step
from trainer.config import RunConfig, by_model, override, to_dict
from trainer.config.bucket_address import BucketAddress
from trainer.config.run_store import is_hub_name
from trainer.system.exit_codes import EXIT_CONFIG

SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
           "R2_ACCESS_KEY_ID", "R2_SECRET_ACCESS_KEY", "GOOGLE_SERVICE_ACCOUNT_KEY", "SPOTRL_REWARD_TOKEN",
           "SPOTRL_JUDGE_KEY", "SPOTRL_FLEET_KEY")  # fmt: skip
"""Tokens that a run may need. They come from your environment or the platform's secret store, never from a
file."""
SETTINGS = ("AWS_ENDPOINT_URL", "AWS_REGION", "R2_ACCOUNT_ID")
"""Settings of the object store and the node launcher that may be given besides."""
PORT = 8000
"""Port that a server listens at."""
API_KEY = "VLLM_API_KEY"
"""What a server asks its callers for."""
TASK = "trainer/shell/task.sh"
"""What the shell of every task calls."""
FLEET_KEY = "SPOTRL_FLEET_KEY"
"""The secret of a run with rollout workers, which these share."""
SAMPLING_PROGRAM = "trainer.fleet.machine"
"""Module that a sampling machine runs, as `python -m`."""
WEIGHTS = "${MODELS}/${RUN_ID}"
"""Where a node puts `storage.weights`: a launch's own, so that an older export is never taken for a newer
one."""


OUTLAST = """\
outlast() { # waits for a child, also through the signals that interrupt `wait`; returns its exit code
  wait "$1" || true
  while kill -0 "$1" 2>/dev/null; do wait "$1" || true; done
  wait "$1"
}
"""
"""For batch scripts, which trap the signal that tells of a preemption."""


def on_node(recipe: Recipe) -> Recipe:
    """The recipe as its nodes see it: uploaded folders where they are fetched to, and no data that it does
    not use."""
    config = recipe.config
    bucket = bucket_of(recipe)
    if bucket and config.checkpoint.remote == ASKED_BUCKET:
        config = override(config, [f"checkpoint.remote={bucket}"])
    for upload in recipe.uploads:
        config = override(config, [f"{upload.field}={upload.there}"])
    steps = _needed(recipe.steps, config, teaches=recipe.kind != "sample")
    if recipe.storage.weights:
        made = [recipe.storage.weights, WEIGHTS, config.model.path]
        if config.model.revision:
            made.append(config.model.revision)
        module = "trainer.checkpoint.weights"
        steps.append(Step(creates=f"{WEIGHTS}/config.json", module=module, args=tuple(made)))
        config = override(config, [f"model.path={WEIGHTS}", "model.revision="])
    uploads = [upload.step(bucket or ASKED_BUCKET) for upload in recipe.uploads]
    return replace(recipe, config=config, steps=(*uploads, *steps))


def job_name(recipe: Recipe) -> str:
    """The recipe's name as platforms take it: no dots."""
    return recipe.name.replace(".", "-")


def bucket_of(recipe: Recipe) -> str:
    """The recipe's bucket without a slash at its end; empty where it is asked for at launch."""
    given = recipe.storage.bucket
    return BucketAddress.parse(given, "storage.bucket").url if given else ""


def _needed(steps: Sequence[Step], config: RunConfig, teaches: bool) -> list[Step]:
    """The steps whose result the run reads, and those that such a step reads: no tiny model beside one of
    your own. teaches: a machine that samples asks no teacher."""
    read = [config.model.path, config.data.path, config.evaluation_path]
    read += [config.algorithm.teacher] if teaches else []
    needed: list[Step] = []
    for step in reversed(steps):  # a step reads what an earlier one has made
        folder, _, mark = step.creates.rpartition("/")
        if mark not in MARKS.values() or folder in read:
            needed.insert(0, step)
            read += step.args
    return needed


def written_by(recipe: Recipe, target: str) -> str:
    """The head's first lines: the command that writes the file to the folder that the head's commands
    name."""
    where = f"--target {target} --out recipes/generated/{target}"
    command = f"python3 launch.py render {sample_group.run_name(recipe)} {where}"
    return f"{recipe.description}.\nWritten by `{command}`.\nRun from the repository's root:"


def run_id_comment(recipe: Recipe) -> str:
    """What RUN_ID means, for the head of a file."""
    if recipe.kind == "sample":
        whose = "that of the run" if recipe.config.fleet.run == sample_group.OWN_RUN else "its own"
        return (
            f"RUN_ID is {whose}. A machine that is taken away is started again and holds up no other; "
            "all end with their run."
        )
    if recipe.kind == "serve":
        return f"Callers give the key of {API_KEY}. The server ends after {recipe.budget.max_hours:g} hours."
    hours = recipe.budget.max_hours
    if recipe.kind == "check":
        return f"It ends within {hours:g} hours; `python3 launch.py pull RUN_ID` fetches what it found."
    if recipe.config.evaluation.pass_rate_samples:
        return "The same RUN_ID goes on behind the rows that are scored; a new one starts from scratch."
    return "The same RUN_ID resumes from its last committed checkpoint; a new one starts from scratch."


def bucket_keys(url: str) -> tuple[str, ...]:
    """Names of the tokens that open a bucket."""
    match url.partition("://")[0]:
        case "gs":
            return ("GOOGLE_SERVICE_ACCOUNT_KEY",)
        case "r2":
            return ("R2_ACCESS_KEY_ID", "R2_SECRET_ACCESS_KEY")
        case "s3":
            return ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    return ()


def secret_names(recipe: Recipe) -> tuple[str, ...]:
    """Tokens that a recipe's task uses, and no others: a platform keeps what it is given."""
    config = recipe.config
    urls = [bucket_of(recipe), recipe.storage.weights, config.data.path, config.evaluation.path]
    if recipe.uses_bucket and not urls[0]:  # asked for at launch: it may be any
        urls += ["s3://", "r2://", "gs://"]
    used: set[str] = set()
    for url in urls:
        used.update(bucket_keys(url))
    if "AWS_ACCESS_KEY_ID" in used:
        used.add("AWS_SESSION_TOKEN")
    used.add("HF_TOKEN")  # a preflight tries it
    if recipe.kind == "sample" or (recipe.kind == "train" and config.fleet.workers != "off"):
        used.add(FLEET_KEY)
    if recipe.kind == "train":
        if config.logging.wandb == "online":
            used.add("WANDB_API_KEY")
        if config.rewards.remote_url:
            used.add("SPOTRL_REWARD_TOKEN")
        if config.rewards.judge_url:
            used.add("SPOTRL_JUDGE_KEY")
    own = (API_KEY,) if recipe.kind == "serve" else ()
    return (*(name for name in SECRETS if name in used), *own)


def launch_secrets(recipe: Recipe) -> tuple[str, ...]:
    """Secrets of the launch itself, which no platform has for it."""
    used = secret_names(recipe)
    return tuple(name for name in (API_KEY, FLEET_KEY) if name in used)


def sparse_config(config: RunConfig) -> dict:
    """The configuration without the fields that have their default value."""
    default = to_dict(RunConfig())
    values = to_dict(config)
    sparse: dict = {"method": values["method"]}
    for section, fields in values.items():
        if isinstance(fields, dict):
            changed = {key: value for key, value in fields.items() if value != default[section][key]}
            if changed:
                sparse[section] = changed
    return sparse


def config_text(recipe: Recipe) -> str:
    """YAML of the run's configuration, placeholders left in."""
    return yaml.dump(sparse_config(on_node(recipe).config), Dumper=_Quoting, sort_keys=False, width=1000)


class _Quoting(yaml.SafeDumper):
    """Quotes strings with a placeholder: filled in with nothing, an unquoted one would read as null."""


_Quoting.add_representer(
    str,
    lambda dumper, value: dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, '"' if "${" in value else None
    ),
)


def fill_placeholders(text: str, values: dict[str, str]) -> str:
    """`text` with ${NAME} replaced for the names in `values`."""
    return re.sub(r"\$\{(" + "|".join(PLACEHOLDERS) + r")\}", lambda m: values.get(m[1], m[0]), text)


def heredoc(text: str) -> str:
    """`text` quoted for an unquoted here-document: only our placeholders are expanded by the shell."""
    quoted = re.sub(r"([\\`$])", r"\\\1", text)
    return re.sub(r"\\\$\{(" + "|".join(PLACEHOLDERS) + r")\}", r"${\1}", quoted)


def shell_word(argument: str) -> str:
    """One shell word; placeholders stay live inside double quotes."""
    if any("${" + name + "}" in argument for name in PLACEHOLDERS):
        return '"' + re.sub(r'(["\\`])', r"\\\1", argument) + '"'
    return shlex.quote(argument)


def preamble(
    recipe: Recipe,
    work: str,
    asks_bucket: bool = False,
    runs: str = "$WORK/runs",
    data: str = "$WORK/data",
    kept_folder: str = "/",
) -> str:
    """Strict mode, the directories and the site's own lines. `work`, `runs` and `data` are shell expressions;
    `asks_bucket`: where the recipe names no bucket, BUCKET must.

    `data` goes elsewhere where `work` is a volume that all nodes see: each prepares its own copy there.
    kept_folder: what outlives the machine, so that BUCKET may be a file:// address below it
    (Platform.kept_folder).
    """
    own = bucket_of(recipe) or ("asked" if asks_bucket else "''")
    folders = [f'export WORK="${{WORK:-{work}}}"']
    if data != "$WORK/data":
        folders.append(f'export DATA="${{DATA:-{data}}}"')
    if runs != "$WORK/runs":
        folders.append(f'export RUNS="${{RUNS:-{runs}}}"')
    begin = f'. {TASK} begin {own} "{kept_folder}"'
    if recipe.kind == "train":
        begin += f' "{recipe.budget.max_losses} {recipe.budget.max_restarts}"'
    return "\n".join(["set -euo pipefail", *folders, begin, *recipe.site.prelude]) + "\n"


def data_directory(recipe: Recipe) -> str:
    """Where prepared data goes, as a shell expression."""
    return "$HOME/spotrl/data" if recipe.storage.volume and recipe.cluster.nodes > 1 else "$WORK/data"


def driver_check(recipe: Recipe, code: int = EXIT_CONFIG) -> str:
    """Leaves with `code` where the GPU driver cannot run the environment; for every shell that needs the
    GPU."""
    if recipe.environment != "gpu":
        return ""
    if recipe.kind == "sample":
        code = EXIT_CONFIG  # with 36 the machine would be counted as an attempt of the run
    return f". trainer/shell/driver.sh {code} {recipe.budget.max_losses}\n"


def leave_if_over(recipe: Recipe) -> str:
    """Leaves a machine that samples where its run is over, in seconds; for every shell of its task."""
    run = recipe.config.fleet.run
    return f"needed {recipe.environment} {shell_word(run)}\n" if recipe.kind == "sample" else ""


def setup_commands(
    recipe: Recipe,
    bad_driver: int = EXIT_CONFIG,
    check_driver: bool = True,
    begun: bool = True,
    prepare: bool = True,
) -> str:
    """Driver's check, environment and preparation; a second run of it does nothing. begun: in the shell of
    the preamble. prepare: else another job prepares on the same file system, and its results are waited
    for."""
    recipe = on_node(recipe)
    check = driver_check(recipe, bad_driver).rstrip("\n") if check_driver else ""
    lines = [check] if check else []
    lines.append(f"bash trainer/shell/setup.sh {recipe.environment}")
    # the next machine need not download the packages again
    if recipe.storage.volume and recipe.cluster.nodes == 1:
        lines.insert(0, 'export UV_CACHE_DIR="$WORK/uv" UV_LINK_MODE=copy')
    python = f".venvs/{recipe.environment}/bin/python"
    for step in recipe.steps:
        command = " ".join([python, "-m", step.module, *map(shell_word, step.args)])
        done = shell_word(step.creates)
        lines.append(f"step {done} {command}" if prepare else f"await {done}")
    if recipe.kind == "sample":
        lines.insert(0, leave_if_over(recipe).rstrip("\n"))
    if not begun:
        lines.insert(0, f". {TASK}")
    return "\n".join(lines) + "\n"


def keep_commands(recipe: Recipe) -> str:
    """For machines that are thrown away: the head puts what it has prepared into the bucket, while training
    begins."""
    if recipe.kind == "sample":
        return ""  # one writer: the run's head
    below = [step.creates.partition("${DATA}/") for step in on_node(recipe).steps]
    names = [path.partition("/")[0] for before, data, path in below if data and not before]
    python = f".venvs/{recipe.environment}/bin/python"
    return f"keep {python} {' '.join(names)}\n" if names else ""


def login_files(recipe: Recipe, runs: str) -> dict[str, str]:
    """For compute nodes without internet: environment, data and model, prepared on a node that has it (login
    node).

    The job does the same and finds everything there. The driver is checked in the job: this node may have no
    GPU.
    """
    if not recipe.site.offline or recipe.kind == "sample":  # the run's file prepares for both groups
        return {}
    usage = f"# Before the job, where there is internet: RUN_ID=my-run bash {recipe.name}.setup.sh"
    head = f"#!/usr/bin/env bash\n{usage}\n"
    text = head + preamble(recipe, recipe.site.shared_dir or "$PWD/.cache", runs=runs)
    text += setup_commands(recipe, check_driver=False)
    for config in by_model(recipe.config) if recipe.kind == "train" else ():
        model = config.model
        if is_hub_name(model.path):
            revision = f" --revision {shlex.quote(model.revision)}" if model.revision else ""
            text += f".venvs/{recipe.environment}/bin/hf download {model.path}{revision}\n"
    return {f"{recipe.name}.setup.sh": text}


def write_config(recipe: Recipe) -> str:
    """Writes the run's configuration beside the repository, and what it is made from into the run's
    directory."""
    return config_file(recipe) + manifest_command(recipe)


def config_path(recipe: Recipe) -> str:
    """Where a job writes its configuration, as a shell expression. Machines that sample may share a folder
    with the run and with each other, so each has a file of its own (SPOTRL_MACHINE: its job's id)."""
    own = ".sample-${SPOTRL_MACHINE:-0}" if recipe.kind == "sample" else ""
    return f".cache/$RUN_ID{own}.yaml"


def config_file(recipe: Recipe) -> str:
    """Writes the run's configuration beside the repository."""
    return f'write "{config_path(recipe)}" <<YAML\n{heredoc(config_text(recipe))}YAML\n'


def manifest_command(recipe: Recipe) -> str:
    """Writes what the run is made from into its directory; wants the environment. Not from a machine that
    samples, whose hardware is not the run's."""
    if recipe.kind == "sample":
        return ""
    return f'must .venvs/{recipe.environment}/bin/python -m recipes.records.manifest ".cache/$RUN_ID.yaml"\n'


def node_command(recipe: Recipe, host: str = "127.0.0.1") -> str:
    """What runs once on every node. host: address that a server listens on."""
    python = f".venvs/{recipe.environment}/bin/python"
    if recipe.kind == "sample":
        hours = f"--hours {recipe.budget.max_hours:g}"
        return f'{python} -m {SAMPLING_PROGRAM} --config "{config_path(recipe)}" {hours}'
    if recipe.kind == "serve":
        where = f"--host {host} --port {PORT} --hours {recipe.budget.max_hours:g}"
        return f'{python} -m trainer.sampling.serve --config ".cache/$RUN_ID.yaml" {where}'
    flag = " --preflight" if recipe.kind == "preflight" else ""
    launch = f'{python} -m trainer.node{flag} --config ".cache/$RUN_ID.yaml"'
    if recipe.kind == "check":
        hours = f"--hours {recipe.budget.max_hours:g}"
        return f'{launch} -- {python} -m recipes.gpu_check --config ".cache/$RUN_ID.yaml" {hours}'
    return launch
