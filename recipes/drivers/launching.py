"""`up`: from a resolved recipe to running machines: prepare, check, then show or start."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from secrets import token_hex

from recipes.drivers import (
    bucket_access,
    desk_checks,
    launch_checks,
    launch_tokens,
    launched_run,
    shared_record,
    task_files,
    uploads,
)
from recipes.plan import prices, resolving
from recipes.plan.choice import cheapest_target
from recipes.platforms import programs, script
from recipes.platforms.base import Commands, LaunchGiven
from recipes.platforms.targets import target_named
from recipes.recipe.resolved import ResolvedRecipe
from recipes.recipe.spec import Recipe
from recipes.records import manifest, run_process, run_record
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED, FINAL_EXIT_CODES, RECOVER_EXIT_CODES
from trainer.system.processes import end_with_parent

ASK_USD = 20.0
"""Likely dollars of a run from which on `up` asks before it starts one."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a recipe is launched, whatever the recipe."""

    run_id: str = ""
    """Under which it saves and resumes; "": a new one."""
    flags: tuple[str, ...] = ()
    """Passed on to the platform's program as they are."""
    detach: bool = False
    """Leave once the platform has it, without following the logs."""
    takeover: bool = False
    """End the run of this id that is alive, and replace it."""
    reproducible: bool = False
    """Refuse a dirty git tree."""
    yes: bool = False
    """Ask nothing before it is started, whatever it costs."""
    dry_run: bool = False
    """Show what would run, start nothing."""
    trust: bool = False
    """Take from a bucket what somebody else's launch says, without asking."""
    launch: str = ""
    """Value of SPOTRL_LAUNCH; "": a new one."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch, with all that it takes; nothing has been started or written."""

    recipe: Recipe
    """As it was written, with what is uploaded: the manifest has its configuration."""
    run: ResolvedRecipe
    record: RunRecord
    files: dict[str, str]
    """Rendered task files by name, the main one first."""
    env: dict[str, str]
    """What the run is given by name and value."""
    secrets: dict[str, str]
    """Tokens, which stand in no command line and no file."""
    commands: Commands
    options: LaunchOptions

    @property
    def folder(self) -> Path:
        """Where the task files are written."""
        return run_record.RUNS / self.record.run_id / "task"


def launch_recipe(
    name: str, recipe: Recipe, target: str | None, overrides: list[str], options: LaunchOptions
) -> int:
    """Prepares and checks a launch, then starts it; with dry_run it is shown instead. Returns the exit code.

    `name` and `overrides` are what `recipe` was resolved from: the record keeps them for `resume`.
    """
    target = target or cheapest_target(recipe)
    several = recipe.jobs > 1 and target_named(target).follows_one_job
    detach = options.detach or several
    launch = prepare_launch(name, recipe, target, overrides, replace(options, detach=detach))
    for line in bucket_access.unverified(launch.recipe, launch.secrets):
        print(f"# --- {line}" if options.dry_run else line, flush=True)
    notes = desk_checks.check_from_desk(launch.run)
    if not options.dry_run:
        notes += desk_checks.ask_servers(launch.recipe.config, os.environ | launch.secrets)
    for line in notes:
        print(f"# --- {line}" if options.dry_run else f"note: {line}", flush=True)
    if options.dry_run:
        show_launch(launch)
        return 0
    check_prepared(launch)
    if not (options.yes or agrees_to_spend(launch.record)):
        print("nothing was started")
        return EXIT_INTERRUPTED
    replace_earlier(launch)
    code = start_launch(launch)
    if recipe.jobs > 1 and detach:
        _say_how_several_go_on(launch.record, code, options.detach)
    return code


def agrees_to_spend(record: RunRecord) -> bool:
    """Whether the person at the terminal wants a run that is likely to cost more than ASK_USD. A script is
    not asked."""
    if record.planned_usd <= ASK_USD or not sys.stdin.isatty():
        return True
    question = f"likely ${record.planned_usd:,.0f} in {record.planned_hours:.1f} h on {record.target}"
    if record.planned_most_usd:
        question += f", at most ${record.planned_most_usd:,.0f} in nine of ten runs"
    return input(f"{question}: start it? [y/N] ").strip().lower() in ("y", "yes")


def _say_how_several_go_on(record: RunRecord, code: int, detach: bool) -> None:
    """How to follow one of several jobs, which no command follows all at once; where not all of them could
    be started, those that were are ended."""
    if code:
        print(f"not all of {record.run_id} could be started, so those that were are ended", flush=True)
        launched_run.give_up(record.run_id)
    elif not detach:
        before = run_record.workers_of(record.samples_for)
        first = 1 + sum(worker.jobs for worker in before if worker.run_id != record.run_id)
        print(
            f"they are on their way: `python3 launch.py logs {record.samples_for} --worker {first}` follows"
            f" the first, {first + record.jobs - 1} is the last",
            flush=True,
        )


def check_prepared(launch: Launch) -> None:
    """Everything that only others can tell, before anything is rented. Raises ConfigError."""
    task = next(iter(launch.files.values()))
    launch_checks.check_outside(launch.run, launch.record, task, launch.env | launch.secrets)


def prepare_launch(
    name: str, recipe: Recipe, target: str, overrides: list[str], options: LaunchOptions
) -> Launch:
    """The launch of a recipe, checked as far as this machine alone can. Raises ConfigError."""
    platform = target_named(target)
    samples_for = recipe.config.fleet.run if recipe.kind == "sample" else ""
    new_id = run_record.new_worker_id(samples_for) if samples_for else run_record.new_run_id(recipe.name)
    run_id = run_record.check_run_id(options.run_id or new_id)
    uploader = samples_for or run_id  # whose folders were uploaded first
    before = run_record.load_record(uploader) if run_record.is_known(uploader) else None
    recipe = uploads.with_uploads(recipe, target, before.uploads if before else {})
    run = task_files.resolve_task(recipe, target)
    files = {}
    for file, text in task_files.render(run).items():
        files[file] = platform.with_run_id(with_head(text, recipe, target, run_id), run_id)
    used = script.secret_names(recipe)
    secrets = {key: value for key, value in launch_tokens.find_tokens().items() if key in used}
    launch_tokens.check_fleet_key(secrets)
    launch_checks.check_launch(run, options.reproducible)
    try:
        launch_checks.check_keys(run, secrets)
    except ConfigError as error:
        if not options.dry_run:
            raise
        print(f"# --- `up` itself would stop: {error}", flush=True)

    again = None if samples_for else before  # an earlier launch of the same run
    record = RunRecord(
        run_id=run_id,
        recipe=name,
        target=target,
        overrides=overrides,
        flags=list(options.flags),
        uploads={upload.field: upload.key for upload in recipe.uploads},
        bucket=recipe.storage.bucket,
        managed=platform.is_managed(recipe),
        started_s=time.time(),
        **vars(resolving.expect_run(run, prices.sky_catalogs())),
        earlier_usd=again.usd() if again else 0.0,
        earlier_hours=again.hours() if again else 0.0,
        first_started_s=(again.first_started_s or again.started_s) if again else 0.0,
        samples_for=samples_for,
        jobs=recipe.jobs,
        confirmed=platform.driven_from_here,
    )
    env = {"RUN_ID": run_id}
    if recipe.storage.bucket:
        env["BUCKET"] = recipe.storage.bucket
    env |= launch_tokens.find_settings() | {"SPOTRL_SOURCE": manifest.source_id()}
    # The same through all restarts by the platform; a new one opens a run that had ended for good
    # (trainer/checkpoint). Machines that sample have that of their run, where both are started at once.
    if options.launch or not samples_for:
        env["SPOTRL_LAUNCH"] = options.launch or token_hex(4)
    paths = [str(run_record.RUNS / run_id / "task" / file) for file in files]
    made_here = [key for key in (script.API_KEY, script.FLEET_KEY) if key in used]
    names = list(dict.fromkeys([*secrets, *made_here]))
    commands = platform.commands(record, LaunchGiven(paths, env, names, options.detach))
    return Launch(
        recipe=recipe,
        run=run,
        record=record,
        files=files,
        env=env,
        secrets=secrets,
        commands=commands,
        options=options,
    )


def with_head(text: str, recipe: Recipe, target: str, run_id: str) -> str:
    """A task file whose comments launch this very file, under this run's id, and say what wrote it."""
    lines = []
    for line in text.splitlines(keepends=True):
        if line.startswith("# "):
            line = line.replace(f"recipes/generated/{target}/", f"runs/{run_id}/task/")
            line = line.replace("RUN_ID=my-run", f"RUN_ID={run_id}")
            if line.startswith("# Written by "):
                words = f"{recipe.name} --target {target} --run-id {run_id}"
                if recipe.kind == "sample":
                    words = f"rollout-worker --set fleet.run={recipe.config.fleet.run} --target {target}"
                line = f"# Written by `python3 launch.py up {words}`.\n"
        lines.append(line)
    return "".join(lines)


def show_launch(launch: Launch) -> None:
    """Prints the task files, the commands that would run, and what that would cost."""
    for name, text in launch.files.items():
        print(f"# --- {launch.folder / name}\n{text}")
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in launch.env.items())
    for line in uploads.upload_lines(launch.recipe):
        print(f"# --- would upload {line}")
    print(f"# --- would run: {_summary(launch.recipe, launch.record)}")
    for command in launch.commands.up:
        print(f"{exports} {shlex.join(command)}")
    files = [launch.folder / name for name in launch.files]
    lines = target_named(launch.record.target).shown_commands(launch.record, files)
    print(*lines, sep="\n", end="\n" if lines else "")


def replace_earlier(launch: Launch) -> None:
    """Ends an earlier launch of the run that is alive. Raises ConfigError without `takeover`."""
    run_id = launch.record.run_id
    takeover = launch.options.takeover
    if launch.recipe.kind != "train" and not target_named(launch.record.target).runs_here:
        return
    lives = launch_checks.earlier_launch(launch.record, launch.env | launch.secrets)
    if not lives:
        return
    if not takeover:
        loses = "--takeover replaces it, which loses what it has done since its last committed checkpoint"
        if not lives.sure:
            unsure = f"whether run {run_id} is alive cannot be told ({lives.what})"
            raise ConfigError(f"{unsure}: mend that, or {loses} if it lives")
        follow = f"`python3 launch.py logs {run_id}` follows it, `down` ends it"
        raise ConfigError(f"run {run_id} is alive ({lives.what}): {follow}; {loses}")
    print(f"replacing run {run_id} ({lives.what}), which stops within a minute", flush=True)
    if run_record.is_known(run_id):
        launched_run.drive_run(run_id, "down")


def start_launch(launch: Launch) -> int:
    """Uploads, writes files and record, and runs the platform's commands. Returns their exit code."""
    recipe, record = launch.recipe, launch.record
    detach = launch.options.detach
    env = launch.env | launch.secrets
    if recipe.kind == "serve":
        env |= {script.API_KEY: launch_tokens.api_key(record.run_id)}
    if script.FLEET_KEY in script.secret_names(recipe):
        key = launch_tokens.fleet_key(record.samples_for or record.run_id, begins=not record.samples_for)
        env |= {script.FLEET_KEY: key}
    if recipe.uploads:
        uploads.send_uploads(recipe, env)
    launch.folder.mkdir(parents=True, exist_ok=True)
    for name, text in launch.files.items():
        (launch.folder / name).write_text(text)
    manifest.write_launch(recipe, record)
    platform = target_named(record.target)
    used = (*launch.secrets, script.API_KEY, script.FLEET_KEY)
    platform.keep_tokens(record.run_id, {name: env[name] for name in used if name in env})
    (launch.folder.parent / run_process.PROCESS).unlink(missing_ok=True)
    record.save()
    if recipe.kind == "train":
        shared_record.publish_manifest(record, env)
    print(_summary(recipe, record), flush=True)
    if recipe.kind == "serve":
        print(how_to_call(record, recipe.config.run.name), flush=True)
    try:
        code = _run(launch.commands, record, env)
    # Ctrl-C, a program that cannot be started: nothing may cost for ever in `status`
    except BaseException as error:
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_CONFIG
        launched_run.settle_launch(record, code, detach, 0)
        raise
    if code == EXIT_INTERRUPTED and platform.runs_here and not run_record.has_begun(record.run_id):
        print("stopped before the run began: the same command goes on where the preparation was", flush=True)
        run_record.forget_launch(record.run_id)
        return code
    launched_run.settle_launch(record, code, detach, 1 + recipe.budget.keep_minutes)
    now = run_record.load_record(record.run_id)
    # the platform's name for it, which `down` needs
    if recipe.kind == "train" and (now.cluster, now.confirmed) != (record.cluster, record.confirmed):
        shared_record.publish_manifest(now, env)
    return code


def _summary(recipe: Recipe, record: RunRecord) -> str:
    """Where it runs, and what it costs as far as prices are known."""
    text = f"run {record.run_id} on {record.target}"
    if record.samples_for:
        text = f"{record.run_id}: {record.jobs} to sample for {record.samples_for}, on {record.target}"
    if record.usd_per_hour:
        text += f", ${record.usd_per_hour:.2f} per hour"
    if record.usd_per_hour and recipe.kind == "check":
        most = record.usd_per_hour * recipe.budget.max_hours
        text += (
            f", ${most:.2f} at most for its checks, which end after {recipe.budget.max_hours:g} h whatever is"
            " left; starting the machines and setting them up come on top"
        )
    if record.planned_usd:
        text += f", likely {record.planned_hours:.1f} h and ${record.planned_usd:,.0f}"
    if record.planned_most_usd:
        text += (
            f" (nine in ten: within {record.planned_most_hours:.1f} h and ${record.planned_most_usd:,.0f})"
        )
    return text


def how_to_call(record: RunRecord, model: str) -> str:
    """What a person types to reach a server."""
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    body = json.dumps({"model": model, "messages": messages})
    where, attach = target_named(record.target).server_address(record)
    key = f"$(cat {run_record.RUNS / record.run_id / 'api.key'})"
    headers = f'-H "Authorization: Bearer {key}" -H "Content-Type: application/json"'
    return (
        f"once it says `serving`{attach}:\n"
        f"  curl {where}/v1/chat/completions {headers} \\\n"
        f"    -d {shlex.quote(body)}"
    )


def _run(commands: Commands, record: RunRecord, env: dict[str, str]) -> int:
    platform = target_named(record.target)
    for command in commands.up:
        argv = [programs.find_program(command[0]) or command[0], *command[1:]]
        if platform.submits and command[0] == platform.program:
            done = subprocess.run(argv, env=os.environ | env, capture_output=True, text=True)
            printed = done.stdout.strip() or done.stderr.strip()
            print(printed)
            if done.returncode:
                launched_run.launch_failed(record, programs.last_line(printed)).save()
                return done.returncode
            replace(record, cluster=done.stdout.strip().partition(";")[0], confirmed=True).save()
            continue
        code, interrupted = _foreground(argv, os.environ | env)
        if interrupted and command[0] == platform.log_program:
            print(f"\nthe run continues: `python3 launch.py logs {record.run_id}` follows it, `down` ends it")
        # A run that ended by itself while Ctrl-C was pressed says so by its code.
        if interrupted and code not in (*RECOVER_EXIT_CODES, *FINAL_EXIT_CODES):
            return EXIT_INTERRUPTED
        if code:
            return code
    return 0


def _foreground(argv: list[str], env: dict[str, str]) -> tuple[int, bool]:
    """Runs a command to its end: (exit code, whether Ctrl-C was pressed). Ctrl-C is the command's own to
    obey.

    The terminal sends it to the whole process group. `subprocess.run` would kill the command a quarter of a
    second later: amid a checkpoint, or before the machines were told to stop.
    """
    # It is told to save and end when this process is gone, even by SIGKILL.
    ends_with_us = partial(end_with_parent, os.getpid(), signal.SIGTERM)
    process, interrupted = subprocess.Popen(argv, env=env, preexec_fn=ends_with_us), False
    while True:
        try:
            return process.wait(), interrupted
        except KeyboardInterrupt:
            interrupted = True
