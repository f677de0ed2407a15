"""The commands of launch.py, by the panels of `--help`: each function is called with what was given, and
returns the exit code. Those that look at runs are in recipes/commands/look_commands.py.

`list` must answer at once, so every function imports what it needs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from recipes.commands import training_environment
from recipes.commands.command_line import (
    DRY_RUN,
    FILE,
    FLEET,
    LATER,
    LAUNCH,
    ONE_RUN,
    RECIPE,
    RECORDED,
    REMOTE,
    RUN,
    SET,
    STORED,
    TAKEOVER,
    TARGET,
    TRUST,
    Argument,
    NameType,
    PassedOn,
    files_from_here,
    recipe_names,
    run_ids,
)
from recipes.commands.look_commands import launch

BIG, MIDDLE = "grpo-qwen2.5-vl-72b-mathv60k", "grpo-qwen2.5-vl-7b-mathv60k"
"""Recipes of the examples."""


@launch.command("list", panel="decide")
@click.option(
    "--model", default="", metavar="TEXT", help="only those of models with this in their name: qwen3-vl"
)
def list_recipes(model: str) -> int:
    """Recipes, their hours and dollars, and where they can run."""
    from rich.console import Console

    from recipes.screens import recipe_list

    recipe_list.show_list(Console(), model)
    return 0


@launch.command(
    "plan", panel="decide", examples=(f"{BIG} --target dstack-runpod --set rollout.tensor_parallel=8",)
)
@RECIPE
@TARGET
@SET
@click.option("--all", "whole", is_flag=True, help="every row: memory by part, disk, all offers")
@click.option("--json", "as_json", is_flag=True, help="the same facts for programs (docs/memory.md)")
@click.option("--network-gbit", type=float, metavar="G", help="Gb/s between nodes, as preflight found")
@click.option("--deadline", default="", metavar="24h", help="choose what ends in time (90m, 24h, 3d)")
@click.option("--budget", type=float, metavar="USD", help="choose an offer that costs no more")
@click.option("--fleet", is_flag=True, help="compare it with fleets of rollout workers")
def plan_recipe(
    recipe: str,
    target: str | None,
    overrides: list[str],
    whole: bool,
    as_json: bool,
    network_gbit: float | None,
    deadline: str,
    budget: float | None,
    fleet: bool,
) -> int:
    """Whether it fits, what it takes and costs, and what would be cheaper."""
    from recipes.commands import plan_command

    form: plan_command.Form = "json" if as_json else "all" if whole else "screen"
    if fleet:
        return plan_command.show_fleet_plan(recipe, target, overrides, deadline, budget, form=form)
    return plan_command.show_plan(recipe, target, overrides, deadline, budget, network_gbit, form)


@launch.command("render", panel="decide", examples=(f"{MIDDLE} --target skypilot-runpod",))
@RECIPE
@TARGET
@SET
@click.option("--out", type=FILE, metavar="FOLDER", help="folder to write them to")
def render_files(recipe: str, target: str | None, overrides: list[str], out: str | None) -> int:
    """Print the task files of a recipe, or write them to --out."""
    from recipes.drivers import task_files, uploads
    from recipes.plan import choice
    from recipes.platforms.targets import targets_for
    from recipes.presets import own_data, resolve

    resolved = resolve(recipe, overrides)
    if not target:
        target = choice.cheapest_target(resolved)
        print(f"for {target}, the cheapest of {', '.join(targets_for(resolved))}", file=sys.stderr)
    own_data.check_there(resolved)
    resolved = uploads.with_uploads(resolved, target, {})
    files = task_files.render(task_files.resolve_task(resolved, target))
    for line in uploads.upload_lines(resolved):
        print(
            f"`python3 launch.py up` would upload {line}: do so before you launch this file", file=sys.stderr
        )
    for file, text in files.items():
        if out:
            path = Path(out, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(path)
        else:
            print(f"# --- {file}\n{text}" if len(files) > 1 else text, end="")
    return 0


@launch.command("demo", panel="run", examples=("--set run.max_steps=20 --run-id short", "--pretrained"))
@SET
@RECORDED
@TAKEOVER
@DRY_RUN
@click.option(
    "--method",
    type=click.Choice(("grpo", "sft-lora")),
    default="grpo",
    show_default=True,
    help="what is shown",
)
@click.option(
    "--pretrained",
    is_flag=True,
    help="a real model of 135 million parameters on arithmetic (fetches 93 MB; 10 GB of memory)",
)
def run_demo(method: str, pretrained: bool, **given: Any) -> int:
    """The whole pipeline on this machine, without a GPU.

    One that was killed resumes where it was."""
    from recipes.commands import launch_requests
    from recipes.presets import demo

    name = "demo-pretrained" if pretrained else "demo"
    if method != "grpo":
        name += f"-{method}"
    if name == "demo" and not given["dry_run"]:
        print(demo.STAGES, flush=True)
    return launch_requests.start_run(launch_requests.launch_request(name, "local", **given))


@launch.command(
    "up",
    panel="run",
    examples=(
        f"{MIDDLE} --target skypilot-runpod --bucket s3://mine --set optimizer.learning_rate=1e-6",
        f"{MIDDLE} --target slurm -- --exclude=gpu-7 --mail-type=END",
    ),
)
@RECIPE
@LAUNCH
@FLEET
def launch_run(recipe: str, target: str | None, **given: Any) -> int:
    """Run a recipe on a target, and follow its logs.

    Ctrl-C stops following the logs; what stands after `--` goes to sky, dstack, kubectl, sbatch or qsub."""
    from recipes.commands import launch_requests

    return launch_requests.start_run(launch_requests.launch_request(recipe, target, **given))


@launch.command("resume", panel="run", examples=("RUN --before 120",))
@RUN
@STORED
@click.option(
    "--before",
    type=int,
    default=0,
    metavar="STEP",
    help="go back: from the newest checkpoint before this step, dropping what came after it",
)
@TAKEOVER
@TRUST
@DRY_RUN
def resume_run(run: str, bucket: str, before: int, **given: Any) -> int:
    """Start a run again, from its last committed checkpoint."""
    from recipes.commands import launch_requests
    from recipes.drivers.launching import LaunchOptions

    return launch_requests.resume_run(run, bucket, LaunchOptions(**given), before)


@launch.command("down", panel="run")
@RUN
@STORED
@TRUST
@DRY_RUN
def stop_run(run: str, bucket: str, trust: bool, dry_run: bool) -> int:
    """Stop a run and give its machines back."""
    from recipes.drivers import launched_run, shared_record

    shared_record.known_or_adopted(run, bucket, trust)
    return launched_run.end_run(run, dry_run)


@launch.command(
    "evaluate",
    panel="after",
    examples=(
        "Qwen/Qwen3-VL-8B-Instruct --benchmarks mathvista,math-500 --samples 8",
        f"{MIDDLE} --pass-rate --set model.path=runs/mine/hf",
    ),
)
@click.argument(
    "recipe",
    cls=Argument,
    type=NameType("recipe", run_ids, recipe_names, folders=True),
    help="id of a run, folder of a model, or OWNER/NAME of the hub; or a recipe",
)
@LAUNCH
@click.option(
    "--benchmarks",
    default="",
    callback=files_from_here,
    metavar="NAME,...",
    help="scores into benchmarks.json and .md; also a file of rows of your own",
)
@click.option("--pass-rate", is_flag=True, help="of every training row, into pass_rates.jsonl")
@click.option("--samples", type=int, metavar="N", help="completions per row (8; of benchmarks 1)")
@click.option(
    "--temperature", type=float, metavar="T", help="of benchmarks: 0 for one completion, 1 for several"
)
@click.option(
    "--limit", type=int, default=0, metavar="N", help="of benchmarks: only the first N rows of each"
)
@click.option(
    "--prompt",
    type=click.Choice(("ours", "published")),
    help="of benchmarks: as recipes train it, or as published (default for a model of no run or recipe)",
)
@click.option(
    "--map",
    "mapping",
    default="",
    metavar="ROLE=COLUMN,...",
    help="of a file of your own: question, answer, images, choices, source=CATEGORY",
)
@FLEET
def evaluate_model(
    recipe: str,
    target: str | None,
    benchmarks: str,
    pass_rate: bool,
    samples: int | None,
    prompt: str | None,
    temperature: float | None,
    limit: int,
    mapping: str,
    **given: Any,
) -> int:
    """Score a recipe, a model or a run on benchmarks.

    Or measure the pass rate of each training row."""
    from recipes.commands import launch_requests

    if bool(benchmarks) == pass_rate:
        raise click.UsageError("give one of --benchmarks and --pass-rate")
    request = launch_requests.launch_request(recipe, target, **given)
    if pass_rate:
        return launch_requests.pass_rates(request, samples)
    scored = {"temperature": temperature, "limit": limit, "mapping": mapping}
    return launch_requests.start_evaluation(request, prompt, benchmarks, max(1, samples or 1), **scored)


@launch.command(
    "serve",
    panel="after",
    examples=("RUN --target skypilot-runpod", "Qwen/Qwen2.5-VL-7B-Instruct --target local"),
)
@click.argument(
    "recipe",
    cls=Argument,
    type=NameType("recipe", run_ids, folders=True),
    help="id of a run, folder of a model, or OWNER/NAME of the hub",
)
@LAUNCH
def serve_model(recipe: str, target: str | None, **given: Any) -> int:
    """Serve weights with vLLM's OpenAI-compatible server.

    Those of a run, or a model."""
    from recipes.commands import launch_requests

    return launch_requests.start_server(launch_requests.launch_request(recipe, target, **given))


@launch.command("publish", panel="after", examples=("my-run --to me/my-model",))
@STORED
@click.option(
    "--to", required=True, metavar="OWNER/NAME|FOLDER", help="repository of the hub, or a new folder"
)
@click.option("--scores", default="", metavar="RUN", help="evaluation of it whose scores the card shows")
@click.option("--with-diff", is_flag=True, help="with the changes of the tree it was launched from")
@click.option("--private", is_flag=True, help="a new repository is private")
@click.option("--yes", is_flag=True, help="send it")
@ONE_RUN
def publish_run(run: str, bucket: str, to: str, scores: str, **given: bool) -> int:
    """A run's weights, model card, curves and record to the hub.

    Or to a folder; --yes sends them."""
    from recipes.drivers import fetched_runs

    flags = [f"--{name.replace('_', '-')}" for name, wanted in given.items() if wanted]
    return fetched_runs.publish_run(run, bucket, to, scores, flags)


@launch.command("reproduce", panel=LATER, examples=("runs/demo-x/manifest.json",))
@TARGET
@RECORDED
@TAKEOVER
@REMOTE
@TRUST
@DRY_RUN
@click.argument("manifest", cls=Argument, type=FILE, help="manifest.json of a run, or the run's folder")
def reproduce_run(
    manifest: str,
    run_id: str,
    target: str | None,
    bucket: str,
    hosts: str,
    trust: bool,
    dry_run: bool,
    **_: Any,
) -> int:
    """Run again what a manifest describes.

    Refuses where it cannot, and names what differs."""
    from recipes.records import reproduce

    return reproduce.reproduce(Path(manifest), run_id, target, bucket, hosts, dry_run, trust)


@launch.command("preflight", panel="run", examples=("--target ssh --hosts 10.0.0.1,10.0.0.2",))
@LAUNCH
def check_cluster(target: str | None, **given: Any) -> int:
    """Check every node, and a collective between all of them."""
    from recipes.commands import launch_requests

    return launch_requests.start_run(launch_requests.launch_request("preflight", target, **given))


@launch.command("data", panel="decide", cls=PassedOn, files=True)
def prepare_data(arguments: list[str]) -> int:
    """Prepare, preview, verify and compare datasets."""
    return training_environment.prepare_data(arguments)


@launch.command("test", panel=LATER, cls=PassedOn)
def run_tests(arguments: list[str]) -> int:
    """Run the tests; --fast: those without engine.

    All arguments go to pytest."""
    return training_environment.run_tests(arguments)
