"""The command line of launch.py."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from recipes import commands, recipe_files
from trainer.config import ConfigError
from trainer.config.bucket_address import BucketAddress
from trainer.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED

DESCRIPTION = """SpotRL: recipes for post-training vision-language models, and where to run them.

python3 launch.py list                                  every recipe: model, data, shape, targets, memory, cost
python3 launch.py demo                                  the whole pipeline on this machine, without a GPU
python3 launch.py plan grpo-qwen2.5-vl-72b-mathv60k     memory, disk, time and dollars, before you rent
python3 launch.py up grpo-qwen2.5-vl-7b-mathv60k --target skypilot-runpod --bucket s3://mine
"""
ROOT = Path(__file__).resolve().parents[1]
LAUNCHED = ("recipe", "target", "set", "launch", "takeover", "remote", "dry")
"""Arguments of the commands that start a recipe."""
EVALUATE: dict[str, dict[str, Any]] = {
    "--samples": {"type": int, "help": "completions per row (8; of benchmarks 1)"},
    "--temperature": {"type": float, "help": "of benchmarks: default 0 for one completion, 1 for several"},
    "--limit": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "of benchmarks: only the first N rows of each",
    },
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="launch.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, help: str, *arguments: str, example: str = "") -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=help,
            description=help[0].upper() + help[1:] + ".",
            epilog=f"example:\n  python3 launch.py {name} {example}" if example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(target=None, hosts="", detach=False)
        for argument in arguments:
            match argument:
                case "recipe":
                    named = "its name, see `list`, or a file: FILE.yaml, FILE.py:FUNCTION"
                    trained = "id of a run, folder of a model, or OWNER/NAME of the hub"
                    what = {"serve": trained, "evaluate": f"{trained}; or a recipe"}
                    command.add_argument("recipe", help=what.get(name, named))
                case "target":
                    command.add_argument(
                        "--target", help="where: see docs/targets.md; default: the cheapest that can"
                    )
                case "set":
                    command.add_argument(
                        "--set",
                        action="append",
                        default=[],
                        metavar="A.B=C",
                        help="override a field, or all of @FILE.yaml; an unknown one is refused (docs/options.md)",
                    )
                case "run":
                    command.add_argument("run", help="id of a run launched from here: see `status`")
                case "stored":
                    command.add_argument("--bucket", help="of a run that was not launched from here")
                case "dry":
                    command.add_argument(
                        "--dry-run", action="store_true", help="show what would run, start nothing"
                    )
                case "launch":
                    command.add_argument(
                        "--run-id",
                        default="",
                        help="our own id, under which it saves and resumes; default: a new one",
                    )
                    command.add_argument(
                        "--bucket", help="s3://, gs:// or r2:// URL that checkpoints are pushed to"
                    )
                    command.add_argument(
                        "--reproducible", action="store_true", help="refuse a dirty git tree"
                    )
                case "takeover":
                    command.add_argument(
                        "--takeover",
                        action="store_true",
                        help="end the run of this id that is alive, and replace it",
                    )
                case "remote":
                    command.add_argument(
                        "--hosts", default="", help="machines for the target ssh: [user@]address[:port],..."
                    )
                    command.add_argument("--detach", action="store_true", help="do not follow the logs")
        return command

    big, middle = "grpo-qwen2.5-vl-72b-mathv60k", "grpo-qwen2.5-vl-7b-mathv60k"
    add("list", "recipes, what they need and cost, and where they can run").add_argument(
        "--model", default="", metavar="TEXT", help="only those of models with this in their name: qwen3-vl"
    )
    plan = add(
        "plan",
        "memory per phase, disk, time per step and dollars",
        "recipe",
        "target",
        "set",
        example=f"{big} --target dstack-runpod --set rollout.tensor_parallel=8",
    )
    plan.add_argument(
        "--network-gbit",
        type=float,
        default=0.0,
        metavar="G",
        help="Gb/s between nodes, as stated or as preflight found",
    )
    plan.add_argument(
        "--deadline", default="", metavar="24h", help="choose an offer that ends in time (90m, 24h, 3d)"
    )
    plan.add_argument(
        "--budget", type=float, default=0.0, metavar="USD", help="choose an offer that costs no more"
    )
    add(
        "render",
        "print the task files of a recipe, or write them to --out",
        "recipe",
        "target",
        "set",
        example=f"{middle} --target skypilot-runpod",
    ).add_argument("--out", default="", help="folder to write them to")
    add(
        "up",
        "run a recipe; Ctrl-C stops following the logs; what stands after `--` goes to sky, dstack, sbatch or qsub",
        *LAUNCHED,
        example=f"{middle} --target skypilot-runpod --bucket s3://mine --set optimizer.learning_rate=1e-6\n"
        f"  python3 launch.py up {middle} --target slurm -- --exclude=gpu-7 --mail-type=END",
    )
    add(
        "evaluate",
        "score a recipe, a model or a run on benchmarks, or measure the pass rate of each training row",
        *LAUNCHED,
        example=f"Qwen/Qwen3-VL-8B-Instruct --benchmarks mathvista,math-500 --samples 8\n"
        f"  python3 launch.py evaluate {middle} --pass-rate --set model.path=runs/mine/hf",
    )
    what = commands.choices["evaluate"].add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--benchmarks", default="", metavar="NAME,...", help="scores into benchmarks.json and benchmarks.md"
    )
    what.add_argument("--pass-rate", action="store_true", help="of every training row, into pass_rates.jsonl")
    for flag, options in EVALUATE.items():
        commands.choices["evaluate"].add_argument(flag, **options)
    sizes = add(
        "scaling",
        "the same short run on several numbers of nodes, then speed-up and efficiency in one table",
        *LAUNCHED,
        example="sft-qwen2.5-72b-full --target slurm --nodes 4,8,16",
    )
    sizes.add_argument("--nodes", default="1,2,4,8", metavar="N,...", help="numbers of nodes (%(default)s)")
    sizes.add_argument("--steps", type=int, default=20, metavar="N", help="of each run (%(default)s)")
    add(
        "serve",
        "serve a run's weights, or a model, with vLLM's OpenAI-compatible server",
        *LAUNCHED,
        example="RUN --target skypilot-runpod\n  python3 launch.py serve Qwen/Qwen2.5-VL-7B-Instruct --target local",
    )
    add(
        "demo",
        "the whole pipeline on this machine, on CPU; one that was killed resumes where it was",
        "set",
        "launch",
        "takeover",
        "dry",
        example="--set run.max_steps=20 --run-id short",
    )
    commands.choices["demo"].add_argument(
        "--method", choices=("grpo", "sft-lora"), default="grpo", help="what is shown (%(default)s)"
    )
    add(
        "preflight",
        "check a cluster: every node, and a collective between all of them",
        "target",
        "set",
        "launch",
        "takeover",
        "remote",
        "dry",
        example="--target ssh --hosts 10.0.0.1,10.0.0.2",
    )
    add(
        "resume", "start a run again; it resumes from its last committed checkpoint", "run", "takeover", "dry"
    )
    status = add(
        "status", "state, cost and last step of the runs launched from here; all there is of one", "stored"
    )
    status.add_argument("run", nargs="?", help="only this one")
    status.add_argument(
        "--watch", action="store_true", help="live, until it ends: step, phase, reward, speed, nodes"
    )
    add("runs", "runs in a bucket, whoever launched them: how they stand, and why they ended").add_argument(
        "--bucket", help="s3://NAME/PREFIX as given to `up`; default: all that this desk has used"
    )
    logs = add("logs", "follow the log of a run", "run", "stored")
    logs.add_argument("--stored", action="store_true", help="from its bucket: the machines are not asked")
    add(
        "pull", "fetch metrics, samples, log and configuration of a run from its bucket", "run", "stored"
    ).add_argument("--weights", action="store_true", help="the exported weights, too")
    add(
        "profile", "ask a running run for a profile of its next step (docs/debugging.md)", "run", "stored"
    ).add_argument("--fetch", action="store_true", help="fetch the profiles that it has taken")
    add("dashboard", "open a tunnel to Ray's dashboard and jobs of a running run", "run", "dry")
    add("down", "stop a run and give its machines back", "run", "dry")
    add(
        "report",
        "one HTML file: curves, samples, phases, nodes, configuration; of several runs their curves over each other",
        "stored",
    ).add_argument("runs", nargs="+", metavar="run", help="id of a run, or its folder")
    add(
        "reproduce",
        "run again what a manifest describes; refuses where it cannot, and names what differs",
        "target",
        "launch",
        "takeover",
        "remote",
        "dry",
        example="runs/demo-x/manifest.json",
    ).add_argument("manifest", help="manifest.json of a run")
    for name, help in (
        ("data", "prepare, preview, verify and compare datasets"),
        (
            "test",
            "run the tests; --fast: those without engine; all arguments go to pytest",
        ),
    ):
        commands.add_parser(name, help=help)
    return top


def main(arguments: list[str]) -> int:
    """Runs one command and returns the exit code. Configuration errors are one line and exit 2."""
    # argparse leaves no option to a command's own parser, so the rest of a passed-on command never meets it.
    passed_on = arguments[:1] in (["data"], ["test"])
    cut = 1 if passed_on else arguments.index("--") if "--" in arguments else len(arguments)
    args = parser().parse_args(arguments[:cut])
    args.arguments, args.flags = arguments[cut:], [] if passed_on else arguments[cut + 1 :]
    try:
        if args.flags and "takeover" not in args:
            raise ConfigError(
                f"`{args.command}` starts no engine that {' '.join(args.flags)} could be passed on to"
            )
        if "bucket" in args:
            # Given and empty is a variable that is not set, and no wish to do without.
            args.bucket = "" if args.bucket is None else BucketAddress.parse(args.bucket, "--bucket").url
        if "set" in args:
            args.recipe, args.set = recipe_files.expand(getattr(args, "recipe", args.command), args.set)
            if args.command in ("evaluate", "serve") and Path(args.recipe).is_dir():
                args.recipe = str(Path(args.recipe).absolute())
        os.chdir(ROOT)  # files of yours were named from where you stand
        return dispatch(args)
    except ConfigError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def dispatch(args: argparse.Namespace) -> int:
    """Calls the command's function. recipes.commands imports only what each needs: `list` must answer at
    once."""
    match args.command:
        case "list":
            return commands.list_recipes(args.model)
        case "plan":
            return commands.plan(
                args.recipe, args.target, args.set, args.deadline, args.budget, args.network_gbit
            )
        case "render":
            return commands.render(args.recipe, args.target, args.set, args.out)
        case "data" | "test":
            return commands.delegate(args)
        case "evaluate":
            return commands.evaluate(args)
        case "scaling":
            from recipes.scaling import scaling

            return scaling(args)
        case "serve":
            return commands.serve(args)
        case "demo":
            return commands.up("demo" if args.method == "grpo" else f"demo-{args.method}", "local", args)
        case "preflight":
            return commands.up("preflight", args.target, args)
        case "up":
            return commands.up(args.recipe, args.target, args)
        case "resume":
            return commands.resume(args)
        case "status":
            return commands.status(args.run, args.bucket, args.watch)
        case "runs":
            return commands.runs(args.bucket)
        case "logs":
            return commands.logs(args.run, args.bucket, args.stored)
        case "report":
            return commands.report(args.runs, args.bucket)
        case "pull":
            return commands.pull(args.run, args.bucket, args.weights)
        case "profile":
            return commands.profile(args.run, args.bucket, args.fetch)
        case "dashboard":
            return commands.dashboard(args.run, args.dry_run)
        case "down":
            return commands.down(args.run, args.dry_run)
        case "reproduce":
            return commands.reproduce(args)
    raise AssertionError(args.command)
