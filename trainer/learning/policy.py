"""The policy under DeepSpeed ZeRO, and its frozen reference: a second model, or the policy without its
adapters. Where a run has a teacher, the teacher takes the reference's place.

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

from trainer.algorithm.batching import MicroBatch, move_record
from trainer.algorithm.losses import LOG_RATIO, grpo_loss, mismatch_sums, rollout_weights
from trainer.algorithm.lr_schedule import learning_rate
from trainer.algorithm.seeding import seed_of
from trainer.checkpoint.format import Shard
from trainer.config import RunConfig, nodes_share_weights
from trainer.hardware.model_shapes import Shape
from trainer.learning import blocks, experts, fused_layers, gated_delta_kernel, lora
from trainer.learning.first_gradients import FirstGradients
from trainer.learning.logprobs import LogprobModel
from trainer.learning.teacher import FrozenModel
from trainer.learning.zero import base_weights, sharded
from trainer.learning.zero.offload import OffloadedStates
from trainer.learning.zero.partition import Partition, bucket_parameters, whole_shape
from trainer.learning.zero.setup import (
    FUNCTIONAL,
    GATHERS,
    LINEAR,
    exact_frequencies,
    gather_whole,
    gathers_blocks,
    initialize_quietly,
    zero_config,
)
from trainer.storage import hub

LOAD_S = 1800.0
"""How long a collective waits: while models load, the ranks are far apart."""


def init_distributed(device: str) -> None:
    """Meets the other ranks at MASTER_ADDR. `device`: cuda or cpu."""
    # Its shared-memory collectives for CPU would be compiled at the first start: a minute, and a compiler
    # needed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        "nccl" if device == "cuda" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=LOAD_S),
    )


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


class WholeWeights:
    """The policy's weights as an engine takes them."""

    def __init__(self, model: Any, kept: bool) -> None:
        """kept: whether this rank has them whole already."""
        self.names: dict[str, Any] = dict(model.named_parameters())
        self.adapters: dict[str, Any]
        self._base, self.adapters = lora.adapters(self.names, model)
        self._kept = kept

    def groups(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Full weights in the model's own dtype and Hugging Face names, a group of layers at a time, on every
        rank; adapters are merged in. Collective. A group's tensors are only valid until the next one is asked
        for. Peak: a bucket, or the largest parameter."""
        for bucket in bucket_parameters(self._base, bucket_bytes):
            gathered = []
            for name, parameter in bucket if not self._kept else ():
                gathered += [parameter, *lora.adapter_factors(self.adapters.get(name))]
            with deepspeed.zero.GatheredParameters(gathered, modifier_rank=None):
                yield [(name, lora.merged_weight(p.data, self.adapters.get(name))) for name, p in bucket]


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
        teacher: FrozenModel | None = None,
    ) -> None:
        """empty: whether `load` will bring every weight of the policy, so that the policy reads no base
        weights; a reference reads them then. teacher: scores in place of the reference."""
        self.config = config
        self.device = device
        self.total_updates = total_updates
        self.updates = 0
        self.without_gradient: list[str] = []
        moves = device.type == "cuda" and not config.optimizer.offload_optimizer
        self._draws = config.lora.dropout > 0
        """Whether a pass draws random numbers: only then does it matter that a model is in training."""
        ds_config = zero_config(config, shape)
        temperature = config.rollout.temperature if config.method == "grpo" else 1.0
        scorer = self._scorer(config, ds_config, banned_token_ids, temperature, empty)
        self._prepare_backward(scorer.model)
        scorer.train()
        optimizer = torch.optim.AdamW(
            _decay_groups(scorer, config.optimizer.weight_decay),
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            fused=moves,
        )
        self.trained, self.zero = initialize_quietly(
            deepspeed.initialize, model=scorer, optimizer=optimizer, config=ds_config
        )[:2]
        self._gradients = sharded.Gradients()
        if gathers_blocks(config):
            modules = blocks.blocks_of(scorer.model)
            if not config.optimizer.offload_optimizer:
                self._gradients = sharded.gradients_of(modules, self.zero, device)
            self._gather(self.trained, modules, self.zero.parameter_offload, config)
        self.states = OffloadedStates(self.zero, device, moves)
        kept = gathers_blocks(config) and dist.get_world_size() == 1
        self.weights = WholeWeights(scorer.model, kept)
        trained = {name: p for name, p in self.weights.names.items() if p.requires_grad}
        self.partition = Partition(self.zero, trained, config.optimizer.zero_stage, device)
        adapted = config.lora.rank > 0
        frozen = teacher
        if config.method == "grpo" and config.algorithm.kl_coef and not adapted:
            frozen = FrozenModel(config, shape, banned_token_ids)
        self.reference: Any = None
        if frozen:
            # A reference is the policy as it was read: from the files it would take as long again.
            read = None if teacher or empty else scorer
            self.reference = self._frozen(frozen, temperature, read)
        elif adapted:
            self.reference = lora.BaseModel(self.trained, list(self.weights.adapters.values()))
        FUNCTIONAL.linear = LINEAR

    def _prepare_backward(self, model: Any) -> None:
        """Says what the passes with gradients keep of a model, before DeepSpeed puts its hooks on it."""
        modules = blocks.blocks_of(model)
        recomputes = self.config.model.gradient_checkpointing
        if recomputes:
            blocks.recompute(modules, random=self._draws)
        if self.config.optimizer.zero_stage == 3 and dist.get_world_size() > 1:
            blocks.keep_no_gathered_weights(model, modules if recomputes else [])
        if self.config.lora.rank:
            blocks.begin_gradients(modules)

    def _gather(self, engine: Any, modules: Any, offload: Any, config: RunConfig) -> None:
        """Gathers the blocks of a model that `config` names, instead of DeepSpeed."""
        sharded.gather(engine, modules, offload, self.device, config.optimizer.live_parameters)

    def _frozen(self, frozen: FrozenModel, temperature: float, read: LogprobModel | None) -> Any:
        """Loads a model that is never trained; returns DeepSpeed's engine around it. read: the same model,
        whose weights it takes; None: it reads its own."""
        ds_config = zero_config(frozen.config, frozen.shape, inference=True)
        scorer = self._scorer(frozen.config, ds_config, frozen.banned, temperature, empty=read is not None)
        if read is not None:
            base_weights.copy_weights(read, scorer)
        scorer.requires_grad_(False).eval()
        engine = initialize_quietly(deepspeed.initialize, model=scorer, config=ds_config)[0]
        if gathers_blocks(frozen.config, inference=True):
            self._gather(engine, blocks.blocks_of(scorer.model), engine.optimizer, frozen.config)
        return engine

    def _scorer(
        self,
        config: RunConfig,
        ds_config: dict[str, Any],
        banned: list[int],
        temperature: float,
        empty: bool = False,
    ) -> LogprobModel:
        """Loads the model that `config` names and puts it into a `LogprobModel`. empty: leaves out the base
        weights."""
        self._hf_ds_config = HfDeepSpeedConfig(ds_config)  # while alive, from_pretrained shards as it loads
        hf = _load_model(config, ds_config, empty)
        exact_frequencies(hf)
        gather_whole(blocks.blocks_of(hf))
        if config.model.kernels == "compiled":
            fused_layers.fuse_layers(hf)
        if config.lora.rank:
            lora.inject_adapters(hf, config.lora, config.run.seed)
        if self.device.type == "cuda":
            experts.check_grouped_products(hf, self.device, _dtype(config))
        recurrence = None
        if self.device.type == "cuda" and config.model.recurrence == "kernel":
            recurrence = gated_delta_kernel.checked_kernel(hf, self.device, _dtype(config))
        scorer = LogprobModel(hf, banned, temperature, not config.tower_trained, recurrence)
        if config.model.freeze_vision and scorer.has_vision:
            hf.model.visual.requires_grad_(False)
        return scorer.to(self.device)  # its buffers; DeepSpeed leaves a model that it sharded where it is

    # --- learning

    @torch.no_grad()
    def logprobs(
        self, batches: Iterable[MicroBatch], old: bool = True, reference: bool = False
    ) -> dict[str, list[Tensor]]:
        """Log-probabilities [N] of each micro-batch's completion tokens under policy and reference, on the
        host."""
        models = {"old": self.trained} if old else {}
        models |= {"reference": self.reference} if reference else {}
        on_device: dict[str, list[Tensor]] = {name: [] for name in models}
        if self._draws:
            self.trained.eval()
        for batch in batches:
            batch = move_record(batch, self.device)
            for name, model in models.items():
                on_device[name].append(model(batch)[0])
        if self._draws:
            self.trained.train()

        return {name: [logprobs.cpu() for logprobs in parts] for name, parts in on_device.items()}

    def update(self, batches: Iterable[TrainMicroBatch], count: int, kl_coef: float) -> dict[str, float]:
        """One optimizer step over this rank's `count` micro-batches. Returns sums that add up over ranks to
        global means, largest values, and facts of the step; they are read from the device once. kl_coef:
        weight of the KL in the loss."""
        rate = learning_rate(self.config.optimizer, self.updates, self.total_updates)
        for group in self.zero.param_groups:
            group["lr"] = rate
        if self._draws:  # a resumed run drops the same
            torch.manual_seed(seed_of(self.config.run.seed, "dropout", self.updates, dist.get_rank()))
        first = self._first_gradients() if self.updates == 0 else None
        gathered_before = GATHERS.bytes
        self._gradients.begin()

        sums = torch.zeros(len(SUMS), device=self.device, dtype=torch.float64)
        largest = torch.zeros(len(LARGEST), device=self.device)
        for i, item in enumerate(batches):
            self.trained.set_gradient_accumulation_boundary(i == count - 1)
            item = move_record(item, self.device)
            if first and item.batch.pixel_values is not None:
                first.look(item.batch, item.advantages)
            loss, stats, most = self._loss(item, kl_coef)
            self.trained.backward(
                loss * dist.get_world_size()
            )  # DeepSpeed averages over ranks; our loss is a sum
            if i == count - 1:
                self._gradients.end()
            self.trained.step()
            sums += stats
            largest = torch.maximum(largest, most)

        self.updates += 1
        self.without_gradient = first.missing() if first else []
        values = torch.cat([sums, largest.double()]).tolist()
        metrics = dict(zip((*SUMS, *LARGEST), values, strict=True))
        metrics["optim/lr"] = rate
        metrics["optim/skipped_updates"] = float(self.zero.overflow)
        if self.without_gradient:
            metrics["grad/zero_parameters"] = float(len(self.without_gradient))
        metrics["perf/gathered_gib"] = (GATHERS.bytes - gathered_before) / 2**30
        metrics["perf/passes"] = float(count)
        # After a gradient that is not finite, DeepSpeed has left weights and moments as they were.
        if not self.zero.overflow:
            metrics["grad/norm"] = float(self.trained.get_global_grad_norm() or 0.0)
        return metrics

    def _first_gradients(self) -> FirstGradients:
        image_token_id = getattr(self.trained.module.model.config, "image_token_id", -1)
        return FirstGradients(self.partition.trained, self.device, image_token_id)

    def _loss(self, item: TrainMicroBatch, kl_coef: float) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the values of `SUMS`, and those of `LARGEST`; all on the device."""
        a = self.config.algorithm
        shares = item.shares
        logprobs, entropy, greedy = self.trained(item.batch)
        old = logprobs.detach() if item.old_logprobs is None else item.old_logprobs

        # How far the policy's log-probabilities are from those of the engine that sampled, [N].
        gap = torch.zeros_like(old) if item.rollout_logprobs is None else old - item.rollout_logprobs
        correction = None
        corrected = torch.zeros_like(gap)
        if item.rollout_logprobs is not None and a.rollout_correction != "off":
            correction, corrected = rollout_weights(
                gap,
                item.lengths,
                a.rollout_correction,
                a.corrected_at,
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
            kl_estimator=a.kl_estimated_by,
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
            "mismatch/corrected_fraction": (shares * corrected).sum(),
            **mismatch_sums(gap, shares),
        }
        sums = torch.stack([values[name] for name in SUMS]).double()
        ratios = gap.clamp(-LOG_RATIO, LOG_RATIO).exp()
        largest = torch.stack([_largest(gap.abs()), _largest(ratios)])
        return loss.total, sums, largest

    # --- shards in and out

    def shards(self, host: Callable[[str, Tensor], Tensor]) -> dict[str, Shard]:
        """This rank's part of the fp32 weights and Adam's moments; `host(key, tensor)` copies it off the
        device."""
        return self.partition.shards(host)

    def load(self, stream: Callable[[Iterable[tuple[str, str, int, int]]], Iterable[Tensor]]) -> None:
        """Takes over weights and moments: `stream` gives [stop - start] of every (kind, name, start, stop) of
        a flat parameter."""
        self.states.reload()
        self.partition.load(stream)

    def loaded(self, updates: int, skipped: int = 0) -> None:
        """After every rank's `load`: resumes from optimizer step `updates`, of which Adam has not taken
        `skipped`."""
        self.partition.publish(updates - skipped)
        self.updates = updates
        if self.config.method == "grpo":
            self.states.offload()


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


def _load_model(config: RunConfig, ds_config: dict[str, Any], empty: bool) -> Any:
    """Loads the model that `config` names, vision-language or text only, with its pretrained weights unless
    `empty`. Collective."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        model = _build_model(AutoModelForImageTextToText, config, ds_config, empty)
    except ValueError:  # not a vision-language architecture
        model = _build_model(AutoModelForCausalLM, config, ds_config, empty)
    if nodes_share_weights(config) and not empty:
        base_weights.fill_weights(model, config)
    return model


def _build_model(kind: Any, config: RunConfig, ds_config: dict[str, Any], empty: bool) -> Any:
    """Builds a model by one of transformers' auto classes. Its weights are not set yet if `empty`, or if
    nodes share the download: then `base_weights.fill_weights` sets them."""
    from transformers import AutoConfig, BitsAndBytesConfig

    model = config.model
    revision = {"revision": model.revision} if model.revision else {}
    kwargs: dict[str, Any] = {"dtype": _dtype(config), "attn_implementation": "sdpa"}
    if config.lora.qlora:  # then every rank reads the whole model; `initialize` shards it
        kwargs["quantization_config"] = BitsAndBytesConfig(**config.lora.quantization(model.dtype))

    if nodes_share_weights(config):
        hf_config = AutoConfig.from_pretrained(model.path, **revision)
        return base_weights.build_unfilled(kind, hf_config, ds_config, **kwargs)
    if empty:
        hf_config = AutoConfig.from_pretrained(model.path, **revision)
        return kind.from_config(hf_config, **kwargs)
    if hub.from_hub(config):  # transformers would turn an outage into an error of its own
        hub.fetch_files(config, hub.weight_files(config))
    return kind.from_pretrained(model.path, **revision, **kwargs)


def _dtype(config: RunConfig) -> torch.dtype:
    """The type of a model's weights and activations."""
    return torch.bfloat16 if config.model.dtype == "bf16" else torch.float32


def _largest(values: Tensor) -> Tensor:
    """The largest of `values` [N], as a scalar on the device; 0 if there are none."""
    return values.amax() if len(values) else values.sum()


def _decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Adam's parameter groups: matrices decay; biases and norms, which have one dimension, do not."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if len(whole_shape(parameter)) > 1]
    vectors = [parameter for parameter in trained if len(whole_shape(parameter)) <= 1]
    groups = [(matrices, weight_decay), (vectors, 0.0)]
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]
