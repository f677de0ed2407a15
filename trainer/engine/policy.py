"""The policy under DeepSpeed ZeRO-3, and its frozen reference. The only file that imports DeepSpeed.

`Policy` shards the model inside an `AnswerScorer`, updates it, hands out full weights group by group, and gives up its
shards to save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import Tensor, nn
from transformers.integrations import HfDeepSpeedConfig

from trainer.algorithm.batching import MicroBatch
from trainer.algorithm.losses import grpo_loss
from trainer.algorithm.lr_schedule import learning_rate
from trainer.checkpoint.manager import Shard
from trainer.config import ConfigError, RunConfig
from trainer.engine.logprobs import AnswerScorer
from trainer.engine.offload import States

FUNCTIONAL: Any = nn.functional
LINEAR = FUNCTIONAL.linear


def init_distributed(device: str) -> None:
    """Meets the other ranks at MASTER_ADDR. `device`: cuda or cpu."""
    # Its shared-memory collectives for CPU would be compiled at the first start: a minute, and a compiler needed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)


@dataclass(frozen=True)
class TrainMicroBatch:
    """A micro-batch with what the loss needs besides; all [N] over its answer tokens, float32."""

    batch: MicroBatch
    advantages: Tensor
    weights: Tensor
    """Hold the global denominator."""
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None = None
    """None: the policy has not moved since the rollout, so its own detached log-probabilities are the old ones."""


def _frugal(method: Any) -> Any:
    """Lets a method run on DeepSpeed's `linear`, which keeps no gathered weight for the backward pass.

    `zero.Init` puts it in the place of torch's for good, and vLLM compiles its own calls of `linear` in this process.
    """

    @wraps(method)
    def wrapped(*args: Any) -> Any:
        FUNCTIONAL.linear = zero3_linear_wrap
        try:
            return method(*args)
        finally:
            FUNCTIONAL.linear = LINEAR

    return wrapped


def _exact_frequencies(model: Any) -> None:
    """Computes rotary frequencies in fp32 again: `zero.Init` rounds what a model's constructors make to its own type.

    In bf16 that is a radian off at position 1,000 (github.com/deepspeedai/DeepSpeed/issues/4932).
    """
    for module in model.modules():
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.float())
            model._init_weights(module)


class Policy:
    """One rank's part of the ZeRO-3 policy. Every method but `load` is collective: all ranks call it, in order."""

    def __init__(
        self, config: RunConfig, banned_token_ids: list[int], device: torch.device, total_updates: int, pad_id: int
    ) -> None:
        self.config, self.device, self.total_updates, self.pad_id = config, device, total_updates, pad_id
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.updates = 0
        self._moves = device.type == "cuda" and not config.optimizer.offload_optimizer
        ds_config = zero3_config(config)
        temperature = config.rollout.temperature if config.method == "grpo" else 1.0
        scorer = self._scorer(ds_config, banned_token_ids, temperature)
        if config.model.gradient_checkpointing:
            scorer.model.gradient_checkpointing_enable({"use_reentrant": False})
        scorer.train()
        optimizer = torch.optim.AdamW(
            _decay_groups(scorer, config.optimizer.weight_decay),
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            fused=self._moves,
        )
        self.engine, self.zero = _quietly(deepspeed.initialize, model=scorer, optimizer=optimizer, config=ds_config)[:2]
        self._states = States(self.zero, device)
        self.names: dict[str, Any] = {n.removeprefix("model."): p for n, p in scorer.named_parameters()}
        self.reference: Any = None
        if config.method == "grpo" and config.algorithm.kl_coef:
            frozen = zero3_config(config, inference=True)
            reference = self._scorer(frozen, banned_token_ids, temperature).requires_grad_(False).eval()
            self.reference = _quietly(deepspeed.initialize, model=reference, config=frozen)[0]
        FUNCTIONAL.linear = LINEAR  # see `_frugal`

    def _scorer(self, ds_config: dict[str, Any], banned: list[int], temperature: float) -> AnswerScorer:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        model = self.config.model
        self._hf_ds_config = HfDeepSpeedConfig(ds_config)  # while alive, from_pretrained shards as it loads
        dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
        kwargs: dict[str, Any] = {"dtype": dtype, "attn_implementation": model.attention}
        if model.revision:
            kwargs["revision"] = model.revision
        try:
            hf = AutoModelForImageTextToText.from_pretrained(model.path, **kwargs)
        except ValueError:  # not a vision-language architecture
            hf = AutoModelForCausalLM.from_pretrained(model.path, **kwargs)
        _exact_frequencies(hf)
        scorer = AnswerScorer(hf, banned, temperature, model.freeze_vision)
        if model.freeze_vision and scorer.visual:
            hf.model.visual.requires_grad_(False)
        return scorer.to(self.device)  # its buffers; DeepSpeed leaves a model that it sharded where it is

    # --- learning

    @_frugal
    @torch.no_grad()
    def logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Log-probabilities [N] of each micro-batch's answer tokens under the policy, on the host."""
        self.engine.eval()
        out = [self.engine(b.to(self.device))[0].cpu() for b in batches]
        self.engine.train()
        return out

    @_frugal
    def update(self, batches: list[TrainMicroBatch]) -> dict[str, float]:
        """One optimizer step over this rank's micro-batches. Returns sums that add up over ranks to global means.

        `weights` of all micro-batches of all ranks must sum to 1.
        """
        algorithm, sums = self.config.algorithm, dict.fromkeys(STATS, 0.0)
        sums["mismatch/logprob_abs_max"] = 0.0
        rate = learning_rate(self.config.optimizer, self.updates, self.total_updates)
        for group in self.zero.param_groups:
            group["lr"] = rate
        for i, item in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
            batch = item.batch.to(self.device)
            advantages, weights = item.advantages.to(self.device), item.weights.to(self.device)
            logprobs, entropy = self.engine(batch)
            old = logprobs.detach() if item.old_logprobs is None else item.old_logprobs.to(self.device)
            loss = grpo_loss(
                logprobs,
                old,
                advantages,
                weights,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                ref_logprobs=self._reference_logprobs(batch),
                kl_coef=algorithm.kl_coef,
                kl_estimator=algorithm.kl_estimator,
            )
            self.engine.backward(loss.total * self.world_size)  # DeepSpeed averages over ranks; our loss is a sum
            self.engine.step()
            gap = old - item.rollout_logprobs.to(self.device)
            for name, value in (
                ("loss/policy", loss.policy),
                ("loss/total", loss.total.detach()),
                ("kl/mean", loss.kl),
                ("ratio/clip_fraction", loss.clip_fraction),
                ("ratio/mean", loss.ratio),
                ("entropy/mean", (weights * entropy).sum()),
                ("mismatch/logprob_abs_mean", (weights * gap.abs()).sum()),
                ("mismatch/kl", (weights * (torch.expm1(gap) - gap)).sum()),
            ):
                sums[name] += float(value)
            sums["mismatch/logprob_abs_max"] = max(sums["mismatch/logprob_abs_max"], float(gap.abs().max()))
        self.updates += 1
        norm = float(self.engine.get_global_grad_norm() or 0.0)
        return sums | {"grad/norm": norm, "optim/lr": rate}

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        return None if self.reference is None else self.reference(batch)[0]

    # --- weights out, states away

    def weight_groups(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Full weights in the model's own dtype and Hugging Face names, a group of layers at a time, on every rank.

        A group's tensors are only valid until the next one is asked for. Peak: a bucket, or the largest parameter.
        """
        for bucket in _buckets(list(self.names.items()), bucket_bytes):
            with deepspeed.zero.GatheredParameters([p for _, p in bucket], modifier_rank=None):
                yield [(name, p.data) for name, p in bucket]

    def offload(self) -> None:
        """Moves fp32 weights and Adam's moments to host memory to make room for the engine (CUDA only)."""
        if self._moves:
            self._states.leave()

    def reload(self) -> None:
        """Takes back what `offload` moved away."""
        self._states.come_back()

    # --- shards in and out

    def shards(self, host: Callable[[str, Tensor], Tensor]) -> dict[str, Shard]:
        """This rank's part of the fp32 weights and Adam's moments; `host(key, tensor)` copies it off the device."""
        return {name: self._shard(name, p, host) for name, p in self.names.items() if p.requires_grad}

    def _shard(self, name: str, p: Any, host: Callable[[str, Tensor], Tensor]) -> Shard:
        start, stop = self._range(p)
        views = self._views(p)
        tensors = {kind: host(f"{kind}/{name}", view[: stop - start]) for kind, view in views.items()}
        return Shard(shape=tuple(p.ds_shape), start=start, stop=stop, tensors=tensors)

    @torch.no_grad()
    def load(self, read: Callable[[str, str, int, int], Tensor]) -> None:
        """Takes over weights and moments: `read(kind, name, start, stop)` gives [stop - start] of a flat parameter."""
        self.reload()
        for name, p in ((n, p) for n, p in self.names.items() if p.requires_grad):
            start, stop = self._range(p)
            for kind, view in self._views(p).items():
                view[: stop - start].copy_(read(kind, name, start, stop))
            p.ds_tensor.data.view(-1).copy_(self._views(p)["master"])

    @torch.no_grad()
    def loaded(self, updates: int) -> None:
        """After every rank's `load`: goes on from optimizer step `updates`."""
        for state in self.zero.optimizer.state.values():
            state["step"].fill_(float(updates))
        if persistent := self.zero.persistent_parameters:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)
        self.updates = updates
        if self.config.method == "grpo":
            self.offload()

    def _range(self, p: Any) -> tuple[int, int]:
        size = p.ds_tensor.numel()
        start = min(self.rank * size, p.ds_numel)
        return start, min(start + size, p.ds_numel)

    def _views(self, p: Any) -> dict[str, Tensor]:
        """Views [padded shard] of the flat fp32 buffers that hold `p`; Adam's are made here before the first step."""
        group, at, size = self.zero.grad_position[self.zero.get_param_id(p)]
        flat = self.zero.fp32_partitioned_groups_flat[group]
        state = self.zero.optimizer.state[flat]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=self.device if self._fused else "cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(flat), torch.zeros_like(flat)
        whole = {"master": flat.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        return {kind: tensor.narrow(0, at, size) for kind, tensor in whole.items()}

    @property
    def _fused(self) -> bool:
        return bool(self.zero.optimizer.defaults.get("fused"))


STATS = (
    "loss/policy",
    "loss/total",
    "kl/mean",
    "ratio/clip_fraction",
    "ratio/mean",
    "entropy/mean",
    "mismatch/logprob_abs_mean",
    "mismatch/kl",
)
"""Metrics whose per-rank values add up to the global mean."""


def zero3_config(config: RunConfig, inference: bool = False) -> dict[str, Any]:
    """DeepSpeed's configuration: ZeRO-3, our gradient accumulation, our optimizer."""
    o = config.optimizer
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": config.placement.device == "cuda"}
    if inference and o.offload_reference:
        zero["offload_param"] = {"device": "cpu", "pin_memory": config.placement.device == "cuda"}
    if not inference and o.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": config.placement.device == "cuda"}
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.algorithm.micro_batch,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": config.model.dtype == "bf16"},
        "steps_per_print": 10**9,
    }
    if not inference:
        if config.model.dtype == "bf16":
            out["data_types"] = {"grad_accum_dtype": o.grad_accum_dtype}
        out |= {"gradient_clipping": o.max_grad_norm, "zero_force_ds_cpu_optimizer": False}
    return out


def _decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trained = [p for p in module.parameters() if p.requires_grad]
    dims = lambda p: len(getattr(p, "ds_shape", p.shape))  # noqa: E731
    groups = [
        {"params": [p for p in trained if dims(p) > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if dims(p) <= 1], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def _buckets(named: list[tuple[str, Any]], limit: int) -> Iterator[list[tuple[str, Any]]]:
    """Consecutive parameters of up to `limit` bytes together; a larger one alone."""
    bucket: list[tuple[str, Any]] = []
    size = 0
    for name, p in named:
        n = p.ds_numel * p.element_size()
        if bucket and size + n > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, p))
        size += n
    if bucket:
        yield bucket


def _quietly(initialize: Callable[..., Any], **kwargs: Any) -> Any:
    """DeepSpeed logs some hundred lines per engine; warnings and errors stay."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        return initialize(**kwargs)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the policy does not fit this GPU: use more GPUs, a smaller model, or optimizer.offload_optimizer=true"
        ) from error
    finally:
        logger.setLevel(level)
