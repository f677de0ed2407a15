"""A pass of a recipe at its true shape, on tensors that hold nothing: `python -m tests.rehearsal.fake_pass
grpo-qwen2.5-vl-7b-mathv60k update longest`.

torch's FakeTensorMode plays what a pass allocates, on which device, and when it would wait for it. Forward
passes, with gradients and without, and the loss run on fake CUDA tensors, where a tensor on the wrong device
shows. autograd's engine would ask a driver for its context, so a backward pass runs on fake CPU tensors that
take the branch for CUDA in attention all the same. Prints one object of JSON: the peak of activations in
bytes, reads that would wait for the GPU, operations with tensors of two devices, and for a roofline the
FLOPs of matrix products and the bytes that all other kernels read and write.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface

from recipes.plan import hub_config
from recipes.presets import get
from recipes.recipe.spec import Recipe
from tests.rehearsal.models import build
from tests.rehearsal.rows import longest, shared, usual
from trainer.algorithm import batching
from trainer.config import RunConfig
from trainer.config.budget import logprob_tokens, micro_batch_tokens
from trainer.learning import attention, logprobs, tower_inputs
from trainer.learning.policy import Policy, TrainMicroBatch

LOGSUMEXP = "aten.logsumexp.default"
"""It makes three temporaries of its argument's size that no dispatch shows (measured on a real model:
tests/recipes/test_activations.py)."""
MASKED = ("aten.index.Tensor", "aten.index_put_.default", "aten.index_put.default")
"""What they do with a mask waits for the number of its true values."""
GROUPED = "aten._grouped_mm"
"""One product of all experts, which torch's registry of FLOPs lacks: each row meets one expert's matrix, and
of a gradient each row counts for one."""
OUT_OF_4_BITS = "bitsandbytes.gemm_4bit"
"""A product with a matrix in 4 bits, [outputs, inputs], which the registry lacks too."""
WAITS = ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default")


class Watch(TorchDispatchMode):
    """Counts live bytes on `device`, reads that wait for it, operations with tensors of two devices, and
    work: FLOPs of matrix products, bytes that other kernels move."""

    def __init__(self, device: str, image_tokens: int) -> None:
        super().__init__()
        self.device = device
        self.image_tokens = image_tokens
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
        if name in MASKED and isinstance(args[0], FakeTensor):
            args = (args[0], self._by_index(name, args[1]), *args[2:])
        if name == LOGSUMEXP:
            inside = 3 * args[0].numel() * args[0].element_size()
            self.peak = max(self.peak, self.live + inside)
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for leaf in made:
            self.take(leaf)
        self._work(func, given, made, result, args, kwargs or {})
        return result

    def _by_index(self, name: str, indices: Any) -> list[Tensor | None]:
        """Indices in the place of masks, whose true values a GPU would be waited for. All masks are of image
        tokens."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                found.append(index)
                continue
            if index.device.type == self.device:
                self.waits[f"{name} at {_caller()}"] += 1
            places = torch.zeros(self.image_tokens, dtype=torch.long, device=index.device)
            found += [places] * index.dim()
        return found

    def _work(self, func: Any, given: list, made: list, result: Any, args: Any, kwargs: Any) -> None:
        """Adds what a kernel costs, but for the attention over packed rows: torch has no count for its
        products, and the plan's seconds of a token leave them out too."""
        if counted := flop_registry.get(func._overloadpacket):
            self.flops += counted(*args, **kwargs, out_val=result)
            return
        if str(func._overloadpacket) == GROUPED:
            self.flops += 2 * args[0].shape[-1] * math.prod(result.shape[-2:])
            return
        if str(func._overloadpacket) == OUT_OF_4_BITS:
            self.flops += 2 * args[0].numel() * args[2][0]
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


def play(recipe: Recipe, what: str, kind: str) -> dict[str, Any]:
    """One pass over a row. what: `logprobs`, without gradients; `loss`, with what a backward pass will need,
    and the loss behind it; `update`, the same with the backward pass. kind of row: longest, shared or
    usual."""
    config = recipe.config
    shape = hub_config.shape(config.model)
    assert shape is not None
    learns = what != "logprobs"
    device = "cpu" if what == "update" else "cuda"
    tokens = micro_batch_tokens(config, shape) if learns else logprob_tokens(config, shape)
    row = (usual if kind == "usual" else longest)(recipe, shape, tokens)
    if kind == "shared":
        row = shared(recipe, shape, tokens, learns)
    real = row.micro_batch()
    fake = FakeTensorMode(allow_non_fake_inputs=False)
    without_a_driver(fake, real)
    hf, model = build(config, shape, fake, device)
    if shape.vision:
        features = hf.model.get_image_features
        # The grid stays on the CPU in life; here it is numbers, which no fake tensor holds.
        hf.model.get_image_features = lambda pixels, grid, **kw: features(pixels, np.array(real.grids), **kw)
    if device == "cpu":
        take_the_branch_for_cuda()

    images = sum(height * width for _, height, width in real.grids)
    watch = Watch(device, images // shape.vision.merge**2 if shape.vision else 0)
    with fake:
        place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        item = batching.move_record(to_learn(config, real, row.completions), place)
    with fake, watch:
        watch.ignore([*model.parameters(), *model.buffers()])
        batch = item.batch
        for tensor in (
            batch.input_ids,
            batch.position_ids,
            batch.logits_at,
            batch.targets,
            batch.pixel_values,
        ):
            watch.take(tensor)
        with torch.set_grad_enabled(learns):
            logp = model(batch)[0] if what == "logprobs" else None
            loss = loss_of(config, model, item) if learns else None
        if what == "update":
            assert loss is not None
            for parameter in model.parameters():  # DeepSpeed takes each as it comes, into its bucket
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_drop)
            loss.backward()
    del logp, loss
    return {
        "tokens": real.input_ids.numel(),
        "parameters": sum(_numbers(p) for name, p in model.named_parameters() if ".lora_" not in name),
        "adapters": sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name),
        "peak_bytes": watch.peak,
        "operations": watch.operations,
        "matrix_flops": watch.flops,
        "moved_bytes": watch.moved,
        "waits": dict(watch.waits),
        "mixed": dict(watch.mixed),
    }


def without_a_driver(fake: FakeTensorMode, real: batching.MicroBatch) -> None:
    """Copies to the GPU are made of fake tensors and pin nothing, which would ask a driver."""

    def sent(tensor: Tensor, to: torch.device) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            tensor = fake.from_tensor(tensor)
        return tensor.to(to, non_blocking=True)

    plain_places = tower_inputs.tower_arguments

    def places(visual: Any, grid: Any, to: torch.device) -> Any:
        """The tower's places are made of a real grid on the CPU, as in life."""
        with unset_fake_temporarily():
            found = plain_places(visual, torch.tensor(real.grids), torch.device("cpu"))
        return {key: sent(value, to) if isinstance(value, Tensor) else value for key, value in found.items()}

    batching.send_tensor = sent
    logprobs.send_tensor = sent
    logprobs.tower_arguments = places


def to_learn(config: RunConfig, batch: batching.MicroBatch, lengths: list[int]) -> TrainMicroBatch:
    """The row with all that its loss may need."""
    tokens = batch.targets.numel()
    grpo = config.method == "grpo"

    def some() -> Tensor:
        return torch.zeros(tokens)

    return TrainMicroBatch(
        batch=batch,
        advantages=some(),
        weights=some(),
        shares=some(),
        lengths=torch.tensor(lengths),
        rollout_logprobs=some() if grpo else None,
        old_logprobs=some() if grpo else None,
        ref_logprobs=some() if grpo and config.algorithm.kl_coef else None,
    )


def loss_of(config: RunConfig, trained: Any, item: TrainMicroBatch) -> Tensor:
    """The trainer's own loss of a micro-batch."""
    policy: Any = SimpleNamespace(config=config, trained=trained)
    return Policy._loss(policy, item, config.algorithm.kl_coef)[0]


def take_the_branch_for_cuda() -> None:
    """Attention by torch's variable-length kernel on tensors that say they are on a CPU."""
    import inspect

    source = inspect.getsource(attention.attention)
    branch = "q.is_cuda and "
    assert branch in source, "attention tells the devices apart in another way now"
    names = dict(vars(attention))
    exec(source.replace(branch, ""), names)
    AttentionInterface.register(attention.NAME, names["attention"])


def _numbers(parameter: Any) -> int:
    """Elements of a parameter; of weights in 4 bits, which lie two in a byte, as many as they stand for."""
    packed = getattr(parameter, "quant_state", None)
    return packed.shape.numel() if packed else parameter.numel()


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def main(recipe: str, what: str, kind: str) -> None:
    """Prints what a pass of the recipe did."""
    print(json.dumps(play(get(recipe), what, kind)))


if __name__ == "__main__":
    main(*sys.argv[1:])
