"""flash-linear-attention's kernel in Triton's interpreter, on a CPU:

    TRITON_INTERPRET=1 python -m tests.learning.rank_scripts.interpreted_kernel OUT.json [MODEL]

with the package on the path. The interpreter runs the source of the real kernels on numpy arrays; what a
compiler makes of it on a card it cannot show. Writes how far the kernel is from PyTorch, on a packed row with
shared prompts and, if one is given, in the gradients of a whole model.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fla.ops.common import chunk_delta_h
from transformers import AutoModelForImageTextToText
from transformers.models.qwen3_5 import modeling_qwen3_5
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from tests.learning import plain
from tests.learning.test_delta import HEADS, ROW, TOKENS, WIDTH
from tests.learning.test_packing import positions
from tests.recipes.test_activations import Live
from trainer.algorithm.batching import collate
from trainer.learning import gated_delta, gated_delta_kernel
from trainer.learning.logprobs import LogprobModel


def prepare() -> None:
    """What the interpreter lacks: a clock for choosing among configurations, which takes the first one, and
    loops over a number that was read, which must give Triton's numbers."""
    Autotuner._bench = lambda *_, **__: (0.0, 0.0, 0.0)  # ty: ignore[invalid-assignment]
    chunk_delta_h.range = counted  # ty: ignore[unresolved-attribute]


def counted(*bounds: Any) -> Any:
    return map(interpreter._implicit_cvt, range(*map(int, bounds)))


def relative(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference of two lists of tensors, each as a share of the second one's norm."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def of_a_row(kernel: gated_delta.Recurrence) -> float:
    """A packed row with shared prompts against transformers' recurrence: output and gradients, in fp32."""
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, TOKENS, HEADS, WIDTH, generator=g, requires_grad=True) for _ in range(3)]
    rows.append((-0.1 * torch.rand(1, TOKENS, HEADS, generator=g)).requires_grad_())
    rows.append(torch.rand(1, TOKENS, HEADS, generator=g).requires_grad_())
    weights = torch.randn(1, TOKENS, HEADS, WIDTH, generator=g)
    plain = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    found = []
    for chosen in (kernel, None):
        packed = gated_delta.recurrence(plain, chosen)
        out = packed(*rows[:3], g=rows[3], beta=rows[4], layout=ROW, use_qk_l2norm_in_kernel=True)[0]
        found.append([out.detach(), *torch.autograd.grad((out * weights).sum(), rows)])
    return relative(*found)


def of_a_model(kernel: gated_delta.Recurrence, folder: Path) -> float:
    """A policy's gradients over samples of real raggedness, with images, against transformers' padded
    computation; over all parameters, as a share."""
    hf = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    image = hf.config.image_token_id
    encoded = plain.prompts(hf.config)
    samples = plain.items(encoded).pick(range(8))
    model = LogprobModel(hf, [], 0.8, False, kernel).train()
    batch = collate(samples.traces, lambda t: encoded[t.row], lambda i, g: positions(i, g, image))
    weights = torch.from_numpy(np.concatenate(samples.advantages)) / samples.tokens
    (-weights * model(batch)[0]).sum().backward()
    _, gradients = plain.padded_gradients(folder, encoded, samples, 0.8)
    ours = {name.removeprefix("model."): p.grad for name, p in model.named_parameters()}
    return plain.differences(ours, gradients)[0]


def kept(kernel: gated_delta.Recurrence, key_dim: int, value_dim: int, heads: int) -> tuple[int, int]:
    """Bytes that the kernel keeps for its backward pass of a row in bf16, and the peak with that pass."""
    rows = [torch.randn(1, TOKENS, heads, size).bfloat16() for size in (key_dim, key_dim, value_dim)]
    rows += [-torch.rand(1, TOKENS, heads), torch.rand(1, TOKENS, heads).bfloat16()]
    for row in rows:
        row.requires_grad_()
    with Live(rows) as live:
        out = gated_delta.end_to_end(kernel, rows, (TOKENS,), (TOKENS,), None)
        held = live.now
        live.peak = held
        out.sum().backward()
    return held, live.peak


def main() -> None:
    prepare()
    kernel = gated_delta_kernel.load_kernel()

    def halved(*args: Any, **kwargs: Any) -> Any:
        """A kernel that is miscompiled as Triton has done it: gradients of keys are half of what they are."""
        query, key, *rest = args
        return kernel(query, 0.5 * key + 0.5 * key.detach(), *rest, **kwargs)

    cpu = torch.device("cpu")
    found: dict[str, Any] = {
        "row": of_a_row(kernel),
        # The interpreter computes products of bf16 as if they were of integers.
        "sound": gated_delta_kernel.kernel_differences(kernel, 2, 32, 32, cpu, torch.float32),
        "miscompiled": gated_delta_kernel.kernel_differences(halved, 2, 32, 32, cpu, torch.float32),
        "kept": kept(kernel, 32, 32, 2),
        "tokens": TOKENS,
    }
    out, *models = map(Path, sys.argv[1:])
    for model in models:
        found["model"] = of_a_model(kernel, model)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
