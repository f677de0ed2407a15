"""`plan --all`: memory by part and phase, every offer, and all that the plan knows of a recipe."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.capabilities import targets_for
from recipes.plan import (
    allocated,
    cost,
    decode_slots,
    host_and_disk,
    hourly,
    memory,
    offer_choice,
    passes,
    prices,
    rank_balance,
    spread,
    start_time,
    utilization,
    zero_stages,
)
from recipes.recipe import sample_group
from recipes.recipe.resolved import GIB, MemoryPlan
from recipes.recipe.spec import Recipe
from recipes.records import image_record
from recipes.screens.plan_facts import PlanFacts, PlannedOffer
from recipes.screens.recipe_list import machine_shape


def wide_console() -> Console:
    """A console that is wide enough for the tables where output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=190)


def show_whole_plan(
    recipe: Recipe,
    offers: list[cost.Offer],
    left_out: list[str],
    console: Console,
    network_gbit_s: float,
    facts: PlanFacts,
    target: str | None = None,
) -> None:
    """The verdict, memory per phase, host and disk, then every way to run it, and what was left out.

    network_gbit_s: between nodes, for the comparison of ZeRO stages. facts: the same plan's. target: the one
    that was asked for; None: any.
    """
    need = memory.plan_memory(recipe)
    console.print(verdict_line(facts.verdict), soft_wrap=True)
    console.print(f"[bold]{recipe.name}[/bold]: {recipe.description}; {machine_shape(recipe)}\n")
    if need is None:
        console.print("no GPU memory plan: the recipe runs on CPU, or trains no model")
    else:
        _memory(recipe, need, console)
        _passes(recipe, need, console)
        _balance(recipe, need, console)
        console.print(utilization.waiting_remark(recipe, need, network_gbit_s), highlight=False, end="")
        console.print(utilization.utilization_remark(recipe, need, network_gbit_s), highlight=False, end="")
        _slots(recipe, need, network_gbit_s, console)
        console.print(decode_slots.carried_over(recipe, need, network_gbit_s), highlight=False, end="")
        if recipe.kind == "train":
            _stages(recipe, network_gbit_s, console)
    if offers:
        _offers(recipe, offers, facts.offers, console)
    if recipe.dataset.guess and not recipe.config.run.max_steps:
        console.print(f"warning: {recipe.dataset.guess}", highlight=False)
    if recipe.kind != "train":
        _per_hour(recipe, target, console)
    for line in left_out:
        console.print(f"left out: {line}", highlight=False)
    expected = recipe.config.expected
    for band in expected.bands:
        console.print(f"expected: {band} ({band.source})", highlight=False)
    if expected.not_promised:
        console.print(f"not promised: {expected.not_promised}", highlight=False)
    console.print()
    console.print(verdict_line(facts.verdict), soft_wrap=True)


def verdict_line(said: str) -> Text:
    """A verdict, its first words green or red."""
    text = Text(said)
    text.highlight_regex(r"^fits", "green")
    text.highlight_regex(r"^does not fit", "red")
    return text


def _per_hour(recipe: Recipe, target: str | None, console: Console) -> None:
    """What a recipe that trains nothing costs on a target; on every one whose price is known where none is
    named."""
    targets = cost.target_members(recipe, target) if target else targets_for(recipe)
    found = hourly.prices_of(recipe, targets, prices.sky_catalogs())
    if target and not found:
        console.print(f"{target}: machines of your own, or no price is known of them", highlight=False)
    for one in found:
        what = f"${one.usd:.2f} per hour"
        if one.most_usd is not None:
            what = f"${one.most_usd:.2f} at most for its checks, {what} with start and set-up"
        console.print(f"{what}: {one.target}, {one.gpu}, {cost.market_of(one.spot)}", highlight=False)


def _memory(recipe: Recipe, need: MemoryPlan, console: Console) -> None:
    table = Table(
        title=f"GPU memory by phase, GiB of {need.gpu_bytes / GIB:.1f} ({need.gpu})",
        box=None,
        title_justify="left",
    )
    table.add_column("")
    rows: dict[str, list[str]] = {}
    sums = []
    for i, phase in enumerate(need.phases):
        table.add_column(phase.name, justify="right")
        sums.append(f"[bold]{phase.total / GIB:.1f}[/bold]")
        for part, size in phase.parts.items():
            row = rows.setdefault(part, [""] * len(need.phases))
            row[i] = f"{size / GIB:.1f}"
    for part, cells in rows.items():
        table.add_row(part, *cells)
    table.add_row("[bold]sum[/bold]", *sums)
    if found := allocated.beside(recipe.name, need):
        taken = [found.get(phase.name) for phase in need.phases]
        table.add_row("allocated", *(f"{one.tensors:.1f}" if one else "" for one in taken))
        table.add_row("with what torch keeps", *(f"{one.allocated:.1f}" if one else "" for one in taken))
    console.print(table)
    if found:
        console.print(
            "allocated: by one rank at its true shape on a device that computes nothing, an update with its"
            " optimizer step; CUDA context and NCCL as planned. What torch keeps of earlier tensors gives way"
            " where memory is short (docs/first-gpu-hour.md)",
            highlight=False,
        )
    if any(phase.name.endswith("rollout") for phase in need.phases):
        console.print(f"\nKV cache: {need.kv_cache_tokens:,} tokens per engine")
    for name, values in (("host RAM per node", need.host), ("disk per node", need.disk)):
        inside = ", ".join(f"{part} {value / GIB:.0f}" for part, value in values.items())
        console.print(f"{name}: {sum(values.values()) / GIB:.0f} GiB ({inside})", highlight=False)
    if replayed := need.host.get("experts to replay"):
        console.print(
            f"routing replay: {host_and_disk.experts_of_token(need.shape)} bytes of chosen experts for each"
            f" token, {replayed / GIB:.2f} GiB of a node's RAM in a step",
            highlight=False,
        )
    saved = f"; one checkpoint: {need.checkpoint_bytes / GIB:.0f} GiB" if need.checkpoint_bytes else ""
    console.print(f"/dev/shm per node: {need.shm_bytes / GIB:.0f} GiB{saved}")
    console.print()


def _passes(recipe: Recipe, need: MemoryPlan, console: Console) -> None:
    if recipe.config.method != "grpo" or recipe.kind != "train":
        return
    recipe = memory.with_rows(recipe)
    step = passes.of_step(recipe, need.shape)
    forward, updates = passes.gathered_bytes(recipe.config, need.shape, step)
    judged = f" and {len(step.teacher)} of the teacher" if step.teacher else ""
    console.print(
        f"passes per step: {len(step.updates)} in updates, {len(step.logprobs) * step.models} for"
        f" log-probabilities{judged}; one of an update keeps the host busy for"
        f" {cost.host_seconds(recipe.config, need.shape):.2f} s\na rank gathers"
        f" {(forward + updates) / GIB:,.0f} GiB per step, {updates / GIB:,.0f} of them in updates"
        f" (perf/gathered_gib)\nengines use {decode_slots.share_of_slots(recipe, need):.0%} of "
        f"their decode slots"
        " (perf/slots_used)",
        highlight=False,
    )


def _balance(recipe: Recipe, need: MemoryPlan, console: Console) -> None:
    """How long ranks wait for the slowest one, and what changes that."""
    if recipe.kind != "train" or recipe.config.placement.world_size == 1:
        return
    busy = rank_balance.busy_shares(recipe, need.shape)
    console.print(
        f"ranks compute {busy.typical:.0%} of the updates at drawn lengths, {busy.heavy:.0%} where a few"
        f" completions are much longer ({busy.worst:.0%} in the worst of {rank_balance.DRAWS} "
        f"steps); the rest"
        " they wait for the slowest (perf/ranks_busy_fraction)",
        highlight=False,
    )
    for one in rank_balance.balance_proposals(recipe, need.shape):
        shares = f"{one.busy.typical:.0%} and {one.busy.heavy:.0%}"
        console.print(f"  --set {one.change}: {shares}; {one.effect}", highlight=False)
    console.print()


def _slots(recipe: Recipe, need: MemoryPlan, network_gbit_s: float, console: Console) -> None:
    """How empty the engines' decode slots are, and what more prompts would bring."""
    more = decode_slots.more_prompts(recipe, network_gbit_s)
    if more is None:
        return
    console.print(
        f"{1 - decode_slots.share_of_slots(recipe, need):.0%} of the decode slots are empty "
        f"while engines wait for the"
        f" longest completion; with {decode_slots.TIMES} times the prompts a sample takes"
        f" {1000 * more.sample_s:.0f} ms, not {1000 * more.before_s:.0f} ({need.gpu}):",
        highlight=False,
    )
    console.print(
        f"  {' '.join(f'--set {one}' for one in more.changes)}: the optimizer's batch stays, and a step makes"
        f" {more.updates} updates, not {more.before}, the later ones on samples of older weights",
        highlight=False,
    )
    console.print()


def _stages(recipe: Recipe, network_gbit_s: float, console: Console) -> None:
    stages = zero_stages.compare_stages(recipe, network_gbit_s) if recipe.kind == "train" else []
    if len(stages) < 2:
        return
    where = f", {network_gbit_s:g} Gb/s between nodes" if recipe.cluster.nodes > 1 else ""
    table = Table(
        title=f"ZeRO stages on {sample_group.describe_machines(recipe.cluster)}, updates of a "
        f"step in seconds{where}",
        box=None,
        title_justify="left",
    )
    for column in (
        "ZeRO",
        "peak GiB",
        "fits",
        "compute",
        "collectives",
        "host",
        "waited for",
        "gather after",
        "sum",
    ):
        table.add_column(column, justify="left" if column == "ZeRO" else "right")
    for stage in stages:
        t = stage.time
        name, fits = stage.name + (" (recipe)" if stage.ours else ""), "yes" if stage.fits else "no"
        table.add_row(
            name,
            f"{stage.peak_bytes / GIB:.1f}",
            fits,
            *[f"{value:.2f}" for value in (t.compute, t.wire, t.host, t.waited, t.after, t.total)],
        )
    console.print(table)
    if said := zero_stages.stage_advice(recipe, stages, network_gbit_s):
        console.print(said, highlight=False, soft_wrap=True)
    console.print()


def _offers(recipe: Recipe, offers: list[cost.Offer], planned: list[PlannedOffer], console: Console) -> None:
    """planned: the offers with their ranges, in the same order."""
    first = offers[0]
    title = f"Time and cost of {first.steps} steps, cheapest first; {_assumed(recipe)}"
    table = Table(title=title, box=None, title_justify="left")
    for column in ("target", "GPU", "market", "$/hour", "images s", "rollout s", "logprobs s", "update s",
                   "sync s", "start-up s", "step s", "hours", "10 to 90%", "preempted", "save every",
                   "$ per run", "10 to 90%"):  # fmt: skip
        table.add_column(column, justify="left" if column in ("target", "GPU", "market") else "right")
    for offer, one in zip(offers, planned, strict=True):
        step = offer.step
        phases = (step.images, step.rollout, step.logprobs, step.update, step.sync, step.phases, step.total)
        rate = one.usd_per_hour
        priced = one.usd is not None
        table.add_row(
            offer.target,
            offer.gpu,
            cost.market_of(offer.spot),
            "yours" if rate is None else f"{rate:.2f}",
            *[f"{value:.1f}" for value in phases],
            f"{offer.hours:.1f}",
            f"{one.hours_10:.1f} to {one.hours_90:.1f}",
            f"{offer.preemptions:.1f}",
            f"{offer.interval_s / 60:.0f} min",
            f"{one.usd:,.0f}" if priced else "-",
            f"{one.usd_10:,.0f} to {one.usd_90:,.0f}" if priced else "-",
        )
    console.print(table)
    console.print(_ranges(first, recipe), highlight=False)
    pull = start_time.pull_seconds(recipe.cluster.image)
    starts = {offer.target: start_time.start_seconds(offer.target, pull is not None) for offer in offers}
    told = []
    for name, (took, runs) in starts.items():
        if runs:
            told.append(f"{name} {took:.0f} s ({runs} runs launched from here)")
    otherwise = "else " if told else ""
    longer = f"longer where the model's download takes over {start_time.START_S:.0f} s"
    assumed = start_time.Restart(0.0, 0.0, pull=pull).total()
    told.append(f"{otherwise}{assumed:.0f} s assumed, {longer}")
    took, received, runs = start_time.setup_medians()
    part = (
        f" Of that the environment: {took:.0f} s, {received / 1e9:.1f} GB downloaded ({runs} runs)."
        if runs
        else ""
    )
    console.print(f"Launch to first step: {', '.join(told)}.{part}", highlight=False)
    if spot := next((offer for offer in offers if offer.spot), None):
        console.print(f"Back after a preemption on {spot.target}: {spot.restart}.", highlight=False)
    image = image_record.find_image(recipe.cluster.image)
    if image and not image.current:
        console.print(
            "cluster.image holds another environment than this checkout's, so each machine makes its own: "
            "`python3 launch.py image --push` builds the one of this checkout",
            highlight=False,
        )
    console.print(
        "Times are a model (recipes/plan/cost.py states every assumption), prices a snapshot or SkyPilot's"
        " catalog."
    )


def _assumed(recipe: Recipe) -> str:
    """The length of completions that the times rest on."""
    tokens = recipe.dataset.answer_tokens
    if recipe.config.method == "sft":
        return f"solutions of {tokens:,} tokens"
    return f"completions of {tokens:,} tokens assumed, of {recipe.config.rollout.max_tokens:,} allowed"


def _ranges(offer: cost.Offer, recipe: Recipe) -> str:
    """What the ranges of hours and dollars are made of."""
    low, high = offer.step_bounds
    told = [f"step time {low:.2f} to {high:.2f} times the plan's"]
    if offer.stretch:
        limit = recipe.config.rollout.max_tokens
        tokens = [min(limit, round(recipe.dataset.answer_tokens * factor)) for factor in spread.COMPLETIONS]
        told.append(f"completions of {tokens[0]:,} to {tokens[1]:,} tokens")
    told.append(f"starts {spread.START[0]:g} to {spread.START[1]:g} times as long")
    told.append(f"{spread.FAILED_START:.0%} of them made again, and lost machines")
    line = f"10 to 90%: the plan's own range, between the tenths of {offer_choice.RUNS} simulated runs, with"
    line = (
        f"{line} {', '.join(told)}. No run on a GPU stands behind it: --deadline and --budget take steps of"
    )
    line = f"{line} {offer.published_end:g} times the plan, the slowest that others have published."
    return f"{line} {spread.VISION_REASONS}" if offer.vision else line
