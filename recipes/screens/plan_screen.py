"""`plan` on one screen of 100 columns and 40 lines: the verdict, a step's time, the cheapest offers and the
one that `up` takes, what would make it cheaper, and what all of it assumes."""

from __future__ import annotations

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.plan import cost
from recipes.plan.cheaper import CheaperChange
from recipes.screens.plan_facts import TITLES, PlanFacts, PlannedOffer
from recipes.screens.whole_plan import verdict_line

WIDTH = 100
OFFERS = 5
CHEAPER = 4
REMARKS = 3
"""Most of each that are shown; `--all` and `--json` have the others."""
BAR = 40
"""Columns of the longest bar."""


def narrow_console() -> Console:
    """A console of at most WIDTH columns, and of as many where output goes to a file."""
    console = Console()
    return Console(width=min(WIDTH, console.width) if console.is_terminal else WIDTH)


def show_plan_screen(facts: PlanFacts, console: Console) -> None:
    """The whole screen; colors and bars on a terminal, plain text elsewhere."""
    console.print(verdict_line(facts.verdict))
    console.print(Text(f"{facts.recipe}: {facts.description}; {facts.machines}"))
    if facts.taken:
        _step(facts, facts.taken, console)
    if facts.offers:
        _offers(facts, console)
    if facts.hourly:
        _hourly(facts, console)
    if facts.limits:
        console.print()
        for line in facts.limits.said:
            console.print(Text(line))
    if facts.cheaper:
        _cheaper(facts.cheaper[:CHEAPER], console)
    _assumed(facts, console)
    console.print()
    console.print(verdict_line(facts.verdict))


def _table(*columns: str, words: int) -> Table:
    """A table without lines, whose first columns are words and whose others are figures."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < words else "right", no_wrap=True)
    return table


def _step(facts: PlanFacts, taken: PlannedOffer, console: Console) -> None:
    console.print()
    table = _table(f"a step of {taken.step_s:.1f} s on {taken.gpu}", "seconds", "share", "", words=1)
    table.columns[3].justify = "left"
    longest = max(facts.step_s.values())
    for phase, seconds in facts.step_s.items():
        if seconds < 0.005:
            continue
        bar = Bar(longest, 0, seconds, width=BAR, color="cyan") if console.is_terminal else ""
        table.add_row(TITLES.get(phase, phase), f"{seconds:.2f}", f"{seconds / taken.step_s:.0%}", bar)
    console.print(table)
    if facts.host_gib and facts.disk_gib:
        console.print(f"a node needs {facts.host_gib:.0f} GiB of RAM and {facts.disk_gib:.0f} of disk")


def _offers(facts: PlanFacts, console: Console) -> None:
    console.print()
    head = f"{facts.steps:,} steps on"
    table = _table("", head, "GPU", "market", "hours", "10-90%", "$", "10-90%", "preempted", words=4)
    shown = facts.offers[:OFFERS]
    if facts.taken and facts.taken not in shown:
        shown.append(facts.taken)
    for offer in shown:
        dollars = ("-", "-")
        if offer.usd is not None:
            dollars = f"{offer.usd:,.0f}", f"{offer.usd_10:,.0f}-{offer.usd_90:,.0f}"
        taken = offer == facts.taken
        hours = f"{offer.hours:.1f}", f"{offer.hours_10:.1f}-{offer.hours_90:.1f}"
        lost = f"{offer.preemptions:.1f}"
        cells = (offer.target, offer.gpu, offer.market, *hours, *dollars, lost)
        table.add_row(">" if taken else "", *cells, style="bold" if taken else "")
    console.print(table)
    if facts.taken:
        console.print(Text(f"`up` takes {facts.taken.target} (>): {facts.why}"))
    elif facts.why:
        console.print(Text(facts.why))


def _hourly(facts: PlanFacts, console: Console) -> None:
    console.print()
    check = facts.hourly[0].most_usd is not None
    table = _table("", "GPU", "market", "$/hour", *(["$ at most"] if check else []), words=3)
    for one in facts.hourly[:OFFERS]:
        most = [] if one.most_usd is None else [f"{one.most_usd:.2f}"]
        table.add_row(one.target, one.gpu, cost.market_of(one.spot), f"{one.usd:.2f}", *most)
    console.print(table)
    if check:
        console.print("at most: for its checks; start and set-up come on top")


def _cheaper(found: list[CheaperChange], console: Console) -> None:
    console.print("\ncheaper:", style="bold")
    table = _table("", "", "", "", words=1)
    table.columns[3].justify = "left"
    table.columns[3].no_wrap = False
    table.show_header = False
    for one in found:
        usd = "" if one.usd is None else f"${one.usd:,.0f}"
        said = Text(f"{one.change}: {one.but}")
        table.add_row(one.what, f"{one.hours:.1f} h", usd, said)
    console.print(table)


def _assumed(facts: PlanFacts, console: Console) -> None:
    console.print()
    if facts.assumptions:
        console.print("assumed, and checked by one hour of one H100 alone (docs/first-gpu-hour.md):")
    for line in facts.assumptions:
        console.print(Text(f"  {line}"))
    for line in facts.remarks[:REMARKS]:
        console.print(Text(line))
    if len(facts.remarks) > REMARKS:
        console.print(f"{len(facts.remarks) - REMARKS} more remarks: --all")
    if facts.expected:
        console.print(f"promised: {len(facts.expected)} bands, which `compare RUN --expected` checks")
    choose = "; to choose: --deadline 24h, --budget 100; with workers: --fleet" if facts.offers else ""
    console.print(f"more: --all, --json{choose}")
