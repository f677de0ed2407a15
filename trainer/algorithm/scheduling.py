"""Who computes what: samples dealt to ranks and passes by a token budget. Plain Python, a pure function of lengths.

Every rank makes the same number of passes, since each gathers weights from all others. A pass holds up to `budget`
tokens, and a prompt's completions share its tokens where they meet in one pass. Groups stay together where that does
not unbalance the ranks, and are cut, each piece with the prompt again, where a rank would wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Plan = list[list[list[int]]]
"""[rank][pass] -> indices of samples, those of one prompt side by side; [] where a rank has nothing to do."""

SLACKS = (1.0, 1.25, 1.5, 2.0, 3.0, float("inf"))
"""Sizes of pieces that are tried, in a rank's equal share of the tokens; the last cuts groups at the budget only."""


@dataclass(frozen=True)
class Length:
    """What the schedule knows of one sample."""

    prompt: Hashable
    """Equal for samples of one prompt."""
    prompt_tokens: int
    completion_tokens: int
    image_tokens: int = 0
    """Of the prompt's tokens."""


@dataclass(frozen=True)
class Cost:
    """Time in tokens' worth of the layers' matrix products."""

    attended: float = 1e-5
    """Of a token per token that it attends to: 0.9e-5 for 72B, 1.3e-5 for 7B, by FLOPs."""
    image_token: float = 0.0
    """Of an image token's patches in the vision tower."""
    per_pass: float = 2_000.0
    """Of a pass whatever it holds: gathers and hooks. An assumption for NVLink and 8x400G."""

    def prompt(self, x: Length) -> float:
        """A prompt, once."""
        return x.prompt_tokens * (1 + self.attended * x.prompt_tokens) + self.image_token * x.image_tokens

    def completion(self, x: Length) -> float:
        """A completion, which attends to its prompt and itself."""
        return x.completion_tokens * (1 + self.attended * (x.completion_tokens + 2 * x.prompt_tokens))


KEYS = 4
"""Keys that a pass may hold per token of its budget. A shared prompt's keys are repeated for every completion, and many
short completions of a long prompt would take memory that tokens do not show."""


@dataclass(frozen=True)
class Unit:
    """Samples of one prompt that stay together."""

    members: list[int]
    tokens: int
    """Of a budget: the tokens, the prompt's among them; or, where that is more, a share of 1 / KEYS of the keys."""
    cost: float


def schedule(lengths: Sequence[Length], world_size: int, budget: int, cost: Cost = Cost()) -> Plan:
    """The plan that ends first of a few that differ in how small groups are cut.

    Largest passes first, so that what does not fit memory shows at once. A sample longer than the budget stands alone.
    Equal input gives equal plans: ties go by index.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, x in enumerate(lengths):
        groups.setdefault(x.prompt, []).append(i)
    total = sum(lengths[g[0]].prompt_tokens for g in groups.values()) + sum(
        x.completion_tokens for x in lengths
    )
    longest = max((x.prompt_tokens for x in lengths), default=0) + 1
    whole = max(  # the largest group: every limit from there on cuts none
        (
            _room(lengths[g[0]].prompt_tokens, [lengths[i].completion_tokens for i in g])
            for g in groups.values()
        ),
        default=0,
    )
    limits = (int(min(budget, whole, max(total / world_size * slack, longest))) for slack in SLACKS)
    best: tuple[float, list[list[list[Unit]]]] | None = None
    for limit in dict.fromkeys(limits):
        units = [u for members in groups.values() for u in _pieces(members, lengths, limit, cost)]
        passes = _passes(units, world_size, budget)
        ends = sum(cost.per_pass + max(sum(u.cost for u in rank) for rank in one) for one in passes)
        if best is None or ends < best[0]:
            best = ends, passes
    assert best is not None
    first = {i: g[0] for g in groups.values() for i in g}
    order = lambda bin_: sorted((i for u in bin_ for i in u.members), key=lambda i: (first[i], i))  # noqa: E731
    return [[order(one[rank]) for one in best[1]] for rank in range(world_size)]


def _pieces(members: list[int], lengths: Sequence[Length], limit: int, cost: Cost) -> list[Unit]:
    """A group whole, or in as few pieces of up to `limit` tokens as it takes, each with the prompt."""
    prompt = lengths[members[0]]
    room = limit - prompt.prompt_tokens
    sizes = [lengths[i].completion_tokens for i in members]
    count = min(max(-(-sum(sizes) // max(room, 1)), 1), len(members))
    while True:
        if count == 1:  # as most are; `_fill` would say the same
            parts = [sorted(range(len(sizes)), key=lambda k: -sizes[k])]
        elif (parts := _fill([float(n) for n in sizes], sizes, count, room)) is None:
            count += 1
            continue
        units = [
            Unit(
                [members[k] for k in part],
                _room(prompt.prompt_tokens, [sizes[k] for k in part]),
                cost.prompt(prompt) + sum(cost.completion(lengths[members[k]]) for k in part),
            )
            for part in parts
            if part
        ]
        if count >= len(members) or all(u.tokens <= limit or len(u.members) == 1 for u in units):
            return units
        count += 1


def _room(prompt: int, completions: list[int]) -> int:
    """`Unit.tokens` of a prompt and its completions."""
    tokens = prompt + sum(completions)
    keys = tokens if len(completions) == 1 else len(completions) * prompt + tokens
    return max(tokens, -(-keys // KEYS))


def _passes(units: list[Unit], world_size: int, budget: int) -> list[list[list[Unit]]]:
    """[pass][rank] -> units: as few passes as the budget allows, bins of about one cost side by side."""
    costs, tokens = [u.cost for u in units], [u.tokens for u in units]
    count = max(-(-_bins_needed(tokens, budget) // world_size), 1)
    while (bins := _fill(costs, tokens, world_size * count, budget)) is None:
        count += 1
    bins.sort(key=lambda b: -sum(costs[i] for i in b))
    filled = [[units[i] for i in b] for b in bins]
    return [filled[p * world_size : (p + 1) * world_size] for p in range(count)]


def _fill(costs: list[float], tokens: list[int], bins: int, budget: int) -> list[list[int]] | None:
    """Longest processing time first: the costliest next into the cheapest bin that still has room for it.

    None if something fits nowhere; an empty bin takes anything.
    """
    heap = [(0.0, b, 0) for b in range(bins)]  # cost, bin, tokens: a heap already
    out: list[list[int]] = [[] for _ in range(bins)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        full = []
        while heap and (held := heap[0][2]) and held + tokens[i] > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, b, held = heap[0]
        heapq.heapreplace(heap, (load + costs[i], b, held + tokens[i]))
        out[b].append(i)
        for entry in full:
            heapq.heappush(heap, entry)
    return out


def _bins_needed(tokens: list[int], budget: int) -> int:
    """Bins that first-fit decreasing takes."""
    free: list[int] = []
    for n in sorted(tokens, reverse=True):
        for b, room in enumerate(free):
            if n <= room:
                free[b] -= n
                break
        else:
            free.append(max(budget - n, 0))
    return len(free)
