"""What the commands of launch.py do; each returns an exit code."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from recipes import run_record
from recipes.presets import resolve
from trainer.config import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


NO_TRAINING = ("lora.rank=1", "lora.vision=false", "lora.dropout=0")
"""An adapter that changes nothing, B being 0: a model that is only asked then needs no optimizer states, and
a fraction of the GPUs."""


def list_recipes(model: str) -> int:
    from recipes import shown

    shown.recipes(_wide(), model)
    return 0


def _wide() -> Console:
    """A console that is wide enough for the tables where output goes to a file."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=170)


def plan(
    name: str,
    target: str | None,
    overrides: list[str],
    deadline: str = "",
    budget_usd: float = 0.0,
    network_gbit_s: float = 0.0,
) -> int:
    """Memory, disk, time and dollars of a recipe. Exit code 2 where it does not fit, or no offer keeps the
    limits.

    network_gbit_s: between nodes, for the comparison of ZeRO stages; 0: the target's.
    """
    from recipes import capabilities, shown
    from recipes.plan import choose, cost, memory, prices, zero_stages

    if network_gbit_s < 0:
        raise ConfigError(f"--network-gbit {network_gbit_s:g}: give Gb/s above 0")
    recipe = resolve(name, overrides)
    if target:
        capabilities.check(recipe, target)
    where = prices.sky_catalogs(), [target] if target else None
    offers = cost.offers(recipe, *where)
    network = network_gbit_s or zero_stages.network_of(recipe, target)
    shown.plan(recipe, offers, cost.short_of_ram(recipe, *where), _wide(), network)
    if deadline or budget_usd:
        try:
            hours = choose.hours_of(deadline) if deadline else math.inf
        except (ValueError, KeyError) as error:
            raise ConfigError(f"--deadline {deadline!r}: write it as 90m, 24h or 3d") from error
        # machines of your own are not chosen among
        offers = [offer for offer in offers if offer.usd is not None]
        chosen = choose.choose(offers, hours, budget_usd or math.inf)
        return shown.choice(recipe, *chosen, _wide(), where[0])
    need = memory.plan(recipe)
    return 0 if need is None or need.fits else 2


def render(name: str, target: str | None, overrides: list[str], out: str) -> int:
    """Writes or prints the task files of a recipe."""
    from recipes import uploads
    from recipes.capabilities import targets_for
    from recipes.targets.render import render as render_files

    recipe = resolve(name, overrides)
    if not target:
        raise ConfigError(
            f"name a target with --target: {recipe.name} runs on {', '.join(targets_for(recipe))}"
        )
    recipe = uploads.planned(recipe, target, {})
    files = render_files(recipe, target)
    for line in uploads.lines(recipe):
        print(f"`launch.py up` would upload {line}: do so before you launch this file", file=sys.stderr)
    for file, text in files.items():
        if out:
            path = Path(out) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(path)
        else:
            print(f"# --- {file}\n{text}" if len(files) > 1 else text, end="")
    return 0


def up(name: str, target: str | None, args: argparse.Namespace) -> int:
    """Starts a recipe on a target."""
    from recipes.drivers import launching

    overrides = list(args.set)
    if args.hosts:
        overrides.append(f"site.hosts=[{args.hosts}]")
        target = target or "ssh"
    if args.bucket:
        overrides.append(f"storage.bucket={args.bucket}")
    recipe, run_id = resolve(name, overrides), args.run_id
    if name.startswith("demo") and not run_id:
        run_id = run_record.interrupted(
            name, target or "local", overrides, Path(recipe.config.model.path).name
        )
        if run_id:
            print(f"resuming {run_id}, which was interrupted (--run-id NEW starts from scratch)")
    return launching.up(name, recipe, target, run_id, overrides, args)


def evaluate(args: argparse.Namespace) -> int:
    """Scores on benchmarks, or pass rates of the training rows. What the user sets wins."""
    from recipes.drivers import trained
    from recipes.presets import benchmarks

    if not args.benchmarks:
        args.set.append(f"evaluation.pass_rate_samples={max(1, args.samples or 8)}")
        return up(args.recipe, args.target, args)
    name, own = trained.evaluated(args.recipe, args.bucket, args.target)
    asked = benchmarks.settings(args.benchmarks, max(1, args.samples or 1), args.temperature, args.limit)
    args.set = _sized(name, [*own, *asked, *NO_TRAINING], args.set)
    return up(name, args.target, args)


def serve(args: argparse.Namespace) -> int:
    """Serves a run's weights, or a model, with vLLM."""
    from recipes.drivers import trained

    args.set = _sized("serve", trained.served(args.recipe, args.bucket, args.target), args.set)
    return up("serve", args.target, args)


def _sized(name: str, own: list[str], given: list[str]) -> list[str]:
    """All overrides, with the fewest GPUs that do where the user names no number."""
    from recipes.plan import sizing

    keys = {text.partition("=")[0].strip() for text in given}
    if keys & {"cluster.nodes", "cluster.gpus_per_node"}:
        return [*own, *given]
    return [*own, *sizing.fewest_gpus(resolve(name, [*own, *given])), *given]


def delegate(args: argparse.Namespace) -> int:
    """Commands that need the training environment: data (but not its help), test."""
    if args.command == "data" and (not args.arguments or {"-h", "--help"} & set(args.arguments)):
        return subprocess.run([sys.executable, "-m", "data_prep", *(args.arguments or ["--help"])]).returncode
    environment = "test" if args.command == "test" else "cpu"
    code = subprocess.run(["bash", "trainer/setup.sh", environment]).returncode
    if code:
        return code
    command = [f".venvs/{environment}/bin/python", "-m", "data_prep" if args.command == "data" else "pytest"]
    # All tests: the quick ones on all cores, then those that bring processes of their own.
    parts = [["--fast"], ["--rest"]] if args.command == "test" and not args.arguments else [args.arguments]
    return max((subprocess.run([*command, *part]).returncode for part in parts), key=abs)


def resume(args: argparse.Namespace) -> int:
    """Starts a run again with its own id; the trainer resumes from the last committed checkpoint."""
    from recipes.drivers import launching

    record = run_record.load(args.run)
    args.reproducible, args.flags = False, args.flags or record.flags
    recipe = resolve(record.recipe, record.overrides)
    return launching.up(record.recipe, recipe, record.target, record.run_id, record.overrides, args)


def status(run: str | None, bucket: str, watch: bool) -> int:
    """The runs launched from here, or one with what its engine and its files say; live with `watch`."""
    from recipes.drivers import sight
    from recipes.drivers import status as status_table

    if watch:
        return sight.watch(run or sight.newest(), bucket)
    if run and not run_record.known(run) and sight.url_of(run, bucket):
        return sight.now(run, bucket)
    try:
        code = status_table.show(run)
    # the engine's program is not installed here: the bucket is asked all the same
    except ConfigError as error:
        if not (run and sight.url_of(run, bucket)):
            raise
        print(f"warning: {error}", file=sys.stderr, flush=True)
        code = 0
    return (sight.now(run, bucket) or code) if run else code


def runs(bucket: str) -> int:
    """The runs of a bucket, or of all buckets that this desk knows."""
    from recipes.drivers import sight

    return sight.runs(bucket)


def logs(run: str, bucket: str, stored: bool) -> int:
    """Follows a run's log."""
    from recipes.drivers import sight

    return sight.logs(run, bucket, stored)


def report(runs: list[str], bucket: str) -> int:
    """One HTML file of one run or several."""
    from recipes.drivers import sight

    return sight.report(runs, bucket)


def pull(run: str, bucket: str, weights: bool) -> int:
    """Fetches a run's files from its bucket."""
    from recipes.drivers import sight

    return sight.pull(run, bucket, weights)


def profile(run: str, bucket: str, fetch: bool) -> int:
    """Asks a running run for a profile of its next step, or fetches those that it has taken."""
    from recipes.drivers import sight

    return sight.profile(run, bucket, fetch)


def dashboard(run: str, dry_run: bool) -> int:
    """Opens a tunnel to Ray's dashboard."""
    from recipes.drivers import dashboard as tunnel

    return tunnel.open_tunnel(run, dry_run)


def down(run: str, dry_run: bool) -> int:
    """Ends a run and gives its machines back."""
    from recipes.drivers import launching

    return launching.drive(run, "down", dry_run)


def reproduce(args: argparse.Namespace) -> int:
    """Runs again what a manifest describes."""
    from recipes import reproduce as reproducing

    return reproducing.reproduce(args)
