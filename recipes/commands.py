"""The commands of launch.py, each declared above the function that it calls; a function returns the exit
code.

`list` must answer at once, so every function imports what it needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.command_line import (
    COMMANDS,
    DRY_RUN,
    LAUNCH,
    RECIPE,
    REMOTE,
    RUN,
    SET,
    STARTED,
    STORED,
    TAKEOVER,
    TARGET,
    argument,
    command,
    one_of,
)
from recipes.delegated import delegate
from trainer.config import ConfigError

BIG, MIDDLE = "grpo-qwen2.5-vl-72b-mathv60k", "grpo-qwen2.5-vl-7b-mathv60k"
"""Recipes of the examples."""


def call(args: argparse.Namespace) -> int:
    """Calls the function of the command that was given."""
    return COMMANDS[args.command].run(args)


@command(
    "list",
    "recipes, what they need and cost, and where they can run; all there is of one",
    argument("recipe", nargs="?", default="", help="only this one, with its details"),
    argument(
        "--model", default="", metavar="TEXT", help="only those of models with this in their name: qwen3-vl"
    ),
)
def _(args: argparse.Namespace) -> int:
    from rich.console import Console

    from recipes.screens import recipe_list

    if args.recipe:
        recipe_list.show_one(args.recipe, Console())
    else:
        recipe_list.show(Console(), args.model)
    return 0


@command(
    "plan",
    "whether it fits, what it takes and costs, and what would be cheaper",
    RECIPE,
    TARGET,
    SET,
    argument("--all", action="store_true", help="every table: memory by part, disk, all offers, ZeRO stages"),
    argument("--json", action="store_true", help="the same facts for programs (docs/memory.md)"),
    argument("--network-gbit", type=float, metavar="G", help="Gb/s between nodes, as preflight found"),
    argument("--deadline", default="", metavar="24h", help="choose what ends in time (90m, 24h, 3d)"),
    argument("--budget", type=float, metavar="USD", help="choose an offer that costs no more"),
    argument("--fleet", action="store_true", help="compare it with fleets of rollout workers"),
    argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="plan with what a card showed: gpu-check.json, or the folder of such a run",
    ),
    example=f"{BIG} --target dstack-runpod --set rollout.tensor_parallel=8",
)
def _(args: argparse.Namespace) -> int:
    from recipes import planning

    def planned() -> int:
        limits = args.deadline, args.budget
        form: planning.Form = "json" if args.json else "all" if args.all else "screen"
        if args.fleet:
            return planning.fleet(args.recipe, args.target, args.set, *limits, form=form)
        return planning.plan(args.recipe, args.target, args.set, *limits, args.network_gbit, form)

    return planning.with_measured(args.calibrate, planned) if args.calibrate else planned()


@command(
    "render",
    "print the task files of a recipe, or write them to --out",
    RECIPE,
    TARGET,
    SET,
    argument("--out", type=Path, help="folder to write them to"),
    example=f"{MIDDLE} --target skypilot-runpod",
)
def _(args: argparse.Namespace) -> int:
    from recipes import rendering

    return rendering.write(args.recipe, args.target, args.set, args.out)


@command(
    "up",
    "run a recipe; Ctrl-C stops following the logs; what stands after `--` goes to sky, dstack, "
    "kubectl, sbatch or qsub",
    RECIPE,
    *STARTED,
    argument(
        "--fleet", default="", metavar="4xL40S:spot", help="machines that sample for it (docs/fleet.md)"
    ),
    argument("--yes", action="store_true", help="start both groups of machines without asking"),
    example=f"{MIDDLE} --target skypilot-runpod --bucket s3://mine --set optimizer.learning_rate=1e-6\n"
    f"  python3 launch.py up {MIDDLE} --target slurm -- --exclude=gpu-7 --mail-type=END",
)
def _(args: argparse.Namespace) -> int:
    from recipes import requests

    return requests.up(requests.of(args, args.recipe, args.target))


@command(
    "evaluate",
    "score a recipe, a model or a run on benchmarks, or measure the pass rate of each training row",
    argument("recipe", help="id of a run, folder of a model, or OWNER/NAME of the hub; or a recipe"),
    *STARTED,
    one_of(
        argument(
            "--benchmarks",
            default="",
            metavar="NAME,...",
            help="scores into benchmarks.json and benchmarks.md; a file of rows is one of your own",
        ),
        argument("--pass-rate", action="store_true", help="of every training row, into pass_rates.jsonl"),
    ),
    argument("--samples", type=int, help="completions per row (8; of benchmarks 1)"),
    argument("--temperature", type=float, help="of benchmarks: default 0 for one completion, 1 for several"),
    argument(
        "--limit", type=int, default=0, metavar="N", help="of benchmarks: only the first N rows of each"
    ),
    argument(
        "--prompt",
        choices=("ours", "published"),
        default="",
        help="of benchmarks: ours as the recipes train it, or each benchmark's own words with the answer "
        "wherever it stands (default: published for a model that is no run's and no recipe's)",
    ),
    argument(
        "--scoring",
        choices=("ours", "published"),
        default="ours",
        help="of benchmarks: published adds a column by their authors' own rules, where they have some",
    ),
    argument(
        "--map",
        default="",
        metavar="ROLE=COLUMN,...",
        help="of a file of your own: question=..., answer=..., images=..., choices=..., source=CATEGORY",
    ),
    argument(
        "--fleet", default="", metavar="4xL40S:spot", help="machines that sample for it (docs/evaluation.md)"
    ),
    argument("--yes", action="store_true", help="start both groups of machines without asking"),
    example=f"Qwen/Qwen3-VL-8B-Instruct --benchmarks mathvista,math-500 --samples 8\n"
    f"  python3 launch.py evaluate {MIDDLE} --pass-rate --set model.path=runs/mine/hf",
)
def _(args: argparse.Namespace) -> int:
    from recipes import requests

    request = requests.of(args, args.recipe, args.target)
    if not args.benchmarks:
        return requests.pass_rates(request, args.samples)
    asked = requests.BenchmarkRequest(
        args.benchmarks, args.samples, args.temperature, args.limit, args.prompt, args.scoring, args.map
    )
    return requests.score(request, asked)


@command(
    "scaling",
    "the same short run on several numbers of nodes, then speed-up and efficiency in one table",
    RECIPE,
    *STARTED,
    argument("--nodes", default="1,2,4,8", metavar="N,...", help="numbers of nodes (%(default)s)"),
    argument("--steps", type=int, default=20, metavar="N", help="of each run (%(default)s)"),
    example="sft-qwen2.5-72b-full --target slurm --nodes 4,8,16",
)
def _(args: argparse.Namespace) -> int:
    from recipes import requests, scaling

    return scaling.scaling(requests.of(args, args.recipe, args.target), args.nodes, args.steps)


@command(
    "config",
    "write the run.yaml of a supervised recipe, for torchrun on machines of your own",
    RECIPE,
    SET,
    argument("--run-id", default="", help="our own id, under which it saves and resumes; default: a new one"),
    argument("--bucket", help="s3://, gs:// or r2:// URL that checkpoints are pushed to"),
    argument(
        "--out", type=Path, default=Path("run.yaml"), metavar="FILE", help="where to write it (%(default)s)"
    ),
    example="sft-qwen2.5-7b-lora --set cluster.nodes=2 --set checkpoint.shared_files=true --out run.yaml",
)
def _(args: argparse.Namespace) -> int:
    from recipes import torchrun_config

    return torchrun_config.write(args.recipe, args.set, args.bucket, args.run_id, args.out)


@command(
    "serve",
    "serve a run's weights, or a model, with vLLM's OpenAI-compatible server",
    argument("recipe", help="id of a run, folder of a model, or OWNER/NAME of the hub"),
    *STARTED,
    example="RUN --target skypilot-runpod\n"
    "  python3 launch.py serve Qwen/Qwen2.5-VL-7B-Instruct --target local",
)
def _(args: argparse.Namespace) -> int:
    from recipes import requests

    return requests.serve(requests.of(args, args.recipe, args.target))


@command(
    "demo",
    "the whole pipeline on this machine, on CPU; one that was killed resumes where it was",
    SET,
    *LAUNCH,
    TAKEOVER,
    DRY_RUN,
    argument("--method", choices=("grpo", "sft-lora"), default="grpo", help="what is shown (%(default)s)"),
    argument(
        "--pretrained",
        action="store_true",
        help="a real model of 135 million parameters on arithmetic (fetches 93 MB; 10 GB of memory)",
    ),
    example="--set run.max_steps=20 --run-id short\n  python3 launch.py demo --pretrained",
)
def _(args: argparse.Namespace) -> int:
    from recipes import requests

    name = "demo-pretrained" if args.pretrained else "demo"
    if args.method != "grpo":
        name += f"-{args.method}"
    return requests.demo(requests.of(args, name, "local"))


@command(
    "preflight",
    "check a cluster: every node, and a collective between all of them",
    *STARTED,
    example="--target ssh --hosts 10.0.0.1,10.0.0.2",
)
def _(args: argparse.Namespace) -> int:
    from recipes import requests

    return requests.up(requests.of(args, "preflight", args.target))


@command(
    "resume",
    "start a run again; it resumes from its last committed checkpoint",
    RUN,
    STORED,
    argument(
        "--before",
        type=int,
        default=0,
        metavar="STEP",
        help="go back: from the newest checkpoint before this step, dropping what came after it",
    ),
    TAKEOVER,
    DRY_RUN,
    example="RUN --before 120",
)
def _(args: argparse.Namespace) -> int:
    from recipes import requests

    return requests.resume(args.run, args.bucket, requests.of(args, "", None).options, args.before)


@command(
    "status",
    "state, cost and last step of the runs launched from here; all there is of one",
    STORED,
    argument("run", nargs="?", help="only this one"),
    argument("--watch", action="store_true", help="live, until it ends: step, phase, reward, speed, nodes"),
)
def _(args: argparse.Namespace) -> int:
    from recipes.drivers import status

    return status.of(args.run, args.bucket, args.watch)


@command(
    "runs",
    "runs in a bucket, whoever launched them: how they stand, and why they ended",
    argument("--bucket", help="s3://NAME/PREFIX as given to `up`; default: all that this desk has used"),
)
def _(args: argparse.Namespace) -> int:
    from recipes.drivers import sight

    return sight.runs(args.bucket)


@command(
    "logs",
    "follow the log of a run",
    RUN,
    STORED,
    argument("--stored", action="store_true", help="from its bucket: the machines are not asked"),
    argument("--worker", type=int, default=0, metavar="N", help="of the Nth machine that samples for it"),
)
def _(args: argparse.Namespace) -> int:
    from recipes.drivers import sight

    return sight.logs(args.run, args.bucket, args.stored, args.worker)


@command(
    "bundle",
    "put what a maintainer needs after a failure into one file, without secrets: configuration, ends of all "
    "logs, post-mortem, preflight, versions, last metrics",
    argument("run", help="id of a run, or its folder"),
    STORED,
    argument("--out", default="", help="file to write; default: runs/RUN/RUN-bundle.tar.gz"),
    argument("--dry-run", action="store_true", help="list its contents, write nothing"),
    example="RUN",
)
def _(args: argparse.Namespace) -> int:
    from recipes.drivers import bundle

    return bundle.bundle(args.run, args.bucket or "", args.out, args.dry_run)


@command(
    "pull",
    "fetch metrics, samples, log and configuration of a run from its bucket",
    RUN,
    STORED,
    argument("--weights", action="store_true", help="the exported weights, too"),
)
def _(args: argparse.Namespace) -> int:
    from recipes.drivers import sight

    return sight.pull(args.run, args.bucket, args.weights)


@command(
    "profile",
    "ask a running run for a profile of its next step (docs/debugging.md)",
    RUN,
    STORED,
    argument("--fetch", action="store_true", help="fetch the profiles that it has taken"),
)
def _(args: argparse.Namespace) -> int:
    from recipes.drivers import sight

    return sight.profile(args.run, args.bucket, args.fetch)


@command("dashboard", "open a tunnel to Ray's dashboard and jobs of a running run", RUN, STORED, DRY_RUN)
def _(args: argparse.Namespace) -> int:
    from recipes.drivers import dashboard, shared_record

    shared_record.known_or_adopted(args.run, args.bucket)
    return dashboard.open_tunnel(args.run, args.dry_run)


@command("down", "stop a run and give its machines back", RUN, STORED, DRY_RUN)
def _(args: argparse.Namespace) -> int:
    from recipes.drivers import launched, shared_record

    shared_record.known_or_adopted(args.run, args.bucket)
    return launched.end(args.run, args.dry_run)


@command(
    "alert",
    "tell a webhook or a command when a run ends for good, falls silent, trips a guard or overruns its plan",
    RUN,
    STORED,
    argument("--webhook", default="", metavar="URL", help="takes Slack's JSON; better: SPOTRL_ALERT_WEBHOOK"),
    argument("--command", dest="shell", default="", help="a shell line; it has RUN_ID, ALERT and ALERT_TEXT"),
    argument("--every", type=float, default=60.0, metavar="S", help="seconds between looks (%(default)g)"),
    argument("--once", action="store_true", help="one look, for cron"),
    example='RUN --command \'mail -s "$RUN_ID $ALERT" me@example.org <<< "$ALERT_TEXT"\'',
)
def _(args: argparse.Namespace) -> int:
    from recipes.drivers import alerts

    return alerts.watch(args.run, args.bucket, args.webhook, args.shell, args.every, args.once)


@command(
    "report",
    "one HTML file: curves, samples, phases, nodes, configuration; of several runs their curves over each "
    "other",
    STORED,
    argument("runs", nargs="+", metavar="run", help="id of a run, or its folder"),
)
def _(args: argparse.Namespace) -> int:
    from recipes.drivers import sight

    return sight.report(args.runs, args.bucket)


@command(
    "compare",
    "where a run left what its recipe expects of it, or where two runs part; exit code 1 if so",
    STORED,
    argument(
        "--expected",
        nargs="?",
        const="own",
        default="",
        metavar="FILE.yaml",
        help="one run against the bands of its recipe, or of a file (docs/expected.md)",
    ),
    argument("runs", nargs="+", metavar="run", help="id of a run, or its folder: two, or one --expected"),
    example="demo-1 --expected\n  python3 launch.py compare demo-1 demo-2",
)
def _(args: argparse.Namespace) -> int:
    from recipes.drivers import sight

    if len(args.runs) != (1 if args.expected else 2):
        raise ConfigError("compare one run with --expected, or two runs")
    return sight.compare(args.runs, args.bucket, args.expected)


@command(
    "publish",
    "a run's weights, model card, curves and record to the hub or a folder; --yes sends them",
    STORED,
    argument(
        "--to", required=True, metavar="OWNER/NAME|FOLDER", help="repository of the hub, or a new folder"
    ),
    argument("--scores", default="", metavar="RUN", help="evaluation of it whose scores the card shows"),
    argument("--with-diff", action="store_true", help="with the changes of the tree it was launched from"),
    argument("--private", action="store_true", help="a new repository is private"),
    argument("--yes", action="store_true", help="send it"),
    argument("run", help="id of a run, or its folder"),
    example="my-run --to me/my-model",
)
def _(args: argparse.Namespace) -> int:
    from recipes.drivers import sight

    wanted = {"--with-diff": args.with_diff, "--private": args.private, "--yes": args.yes}
    flags = [flag for flag, given in wanted.items() if given]
    return sight.publish(args.run, args.bucket, args.to, args.scores, flags)


@command(
    "reproduce",
    "run again what a manifest describes; refuses where it cannot, and names what differs",
    TARGET,
    *LAUNCH,
    TAKEOVER,
    *REMOTE,
    DRY_RUN,
    argument("manifest", type=Path, help="manifest.json of a run, or the run's folder"),
    example="runs/demo-x/manifest.json",
)
def _(args: argparse.Namespace) -> int:
    from recipes import reproduce

    return reproduce.reproduce(args.manifest, args.run_id, args.target, args.bucket, args.hosts, args.dry_run)


@command(
    "image",
    "put the locked environment into an image in your registry, so that machines need not make it",
    argument(
        "--push", required=True, metavar="REGISTRY/NAME[:TAG]", help="where to; built only if it is not there"
    ),
    DRY_RUN,
    example="--push registry.example.org/me/spotrl",
)
def _(args: argparse.Namespace) -> int:
    from recipes.drivers import image

    return image.image(args.push, args.dry_run)


@command("data", "prepare, preview, verify and compare datasets", passes_on=True)
def _(args: argparse.Namespace) -> int:
    return delegate("data", args.arguments)


@command("test", "run the tests; --fast: those without engine; all arguments go to pytest", passes_on=True)
def _(args: argparse.Namespace) -> int:
    return delegate("test", args.arguments)
