"""What a person asks of `up` and the commands like it, and how each becomes a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipes.drivers import fleet_launch, launch_tokens, launching, shared_record, trained_model
from recipes.drivers.launching import LaunchOptions
from recipes.plan import sizing
from recipes.presets import benchmarks, resolve
from recipes.records import run_process, run_record
from trainer.config import ConfigError

NOTHING_AHEAD = ("rollout.staleness=0", "rollout.tokens_per_step=0")
NO_TRAINING = ("lora.rank=1", "lora.vision=false", "lora.dropout=0", *NOTHING_AHEAD)
"""An adapter that changes nothing, B being 0: a model that is only asked then needs no optimizer states, and
a fraction of the GPUs."""


@dataclass(frozen=True)
class LaunchRequest:
    recipe: str
    """Its name or file; for `evaluate` and `serve` also a run or a model."""
    target: str | None
    """Where; None: the cheapest that can."""
    overrides: tuple[str, ...]
    """`section.key=value`, later ones win."""
    bucket: str
    """That checkpoints are pushed to; "": none was named."""
    hosts: str
    """Machines for the target ssh, separated by commas."""
    options: LaunchOptions
    """How it is launched."""
    fleet: str = ""
    """Machines that sample for it, as `--fleet` writes them."""


def launch_request(
    recipe: str,
    target: str | None,
    *,
    overrides: Sequence[str] = (),
    bucket: str = "",
    hosts: str = "",
    fleet: str = "",
    **options: Any,
) -> LaunchRequest:
    """The request of what a command was given; options: fields of `LaunchOptions`."""
    return LaunchRequest(recipe, target, tuple(overrides), bucket, hosts, LaunchOptions(**options), fleet)


def start_run(request: LaunchRequest) -> int:
    """Starts a recipe on a target; a demo that was interrupted goes on where it was."""
    overrides = list(request.overrides)
    target, options = request.target, request.options
    if request.hosts:
        target = target or "ssh"
    name = request.recipe
    samples = any(setting.partition("=")[0].strip() == "fleet.run" for setting in overrides)
    if request.hosts and samples:
        overrides += [f"sample.hosts=[{request.hosts}]", f"sample.nodes={request.hosts.count(',') + 1}"]
    elif request.hosts:
        overrides.append(f"site.hosts=[{request.hosts}]")
    if request.bucket:
        overrides.append(f"storage.bucket={request.bucket}")
    if request.fleet:
        overrides = [*fleet_launch.fleet_overrides(request.fleet), *overrides]
    recipe = resolve(name, overrides)
    if recipe.sample and recipe.kind == "train":
        return fleet_launch.launch_fleet_run(name, recipe, target, overrides, options, options.yes)
    if name.startswith("demo") and recipe.kind == "train" and not options.run_id:
        model = Path(recipe.config.model.path).name
        run_id = run_process.interrupted_run(name, target or "local", overrides, model)
        options = replace(options, run_id=run_id)
        if run_id:
            print(f"resuming {run_id}, which was interrupted (--run-id NEW starts from scratch)")
    return launching.launch_recipe(name, recipe, target, overrides, options)


def pass_rates(request: LaunchRequest, samples: int | None) -> int:
    """Measures the pass rate of each of a recipe's training rows."""
    of_pass_rates = (f"evaluation.pass_rate_samples={max(1, samples or 8)}", *NOTHING_AHEAD)
    overrides = (*request.overrides, *of_pass_rates)
    if request.fleet:
        overrides = _without_model(request.recipe, of_pass_rates, request.overrides)
    return start_run(replace(request, overrides=overrides))


def start_evaluation(
    request: LaunchRequest, prompt: str | None, names: str, samples: int, **scored: Any
) -> int:
    """Scores a recipe, a model or a run on benchmarks. What the user sets wins. prompt: None is `published`
    for a model that neither a run nor a recipe trains, else `ours`; the others: of `evaluation_overrides`."""
    trained_model.adopt_where_shared(request.recipe, request.bucket, request.options.trust)
    recipe, own = trained_model.what_to_evaluate(request.recipe, request.bucket, request.target)
    if not prompt:
        foreign = trained_model.is_foreign_model(request.recipe, request.bucket, request.target)
        prompt = "published" if foreign else "ours"
        print(f"asks: --prompt {prompt} (docs/evaluation.md)")
    of_benchmarks = benchmarks.evaluation_overrides(
        names, samples, prompt=prompt, fleet=bool(request.fleet), **scored
    )
    sized = _without_model if request.fleet else _sized
    overrides = sized(recipe, (*own, *of_benchmarks, *NO_TRAINING), request.overrides)
    return start_run(replace(request, recipe=recipe, overrides=overrides))


def start_server(request: LaunchRequest) -> int:
    """Serves a run's weights, or a model, with vLLM."""
    trained_model.adopt_where_shared(request.recipe, request.bucket, request.options.trust)
    own = trained_model.what_to_serve(request.recipe, request.bucket, request.target)
    overrides = _sized("serve", tuple(own), request.overrides)
    return start_run(replace(request, recipe="serve", overrides=overrides))


def _sized(name: str, own: tuple[str, ...], given: tuple[str, ...]) -> tuple[str, ...]:
    """All overrides, with the fewest GPUs that do where the user names no number."""
    keys = {text.partition("=")[0].strip() for text in given}
    if keys & {"cluster.nodes", "cluster.gpus_per_node"}:
        return (*own, *given)
    return (*own, *sizing.fewest_gpus(resolve(name, [*own, *given])), *given)


def _without_model(name: str, own: tuple[str, ...], given: tuple[str, ...]) -> tuple[str, ...]:
    """All overrides of an evaluation that rollout workers sample: what hands rows out and grades them loads
    no model, so that one GPU is more than it needs."""
    workers = "fleet.workers=only"
    gpus = resolve(name, [*own, workers, *given]).cluster.gpus_per_node
    return (*own, workers, "cluster.nodes=1", f"cluster.gpus_per_node={min(1, gpus)}", *given)


BEFORE = "checkpoint.before="


def resume_run(run: str, bucket: str, options: LaunchOptions, before: int = 0) -> int:
    """Starts a run again with its own id; the trainer resumes from the last committed checkpoint, or from the
    newest one before step `before`. bucket: of a run that was not launched from here. Raises ConfigError."""
    shared_record.known_or_adopted(run, bucket, options.trust)
    record = run_record.load_record(run)
    # what it costs was agreed to when it was started
    options = replace(options, yes=True, run_id=record.run_id, flags=options.flags or tuple(record.flags))
    overrides = list(record.overrides)
    if before < 0:
        raise ConfigError(f"--before {before}: give a step of the run, above 0")
    if before:
        if f"{BEFORE}{before}" in overrides:
            raise ConfigError(
                f"--before {before}: the run has gone back to before that step, and goes on from there;"
                " to go back again, name another step"
            )
        # Steps that were made since an earlier return count by that return's step no more.
        overrides = [setting for setting in overrides if not setting.startswith(BEFORE)]
        overrides.append(f"{BEFORE}{before}")
    recipe = resolve(record.recipe, overrides)
    if recipe.kind == "train" and recipe.config.fleet.workers != "off":
        launch_tokens.check_resumed(run)
    if recipe.sample and recipe.kind == "train":
        return fleet_launch.launch_fleet_run(
            record.recipe, recipe, record.target, overrides, options, yes=True
        )
    return launching.launch_recipe(record.recipe, recipe, record.target, overrides, options)
