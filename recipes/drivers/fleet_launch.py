"""A run with a second group of machines, which sample for it: started together, and ended together.

The machines that sample are a launch of their own, with its own record: `up rollout-worker` makes the same.
"""

from __future__ import annotations

import re
import sys
import time
from contextlib import suppress
from dataclasses import replace
from secrets import token_hex

from recipes.drivers import launch_tokens, launched_run, launching, shared_record
from recipes.drivers.launching import Launch, LaunchOptions
from recipes.plan import choice
from recipes.plan.fleet_cost import FleetRow
from recipes.platforms.targets import is_obeyed, target_named
from recipes.presets import resolve
from recipes.recipe.resolved import Expectation
from recipes.recipe.spec import Recipe
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from recipes.screens import fleet_screen
from trainer.config import ConfigError
from trainer.config.bucket_address import BucketAddress
from trainer.config.run_store import ATTEMPTS, CHECKPOINTS, FLEET
from trainer.system.exit_codes import EXIT_INTERRUPTED

FORM = re.compile(r"(\d+)(?:x(?:(\d+)x)?([A-Za-z][\w-]*))?(?::(spot|any|on-demand))?(?:@([\w-]+))?")
SPOT = {"spot": "only", "any": "prefer", "on-demand": "never", None: "prefer"}
LOOK_S = 15.0
"""Seconds between two looks whether the run has its machines."""
UNKNOWN_S = 600.0
"""A run that its platform has taken and does not list this long after is not there."""
END_S = 60.0
"""Workers on this machine have this long to end by themselves when their run has ended."""


def fleet_overrides(text: str) -> list[str]:
    """Overrides of `--fleet 4xL40S:spot@skypilot-runpod`. Raises ConfigError."""
    match = FORM.fullmatch(text)
    if not match or text.startswith("0"):
        raise ConfigError(
            f"--fleet {text!r}: write it as 4xL40S (4 machines of one GPU), 2x8xL40S, 4xL40S:spot, "
            "4xL40S:on-demand, 4xL40S@TARGET; a number alone for a run on CPU"
        )
    nodes, gpus, gpu, market, target = match.groups()
    sets = [f"sample.nodes={nodes}", f"sample.gpus_per_node={gpus or 1 if gpu else 0}"]
    sets += [f"sample.gpu={gpu}"] if gpu else []
    sets += [f"sample.target={target}"] if target else []
    return [*sets, f"sample.spot={SPOT[market]}", "fleet.workers=only"]


def of_run(
    overrides: list[str], bucket: str, target: str | None, trust: bool = False
) -> tuple[str, list[str]]:
    """(recipe, overrides) of `rollout-worker`: those of the run that `fleet.run` names, then those that are
    given. Raises ConfigError without override."""
    given = {option.strip(): value.strip() for option, _, value in (o.partition("=") for o in overrides)}
    run_id = given.get("fleet.run", "")
    if not run_id:
        raise ConfigError(
            "a rollout worker samples for a run: name it with --set fleet.run=RUN, see `status`"
        )
    shared_record.known_or_adopted(run_id, bucket, trust)
    record = run_record.load_record(run_id)
    kept = []
    for override in record.overrides:
        section = override.partition("=")[0].partition(".")[0].strip()
        # The run's own regions, partitions and hosts are no others'; machines are named for each launch.
        if section != "sample" and (section != "site" or target == record.target):
            kept.append(override)
    return record.recipe, [*kept, *overrides]


def launch_fleet_run(
    name: str, recipe: Recipe, target: str | None, overrides: list[str], options: LaunchOptions, yes: bool
) -> int:
    """Shows both groups with their dollars, asks, and starts them. Returns the exit code.

    The run is started first, and its workers when it has its machines, as far as its platform tells: no
    machine waits for a run that waits itself. In the foreground on this machine its workers are first."""
    assert recipe.sample is not None
    target = target or choice.cheapest_target(recipe)
    run_id = options.run_id or run_record.new_run_id(recipe.name)
    options = replace(options, run_id=run_id, launch=token_hex(4))
    foreground = target_named(target).driven_from_here and not options.detach
    alone = replace(recipe, sample=None)
    run = launching.prepare_launch(name, alone, target, overrides, replace(options, detach=not foreground))
    theirs = recipe.sample.target or target
    kept = []
    for override in overrides:  # those of a run's own platform, such as a partition, are no others'
        option = override.partition("=")[0].strip()
        if theirs == target or option.startswith("cluster.") or is_obeyed(recipe, theirs, option):
            kept.append(override)
    kept.append(f"fleet.run={run_id}")
    own = replace(options, run_id="", flags=(), detach=True, takeover=False)
    workers = launching.prepare_launch(name, resolve(name, kept), theirs, kept, own)
    lines, plan = fleet_screen.describe_both_groups(recipe, run.record, workers.record)
    print(*lines, *_rights(workers.record.bucket, run_id), sep="\n", flush=True)
    run, workers = _planned(run, plan), _planned(workers, plan)
    if options.dry_run:
        launching.show_launch(run)
        launching.show_launch(workers)
        return 0
    for launch in (run, workers):
        launching.check_prepared(launch)
    if not yes and sys.stdin.isatty() and input("start both? [y/N] ").strip().lower() not in ("y", "yes"):
        print("nothing was started")
        return EXIT_INTERRUPTED
    launching.replace_earlier(run)
    alive = [record.run_id for record in _living(run_id) if not _replaced(record)]
    if alive:
        print(f"{', '.join(alive)} sample for it already: no others are started", flush=True)
    if foreground:
        return _in_foreground(run, None if alive else workers)
    code = launching.start_launch(run)
    if not code and not alive:
        code = _start_workers(workers, run_id, waits=not options.detach)
    return code if code or options.detach else launched_run.drive_run(run_id, "logs")


def _rights(bucket: str, run_id: str) -> list[str]:
    """What workers need of a bucket, and no more; nothing for a folder. All else that decides what is trained
    is signed (trainer/storage/seal.py), but who has a worker's credentials has the run's key too."""
    if not BucketAddress.parse(bucket).is_store:
        return []
    read = ", ".join(f"{run_id}/{name}/" for name in (ATTEMPTS, CHECKPOINTS, FLEET))
    written = ", ".join(f"{run_id}/{FLEET}/{name}/" for name in ("workers", "samples"))
    need = f"rights   workers need of {bucket} no more than to read {read}, data/, models/"
    return [f"{need} and to write {written}"]


def _start_workers(workers: Launch, run_id: str, waits: bool) -> int:
    """Starts the workers of a run that was started; where not all of them can be, both are ended. waits:
    until the run has its machines."""
    code = EXIT_INTERRUPTED
    try:
        code = (waits and _without_machines(run_id)) or launching.start_launch(workers)
    finally:
        if code:
            print(f"no machine samples for {run_id}, so it is ended: it would wait for none", flush=True)
            launched_run.give_up(workers.record.run_id, run_id)
    return code


def _without_machines(run_id: str) -> int:
    """Waits until a run has its machines: 0, also where its platform does not tell; 1 if it ended before."""
    record = run_record.load_record(run_id)
    began = time.monotonic()
    is_announced = False
    while (answer := launched_run.ask_platform(record)) and answer.state != "running":
        missing = not answer.known and time.monotonic() - began > UNKNOWN_S
        if missing or (answer.known and answer.ended_s):
            print(answer.text, flush=True)
            return 1
        if not is_announced:
            print(
                f"machines that sample are rented when {run_id} has its own ({answer.text}); Ctrl-C ends it,"
                " --detach does not wait",
                flush=True,
            )
        is_announced = True
        time.sleep(LOOK_S)
    return 0


def _planned(launch: Launch, plan: FleetRow | None) -> Launch:
    """The launch with the hours that both groups are planned for: those of the run without workers are not
    its own."""
    hours = plan.hours if plan else 0.0
    planned = Expectation(
        launch.record.usd_per_hour, planned_hours=hours, planned_usd=hours * launch.record.usd_per_hour
    )
    return replace(launch, record=replace(launch.record, **vars(planned)))


def _in_foreground(run: Launch, workers: Launch | None) -> int:
    """Starts the workers, then follows the run to its end. They go with it."""
    run_id = run.record.run_id
    launch_tokens.fleet_key(run_id, begins=True)
    code = EXIT_INTERRUPTED
    try:
        code = launching.start_launch(workers) if workers else 0
    finally:
        if code and workers:
            launched_run.give_up(workers.record.run_id)
    if code:
        return code
    try:
        return launching.start_launch(run)
    finally:
        for record in _living(run_id):
            end = time.monotonic() + END_S  # workers on this machine end by themselves
            here = target_named(record.target).runs_here
            while here and not launched_run.gone_here(record) and time.monotonic() < end:
                time.sleep(0.2)
            with suppress(ConfigError):
                launched_run.drive_run(record.run_id, "down")


def _replaced(record: RunRecord) -> bool:
    """Ends workers of which nobody tells whether they live, so that others are started: those on Slurm, PBS
    and ssh. Returns whether it did."""
    platform = target_named(record.target)
    if platform.disposable or platform.runs_here:
        return False
    with suppress(ConfigError):
        print(f"ending what is left of {record.run_id}, which may sample for it still", flush=True)
        launched_run.drive_run(record.run_id, "down")
    launched_run.note_end(record.run_id)
    return True


def _living(run_id: str) -> list[RunRecord]:
    """The launches that still sample for a run, as far as their platforms tell."""
    living = []
    for record in run_record.workers_of(run_id):
        if record.ended_s:
            continue
        answered = launched_run.with_answer(record, launched_run.ask_platform(record))
        if answered != record:
            answered.save()
        if not answered.ended_s and not launched_run.gone_here(answered):
            living.append(answered)
    return living
