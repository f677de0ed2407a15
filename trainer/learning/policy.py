"""The policy under DeepSpeed ZeRO, and its frozen reference: a second model, or the first without its
adapters; in their place the teacher, where there is one.

`Policy` shards the model inside a `LogprobModel`, updates it, yields full weights group by group, and
offloads its shards to save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations import HfDeepSpeedConfig

from trainer.algorithm.batching import MicroBatch, moved
from trainer.algorithm.correction import mismatch, rollout_weights
from trainer.algorithm.losses import LOG_RATIO, grpo_loss
from trainer.algorithm.lr_schedule import learning_rate
from trainer.algorithm.seeding import seed_of
from trainer.checkpoint.format import Shard
from trainer.config import RunConfig, nodes_share_weights
from trainer.hardware.model_shapes import Shape
from trainer.learning import fused, lora
from trainer.learning.first_gradients import FirstGradients
from trainer.learning.logprobs import LogprobModel
from trainer.learning.teacher import Frozen
from trainer.learning.zero import base_weights
from trainer.learning.zero.offload import States
from trainer.learning.zero.partition import Partition, buckets, whole_shape
from trainer.learning.zero.setup import (
    FUNCTIONAL,
    GATHERS,
    LINEAR,
    exact_frequencies,
    frugal,
    quietly,
    zero_config,
)
from trainer.ranks import torchrun
from trainer.storage import hub


def init_distributed(device: str) -> None:
    """Meets the other ranks at MASTER_ADDR. `device`: cuda or cpu."""
    # Its shared-memory collectives for CPU would be compiled at the first start: a minute, and a compiler
    # needed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        "nccl" if device == "cuda" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=torchrun.LOAD_S),
    )


def wait_less() -> None:
    """From the first step on: no collective waits longer than one of a step may."""
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timedelta(seconds=torchrun.STEP_S))


@dataclass(frozen=True)
class TrainMicroBatch:
    """A micro-batch with what the loss needs besides; all [N] over its completion tokens, float32."""

    batch: MicroBatch
    advantages: Tensor
    weights: Tensor
    """Hold the global denominator."""
    shares: Tensor
    """Weights of the metrics' means; those of all micro-batches of all ranks sum to 1."""
    lengths: Tensor
    """[completions]: tokens of each."""
    rollout_logprobs: Tensor | None = None
    """None: no engine sampled these."""
    old_logprobs: Tensor | None = None
    """None: the policy has not moved since the rollout, so its own detached log-probabilities are the old
    ones."""
    ref_logprobs: Tensor | None = None
    """None: no KL term."""


class Policy:
    """One rank's part of the policy. Every method but `load` is collective: all ranks call it, in order."""

    def __init__(
        self,
        config: RunConfig,
        shape: Shape,
        banned_token_ids: list[int],
        device: torch.device,
        total_updates: int,
        empty: bool = False,
        teacher: Frozen | None = None,
    ) -> None:
        """empty: `load` will bring every weight of the policy, which reads no base weights; a reference
        does. teacher: stands in the reference's place."""
        self.config = config
        self.device = device
        self.total_updates = total_updates
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.updates = 0
        self.without_gradient: list[str] = []
        self._moves = device.type == "cuda" and not config.optimizer.offload_optimizer
        ds_config = zero_config(config, shape)
        temperature = config.rollout.temperature if config.method == "grpo" else 1.0
        scorer = self._scorer(config, ds_config, banned_token_ids, temperature, empty)
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
        self.trained, self.zero = quietly(
            deepspeed.initialize, model=scorer, optimizer=optimizer, config=ds_config
        )[:2]
        self._states = States(self.zero, device)
        self.names: dict[str, Any] = {n.removeprefix("model."): p for n, p in scorer.named_parameters()}
        self.partition = Partition(self.zero, self.names, config.optimizer.zero_stage, device)
        self._base, self._adapters = lora.adapters(self.names, scorer.model)
        self.reference: Any = (
            lora.Base(self.trained, list(self._adapters.values())) if config.lora.rank else None
        )
        frozen = teacher
        if config.method == "grpo" and config.algorithm.kl_coef and not config.lora.rank:
            frozen = Frozen(config, shape, banned_token_ids)
        if frozen:
            settings = zero_config(frozen.config, frozen.shape, inference=True)
            reference = self._scorer(frozen.config, settings, frozen.banned, temperature)
            reference.requires_grad_(False).eval()
            self.reference = quietly(deepspeed.initialize, model=reference, config=settings)[0]
        FUNCTIONAL.linear = LINEAR  # see `frugal`

    def _scorer(
        self,
        config: RunConfig,
        ds_config: dict[str, Any],
        banned: list[int],
        temperature: float,
        empty: bool = False,
    ) -> LogprobModel:
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            BitsAndBytesConfig,
        )

        model = config.model
        self._hf_ds_config = HfDeepSpeedConfig(ds_config)  # while alive, from_pretrained shards as it loads
        dtype = torch.bfloat16 if model.dtype == "bf16" else torch.float32
        kwargs: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
        revision = {"revision": model.revision} if model.revision else {}
        if config.lora.qlora:  # then every rank reads the whole model; `initialize` shards it
            kwargs["quantization_config"] = BitsAndBytesConfig(**config.lora.quantization(model.dtype))

        shared = nodes_share_weights(config)

        def build(kind: Any) -> Any:
            if not (shared or empty):
                if hub.from_hub(config):  # transformers would turn an outage into an error of its own
                    hub.fetch(config, hub.weight_files(config))
                return kind.from_pretrained(model.path, **revision, **kwargs)
            hf_config = AutoConfig.from_pretrained(model.path, **revision)
            if shared:
                return base_weights.unfilled(kind, hf_config, ds_config, **kwargs)
            return kind.from_config(hf_config, **kwargs)

        try:
            hf = build(AutoModelForImageTextToText)
        except ValueError:  # not a vision-language architecture
            hf = build(AutoModelForCausalLM)
        if shared and not empty:
            base_weights.fill(hf, config)
        exact_frequencies(hf)
        if model.kernels == "compiled":
            fused.fuse(hf)
        if config.lora.rank:
            lora.inject(hf, config.lora, config.run.seed)
        scorer = LogprobModel(hf, banned, temperature, not config.tower_trained)
        if model.freeze_vision and scorer.has_vision:
            hf.model.visual.requires_grad_(False)
        return scorer.to(self.device)  # its buffers; DeepSpeed leaves a model that it sharded where it is

    # --- learning

    @frugal
    @torch.no_grad()
    def logprobs(
        self, batches: Iterable[MicroBatch], old: bool = True, reference: bool = False
    ) -> dict[str, list[Tensor]]:
        """Log-probabilities [N] of each micro-batch's completion tokens under policy and reference, on the
        host."""
        asked = [("old", self.trained)] if old else []
        if reference:
            asked.append(("reference", self.reference))
        found: dict[str, list[Tensor]] = {name: [] for name, _ in asked}
        self.trained.eval()
        for batch in batches:
            batch = moved(batch, self.device)
            for name, model in asked:
                found[name].append(model(batch)[0])
        self.trained.train()
        return {name: [x.cpu() for x in parts] for name, parts in found.items()}

    @frugal
    def update(self, batches: Iterable[TrainMicroBatch], count: int, kl_coef: float) -> dict[str, float]:
        """One optimizer step over this rank's `count` micro-batches. Returns sums that add up over ranks to
        global means, largest values, and facts of the step; they are read from the device once.

        kl_coef: weight of the KL in the loss.
        """
        rate = learning_rate(self.config.optimizer, self.updates, self.total_updates)
        for group in self.zero.param_groups:
            group["lr"] = rate
        if self.config.lora.dropout:  # a resumed run drops the same
            torch.manual_seed(seed_of(self.config.run.seed, "dropout", self.updates, self.rank))
        first = None
        if self.updates == 0:
            learned = {name: p for name, p in self.names.items() if p.requires_grad}
            first = FirstGradients(learned, self.device)
        gathered, sums = GATHERS.bytes, torch.zeros(len(SUMS), device=self.device, dtype=torch.float64)
        largest = torch.zeros(len(LARGEST), device=self.device)
        for i, item in enumerate(batches):
            self.trained.set_gradient_accumulation_boundary(i == count - 1)
            item = moved(item, self.device)
            if first and item.batch.pixel_values is not None:
                first.pictured()
            loss, stats, most = self._loss(item, kl_coef)
            self.trained.backward(loss * self.world_size)  # DeepSpeed averages over ranks; our loss is a sum
            self.trained.step()
            sums += stats
            largest = torch.maximum(largest, most)
        self.updates += 1
        self.without_gradient = first.missing() if first else []
        values = torch.cat([sums, largest.double()]).tolist()
        out = dict(zip((*SUMS, *LARGEST), values, strict=True))
        out |= {"optim/lr": rate, "optim/skipped_updates": float(self.zero.overflow)}
        if self.without_gradient:
            out["grad/zero_parameters"] = float(len(self.without_gradient))
        out |= {"perf/gathered_gib": (GATHERS.bytes - gathered) / 2**30, "perf/passes": float(count)}
        if self.zero.overflow:  # not finite: DeepSpeed has left weights and moments as they were
            return out
        return out | {"grad/norm": float(self.trained.get_global_grad_norm() or 0.0)}

    def _loss(self, item: TrainMicroBatch, kl_coef: float) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the values of `SUMS`, and those of `LARGEST`; all on the device."""
        a, shares = self.config.algorithm, item.shares
        logprobs, entropy, greedy = self.trained(item.batch)
        old = logprobs.detach() if item.old_logprobs is None else item.old_logprobs
        gap = torch.zeros_like(old) if item.rollout_logprobs is None else old - item.rollout_logprobs
        correction, beyond = None, torch.zeros_like(gap)
        if a.rollout_correction != "off" and item.rollout_logprobs is not None:
            correction, beyond = rollout_weights(
                gap,
                item.lengths,
                a.rollout_correction,
                a.correction_level,
                a.correction_low,
                a.correction_high,
            )
        loss = grpo_loss(
            logprobs,
            old,
            item.advantages,
            item.weights,
            clip_low=a.clip_low,
            clip_high=a.clip_high,
            ref_logprobs=item.ref_logprobs,
            kl_coef=kl_coef,
            kl_estimator=a.kl_estimator,
            kind=a.surrogate,
            dual_clip=a.dual_clip,
            lengths=item.lengths,
            correction=correction,
            shares=shares,
        )
        values = {
            "loss/policy": loss.policy,
            "loss/total": loss.total.detach(),
            "loss/nll": -(shares * logprobs.detach()).sum(),
            "kl/mean": loss.kl,
            "ratio/clip_fraction": loss.clip_fraction,
            "ratio/clamped_fraction": loss.clamped,
            "ratio/mean": loss.ratio,
            "entropy/mean": (shares * entropy).sum(),
            "loss/token_accuracy": (shares * greedy).sum(),
            "mismatch/corrected_fraction": (shares * beyond).sum(),
            **mismatch(gap, shares),
        }
        most = [x.amax() if len(x) else x.sum() for x in (gap.abs(), gap.clamp(-LOG_RATIO, LOG_RATIO).exp())]
        return loss.total, torch.stack([values[name] for name in SUMS]).double(), torch.stack(most)

    # --- weights out, states away

    def weight_groups(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Full weights in the model's own dtype and Hugging Face names, a group of layers at a time, on every
        rank; adapters are merged in.

        A group's tensors are only valid until the next one is asked for. Peak: a bucket, or the largest
        parameter.
        """
        for bucket in buckets(self._base, bucket_bytes):
            layers = [(name, p, self._adapters.get(name)) for name, p in bucket]
            parts = [part for _, p, layer in layers for part in (p, *lora.factors(layer))]
            with deepspeed.zero.GatheredParameters(parts, modifier_rank=None):
                yield [(name, lora.merged(p.data, layer)) for name, p, layer in layers]

    def offload(self) -> None:
        """Moves fp32 weights and Adam's moments to host memory to free GPU memory for the engine (CUDA
        only)."""
        if self._moves:
            self._states.offload()

    def lock_behind(self) -> None:
        """Prepares the host's memory for faster moves, while the engine samples."""
        self._states.lock_behind()

    def reload(self) -> None:
        """Takes back what `offload` moved away."""
        self._states.reload()

    # --- shards in and out

    def shards(self, host: Callable[[str, Tensor], Tensor]) -> dict[str, Shard]:
        """This rank's part of the fp32 weights and Adam's moments; `host(key, tensor)` copies it off the
        device."""
        return self.partition.shards(host)

    def load(self, stream: Callable[[Iterable[tuple[str, str, int, int]]], Iterable[Tensor]]) -> None:
        """Takes over weights and moments: `stream` gives [stop - start] of every (kind, name, start, stop) of
        a flat parameter.
        """
        self.reload()
        self.partition.load(stream)

    def loaded(self, updates: int, skipped: int = 0) -> None:
        """After every rank's `load`: resumes from optimizer step `updates`, of which Adam has not taken
        `skipped`."""
        self.partition.publish(updates - skipped)
        self.updates = updates
        if self.config.method == "grpo":
            self.offload()


SUMS = (
    "loss/policy",
    "loss/total",
    "loss/nll",
    "kl/mean",
    "ratio/clip_fraction",
    "ratio/clamped_fraction",
    "ratio/mean",
    "entropy/mean",
    "loss/token_accuracy",
    "mismatch/logprob_abs_mean",
    "mismatch/kl",
    "mismatch/kl_reverse",
    "mismatch/ratio_mean",
    "ratio_square",
    "mismatch/corrected_fraction",
)
"""Metrics whose per-rank values add up to the global mean."""
LARGEST = ("mismatch/logprob_abs_max", "mismatch/ratio_max")
"""Metrics whose per-rank values give the global one as their largest."""


def _decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Adam's parameter groups: matrices decay; biases and norms, which have one dimension, do not."""
    matrices, vectors = [], []
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        several = len(whole_shape(parameter)) > 1
        (matrices if several else vectors).append(parameter)

    groups = []
    if matrices:
        groups.append({"params": matrices, "weight_decay": weight_decay})
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    return groups
