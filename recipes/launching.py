"""`up`: from a resolved recipe to running machines, with every check that can be made before anything is rented."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import time

from recipes import engines, run_record
from recipes.run_record import RunRecord
from recipes.spec import Recipe
from recipes.targets import local


def up(recipe: Recipe, target: str | None, args: argparse.Namespace) -> int:
    """Renders the task, then runs the engine's commands; with --dry-run prints both and starts nothing."""
    target = target or "local"
    run_id = run_record.check_run_id(args.run_id or run_record.new_run_id(recipe.name))
    record = RunRecord(run_id=run_id, recipe=recipe.name, target=target, overrides=args.set, bucket=args.bucket,
                       started_s=time.time())  # fmt: skip
    files = {name: text for name, text in local.render(recipe).items()}
    directory = run_record.RUNS / run_id / "task"
    env = {"RUN_ID": run_id} | ({"BUCKET": args.bucket} if args.bucket else {})
    paths = [str(directory / name) for name in files]
    commands = engines.commands(record, paths, env)
    if args.dry_run:
        for name, text in files.items():
            print(f"# --- {directory / name}\n{text}")
        exports = " ".join(f"{k}={shlex.quote(v)}" for k, v in env.items())
        for command in commands.up:
            print(f"{exports} {shlex.join(command)}")
        return 0
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    record.save()
    print(f"run {run_id}", flush=True)
    for command in commands.up:
        code = subprocess.run(command, env=os.environ | env).returncode
        if code:
            return code
    return 0
