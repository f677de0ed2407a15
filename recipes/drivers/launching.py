"""`up`: from a resolved recipe to running machines, with every check that can be made before anything is
rented."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from secrets import token_hex

from recipes import capabilities, manifest, run_record, uploads
from recipes.drivers import bucket_access, desk_python, engine_state, engines, ssh_driver, tokens
from recipes.drivers.engines import Commands
from recipes.plan import cost, memory, prices
from recipes.presets import own_data
from recipes.run_record import RunRecord
from recipes.spec import Recipe
from recipes.targets import dstack, script, ssh
from recipes.targets.render import render
from trainer.config import ConfigError
from trainer.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED


def up(
    name: str, recipe: Recipe, target: str | None, run_id: str, overrides: list[str], args: argparse.Namespace
) -> int:
    """Checks, renders, then runs the engine's commands; with --dry-run prints both and starts nothing.

    `name` and `overrides` are what `recipe` was resolved from: the record keeps them for `resume`.
    """
    target = target or cheapest_target(recipe)
    run_id = run_record.check_run_id(run_id or run_record.new_run_id(recipe.name))
    before = run_record.load(run_id) if run_record.known(run_id) else None
    recipe = uploads.planned(recipe, target, before.uploads if before else {})
    files = render(recipe, target)
    secrets = tokens.found()
    check(recipe, target, args.reproducible, secrets)
    can = capabilities.capability(target)
    plan = cost.planned(recipe, target, prices.sky_catalogs())
    record = RunRecord(
        run_id=run_id,
        recipe=name,
        target=target,
        overrides=overrides,
        flags=args.flags,
        uploads={upload.field: upload.key for upload in recipe.uploads},
        bucket=recipe.storage.bucket,
        managed=capabilities.managed(recipe, target),
        started_s=time.time(),
        usd_per_hour=cost.usd_per_hour(recipe, target, prices.sky_catalogs()),
        planned_usd=(plan.usd or 0.0) if plan else 0.0,
        planned_hours=plan.hours if plan else 0.0,
        earlier_usd=before.usd() if before else 0.0,
        confirmed=can.engine in ("", "ssh"),
    )
    directory = run_record.RUNS / run_id / "task"
    env = {"RUN_ID": run_id} | ({"BUCKET": recipe.storage.bucket} if recipe.storage.bucket else {})
    env |= tokens.settings()
    # The same through all restarts by the engine; a new one opens a run that had ended for good
    # (trainer/checkpoint).
    env |= {"SPOTRL_SOURCE": manifest.source_id(), "SPOTRL_LAUNCH": token_hex(4)}
    paths = [str(directory / name) for name in files]
    names = [*secrets, *([script.API_KEY] if recipe.kind == "serve" else [])]
    commands = engines.commands(record, paths, env, names, args.detach)
    for line in bucket_access.unverified(recipe, secrets):
        print(f"# --- {line}" if args.dry_run else line, flush=True)
    if args.dry_run:
        return _show(recipe, record, files, commands, env)
    tool(commands)
    if can.engine == "dstack":
        _check_secrets(recipe, target)
    if recipe.kind == "serve":
        secrets |= {script.API_KEY: tokens.api_key(run_id)}
    if recipe.storage.weights:
        bucket_access.check_weights(recipe.storage.weights, env | secrets)
    if recipe.storage.bucket and recipe.kind == "train":
        bucket_access.probe(recipe.storage.bucket, env | secrets)
    if recipe.kind == "train" and (lives := alive(record, env | secrets)):
        if not args.takeover:
            raise ConfigError(
                f"run {run_id} is alive ({lives}): `launch.py logs {run_id}` follows it, `down` ends it; --takeover "
                "replaces it, which loses what it has done since its last committed checkpoint"
            )
        print(f"replacing run {run_id} ({lives}), which stops within a minute", flush=True)
        if run_record.known(run_id):
            drive(run_id, "down")
    if recipe.uploads:
        uploads.send(recipe, desk_python.find(), env | secrets)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    manifest.write_launch(recipe, record)
    record.save()
    print(
        f"run {run_id} on {target}"
        + (f", ${record.usd_per_hour:.2f} per hour" if record.usd_per_hour else "")
        + (
            f", planned: {record.planned_hours:.1f} h and ${record.planned_usd:,.0f}"
            if record.planned_usd
            else ""
        ),
        flush=True,
    )
    if recipe.kind == "serve":
        print(engines.how_to_call(record, recipe.config.run.name), flush=True)
    try:
        code = _run(commands, record, env | secrets)
    # Ctrl-C, a program that cannot be started: nothing may cost for ever in `status`
    except BaseException as error:
        settle(
            run_id, EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_CONFIG, args.detach, 0
        )
        raise
    settle(run_id, code, args.detach, 1 + recipe.budget.keep_minutes)
    return code


def cheapest_target(recipe: Recipe) -> str:
    """The default target of a recipe: this machine without GPUs, else the cheapest offer."""
    if not recipe.cluster.gpus_per_node:
        return "local"
    found = [offer for offer in cost.offers(recipe, prices.sky_catalogs()) if offer.usd is not None]
    if found:
        return found[0].target
    rented = [(prices_of[0][0], name) for name in capabilities.targets_for(recipe) if name != "skypilot" if
              (prices_of := cost.node_prices(recipe, name, prices.sky_catalogs()))]  # fmt: skip
    if recipe.kind != "train" and rented:
        return min(rented)[1]
    raise ConfigError(
        f"no target with known prices can run {recipe.name}: name one with --target (docs/targets.md)"
    )


def check(recipe: Recipe, target: str, reproducible: bool, secrets: Collection[str]) -> None:
    """Everything that can be known before something is started. Raises ConfigError with the change to
    make."""
    can = capabilities.capability(target)
    files = own_data.files_of(recipe.config.data.source) if recipe.config.data.source else []
    if files and not can.shared_files:
        raise ConfigError(
            f"data.source names {files[0]}, and the nodes of {target} do not have it: put the rows into a bucket, "
            f"`launch.py data prepare {files[0]} --out s3://...`, and set data.path to that"
        )
    data, made = recipe.config.data.path, {step.creates for step in recipe.steps}
    if recipe.kind == "train" and data.startswith("${DATA}") and f"{data}/manifest.json" not in made:
        raise ConfigError(
            f"{recipe.name} trains on rows that nobody publishes: make them from a run of yours (docs/sft.md), and set "
            "data.path to the folder"
        )
    if recipe.uploads and not recipe.storage.bucket:
        raise ConfigError(
            f"{recipe.uploads[0].local} goes to the nodes of {target} through a bucket: give --bucket"
        )
    if recipe.cluster.gpus_per_node and recipe.kind == "train":
        _check_memory(recipe, target)
    _check_hourly(recipe, target)
    if target == "ssh":
        ssh.hosts_of(recipe)
    bucket = recipe.storage.bucket
    if recipe.kind == "train" and not bucket:
        if can.asks_bucket:
            raise ConfigError(
                f"{target} throws its machines away, so checkpoints need a bucket: give --bucket s3://..."
            )
        if recipe.cluster.nodes > 1 and not (can.shared_files or recipe.config.checkpoint.shared_files):
            raise ConfigError(
                "a new node could not resume without the others' files, so several nodes need a bucket: give --bucket "
                "s3://..., or --set checkpoint.shared_files=true where all of them see the run's directory"
            )
    bucket_access.check_credentials(recipe, target, secrets)
    if recipe.config.logging.wandb == "online" and "WANDB_API_KEY" not in secrets:
        raise ConfigError(
            "logging.wandb is online and there is no token: export WANDB_API_KEY, or set it to offline"
        )
    if reproducible and (dirty := manifest.dirty_files()):
        raise ConfigError(f"--reproducible wants a clean git tree: commit or drop {', '.join(dirty[:4])}")


def _check_hourly(recipe: Recipe, target: str) -> None:
    known, most = cost.node_prices(recipe, target, prices.sky_catalogs()), recipe.budget.max_hourly_usd
    if most and known and known[0][0] > most:
        usd, gpu, spot = known[0]
        raise ConfigError(
            f"budget.max_hourly_usd is {most:g}, and the cheapest node of {target} costs {usd:.2f} per hour "
            f"({recipe.cluster.gpus_per_node} x {gpu}, {'spot' if spot else 'on demand'}): raise it, or take fewer GPUs"
        )


def alive(record: RunRecord, env: dict[str, str]) -> str:
    """What is known of an earlier launch of this run that has not ended; "" if there is none.

    Two attempts at once never write to one checkpoint (trainer/checkpoint/attempt.py); but both cost.
    """
    before = run_record.load(record.run_id) if run_record.known(record.run_id) else None
    said = engine_state.ask(before) if before and not before.ended_s else None
    if said and said.whole and not said.ended_s:
        return said.text
    if not record.bucket or not bucket_access.can_open(record.bucket, env):
        return ""
    command = [desk_python.find(), "-m", "trainer.checkpoint", f"{record.bucket.rstrip('/')}/{record.run_id}"]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    told = json.loads(done.stdout) if done.returncode == 0 else {}
    # our own `down` has ended it
    if not told.get("alive") or (before and before.ended_s > told["seen_unix_s"]):
        return ""
    return f"attempt {told['attempt']} on {told['host']}, seen {time.time() - told['seen_unix_s']:.0f} s ago"


def _check_memory(recipe: Recipe, target: str) -> None:
    mine = capabilities.gpus_for(recipe, target)
    plans = {gpu: memory.plan(recipe, gpu) for gpu in mine}
    bad = {gpu: need for gpu, need in plans.items() if need and not need.fits}
    if not bad:
        return
    gpu, need = next(iter(bad.items()))
    fix = memory.cheapest_fix(recipe, gpu)
    advice = (
        " ".join(f"--set {change}" for change in fix) if fix else "use more nodes, or GPUs with more memory"
    )
    raise ConfigError(f"{recipe.name} does not fit {gpu}: {need.problem}; cheapest change: {advice}")


def _check_secrets(recipe: Recipe, target: str) -> None:
    """dstack's secrets: its server looks for them only when the machines are there."""
    wanted = dstack.secrets(recipe, target)
    if not wanted:
        return
    done = subprocess.run([engines.find("dstack"), "secret", "list"], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise ConfigError(
            f"dstack secret list said {said!r}: point dstack at your server (dstack project add)"
        )
    missing = [name.lower() for name in wanted if name.lower() not in done.stdout.split()]
    if missing:
        raise ConfigError(
            f"dstack has no secret {', '.join(missing)}: run dstack secret set {missing[0]} VALUE"
        )


def tool(commands: Commands) -> None:
    """Raises ConfigError where the engine's program is missing; the launch environment counts as
    installed."""
    if not engines.find(commands.tool):
        raise ConfigError(f"{commands.tool} is not installed: {commands.hint}")


def _show(
    recipe: Recipe, record: RunRecord, files: dict[str, str], commands: Commands, env: dict[str, str]
) -> int:
    directory = run_record.RUNS / record.run_id / "task"
    for name, text in files.items():
        print(f"# --- {directory / name}\n{text}")
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
    for line in uploads.lines(recipe):
        print(f"# --- would upload {line}")
    print("# --- would run")
    for command in commands.up:
        print(f"{exports} {shlex.join(command)}")
    if record.target == "ssh":
        print("# --- which runs, with tokens on standard input")
        print(*ssh_driver.shown(recipe, record, directory / next(iter(files))), sep="\n")
    return 0


def _run(commands: Commands, record: RunRecord, env: dict[str, str]) -> int:
    for command in commands.up:
        argv = [engines.find(command[0]) or command[0], *command[1:]]
        if command[0] in ("sbatch", "qsub"):
            done = subprocess.run(argv, env=os.environ | env, capture_output=True, text=True)
            said = done.stdout.strip() or done.stderr.strip()
            print(said)
            if done.returncode:
                engine_state.launch_failed(record, (said or "no word").splitlines()[-1]).save()
                return done.returncode
            replace(record, cluster=done.stdout.strip().partition(";")[0], confirmed=True).save()
            continue
        code, interrupted = _foreground(argv, os.environ | env)
        if interrupted and command[0] in ("tail", "sky"):
            print(f"\nthe run continues: `launch.py logs {record.run_id}` follows it, `down` ends it")
        if code or interrupted:
            return EXIT_INTERRUPTED if interrupted else code
    return 0


def _foreground(argv: list[str], env: dict[str, str]) -> tuple[int, bool]:
    """Runs a command to its end: (exit code, whether Ctrl-C was pressed). Ctrl-C is the command's own to
    obey.

    The terminal sends it to the whole process group. `subprocess.run` would kill the command a quarter of a
    second later: amid a checkpoint, or before the machines were told to stop.
    """
    process, interrupted = subprocess.Popen(argv, env=env, preexec_fn=_end_with_us), False
    while True:
        try:
            return process.wait(), interrupted
        except KeyboardInterrupt:
            interrupted = True


def _end_with_us() -> None:
    """In the child: it is told to save and end when this process is gone, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def drive(run: str, what: str, dry_run: bool = False) -> int:
    """`status`, `logs` or `down` of a run that was launched from here."""
    record = run_record.load(run)
    if record.managed and what == "logs" and not dry_run and (said := engine_state.ask(record)):
        record = replace(record, cluster=said.name)  # by its name SkyPilot finds only a job that is running
    commands = engines.commands(record, [str(p) for p in record.task_files()], {"RUN_ID": run}, [], False)
    code = 0
    for command in getattr(commands, what):
        if dry_run:
            print(shlex.join(command))
            continue
        tool(commands)
        code = subprocess.run([engines.find(command[0]) or command[0], *command[1:]]).returncode or code
    if what == "down" and not code and not dry_run:
        over(run)
    return code


def settle(run_id: str, code: int, detached: bool, cluster_minutes: float) -> None:
    """Notes what came of a launch whose commands have ended with `code`: what still costs, what never began,
    and why.

    cluster_minutes: until a SkyPilot cluster goes down by itself after its job.
    """
    record = run_record.load(run_id)
    can, interrupted = capabilities.capability(record.target), code == EXIT_INTERRUPTED
    is_cluster = can.engine == "sky" and not record.managed
    if not code:
        record = replace(record, confirmed=True)
        if not detached:
            minutes = cluster_minutes if is_cluster else 0
            record = replace(record, ended_s=time.time() + 60 * minutes, state="finished")
    elif can.engine in ("sky", "dstack"):
        said = engine_state.ask(record)
        record = engine_state.noted(record, said)
        if record.confirmed and is_cluster and not interrupted:
            record = replace(record, ended_s=time.time() + 60 * cluster_minutes, why=f"exit code {code}")
        elif not record.confirmed and said and not interrupted:
            record = engine_state.launch_failed(
                record, f"{said.text}; the launch ended with exit code {code}"
            )
        elif not record.confirmed:
            print(
                f"the launch of {run_id} is not confirmed: `launch.py status {run_id}` asks the platform",
                flush=True,
            )
    elif can.engine in ("", "ssh") and not detached:
        state, why = ("stopped", "Ctrl-C") if interrupted else ("failed", f"exit code {code}")
        record = replace(record, ended_s=time.time(), state=state, why=why)
    elif not record.ended_s and (not record.confirmed or detached):
        record = engine_state.launch_failed(record, "Ctrl-C" if interrupted else f"exit code {code}")
    record.save()


def over(run: str) -> None:
    """Notes that `down` has given a run's machines back."""
    record = run_record.load(run)
    is_cluster = record.target.startswith("skypilot") and not record.managed
    state = "gone" if is_cluster else record.state if record.ended_s else "stopped"
    replace(record, ended_s=record.ended_s or time.time(), state=state).save()
