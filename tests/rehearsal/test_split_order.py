"""Groups of ranks are made in step on every rank, in every layout that a recipe has.

DeepSpeed binds the default process group to a device on CUDA (deepspeed/comm/torch.py). torch then makes each
new NCCL group by `ncclCommSplit` of the default one, a call of all ranks: members with a color, the others
without. For a gloo group the ranks outside call it too, and the members do not (torch's
`_new_process_group_helper`). Where ranks disagree on the order, all of them hang (pytorch 145376, NeMo-RL
3189). vLLM's and DeepSpeed's own code is run here as each rank of each layout, down to torch's `new_group`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recipes.presets import RECIPES, get

Call = tuple[str, tuple[int, ...]]
"""Backend and ranks of one `new_group`."""


def layouts() -> list[tuple[int, int, int]]:
    """(ranks, tensor-parallel ranks of an engine or 0 without one, ranks of an hpZ copy) of all recipes on
    GPUs."""
    found = set()
    for name in RECIPES:
        recipe = get(name)
        if recipe.kind == "train" and recipe.config.placement.device == "cuda":
            config = recipe.config
            engine = config.rollout.tensor_parallel if config.method == "grpo" else 0
            found.add((config.placement.world_size, engine, config.optimizer.hpz_ranks))
    return sorted(found)


def order(monkeypatch, rank: int, layout: tuple[int, int, int]) -> list[Call]:
    """What this rank asks torch for, in order."""
    import torch.distributed as dist
    import vllm.config
    from deepspeed.utils import groups
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import shm_broadcast

    world, tensor_parallel, hpz = layout
    calls: list[Call] = []

    def new_group(ranks: Any, backend: str = "nccl", **_: Any) -> object:
        calls.append((backend, tuple(ranks)))
        return SimpleNamespace(ranks=tuple(ranks))

    of_torch = {
        "new_group": new_group,
        "get_rank": lambda *_: rank,
        "get_world_size": lambda *_: world,
        "get_backend": lambda *_: "nccl",
        "is_initialized": lambda: True,
    }
    for name, function in of_torch.items():
        monkeypatch.setattr(dist, name, function)
        if name != "get_backend":
            monkeypatch.setattr(groups.dist, name, function)

    if hpz > 1:
        monkeypatch.setattr(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", None)
        groups._create_zero_param_parallel_group(hpz)
    if not tensor_parallel:
        return calls
    dense = SimpleNamespace(
        parallel_config=vllm.config.ParallelConfig(),
        model_config=SimpleNamespace(is_moe=False, architecture=""),
        engram_config=None,
    )
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: dense)
    # What a group does once it is there asks nothing more of torch's groups.
    monkeypatch.setattr(parallel_state, "resolve_obj_by_qualname", lambda _: lambda **_: None)
    monkeypatch.setattr(shm_broadcast.MessageQueue, "create_from_process_group", lambda *_: None)
    for name in ("_WORLD", "_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB"):
        monkeypatch.setattr(parallel_state, name, None, raising=False)
    monkeypatch.setattr(
        parallel_state, "_WORLD", parallel_state.init_world_group(list(range(world)), 0, "nccl")
    )
    parallel_state.initialize_model_parallel(tensor_parallel)
    return calls


def splits(rank: int, made: list[Call]) -> list[tuple[bool, tuple[int, ...]]]:
    """This rank's calls of `ncclCommSplit`, in order: (as a member, the group)."""
    calls = []
    for backend, members in made:
        if backend == "nccl" or rank not in members:
            calls.append((backend == "nccl" and rank in members, members))
    return calls


def out_of_step(made: list[list[Call]]) -> str:
    """What hangs; empty where nothing does. made: by rank, what it asks for."""
    calls = [splits(rank, mine) for rank, mine in enumerate(made)]
    if len({len(mine) for mine in calls}) > 1:
        return "ranks make unequal numbers of calls"
    for k in range(len(calls[0])):
        together: dict[tuple[int, ...], set[int]] = {}
        for rank, mine in enumerate(calls):
            member, group = mine[k]
            if member:
                together.setdefault(group, set()).add(rank)
        for group, ranks in together.items():
            if ranks != set(group):
                return f"in call {k} only {sorted(ranks)} of {group} are members"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_every_recipe_makes_its_groups_in_step(monkeypatch, layout):
    made = [order(monkeypatch, rank, layout) for rank in range(layout[0])]
    assert out_of_step(made) == ""
    assert all(mine == made[0] for mine in made), "in one order on every rank, by construction"
    if layout[1] > 1:
        assert ("nccl", tuple(range(layout[1]))) in made[0], "an engine's ranks were not seen"
    if layout[2] > 1:
        assert ("nccl", tuple(range(layout[2]))) in made[0], "a copy's ranks were not seen"


def test_a_group_of_some_ranks_only_would_be_found():
    everyone = [("nccl", tuple(range(4)))]
    assert out_of_step([everyone] * 4) == ""
    assert out_of_step([everyone + [("gloo", (0, 1))]] * 4) != "", "members do not split, the others do"
    one, other = [("nccl", (0, 1))], [("nccl", (1, 2))]
    assert out_of_step([one + other, one + other, other + one]) != "", "ranks disagree on the order"
    assert out_of_step([one, one, []]) != ""
