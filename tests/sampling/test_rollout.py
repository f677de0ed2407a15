"""The engine's parts that need no engine, and how prompts join a running one."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainer.config import override


def test_the_ban_fits_both_model_runners_and_keeps_no_tensor():
    """V1 serves CPUs, V2 GPUs; tensors made while the engine loads are lost at sleep level 2."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorV2

    from trainer.sampling.vllm_engine import BanTokens

    assert issubclass(BanTokens, LogitsProcessor) and issubclass(BanTokens, ProcessorV2)
    config: Any = SimpleNamespace(additional_config={"banned_token_ids": [0, 1, 4, 6]})
    v1, v2 = BanTokens(config, torch.device("cpu"), False), BanTokens(config, SimpleNamespace())
    assert v2.add_request(0, SimpleNamespace())  # it wants to see the logits of every request
    for logits in (v1.apply(torch.zeros(2, 8)), v2.apply(torch.zeros(2, 8), SimpleNamespace())):
        assert logits.isinf().nonzero().tolist() == [[row, i] for row in range(2) for i in (0, 1, 4, 6)]
    assert not any(isinstance(value, torch.Tensor) for value in vars(v1).values())


def test_ranges_join_neighbours():
    from trainer.sampling.vllm_engine import id_ranges

    assert (
        id_ranges([]) == []
        and id_ranges([7]) == [(7, 8)]
        and id_ranges([1, 2, 3, 9, 11, 12]) == [(1, 4), (9, 10), (11, 13)]
    )


@pytest.mark.long
def test_what_gpus_are_measured_by_runs_here_too(run_ranks, small_config):
    """tests/gpu's rates, on the tiny model: both engines answer the same prompts, and every figure is
    there."""
    config = replace(
        small_config,
        placement=replace(small_config.placement, workers_per_node=1),
        rollout=replace(small_config.rollout, max_tokens=64),
    )
    ours, bare = run_ranks("rates", config)[0], run_ranks("bare", config)[0]
    assert set(ours["seconds"]) == {"sync", "rollout", "update"} and min(ours["seconds"].values()) > 0
    assert ours["tokens"] > 0.8 * 32 * 8 * 64 and bare["tokens"] > 0.8 * 32 * 8 * 64
    # Two products per parameter and token forward, twice that backward; some 4,096 tokens in each of 8 packs.
    parameters = 400_000  # in matrices: two layers of 147,456, and the head
    assert ours["model_flops"] > 6 * parameters * 8 * 3_000
    print(ours, bare)


def test_prompts_with_images_may_join_between_steps(run_ranks, small_config, picture_dataset):
    """An engine on a GPU takes a few at a time: the host prepares the next ones while it computes."""
    config = override(small_config, [f"data.path={picture_dataset}", "placement.workers_per_node=1"])
    result = run_ranks("added_later", config)[0]
    pairs = zip(result["together"], result["one by one"], strict=True)
    for (tokens, logprobs), (again, of_again) in pairs:
        assert tokens == again
        assert np.allclose(logprobs, of_again, atol=1e-5)
    assert result["narrow"] == result["greedy"] != [], "a top-p of almost nothing leaves the likeliest token"
