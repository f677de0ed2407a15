"""The commands of launch.py that look at a run or ask something of it: the panel *look* of `--help`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from recipes.commands.command_line import (
    DRY_RUN,
    LATER,
    RUN,
    RUN_OR_FOLDER,
    STORED,
    TRUST,
    Argument,
    NameType,
    bucket,
    launch,
    run_ids,
)
from trainer.system.errors import ConfigError


@launch.command("status", panel="look")
@STORED
@click.argument("run", cls=Argument, required=False, type=NameType("run", run_ids), help="only this one")
@click.option("--watch", is_flag=True, help="live, until it ends: step, phase, reward, speed, nodes")
def show_status(run: str | None, bucket: str, watch: bool) -> int:
    """State, cost and last step of the runs launched from here.

    All there is of one, where one is named."""
    from recipes.drivers import status

    return status.show_runs(run, bucket, watch)


@launch.command("runs", panel="look")
@bucket("s3://NAME/PREFIX as given to `up`; default: all that this desk has used")
def list_runs(bucket: str) -> int:
    """Runs in a bucket, whoever launched them, and why they ended."""
    from recipes.drivers import fetched_runs

    return fetched_runs.list_runs(bucket)


@launch.command("logs", panel="look")
@RUN
@STORED
@click.option("--stored", is_flag=True, help="from its bucket: the machines are not asked")
@click.option("--worker", type=int, default=0, metavar="N", help="of the Nth machine that samples for it")
def follow_logs(run: str, bucket: str, stored: bool, worker: int) -> int:
    """Follow the log of a run."""
    from recipes.drivers import fetched_runs

    return fetched_runs.show_logs(run, bucket, stored, worker)


def several_runs(text: str) -> Callable[[Any], Any]:
    """The argument of commands that look at several runs."""
    return click.argument(
        "runs", cls=Argument, nargs=-1, required=True, metavar="RUN...", type=RUN_OR_FOLDER, help=text
    )


@launch.command("report", panel="look")
@STORED
@several_runs("ids of runs, or their folders")
def report_runs(runs: tuple[str, ...], bucket: str) -> int:
    """One HTML file: curves, samples, phases, nodes, options.

    Of several runs their curves over each other."""
    from recipes.drivers import fetched_runs

    return fetched_runs.write_report(list(runs), bucket)


@launch.command("compare", panel="look", examples=("demo-1 --expected", "demo-1 demo-2"))
@STORED
@click.option("--expected", is_flag=True, help="one run against the bands of its recipe (docs/watching.md)")
@several_runs("id of a run, or its folder: two, or one --expected")
def compare_runs(runs: tuple[str, ...], bucket: str, expected: bool) -> int:
    """Where a run left its recipe's bands, or two runs part.

    The exit code is 1 if so."""
    from recipes.drivers import fetched_runs

    if len(runs) != (1 if expected else 2):
        raise ConfigError("compare one run with --expected, or two runs")
    return fetched_runs.compare_runs(list(runs), bucket, expected)


@launch.command("pull", panel="look")
@RUN
@STORED
@click.option("--weights", is_flag=True, help="the exported weights, too")
def pull_run(run: str, bucket: str, weights: bool) -> int:
    """Fetch metrics, samples, log and options from a bucket."""
    from recipes.drivers import fetched_runs

    return fetched_runs.pull_run(run, bucket, weights)


@launch.command(
    "alert",
    panel=LATER,
    examples=('RUN --command \'mail -s "$RUN_ID $ALERT" me@example.org <<< "$ALERT_TEXT"\'',),
)
@RUN
@STORED
@click.option("--webhook", default="", metavar="URL", help="takes Slack's JSON; better: SPOTRL_ALERT_WEBHOOK")
@click.option(
    "--command", "shell", default="", metavar="LINE", help="a shell line; it has RUN_ID, ALERT and ALERT_TEXT"
)
@click.option(
    "--every", type=float, default=60.0, metavar="S", show_default=True, help="seconds between looks"
)
@click.option("--once", is_flag=True, help="one look, for cron")
def alert_on_run(run: str, bucket: str, webhook: str, shell: str, every: float, once: bool) -> int:
    """Tell a webhook or a command when a run needs a person.

    It ends for good, falls silent, trips a guard or overruns its plan."""
    from recipes.drivers import alerts

    return alerts.watch_run(run, bucket, webhook, shell, every, once)


@launch.command("profile", panel=LATER)
@RUN
@STORED
@click.option("--fetch", is_flag=True, help="fetch the profiles that it has taken")
def profile_run(run: str, bucket: str, fetch: bool) -> int:
    """Ask a running run for a profile of its next step.

    See docs/failures.md."""
    from recipes.drivers import fetched_runs

    return fetched_runs.profile_run(run, bucket, fetch)


@launch.command("dashboard", panel=LATER)
@RUN
@STORED
@TRUST
@DRY_RUN
def open_dashboard(run: str, bucket: str, trust: bool, dry_run: bool) -> int:
    """Open a tunnel to Ray's dashboard of a running run."""
    from recipes.drivers import dashboard_tunnel, shared_record

    shared_record.known_or_adopted(run, bucket, trust)
    return dashboard_tunnel.open_tunnel(run, dry_run)
