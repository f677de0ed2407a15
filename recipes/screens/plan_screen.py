"""`plan` on one screen of 100 columns and 40 lines: the verdict, a step's time, the cheapest offers and the
one that `up` takes, what would make it cheaper, and what all of it assumes. `--all` shows the same with every
row, and memory by its parts."""

from __future__ import annotations

from rich.bar import Bar
from rich.console import Console
from rich.text import Text

from recipes.plan import cost
from recipes.recipe.resolved import GIB, MemoryPlan
from recipes.screens.plan_facts import Plan, PlanFacts, PlannedOffer
from recipes.screens.tables import show_lines, show_table, verdict_line

OFFERS = 5
CHEAPER = 4
REMARKS = 3
"""Most of each that are shown; `--all` and `--json` have the others."""
ALL = 10_000
BAR = 40
"""Columns of the longest bar."""


def show_plan(plan: Plan, console: Console, whole: bool = False) -> None:
    """The whole screen; colors and bars on a terminal, plain text elsewhere. whole: with every row."""
    facts, need, sampling = plan
    console.print(verdict_line(facts.verdict), soft_wrap=whole)
    console.print(Text(f"{facts.recipe}: {facts.description}; {facts.machines}"))
    if whole and need:
        _memory(need, console)
    if facts.taken:
        _step(facts, facts.taken, console)
    if facts.offers:
        _offers(facts, console, ALL if whole else OFFERS)
    if facts.hourly:
        _hourly(facts, console, ALL if whole else OFFERS)
    if whole and sampling:
        console.print("\nsecond group, each a job that samples:", style="bold")
        _memory(sampling, console)
    if facts.limits:
        console.print()
        show_lines(console, facts.limits.said, whole=whole)
    if facts.cheaper:
        _cheaper(facts, console, ALL if whole else CHEAPER)
    _assumed(facts, console, whole)
    console.print()
    console.print(verdict_line(facts.verdict), soft_wrap=whole)


def _memory(need: MemoryPlan, console: Console) -> None:
    """Every part in every phase, and what a node needs."""
    rows: dict[str, list[str]] = {}
    for i, phase in enumerate(need.phases):
        sizes = phase.parts | {"sum": phase.total}
        for part, size in sizes.items():
            cells = rows.setdefault(part, [""] * len(need.phases))
            cells[i] = f"{size / GIB:.1f}"
    rows["sum"] = rows.pop("sum")
    console.print()
    head = f"GiB of {need.gpu_bytes / GIB:.1f} ({need.gpu})"
    columns = (head, *(phase.name for phase in need.phases))
    show_table(console, columns, [(part, *cells) for part, cells in rows.items()], words=1)
    if any(phase.name.endswith("rollout") for phase in need.phases):
        console.print(f"KV cache: {need.kv_cache_tokens:,} tokens per engine", highlight=False)
    for name, values in (("host RAM per node", need.host), ("disk per node", need.disk)):
        inside = ", ".join(f"{part} {value / GIB:.0f}" for part, value in values.items())
        console.print(f"{name}: {sum(values.values()) / GIB:.0f} GiB ({inside})", highlight=False)
    saved = f"; one checkpoint: {need.checkpoint_bytes / GIB:.0f} GiB" if need.checkpoint_bytes else ""
    console.print(f"/dev/shm per node: {need.shm_bytes / GIB:.0f} GiB{saved}", highlight=False)


def _step(facts: PlanFacts, taken: PlannedOffer, console: Console) -> None:
    console.print()
    longest = max(facts.step_s.values())
    rows = []
    for phase, seconds in facts.step_s.items():
        if seconds >= 0.005:
            bar = Bar(longest, 0, seconds, width=BAR, color="cyan") if console.is_terminal else ""
            rows.append((phase, f"{seconds:.2f}", f"{seconds / taken.step_s:.0%}", bar))
    columns = (f"a step of {taken.step_s:.1f} s on {taken.gpu}", "seconds", "share", "")
    show_table(console, columns, rows, words=1, last_is_words=True)
    if facts.host_gib and facts.disk_gib:
        peak = (
            f"{facts.tightest} needs {facts.memory_gib[facts.tightest]:.1f} of {facts.gpu_gib:.1f} GiB a GPU"
        )
        console.print(
            f"{peak}, a node {facts.host_gib:.0f} GiB of RAM and {facts.disk_gib:.0f} of disk",
            highlight=False,
        )


def _offers(facts: PlanFacts, console: Console, most: int) -> None:
    console.print()
    shown = facts.offers[:most]
    if facts.taken and facts.taken not in shown:
        shown.append(facts.taken)
    rows = []
    for offer in shown:
        dollars = ("-", "-")
        if offer.usd is not None:
            dollars = f"{offer.usd_50:,.0f}", f"{offer.usd_10:,.0f}-{offer.usd_90:,.0f}"
        hours = f"{offer.hours_50:.1f}", f"{offer.hours_10:.1f}-{offer.hours_90:.1f}"
        mark = ">" if offer == facts.taken else ""
        rows.append(
            (mark, offer.target, offer.gpu, offer.market, *hours, *dollars, f"{offer.preemptions:.1f}")
        )
    columns = (
        "",
        f"{facts.steps:,} steps on",
        "GPU",
        "market",
        "hours",
        "10-90%",
        "$",
        "10-90%",
        "preempted",
    )
    marked = shown.index(facts.taken) if facts.taken else -1
    show_table(console, columns, rows, words=4, marked=marked)
    if facts.taken:
        console.print(Text(f"`up` takes {facts.taken.target} (>): {facts.why}"))
    elif facts.why:
        console.print(Text(facts.why))


def _hourly(facts: PlanFacts, console: Console, most: int) -> None:
    console.print()
    check = facts.hourly[0].most_usd is not None
    rows = []
    for price in facts.hourly[:most]:
        limit = [] if price.most_usd is None else [f"{price.most_usd:.2f}"]
        rows.append((price.target, price.gpu, cost.market_of(price.spot), f"{price.usd:.2f}", *limit))
    show_table(console, ("", "GPU", "market", "$/hour", *(["$ at most"] if check else [])), rows, words=3)
    if check:
        console.print("at most: for its checks; start and set-up come on top")


def _cheaper(facts: PlanFacts, console: Console, most: int) -> None:
    console.print("\ncheaper, beside the run as it is planned:", style="bold")
    rows = []
    for way in facts.cheaper[:most]:
        now = facts.taken
        assert now is not None
        share = way.hours / now.hours if way.usd is None or not now.usd else way.usd / now.usd
        rows.append(
            (way.what, f"{share - 1:+.0%} {'h' if way.usd is None else '$'}", f"{way.change}: {way.but}")
        )
    show_table(console, ("", "", ""), rows, words=1, last_is_words=True)


def _assumed(facts: PlanFacts, console: Console, whole: bool) -> None:
    console.print()
    if facts.assumptions:
        console.print("assumed, and checked by one hour of one H100 alone (docs/planned.md):")
    show_lines(console, facts.assumptions, indent="  ", whole=whole)
    if whole:
        show_lines(console, facts.remarks, whole=True)
        show_lines(console, (f"expected: {band}" for band in facts.expected), whole=True)
        if facts.not_promised:
            console.print(Text(f"not promised: {facts.not_promised}"))
        return
    show_lines(console, facts.remarks[:REMARKS])
    if len(facts.remarks) > REMARKS:
        console.print(f"{len(facts.remarks) - REMARKS} more remarks: --all")
    if facts.expected:
        console.print(f"promised: {len(facts.expected)} bands, which `compare RUN --expected` checks")
    choose = "; to choose: --deadline 24h, --budget 100; with workers: --fleet" if facts.offers else ""
    console.print(f"more: --all, --json{choose}")
