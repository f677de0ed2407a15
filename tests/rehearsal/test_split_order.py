"""Groups of ranks are made in step on every rank, in every layout that a recipe has.

DeepSpeed binds the default process group to a device on CUDA (deepspeed/comm/torch.py). torch then makes each
new NCCL group by `ncclCommSplit` of the default one, a call of all ranks: members with a color, the others
without. For a gloo group the ranks outside call it too, and the members do not (torch's
`_new_process_group_helper`). Where ranks disagree on the order, all of them hang (pytorch 145376, NeMo-RL
3189). vLLM makes its groups for all ranks in one order; this plays that order for the layouts of the recipes.
"""

from __future__ import annotations

import pytest

from recipes.presets import RECIPES, get


def layouts() -> list[tuple[int, int]]:
    """(ranks, tensor-parallel ranks of an engine) of all GRPO recipes on GPUs."""
    found = set()
    for name in RECIPES:
        config = get(name).config
        if config.method == "grpo" and config.placement.device == "cuda":
            found.add((config.placement.world_size, config.rollout.tensor_parallel))
    return sorted(found)


def groups_of_vllm(world: int, tensor_parallel: int) -> list[list[list[int]]]:
    """Lists of groups in vLLM's order (distributed/parallel_state.py): world, tensor parallel, and four kinds
    of which every rank is one by itself."""
    engines = [list(range(i, i + tensor_parallel)) for i in range(0, world, tensor_parallel)]
    alone = [[rank] for rank in range(world)]
    return [[list(range(world))], engines, alone, alone, alone, alone]


def splits(rank: int, kinds: list[list[list[int]]]) -> list[tuple[bool, tuple[int, ...]]]:
    """This rank's calls of `ncclCommSplit`, in order: (as a member, the group)."""
    calls = []
    for groups in kinds:
        for members in groups:
            calls.append((rank in members, tuple(members)))  # the NCCL group
            if rank not in members:
                calls.append((False, tuple(members)))  # the gloo group beside it
    return calls


def out_of_step(world: int, kinds: list[list[list[int]]]) -> str:
    """What hangs; empty where nothing does."""
    calls = [splits(rank, kinds) for rank in range(world)]
    if len({len(mine) for mine in calls}) > 1:
        return "ranks make unequal numbers of calls"
    for k in range(len(calls[0])):
        together: dict[tuple[int, ...], set[int]] = {}
        for rank in range(world):
            member, group = calls[rank][k]
            if member:
                together.setdefault(group, set()).add(rank)
        for group, ranks in together.items():
            if ranks != set(group):
                return f"in call {k} only {sorted(ranks)} of {group} are members"
    return ""


@pytest.mark.parametrize(("world", "tensor_parallel"), layouts())
def test_every_recipe_makes_its_groups_in_step(world, tensor_parallel):
    assert out_of_step(world, groups_of_vllm(world, tensor_parallel)) == ""


def test_a_group_of_some_ranks_only_would_be_found():
    kinds = groups_of_vllm(8, 2)
    assert out_of_step(8, [*kinds, [[0, 1, 2, 3]]]) != ""
    assert out_of_step(8, [*kinds[:1], [[0, 1], [2, 3], [4, 5], [7]]]) != ""
