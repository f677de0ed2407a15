"""Experts that vLLM chose for the tokens of a completion, for `algorithm.routing_replay`.

On a GPU vLLM gives them with the completion. It does so with its model runner V2 alone, which needs Triton,
so on a CPU they are kept here, by vLLM's own recorder of one step, where the token's keys are kept: a prompt
that came out of the prefix cache has those of the pass that computed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from trainer.algorithm.traces import Trace


class Routes:
    """What an engine chose, by its requests."""

    def __init__(self, llm: Any) -> None:
        (worker,) = llm.collective_rpc(lambda worker: worker)
        self._kept = None
        if worker.device.type == "cpu":
            self._kept = BesideKeys(worker.model_runner)

    def of(self, output: Any, tokens: int) -> np.ndarray:
        """Those of the first `tokens` tokens of a request that has just finished, [tokens, layers, k]. Raises
        RuntimeError where one is missing."""
        if self._kept:
            found = self._kept.of(output.request_id, tokens)
        else:
            found = output.outputs[0].routed_experts
        if found is None or len(found) < tokens or (found < 0).any():
            raise RuntimeError(f"vLLM did not say which experts computed the {tokens} tokens of a completion")
        return found[:tokens]


class BesideKeys:
    """The experts of every token whose keys the engine holds, [slots of the KV cache, layers, k].

    Layers share slots in groups. A token has one in each group of layers with attention; gated delta-net
    layers have slots for states.
    """

    def __init__(self, runner: Any) -> None:
        """runner: vLLM's model runner V1."""
        cache = runner.kv_cache_config
        self.runner = runner
        groups = cache.kv_cache_groups
        attends = [isinstance(group.kv_cache_spec, AttentionSpec) for group in groups]
        self.group = attends.index(True)
        self.layer = groups[self.group].layer_names[0]
        self.block = groups[self.group].kv_cache_spec.block_size
        most = runner.vllm_config.scheduler_config.max_num_batched_tokens
        self.recorder = RoutedExpertsCapturer(most, runner.vllm_config)
        shape = cache.num_blocks * self.block, *self.recorder.shape_per_token
        self.held = torch.full(shape, -1, dtype=torch.int16)
        bind_routed_experts_capturer(runner.model, self.recorder)
        self._forward = runner._model_forward
        runner._model_forward = self._recorded

    def _recorded(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's forward pass, whose choices are then moved to where its keys lie."""
        out = self._forward(*args, **kwargs)
        mappings: Any = get_forward_context().slot_mapping
        slots = mappings.get(self.layer)
        if slots is not None:  # a pass to warm up has none
            real = slots >= 0  # the rest pads
            self.held[slots[real]] = self.recorder.device_buffer[: len(slots)][real].short()
        return out

    def of(self, request_id: str, tokens: int) -> np.ndarray:
        """Experts of a request's first tokens. vLLM forgets where its keys are with the next step."""
        # vLLM adds a suffix to a request's name.
        states = self.runner.requests.items()
        state = next(state for name, state in states if name.rpartition("-")[0] == request_id)
        blocks = torch.tensor(state.block_ids[self.group])
        slots = (blocks[:, None] * self.block + torch.arange(self.block)).flatten()
        found = self.held[slots[:tokens]].numpy()
        return found if (found < 0).any() else found.astype(self.recorder.output_dtype_name)


def one_prompt(group: Sequence[Trace]) -> list[Trace]:
    """Traces of one prompt, whose tokens a packed row has once: all get the first one's experts for them."""
    first = group[0].routes
    if first is None:
        return list(group)
    shared = group[0].shared
    out = []
    for trace in group:
        assert trace.routes is not None
        out.append(replace(trace, routes=np.concatenate([first[:shared], trace.routes[shared:]])))
    return out
