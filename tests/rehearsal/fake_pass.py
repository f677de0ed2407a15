"""A pass of a recipe at its true shape, on tensors that hold nothing: `python -m tests.rehearsal.fake_pass
grpo-qwen2.5-vl-7b-mathv60k`.

torch's FakeTensorMode plays what a pass allocates, on which device, and when it would wait for it. Forward
passes without gradients run on fake CUDA tensors, where a tensor on the wrong device shows. autograd's engine
would ask a driver for its context, so a pass with gradients runs on fake CPU tensors that take the branch for
CUDA in attention all the same. The row is one of the plan's: longest samples with largest images, or whole
groups up to the budget. Prints one object of JSON: peaks of activations in bytes beside the plan's, reads
that would wait for the GPU, operations with tensors of two devices, and for a roofline the FLOPs of matrix
products and the bytes that all other kernels read and write.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
import weakref
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.initialization import no_init_weights

from recipes.plan import activations, hub_config
from recipes.presets import get
from trainer.algorithm import batching
from trainer.algorithm.traces import Trace, completed
from trainer.config import RunConfig
from trainer.config.budget import logprob_tokens, longest_sample, micro_batch_tokens
from trainer.data.processor import EncodedPrompt, mrope_positions
from trainer.hardware.model_shapes import Shape
from trainer.learning import attention, logprobs, tower
from trainer.learning.zero.setup import exact_frequencies

IMAGE, MERGED = 151655, (32, 40)
"""Qwen2.5-VL's image token; rows and columns of merged patches of the largest image, 1,280 tokens."""
TYPICAL = 420
"""Tokens of a usual prompt, 300 of them an image's."""
VOCABULARY = 151665
"""Token ids from here on are banned: they are no tokens."""
LOGSUMEXP = "aten.logsumexp.default"
"""It makes three temporaries of its argument's size that no dispatch shows (measured on a real model:
tests/recipes/test_activations.py)."""
WAITS = ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default")


class Watch(TorchDispatchMode):
    """Counts live bytes on `device`, reads that wait for it, operations with tensors of two devices, and
    work: FLOPs of matrix products, bytes that other kernels move."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.live = 0
        self.peak = 0
        self.operations = 0
        self.flops = 0
        self.moved = 0
        self.waits: Counter[str] = Counter()
        self.mixed: Counter[str] = Counter()
        self._known: dict[int, int] = {}

    def ignore(self, tensors: Any) -> None:
        """Leaves tensors out that were there before, such as weights."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()._cdata] = 0

    def take(self, tensor: Any) -> None:
        """Counts a tensor's memory, until it is gone."""
        if not isinstance(tensor, Tensor) or tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.operations += 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in given if tensor.dim() or tensor.device.type == "cuda"}
        if len(devices) > 1 and name != "aten.copy_.default":
            self.mixed[f"{name} at {_caller()}"] += 1
        if name in WAITS and args[0].device.type == self.device:
            self.waits[f"{name} at {_caller()}"] += 1
        if name in WAITS and isinstance(args[0], FakeTensor):  # which has no value: any will do
            return True if args[0].dtype == torch.bool else 1
        if name == LOGSUMEXP:
            inside = 3 * args[0].numel() * args[0].element_size()
            self.peak = max(self.peak, self.live + inside)
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for leaf in made:
            self.take(leaf)
        self._work(func, given, made, result, args, kwargs or {})
        return result

    def _work(self, func: Any, given: list, made: list, result: Any, args: Any, kwargs: Any) -> None:
        """Adds what a kernel costs. Attention's own kernel is neither: its share is 2 to 3% of a pass."""
        if counted := flop_registry.get(func._overloadpacket):
            self.flops += counted(*args, **kwargs, out_val=result)
            return
        storages = {tensor.untyped_storage()._cdata for tensor in given}
        views = made and all(tensor.untyped_storage()._cdata in storages for tensor in made)
        if views and not func._schema.is_mutable:
            return
        if func.namespace == "aten" and not func._overloadpacket.__name__.startswith(("empty", "new_empty")):
            on_device = (tensor for tensor in [*given, *made] if tensor.device.type == self.device)
            self.moved += sum(tensor.numel() * tensor.element_size() for tensor in on_device)


def _caller() -> str:
    """The innermost line that is neither torch's nor ours here."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and "fake_pass" not in frame.filename:
            return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
    return "?"


def model_config(shape: Shape) -> Qwen2_5_VLConfig:
    """transformers' configuration of a Qwen2.5-VL of this shape."""
    vision = shape.vision
    assert vision is not None
    text = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": shape.tied,
        "layer_types": ["full_attention"] * shape.layers,
    }
    pictures = {
        "depth": vision.depth,
        "hidden_size": vision.hidden,
        "intermediate_size": vision.intermediate,
        "num_heads": vision.heads,
        "out_hidden_size": shape.hidden,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=pictures, tie_word_embeddings=shape.tied, image_token_id=IMAGE
    )
    config._attn_implementation = "sdpa"
    config.dtype = torch.bfloat16
    return config


def row(config: RunConfig, tokens: int, full: bool) -> batching.MicroBatch:
    """A row of at most so many tokens. full: groups as the data has them, of prompts with a small image; else
    the longest samples, each with its largest image."""
    rng = random.Random(0)
    encoded: list[EncodedPrompt] = []
    traces: list[Trace] = []

    def add(prompt_tokens: int, merged: tuple[int, int], lengths: list[int]) -> None:
        height, width = merged
        ids = words(rng, 20) + [IMAGE] * (height * width)
        ids += words(rng, prompt_tokens - len(ids))
        grid = torch.tensor([[1, 2 * height, 2 * width]])
        for index, length in enumerate(lengths):
            traces.append(
                completed(ids, words(rng, length), group=len(encoded), row=len(encoded), index=index)
            )
        encoded.append(EncodedPrompt(ids, torch.zeros(4 * height * width, 1176), grid))

    used = 0
    while full:
        lengths = [_length(rng, config) for _ in range(config.rollout.samples_per_prompt)]
        used += TYPICAL + sum(lengths)
        if used > tokens:
            break
        add(TYPICAL, (15, 20), lengths)
    if not full:
        for _ in range(max(1, tokens // longest_sample(config))):
            add(config.data.prompt_max_tokens, MERGED, [config.rollout.max_tokens])

    def positions(ids: list[int], grid: Tensor | None) -> Tensor:
        grids = () if grid is None else tuple(map(tuple, grid.tolist()))
        return mrope_positions(tuple(ids), grids, IMAGE, 2)

    return batching.collate(traces, lambda trace: encoded[trace.row], positions)


def words(rng: random.Random, count: int) -> list[int]:
    """Token ids of text."""
    return [rng.randrange(1000) for _ in range(count)]


def _length(rng: random.Random, config: RunConfig) -> int:
    """Tokens of a completion, as the plan draws them."""
    return int(min(config.rollout.max_tokens, rng.lognormvariate(5.8, 0.6)))


def play(config: RunConfig, shape: Shape, learns: bool, full: bool) -> dict[str, Any]:
    """One pass over a row. learns: with gradients, and with the backward pass. full: see `row`."""
    device = "cpu" if learns else "cuda"
    tokens = micro_batch_tokens(config, shape) if learns else logprob_tokens(config, shape)
    real = row(config, tokens, full)
    fake = FakeTensorMode(allow_non_fake_inputs=False)

    def sent(tensor: Tensor, to: torch.device) -> Tensor:
        """`batching.sent` without pinning, which asks a driver."""
        if not isinstance(tensor, FakeTensor):
            tensor = fake.from_tensor(tensor)
        return tensor.to(to, non_blocking=True)

    plain_places = tower.places

    def places(visual: Any, grid: Any, to: torch.device) -> Any:
        """The tower's places are made of a real grid on the CPU, as in life."""
        with unset_fake_temporarily():
            found = plain_places(visual, torch.tensor(real.grids), torch.device("cpu"))
        return {key: sent(value, to) if isinstance(value, Tensor) else value for key, value in found.items()}

    batching.sent = sent
    logprobs.sent = sent
    logprobs.places = places
    hf, model = build(config, shape, fake, device)
    features = hf.model.get_image_features
    # The grid stays on the CPU in life; here it is numbers, which no fake tensor holds.
    hf.model.get_image_features = lambda pixels, grid, **kw: features(pixels, np.array(real.grids), **kw)
    if device == "cpu":
        take_the_branch_for_cuda()

    watch = Watch(device)
    with fake:
        batch = batching.moved(real, torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
        advantages = torch.ones(len(real.targets), device=device)
    with fake, watch:
        watch.ignore([*model.parameters(), *model.buffers()])
        inputs = [batch.input_ids, batch.position_ids, batch.logits_at, batch.targets, batch.pixel_values]
        for tensor in inputs:
            watch.take(tensor)
        with torch.set_grad_enabled(learns):
            logp = model(batch)[0]
        if learns:
            for parameter in model.parameters():  # DeepSpeed takes each as it comes, into its bucket
                parameter.register_post_accumulate_grad_hook(_drop)
            (logp * advantages).sum().backward()
    if learns:
        halves = activations.scored(config, shape), activations.backward(config, shape)
        planned = max(sum(parts.values()) for parts in halves)
    else:
        planned = max(activations.forward(config, shape, tokens), activations.logits(config, shape, tokens))
    return {
        "tokens": real.input_ids.numel(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak_bytes": watch.peak,
        "planned_bytes": planned,
        "operations": watch.operations,
        "matrix_flops": watch.flops,
        "moved_bytes": watch.moved,
        "waits": dict(watch.waits),
        "mixed": dict(watch.mixed),
    }


def build(config: RunConfig, shape: Shape, fake: FakeTensorMode, device: str) -> tuple[Any, Any]:
    """transformers' model and ours around it, of fake tensors on `device`, as the trainer makes them."""
    torch.set_default_dtype(torch.bfloat16)
    with fake, no_init_weights(), torch.device(device):
        hf: Any = Qwen2_5_VLForConditionalGeneration(model_config(shape))
    torch.set_default_dtype(torch.float32)
    with fake:
        if shape.tied:
            hf.tie_weights()
        exact_frequencies(hf)
        if config.model.gradient_checkpointing:
            hf.gradient_checkpointing_enable({"use_reentrant": False})
        banned = list(range(VOCABULARY, shape.vocabulary))
        model = logprobs.LogprobModel(hf, banned, config.rollout.temperature, False).train()
        for module in model.modules():  # as `.to(device)` does
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
    return hf, model


def take_the_branch_for_cuda() -> None:
    """Attention by torch's variable-length kernel on tensors that say they are on a CPU."""
    import inspect

    source = inspect.getsource(attention.attention)
    branch = "q.is_cuda and "
    assert branch in source, "attention tells the devices apart in another way now"
    names = dict(vars(attention))
    exec(source.replace(branch, ""), names)
    AttentionInterface.register(attention.NAME, names["attention"])


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def main(recipe: str, what: str, kind: str) -> None:
    """Prints what a pass of the recipe did. what: update or logprobs. kind of row: longest or full."""
    config = get(recipe).config
    shape = hub_config.shape(config.model)
    assert shape is not None
    print(json.dumps(play(config, shape, learns=what == "update", full=kind == "full")))


if __name__ == "__main__":
    main(*sys.argv[1:])
