"""Deals samples to ranks and passes by a token budget: plain Python, a pure function of lengths.

Every rank makes the same number of passes, since each pass gathers weights from all ranks. A pass holds
up to `budget` tokens. Completions of one prompt share its tokens if they are in the same pass. Groups
stay together unless that would unbalance the ranks; then a group is cut, and every piece holds the
prompt again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Plan = list[list[list[int]]]
"""[rank][pass] -> indices of samples, those of one prompt side by side; [] if the rank has nothing to do."""

SLACKS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, float("inf"))
"""Limits of a piece's size that are tried, as multiples of a rank's equal share of the tokens.

With the last one, groups are cut at the budget only. The first ones help where a rank's share is about one
group: pieces of that size cannot be put together evenly."""


@dataclass(frozen=True)
class SampleLength:
    """Size of one sample, which is all that the schedule knows of it."""

    prompt: Hashable
    """Equal for samples of one prompt."""
    prompt_tokens: int
    completion_tokens: int
    image_tokens: int = 0
    """Number of image tokens among the prompt's tokens."""
    shown_later: int = 0
    """Number of image tokens among the completion's tokens."""


@dataclass(frozen=True)
class PassCost:
    """Times of the parts of a pass, in units of the time of one token in the layers' matrix products."""

    attended: float = 1e-5
    """Time of a token for each token that it attends to: 0.9e-5 for 72B, 1.3e-5 for 7B, by FLOPs."""
    image_token: float = 0.0
    """Time of an image token's patches in the vision tower."""
    per_pass: float = 2_000.0
    """Time of gathers and hooks in any pass. This is an assumption for NVLink and 8x400G."""

    def prompt(self, x: SampleLength) -> float:
        """Time of a prompt, once."""
        return x.prompt_tokens * (1 + self.attended * x.prompt_tokens) + self.image_token * x.image_tokens

    def completion(self, x: SampleLength) -> float:
        """Time of a completion, which attends to its prompt and itself."""
        time = x.completion_tokens * (1 + self.attended * (x.completion_tokens + 2 * x.prompt_tokens))
        return time + self.image_token * x.shown_later


KEYS = 4.0
"""Keys that a pass may hold for each token of its budget, where the memory of a key is not known.

The keys of a shared prompt are repeated for every completion. Many short completions of a long prompt
would therefore take memory that the number of tokens does not show."""


@dataclass(frozen=True)
class PromptPiece:
    """Samples of one prompt that stay together."""

    members: list[int]
    tokens: int
    """Tokens of the budget that the piece takes: the tokens of prompt and completions, or the number that the
    memory of its keys corresponds to, if that is larger."""
    cost: float


def schedule_passes(
    lengths: Sequence[SampleLength],
    world_size: int,
    budget: int,
    cost: PassCost = PassCost(),
    keys_per_token: float = KEYS,
) -> Plan:
    """Makes a few plans that cut groups into pieces of different sizes, and returns the one that ends first.
    The largest passes come first, so that a lack of memory shows at once. A sample longer than the budget
    stands alone. Equal input gives equal plans: ties are decided by index."""
    by_prompt: dict[Hashable, list[int]] = {}
    for i, x in enumerate(lengths):
        by_prompt.setdefault(x.prompt, []).append(i)
    groups = list(by_prompt.values())

    plans = []
    for limit in _piece_limits(groups, lengths, world_size, budget, keys_per_token):
        pieces = []
        for members in groups:
            pieces += _pieces(members, lengths, limit, cost, keys_per_token)
        plans.append(_passes(pieces, world_size, budget))

    def time(passes: list[list[list[PromptPiece]]]) -> float:
        """A pass takes as long as its slowest rank."""
        return sum(cost.per_pass + max(map(_cost, ranks)) for ranks in passes)

    return _as_plan(min(plans, key=time), groups, world_size)


def pass_times(plan: Plan, lengths: Sequence[SampleLength], cost: PassCost) -> list[list[float]]:
    """Time of every rank in every pass, [pass][rank], without gathers."""
    by_pass = zip(*plan, strict=True)
    return [[_time(members, lengths, cost) for members in by_rank] for by_rank in by_pass]


def busy_fraction(plan: Plan, lengths: Sequence[SampleLength], cost: PassCost) -> float:
    """Share of the passes in which ranks compute; the rest of the time they wait for the slowest rank."""
    times = pass_times(plan, lengths, cost)
    longest = sum(map(max, times))
    if not longest:
        return 1.0
    return sum(map(sum, times)) / (longest * len(plan))


def _time(members: Sequence[int], lengths: Sequence[SampleLength], cost: PassCost) -> float:
    """Time of one rank's pass over these samples."""
    prompts = {lengths[i].prompt: lengths[i] for i in members}
    return sum(map(cost.prompt, prompts.values())) + sum(cost.completion(lengths[i]) for i in members)


def _as_plan(passes: list[list[list[PromptPiece]]], groups: list[list[int]], world_size: int) -> Plan:
    """The plan of passes that are given as [pass][rank] -> pieces."""
    group_start = {i: members[0] for members in groups for i in members}
    plan: Plan = [[] for _ in range(world_size)]
    for ranks in passes:
        for rank, pieces in enumerate(ranks):
            indices = []
            for piece in pieces:
                indices += piece.members
            # Groups in the order of their first samples, and samples in order within a group.
            plan[rank].append(sorted(indices, key=lambda i: (group_start[i], i)))
    return plan


def _completions(members: Sequence[int], lengths: Sequence[SampleLength]) -> list[int]:
    """Completion tokens of each of these samples."""
    return [lengths[i].completion_tokens for i in members]


def _piece_limits(
    groups: list[list[int]],
    lengths: Sequence[SampleLength],
    world_size: int,
    budget: int,
    keys_per_token: float,
) -> list[int]:
    """The limits of a piece's tokens that are worth a try, each once."""
    total = longest_prompt = largest_group = 0
    for members in groups:
        prompt_tokens = lengths[members[0]].prompt_tokens
        completions = _completions(members, lengths)
        total += prompt_tokens + sum(completions)
        longest_prompt = max(longest_prompt, prompt_tokens)
        largest_group = max(largest_group, _room(prompt_tokens, completions, keys_per_token))

    limits = []
    for slack in SLACKS:
        share = max(total / world_size * slack, longest_prompt + 1)
        # From the size of the largest group on, no limit cuts any group.
        limits.append(int(min(budget, largest_group, share)))
    return list(dict.fromkeys(limits))


def _cost(pieces: list[PromptPiece]) -> float:
    """Time of one rank's pass over these pieces."""
    return sum(piece.cost for piece in pieces)


def _pieces(
    members: list[int], lengths: Sequence[SampleLength], limit: int, cost: PassCost, keys_per_token: float
) -> list[PromptPiece]:
    """A whole group, or as few pieces of up to `limit` tokens as possible, each with the prompt. One sample
    cannot be cut."""
    prompt = lengths[members[0]]
    room = limit - prompt.prompt_tokens
    sizes = _completions(members, lengths)
    count = min(max(-(-sum(sizes) // max(room, 1)), 1), len(members))
    while True:
        # One part is what most groups are; it takes anything.
        parts = _fill(sizes, sizes, count, room if count > 1 else sum(sizes))
        if parts is not None:
            pieces = []
            for part in filter(None, parts):
                pieces.append(_piece([members[k] for k in part], lengths, cost, keys_per_token))
            fits = all(piece.tokens <= limit or len(piece.members) == 1 for piece in pieces)
            if count >= len(members) or fits:
                return pieces
        count += 1


def _piece(
    members: list[int], lengths: Sequence[SampleLength], cost: PassCost, keys_per_token: float
) -> PromptPiece:
    """The piece of these samples of one prompt."""
    prompt = lengths[members[0]]
    tokens = _room(prompt.prompt_tokens, _completions(members, lengths), keys_per_token)
    time = cost.prompt(prompt) + sum(cost.completion(lengths[i]) for i in members)
    return PromptPiece(members, tokens, time)


def _room(prompt: int, completions: list[int], keys_per_token: float) -> int:
    """`PromptPiece.tokens` of a prompt and its completions."""
    tokens = prompt + sum(completions)
    # The prompt's keys stand in the row once more for each completion.
    keys = tokens + len(completions) * prompt if len(completions) > 1 else tokens
    return max(tokens, math.ceil(keys / keys_per_token))


def _passes(pieces: list[PromptPiece], world_size: int, budget: int) -> list[list[list[PromptPiece]]]:
    """[pass][rank] -> pieces: as few passes as the budget allows, with bins of similar cost in one pass."""
    costs = [piece.cost for piece in pieces]
    tokens = [piece.tokens for piece in pieces]
    count = max(-(-_bins_needed(tokens, budget) // world_size), 1)
    while (bins := _fill(costs, tokens, world_size * count, budget)) is None:
        count += 1
    filled = []
    for bin_ in bins:
        filled.append([pieces[i] for i in bin_])
    filled.sort(key=_cost, reverse=True)
    return [filled[first : first + world_size] for first in range(0, len(filled), world_size)]


def _fill(costs: Sequence[float], tokens: list[int], bins: int, budget: int) -> list[list[int]] | None:
    """Indices in each bin, by "longest processing time first": the costliest goes to the cheapest bin with
    room for it. An empty bin takes anything. None if something fits nowhere."""
    out: list[list[int]] = [[] for _ in range(bins)]
    # (cost, bin, tokens), the cheapest first; equal ones are a heap
    heap = [(0.0, b, 0) for b in range(bins)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        full = []
        while heap and heap[0][2] and heap[0][2] + tokens[i] > budget:
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
    """Number of bins that first-fit decreasing takes."""
    free: list[int] = []
    for n in sorted(tokens, reverse=True):
        for b, room in enumerate(free):
            if n <= room:
                free[b] -= n
                break
        else:
            free.append(max(budget - n, 0))
    return len(free)
