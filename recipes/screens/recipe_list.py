"""`list`: one line for each recipe, with figures that are planned once and kept.

Planning all recipes takes seconds of processor time, so `list` keeps what it showed in .cache/list.json,
under a hash of every file that the figures depend on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from trainer.config import ConfigError
from trainer.config.run_folder import write_whole
from trainer.hardware import architectures

if TYPE_CHECKING:
    from recipes.recipe.spec import Recipe
    from recipes.screens.plan_facts import PlannedOffer

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(".cache/list.json")
SOURCES = ("recipes", "trainer/config", "trainer/hardware", "trainer/algorithm")
"""Folders of all code and data that decide the figures: recipes, plan, prices, options and cards. A test
holds them against the modules that are loaded for it."""
SUFFIXES = (".py", ".json", ".yaml")
NOT_SOURCES = ("recipes/generated", "recipes/drivers")
PLACES = {
    "L": ("here", ("local",)),
    "H": ("ssh hosts", ("ssh", "dstack-ssh")),
    "S": ("Slurm", ("slurm",)),
    "P": ("PBS", ("pbs",)),
    "K": ("Kubernetes", ("kubernetes", "skypilot-kubernetes", "dstack-kubernetes")),
    "R": ("RunPod", ("skypilot-runpod", "dstack-runpod")),
    "G": ("GCP", ("skypilot-gcp", "dstack-gcp")),
    "A": ("AWS", ("skypilot-aws",)),
    "Z": ("Azure", ("skypilot-azure",)),
    "M": ("Lambda", ("skypilot-lambda",)),
    "N": ("Nebius", ("skypilot-nebius",)),
}
"""Letter -> where that is, and the targets that run there."""
PURPOSES = (
    "Try it on this machine, without a GPU",
    "GRPO with images, on MathV60K",
    "GRPO with images, on other data",
    "GRPO on text",
    "On-policy distillation",
    "Supervised fine-tuning",
    "Check machines, or serve a model",
)
TRY, MATHV60K, IMAGES, TEXT, DISTILL, TUNE, OTHER = PURPOSES


@dataclass(frozen=True, kw_only=True)
class ListedRecipe:
    """A recipe as its line shows it."""

    name: str
    purpose: str
    """One of PURPOSES."""
    path: str
    """`model.path`, which `--model` looks into."""
    model: str
    gpus: str
    """Nodes, GPUs of each, and the GPU of the cheapest offer."""
    hours: float | None
    """Likely on the offer that `up` takes; None where no price is known or nothing is trained."""
    usd: float | None
    """Likely dollars there."""
    steps: int | None
    where: str
    """A letter of PLACES for each place that can run it, a dot for the others."""


def show_list(console: Console, model: str = "") -> None:
    """Every recipe on one line, by purpose. model: only those of models with this in their name. Raises
    ConfigError where there is none."""
    listed = [recipe for recipe in listed_recipes() if model.lower() in recipe.path.lower()]
    if not listed:
        raise ConfigError(
            f"no recipe trains a model called {model}: give one of {architectures.family_titles()} to any"
            " recipe, as --set model.path=OWNER/NAME"
        )
    widths = [max(len(getattr(recipe, key)) for recipe in listed) for key in ("name", "model", "gpus")]
    head = f"{'':{widths[0]}}  {'model':{widths[1]}}  {'GPUs':{widths[2]}}  {'hours':>6}  {'$':>5}"
    console.print(f"{head}  {'steps':>6}  where", style="dim", soft_wrap=True)
    for purpose in PURPOSES:
        of_purpose = [recipe for recipe in listed if recipe.purpose == purpose]
        if of_purpose:
            console.print(f"[bold]{purpose}[/bold]", highlight=False)
        for recipe in of_purpose:
            console.print(escape(_line(recipe, widths)), highlight=False, soft_wrap=True)
    legend = ", ".join(f"{letter} {place}" for letter, (place, _) in PLACES.items())
    console.print(
        f"\n{legend}.\nHours and dollars are likely ones, of the offer that `up` takes.\n"
        "`python3 launch.py plan NAME` says what one needs and costs, `up NAME` starts it;\n"
        "`up rollout-worker --set fleet.run=RUN` adds a machine that samples for a run (docs/fleet.md)",
        highlight=False,
        soft_wrap=True,
    )


def _line(recipe: ListedRecipe, widths: list[int]) -> str:
    hours = "-" if recipe.hours is None else f"{recipe.hours:.1f}"
    usd = "-" if recipe.usd is None else f"{recipe.usd:,.0f}"
    steps = "-" if recipe.steps is None else f"{recipe.steps:,}"
    name, model, gpus = widths
    words = f"{recipe.name:{name}}  {recipe.model:{model}}  {recipe.gpus:{gpus}}"
    return f"{words}  {hours:>6}  {usd:>5}  {steps:>6}  {recipe.where}"


def listed_recipes() -> list[ListedRecipe]:
    """Every recipe, as kept from an earlier call if nothing that decides the figures has changed since. A
    damaged file is ignored."""
    key = f"{sources_hash()} {hashlib.sha256(desk_state().encode()).hexdigest()}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(CACHE.read_text())
        if kept["key"] == key:
            return [ListedRecipe(**row) for row in kept["rows"]]
    planned = planned_recipes()
    with contextlib.suppress(OSError):  # a checkout that may only be read has no cache
        CACHE.parent.mkdir(exist_ok=True)
        write_whole(CACHE, json.dumps({"key": key, "rows": list(map(asdict, planned))}).encode())
    return planned


def figure_sources(root: Path = ROOT) -> list[Path]:
    """Every file that decides a figure of the list, in one order."""
    paths = []
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            inside = path.relative_to(root).as_posix()
            if path.suffix in SUFFIXES and not inside.startswith(NOT_SOURCES):
                paths.append(path)
    return paths


def sources_hash(root: Path = ROOT) -> str:
    """Changes with the name or content of any of them."""
    total = hashlib.sha256()
    for path in figure_sources(root):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root)} {content}\n".encode())
    return total.hexdigest()


def likely_offer(recipe: Recipe) -> PlannedOffer | None:
    """The offer that `up` takes, with the range of its runs; None where no price is known."""
    from recipes.plan import choice, cost, prices
    from recipes.screens.plan_facts import planned_offer

    targets = choice.driven_targets(recipe) if recipe.kind == "train" else []
    offers = cost.offers(recipe, prices.sky_catalogs(), targets, ranges=True) if targets else []
    taken = choice.taken_offer(offers, targets)
    return planned_offer(taken) if taken else None


def desk_state() -> str:
    """What of this machine decides which offer is taken and what it costs: programs, keys, catalogs, and how
    long the starts of earlier runs took."""
    from recipes.plan import keys, prices

    facts = keys.desk_state()
    for path in (*sorted(prices.sky_catalogs().glob("*/vms.csv")), Path("runs")):
        if path.exists():
            facts.append(f"{path} {path.stat().st_mtime_ns}")
    return "\n".join(facts)


def planned_recipes() -> list[ListedRecipe]:
    """Every recipe, planned now."""
    from recipes.plan import cost
    from recipes.platforms.targets import targets_for
    from recipes.presets import RECIPES, get

    planned = []
    for name in RECIPES:
        recipe = get(name)
        likely = likely_offer(recipe)
        planned.append(
            ListedRecipe(
                name=name,
                purpose=recipe_purpose(recipe),
                path=recipe.config.model.path,
                model=_model(recipe),
                gpus=_gpus(recipe, likely.gpu if likely else recipe.cluster.gpu),
                hours=likely.hours_50 if likely else None,
                usd=likely.usd_50 if likely else None,
                steps=cost.steps_of(recipe) if likely else None,
                where=_where(targets_for(recipe)),
            )
        )
    return planned


def recipe_purpose(recipe: Recipe) -> str:
    """What a person would take it for: one of PURPOSES."""
    from recipes.plan import hub_config

    if recipe.kind != "train":
        return OTHER
    if not recipe.cluster.gpus_per_node:
        return TRY
    if recipe.config.method == "sft":
        return TUNE
    if recipe.config.teaches:
        return DISTILL
    model = hub_config.shape(recipe.config.model)
    if model and model.vision:
        return MATHV60K if recipe.dataset.name == "mathv60k" else IMAGES
    return TEXT


def _model(recipe: Recipe) -> str:
    path = recipe.config.model.path
    if recipe.kind in ("preflight", "check"):
        return "-"
    if recipe.name.startswith("demo-pretrained"):
        return "SmolLM2-135M"
    return "tiny, built here" if "${" in path else path.partition("/")[2].removesuffix("-Instruct")


def _gpus(recipe: Recipe, gpu: str) -> str:
    cluster = recipe.cluster
    if not cluster.gpus_per_node:
        return f"{recipe.config.placement.world_size} CPU ranks"
    return f"{cluster.nodes} x {cluster.gpus_per_node} {gpu}"


def _where(targets: list[str]) -> str:
    letters = ""
    for letter, (_, members) in PLACES.items():
        letters += letter if set(members) & set(targets) else "."
    return letters
