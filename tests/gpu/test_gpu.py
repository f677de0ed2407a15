"""The same code on CUDA: NCCL, bf16, sleep levels 1 and 2, CUDA graphs."""

import inspect
import time

import numpy as np
import pytest
import torch

from tests.families import FAMILIES, loader
from tests.gpu.conftest import changed
from trainer.hardware import architectures


def check_parity(result, figure, what):
    mean = max(m for _, m in result["gaps"])
    figure(f"parity, {what}: mean |log-prob difference|", mean, "nats")
    assert mean < 5e-2
    assert result["stale"][1] > 2 * mean  # the updates did move the policy
    assert result["banned"] == 0 and result["distinct"] > 20


@pytest.mark.parametrize("eager", [True, False])
def test_parity_in_bf16(run_ranks, gpu_config, figure, eager):
    """Before and after two updates. With CUDA graphs: they still read the weights that the sync wrote in
    place."""
    result = run_ranks("parity", changed(gpu_config, rollout={"eager": eager}), timeout_s=600)[0]
    what = "bf16, eager" if eager else "bf16, CUDA graphs"
    check_parity(result, figure, what)
    figure(f"the same request again, its prompt cached, {what}: same tokens", float(result["repeat"]), "")


PARITY = {
    "qwen3_vl": ("Qwen3-VL, CUDA graphs", "qwen3_vl", {}),  # deepstack inputs lie beside the weights
    "qwen3_5": ("Qwen3.5, CUDA graphs", "qwen3_5", {}),  # two kernels: flash-linear-attention's and vLLM's
    "experts": ("Qwen3-VL with experts, CUDA graphs", "qwen3_vl_moe", {}),
    "with_compiled": ("compiled kernels", "", {"model": {"kernels": "compiled"}}),
    "two_engines": ("two engines", "", {"placement": {"workers_per_node": 2}}),  # beside ZeRO-3 over both
    "tensor_parallel": (
        "tensor parallel 2",
        "",
        {"rollout": {"tensor_parallel": 2}, "placement": {"workers_per_node": 2}},
    ),
    "other_sleep-0": ("sleep level 0", "", {"rollout": {"sleep_level": 0}}),
    "other_sleep-1": ("sleep level 1", "", {"rollout": {"sleep_level": 1}}),
    "host_memory": (
        "offload_optimizer and offload_reference",
        "",
        {"optimizer": {"offload_optimizer": True, "offload_reference": True}},
    ),
}
"""By a word that recipes/gpu_check.py asks for: the figure's name, a family, options."""


@pytest.mark.parametrize("name", PARITY)
def test_parity(run_ranks, family_model, gpu_config, figure, name):
    """Before and after two updates, with CUDA graphs."""
    what, family, options = PARITY[name]
    if options.get("placement") and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if family:
        options = options | {"model": {"path": str(family_model(family))}}
    config = changed(gpu_config, **options)
    check_parity(run_ranks("parity", config, timeout_s=600)[0], figure, what)


def attend(compute, q, k, v, weights):
    out = compute(q, k, v)
    return (out, *torch.autograd.grad((out.float() * weights).sum(), (q, k, v)))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "causal", "shared"),
    [(16, 2, 128, True, True), (28, 4, 128, True, False), (16, 16, 80, False, False)],
)
def test_variable_length_attention(figure, heads, kv_heads, width, causal, shared):
    """torch's kernel in bf16 against SDPA in fp32, outputs and gradients: a shared prompt (fewer queries than
    keys, causal from the right end, fewer key heads), plain packing, and the tower's head size without
    causality."""
    from trainer.algorithm.batching import build_layout, move_record
    from trainer.learning import attention

    device = torch.device("cuda")
    q_lengths = [300, 1000, 64, 64, 16]
    k_lengths = [300, 1000, 64, 64, 16]
    index = None
    if shared:  # 400 and 37 queries more that attend to the first 250 of the row and to themselves
        start = sum(q_lengths)
        index = torch.cat(
            [
                torch.arange(start),
                torch.arange(250),
                torch.arange(start, start + 400),
                torch.arange(250),
                torch.arange(start + 400, start + 437),
            ]
        )
        q_lengths, k_lengths = [*q_lengths, 400, 37], [*k_lengths, 650, 287]
    rows, total = move_record(build_layout(q_lengths, k_lengths, index), device), sum(q_lengths)
    torch.manual_seed(0)
    tensors = [torch.randn(total, n, width, device=device) for n in (heads, kv_heads, kv_heads)]
    weights, scale = torch.randn(total, heads, width, device=device), width**-0.5

    def kernel(q, k, v):
        if rows.kv_index is not None:
            k, v = attention.Spread.apply(k, rows.kv_index), attention.Spread.apply(v, rows.kv_index)
        return attention.attend_varlen(q, k, v, rows.cu_q, rows.cu_k, max(rows.q), max(rows.k), causal, scale)

    low = [t.bfloat16().requires_grad_() for t in tensors]
    full = [t.detach().float().requires_grad_() for t in low]
    ours = attend(kernel, *low, weights)
    theirs = attend(lambda q, k, v: attention.by_shape(q, k, v, rows, causal, scale), *full, weights)
    worst = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))
    figure(
        f"varlen attention, {heads}/{kv_heads} heads of {width}, shared {shared}: worst relative error",
        worst,
        "",
    )
    assert worst < 1e-2


@pytest.mark.parametrize("heads", [16, 32, 48])
def test_the_kernel_of_gated_delta_layers(figure, heads):
    """At the sizes of Qwen3.5 0.8B, 9B and 27B: right on this card, and how much faster than PyTorch."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    from trainer.learning import gated_delta, gated_delta_kernel

    device = torch.device("cuda")
    kernel = gated_delta_kernel.load_kernel()
    off = gated_delta_kernel.kernel_differences(
        kernel, heads, 128, 128, device, lengths=gated_delta_kernel.ON_A_GPU
    )
    figure(f"gated delta rule, {heads} heads: worst relative error", max(off.values()), "")

    tokens = 8192
    rows = [torch.randn(1, tokens, heads, 128, device=device).bfloat16().requires_grad_() for _ in range(3)]
    decays = -torch.rand(1, tokens, heads, device=device)
    rates = torch.rand(1, tokens, heads, device=device).bfloat16()

    def by_kernel():
        return gated_delta.end_to_end(kernel, [*rows, decays, rates], (tokens,), (tokens,), None)

    def by_torch():
        plain = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
        return plain(*rows, g=decays, beta=rates, use_qk_l2norm_in_kernel=True)[0]

    seconds = []
    for compute in (by_kernel, by_torch):
        for _ in range(2):  # the first one compiles
            torch.cuda.synchronize()
            start = time.perf_counter()
            compute().sum().backward()
            torch.cuda.synchronize()
            took = time.perf_counter() - start
        seconds.append(took)
    figure(f"gated delta rule, {heads} heads, {tokens} tokens: forward and backward", 1000 * seconds[0], "ms")
    figure(f"gated delta rule, {heads} heads: kernel's time of PyTorch's", seconds[0] / seconds[1], "")
    assert gated_delta_kernel.first_excess(off) == ""


@pytest.mark.parametrize("again", [True, False])
def test_packed_gradients_in_bf16(tiny_model, figure, again):
    """One packed row on the GPU against the padded computation in fp32 on the CPU."""
    total, worst, logp = packed_gradients(tiny_model, "qwen2_5_vl", "plain", again)
    figure(f"packed gradients in bf16, recomputed {again}: relative error over all", total, "")
    assert total < 3e-2 and worst < 0.2
    assert logp < 2e-2


@pytest.mark.parametrize("kernels", ["plain", "compiled"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if not architectures.FAMILIES[name].experts])
def test_packed_gradients_of_families(family_model, figure, family, kernels):
    """The same of every family but mixtures of experts, which choose other experts in bf16."""
    total, worst, _ = packed_gradients(family_model(family), family, kernels, True)
    figure(f"packed gradients in bf16, {family}, {kernels} kernels: relative error over all", total, "")
    figure(f"packed gradients in bf16, {family}, {kernels} kernels: of the worst tensor", worst, "")
    assert total < 5e-2


def packed_gradients(folder, family, kernels, again):
    """Relative errors of all gradients together and of the worst tensor, and the mean one of
    log-probabilities, of a packed row."""
    from tests.learning import plain
    from trainer.algorithm.batching import collate, move_record
    from trainer.data.processor import mrope_positions
    from trainer.learning import blocks, fused_layers, gated_delta, gated_delta_kernel
    from trainer.learning.logprobs import LogprobModel

    hf = loader(family).from_pretrained(folder, dtype=torch.bfloat16).to("cuda")
    image = getattr(hf.config, "image_token_id", None)
    encoded = plain.prompts(hf.config)
    samples = plain.items(encoded)
    if gated_delta.delta_layers(hf):
        kernel = gated_delta_kernel.load_kernel()
        gated_delta.use_packed_delta(hf, kernel)
    if again:
        blocks.recompute(blocks.blocks_of(hf), random=False)
    if kernels == "compiled":
        fused_layers.fuse_layers(hf)
    model = LogprobModel(hf, [], 1.0, False).train().to("cuda")

    def positions(ids, grid):
        grids = () if grid is None else tuple(map(tuple, grid.tolist()))
        return mrope_positions(tuple(ids), grids, image, 2)

    batch = collate(samples.traces, lambda trace: encoded[trace.row], positions)
    logp = model(move_record(batch, torch.device("cuda")))[0]
    weights = torch.from_numpy(np.concatenate(samples.advantages)).to("cuda") / samples.tokens
    (-weights * logp).sum().backward()
    want, gradients = plain.padded_gradients(folder, encoded, samples)
    ours = {n.removeprefix("model."): p.grad.float().cpu() for n, p in model.named_parameters()}
    total, worst = plain.differences(ours, gradients)
    return total, worst, float((logp.detach().cpu() - want).abs().mean())


def test_moving_states_away_and_back_changes_nothing(run_ranks, gpu_config):
    """Backward passes on a GPU differ in their last bits; a lost update changes the third norm by a
    quarter."""
    result = run_ranks("moving", gpu_config, timeout_s=600)[0]
    assert result["buffers"] == ["cuda"] and all(result["rotary"]) and result["linear"]
    kept, moved = result["kept"], result["moved"]
    assert moved["norm"] == pytest.approx(kept["norm"], rel=0.1)
    for name, (total, _) in kept["shards"].items():
        if name.endswith("/exp_avg_sq"):
            assert moved["shards"][name][0] == pytest.approx(total, rel=0.2), name


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_a_sync_restores_the_engine(run_ranks, gpu_config, figure, level):
    """Weights and buffers to the bit, and what is neither (positions, masks) by what the engine computes for
    images."""
    result = run_ranks("sleeping", changed(gpu_config, rollout={"sleep_level": level}), timeout_s=600)[0]
    awake = result["awake_gib"]
    asleep = result["asleep_gib"]
    tokens = result["tokens"]
    figure(f"GPU memory used, sleep level {level}, awake", max(awake), "GiB")
    figure(f"GPU memory used, sleep level {level}, asleep", max(asleep), "GiB")
    assert all(a < b - 1 for a, b in zip(asleep, awake, strict=True))
    assert asleep[-1] < asleep[0] + 0.5 and awake[-1] < awake[0] + 0.5  # nothing piles up from cycle to cycle
    assert result["checksums"][0] == result["checksums"][1] == result["checksums"][2]
    figure(f"parity after sleep level {level}: mean |log-prob difference|", max(result["gaps"]), "nats")
    figure(f"the same in a padded batch, sleep level {level}", max(result["padded"]), "nats")
    assert max(result["gaps"]) < 5e-2 and max(result["padded"]) < 5e-2
    share = min(sum(a == b for a, b in zip(tokens[0], t, strict=False)) / len(tokens[0]) for t in tokens[1:])
    figure(f"the same answers after sleep level {level}: share of tokens", share, "")
    assert share > 0.9
