"""The rollout engine: vLLM in the rank's own process. With `engine_mends` and trainer/weights, the only
file that imports vLLM."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import get_tp_group
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample import logits_processor as processors_v2

from trainer.algorithm.seeding import seed_of
from trainer.algorithm.traces import End, ImageRef, Prompt, Trace, completed_trace, continue_trace
from trainer.config import ConfigError, RunConfig
from trainer.data.dialog import Shown
from trainer.data.processor import EngineRequest, Prompter
from trainer.observe import beacon
from trainer.sampling.engine_mends import (
    heed_experts_of_this_rank,
    reduce_over_gloo,
    shareable_memory,
    zero_scratch,
)
from trainer.sampling.episodes import Episodes
from trainer.weights import in_process

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

ProcessorV2: Any = processors_v2.LogitsProcessor
"""The class that vLLM's model runner V2 (on GPUs) wants a logits processor to have."""
ENDS: dict[str | None, End] = {"stop": "stop", "length": "length"}
"""The meaning of vLLM's reasons to finish. Any other reason is an error."""


class BanTokens(LogitsProcessor, ProcessorV2):
    """Sets the ids in `additional_config["banned_token_ids"]` to -inf before sampling, for every request. It
    keeps no tensor: runner V2 makes processors within the weights' memory, which sleep level 2 discards."""

    def __init__(self, vllm_config: VllmConfig, *_: Any) -> None:
        additional: Any = vllm_config.additional_config
        self.ranges = id_ranges(additional["banned_token_ids"])

    def apply(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        """logits: [requests, vocabulary], changed in place."""
        for start, stop in self.ranges:
            logits[:, start:stop] = float("-inf")
        return logits

    def is_argmax_invariant(self) -> bool:
        """No: the best token may be a banned one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """The ban is the same for all requests."""


def id_ranges(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted ids as runs [start, stop)."""
    runs: list[tuple[int, int]] = []
    for i in ids:
        start = runs.pop()[0] if runs and runs[-1][1] == i else i
        runs.append((start, i + 1))
    return runs


PICTURES_AT_ONCE = 4
"""Number of prompts with images that are added between two steps of an engine on a GPU, so that the host
prepares the next ones while the GPU computes. It is a number and not a time, because the ranks of an
engine must make the same calls."""
HOPPER = (9, 0)
"""Compute capability below which vLLM's batch-invariant mode replaces torch's products by kernels without
gradients, in the whole process and so under the policy."""
BLACKWELL = (10, 0)
"""Compute capability from which vLLM uses FlashInfer's attention."""


def engine_arguments(config: RunConfig, prompter: Prompter, images_per_prompt: int) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`. images_per_prompt: the largest number of images in any row."""
    rollout = config.rollout
    on_gpu = config.placement.device == "cuda"
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "dtype": "bfloat16" if config.model.dtype == "bf16" else "float32",
        "load_format": in_process.BACKEND,
        "tensor_parallel_size": rollout.tensor_parallel,
        "distributed_executor_backend": "external_launcher",
        "max_model_len": config.longest_sequence,
        "enforce_eager": rollout.eager or not on_gpu,
        "enable_prefix_caching": rollout.prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "logits_processors": [BanTokens],
        "additional_config": {"banned_token_ids": prompter.banned_token_ids()},
        "weight_transfer_config": {"backend": in_process.BACKEND},
        "generation_config": "vllm",  # the model's own would change temperature, top_p and top_k
        "seed": 0,
        "disable_log_stats": True,
    }
    if on_gpu and config.run.deterministic == "cuda":
        _check_deterministic(prompter)
    arguments |= _of_gpu(config) if on_gpu else _of_cpu(config)
    if prompter.architecture.gated_delta:
        arguments |= _of_gated_delta(config)
    if prompter.has_vision:
        arguments["limit_mm_per_prompt"] = {"image": images_per_prompt, "video": 0}
        arguments["mm_processor_kwargs"] = {"size": prompter.size}
        arguments["mm_processor_cache_gb"] = 0  # by default 4 GiB; a prompt comes once per step
    if rollout.expert_parallel:
        arguments["enable_expert_parallel"] = True
    return arguments | ({"revision": config.model.revision} if config.model.revision else {})


def _of_gpu(config: RunConfig) -> dict[str, Any]:
    """Further arguments of an engine on a GPU."""
    arguments: dict[str, Any] = {
        "gpu_memory_utilization": config.rollout.gpu_memory_utilization,
        "enable_sleep_mode": config.rollout.sleep_level > 0,
        # Tables and CUDA graphs are made for as many; vLLM's own number depends on the card, and it makes
        # graphs of twice as many tokens.
        "max_num_seqs": config.engine_sequences,
    }
    if not config.rollout.eager:
        arguments["max_cudagraph_capture_size"] = config.engine_sequences
    # Two profiling passes over the whole world, for kernels that these models use on no card but Blackwell.
    if torch.cuda.get_device_capability() < BLACKWELL:
        arguments["kernel_config"] = {"enable_flashinfer_autotune": False}
    return arguments


def _check_deterministic(prompter: Prompter) -> None:
    """Raises ConfigError where vLLM has no batch-invariant kernels, or none beside a policy that trains."""
    if prompter.architecture.gated_delta:
        raise ConfigError(
            "run.deterministic=cuda: vLLM has no repeatable kernels for gated delta-net layers: leave it"
            " empty"
        )
    if torch.version.hip or torch.cuda.get_device_capability() < HOPPER:
        raise ConfigError(
            f"run.deterministic=cuda needs Hopper or newer, and this is {torch.cuda.get_device_name()}: take"
            " another GPU, or leave it empty"
        )


def _of_cpu(config: RunConfig) -> dict[str, Any]:
    """Further arguments of an engine on a CPU."""
    return {
        # vLLM's 128 on CPU is more than most prompts have: groups would share nothing
        "block_size": 32,
        "kv_cache_memory_bytes": int(config.rollout.kv_cache_gib * 2**30),
        # A prompt cut in two would rewind its seeded generator, which torch's CPU generator cannot.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, config.longest_sequence),
    }


def _of_gated_delta(config: RunConfig) -> dict[str, Any]:
    """Further arguments for a model with gated delta-net layers: a state in fp32, as the policy computes it.
    Raises ConfigError for what vLLM's kernels for CPUs do not compute."""
    arguments: dict[str, Any] = {"mamba_ssm_cache_dtype": "float32"}
    if config.placement.device == "cuda":
        # vLLM's own choice on Hopper and newer is a kernel of FlashInfer that was not compared with the
        # policy's.
        return arguments | {"gdn_prefill_backend": "triton"}
    if config.model.dtype != "bf16":
        raise ConfigError(
            f"model.dtype {config.model.dtype}: on a CPU vLLM computes gated delta-net layers in bf16 only:"
            " set model.dtype to bf16"
        )
    # A cached prefix needs states at its blocks' ends, which only come with prompts cut into chunks.
    return arguments | {"enable_prefix_caching": False}


class Engine:
    """This rank's part of an engine of `rollout.tensor_parallel` ranks; all of them make the same calls."""

    def __init__(self, config: RunConfig, prompter: Prompter, images_per_prompt: int) -> None:
        in_process.register_transfer()
        self.config = config
        self.eos_token_id, self._image_token_id = prompter.eos_token_id, prompter.image_token_id
        self._reply_text = prompter.reply_text
        on_gpu = config.placement.device == "cuda"
        self.pictures_at_once = PICTURES_AT_ONCE if on_gpu else sys.maxsize
        if not on_gpu and config.rollout.tensor_parallel > 1:
            reduce_over_gloo()
        if not on_gpu and config.rollout.expert_parallel:
            heed_experts_of_this_rank()
        several = on_gpu and config.rollout.tensor_parallel > 1
        try:
            with shareable_memory() if several else contextlib.nullcontext():
                self.llm = LLM(**engine_arguments(config, prompter, images_per_prompt))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "vLLM does not fit this GPU: lower rollout.gpu_memory_utilization, or raise"
                " rollout.tensor_parallel"
            ) from error
        except ValueError as error:  # its own check of the memory
            if "memory" not in str(error):
                raise
            key = "gpu_memory_utilization" if on_gpu else "kv_cache_gib"
            raise ConfigError(f"vLLM's memory, rollout.{key}: {str(error).splitlines()[0]}") from error
        self.version = -1
        self._awake = True

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of vLLM's worker in this process."""
        return self.llm.collective_rpc(method, args=args)

    def reset_caches(self) -> None:
        """Empties every cache that was computed with other weights: KV blocks, processed inputs, image
        embeddings (vllm#44910)."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset: a request is still running")
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def sleep(self) -> None:
        """Frees the engine's memory: KV cache, and weights by `rollout.sleep_level` (CUDA only)."""
        if self.sleeps and self._awake:
            self.llm.sleep(level=self.config.rollout.sleep_level)
            self._awake = False

    def wake_weights(self) -> None:
        """First half of waking: memory for the weights, which a sync must fill before anything is sampled."""
        self._wake("weights")
        if self.sleeps:
            self.llm.collective_rpc(zero_scratch)

    def wake_cache(self) -> None:
        """Second half of waking: allocates memory for the KV cache."""
        self._wake("kv_cache")

    def _wake(self, tag: str) -> None:
        if self.sleeps:
            torch.cuda.empty_cache()  # what torch keeps of the policy's pass and of the sync, vLLM cannot use
            self.llm.wake_up(tags=[tag])
            self._awake = True

    @property
    def sleeps(self) -> bool:
        """Whether the engine frees its memory between rollouts."""
        return self.config.placement.device == "cuda" and self.config.rollout.sleep_level > 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        read: Callable[[Prompt], EngineRequest],
        *,
        samples_per_prompt: int,
        temperature: float,
        max_tokens: int,
        top_p: float = 1.0,
        begun: Sequence[Trace] = (),
        episodes: Episodes | None = None,
    ) -> Iterator[list[Trace]]:
        """Samples completions; yields each prompt's group of traces when the last of them has ended, or was
        cut at `Prompt.cut` tokens.

        Every completion is a request of its own with a seed of its own: order does not matter to it, and it
        can be ended or continued by itself. The batch matters where the sums of kernels depend on the number
        of rows: on a CPU in bf16, and in fp32 at large widths (docs/fleet.md, "Bits on CPUs").

        read: the prompt for the engine; it is called as late as the memory of `data.image_cache_gib` for
        patches of open prompts demands, so that a large evaluation does not hold all its images at once.
        begun: completions that were cut and go on; of their prompts nothing else is sampled. episodes: what
        answers replies; an episode that goes on does so in the same call. Raises RuntimeError where engine
        and policy disagree on a prompt's tokens.
        """
        members: dict[int, dict[int, Trace | None]] = {}
        for trace in begun:
            members.setdefault(trace.group, {})[trace.index] = trace
        limit_bytes = int(self.config.data.image_cache_gib * 2**30)
        waiting = deque(prompts)
        open_groups = dict[str, OpenGroup]()
        held_bytes = 0
        sampling = temperature, max_tokens, top_p
        upcoming: EngineRequest | None = None
        while waiting or open_groups:
            pictures = 0
            while waiting and pictures < self.pictures_at_once:
                upcoming = upcoming or read(waiting[0])
                if open_groups and held_bytes + upcoming.pixel_bytes > limit_bytes:
                    break
                prompt = waiting.popleft()
                all_new: dict[int, Trace | None] = dict.fromkeys(range(samples_per_prompt))
                group = OpenGroup(prompt, upcoming, members.get(prompt.group, all_new))
                open_groups[str(group.prompt.group)] = group
                held_bytes += upcoming.pixel_bytes
                pictures += bool(upcoming.images)
                self._add(group, upcoming, sampling, episodes)
                upcoming = None

            beacon.count_piece()
            ended = []
            if self.llm.llm_engine.has_unfinished_requests():
                for output in self.llm.llm_engine.step():
                    if output.finished:
                        name, _, index = output.request_id.partition("/")
                        ended.append(self._trace(open_groups[name], int(index), output, max_tokens))
            for trace in self._go_on(episodes, ended, open_groups, sampling):
                group = open_groups[str(trace.group)]
                group.traces[trace.index] = trace
                if len(group.traces) == len(group.begun):
                    held_bytes -= open_groups.pop(str(trace.group)).pixel_bytes
                    yield [group.traces[i] for i in sorted(group.traces)]

    def _go_on(
        self, episodes: Episodes | None, ended: list[Trace], groups: Mapping[str, OpenGroup], sampling: Any
    ) -> list[Trace]:
        """Has episodes go on whose replies were answered; returns the traces that have ended for good."""
        if episodes is None:
            return ended
        over = []
        idle = not self.llm.llm_engine.has_unfinished_requests()
        for grown in episodes.answered(ended, idle, get_tp_group()):
            trace, observation = grown.trace, grown.observation
            group = groups[str(trace.group)]
            group.begun[trace.index] = trace
            if observation is None or not group.left(trace.index, sampling[1]):
                over.append(trace)
                continue
            self._show(group, trace, observation)
            self._ask(group, trace.index, sampling)
        return over

    def _add(
        self,
        group: OpenGroup,
        request: EngineRequest,
        sampling: tuple[float, int, float],
        episodes: Episodes | None,
    ) -> None:
        """Opens the group's requests. Its images are processed once, for all of them."""
        group.rendered = self._rendered(request.inputs)
        for index, trace in group.begun.items():
            if episodes and trace:
                for observation in episodes.shown(trace):
                    self._show(group, trace, observation)
            self._ask(group, index, sampling)

    def _rendered(self, inputs: Any) -> dict[str, Any]:
        """A prompt with its images processed."""
        rendered: Any = self.llm._preprocess_cmpl([inputs])
        return rendered[0]

    def _ask(self, group: OpenGroup, index: int, sampling: tuple[float, int, float]) -> None:
        """Opens one request. The prompt of one that goes on is the group's with the tokens so far."""
        params = self._params(group, index, *sampling)
        extended: Any = group.extended(index)
        self.llm.llm_engine.add_request(f"{group.prompt.group}/{index}", extended, params)

    def _show(self, group: OpenGroup, trace: Trace, observation: Shown) -> None:
        """Has what a completion goes on from show the images of an observation."""
        if not observation.images:
            return
        ids = trace.tokens[observation.start : observation.stop].tolist()
        alone = one_token_each(ids, self._image_token_id)
        prompt = {"prompt_token_ids": alone, "multi_modal_data": {"image": list(observation.images)}}
        rendered = self._rendered(prompt)
        if list(rendered["prompt_token_ids"]) != ids:
            raise RuntimeError(
                f"row {trace.row}: engine and policy read {len(observation.images)} shown images as"
                f" {len(rendered['prompt_token_ids'])} and {len(ids)} tokens"
            )
        group.shown.setdefault(trace.index, []).append((observation.start, rendered))

    def _params(
        self, group: OpenGroup, index: int, temperature: float, max_tokens: int, top_p: float
    ) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            max_tokens=group.left(index, max_tokens),
            seed=group.seed(index) if temperature else None,
            logprobs=0,
            stop_token_ids=[self.eos_token_id],
            # Text and objects for every token of every decode step would take a sixth of a small model's
            # rollout.
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _trace(self, group: OpenGroup, index: int, output: Any, max_tokens: int) -> Trace:
        engine_ids = list(output.prompt_token_ids or ())
        begun, so_far = group.begun[index], group.so_far(index)
        expected = [*group.prompt_ids, *so_far]
        if engine_ids != expected:
            raise RuntimeError(
                f"row {group.prompt.row}: engine and policy read its prompt as {len(engine_ids)} and "
                f"{len(expected)} tokens: the processors of vLLM and transformers disagree"
            )
        (completion,) = output.outputs
        ids, logprobs = list(completion.token_ids), list(completion.logprobs.logprobs)
        assert len(ids) == len(logprobs), "vLLM gave other logprobs than those of the sampled tokens"
        end = ENDS.get(completion.finish_reason, "error")
        if end == "length" and len(so_far) + len(ids) < max_tokens:
            end = "cut"
        piece = completed_trace(
            expected,
            ids,
            group=group.prompt.group,
            row=group.prompt.row,
            index=index,
            logprobs=logprobs,
            images=tuple(ImageRef(group.prompt.row, number) for number in range(group.images)),
            version=self.version,
            end=end,
        )
        trace = continue_trace(begun, piece) if begun else piece
        return replace(trace, text=self._reply_text(trace.replies[-1].tolist()))


def one_token_each(ids: Sequence[int], image_token_id: int | None) -> list[int]:
    """Token ids with one placeholder for each image, as processors take them; given with one per patch."""
    short = []
    for i, token in enumerate(ids):
        if token != image_token_id or i == 0 or ids[i - 1] != image_token_id:
            short.append(token)
    return short


def with_shown(rendered: dict[str, Any], shown: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """A prompt as vLLM takes it, with the images of what stands behind it, each from a position on."""
    if not shown:
        return rendered
    items = []
    hashes = []
    places = []
    for start, part in [(0, rendered), *shown]:
        if "mm_kwargs" in part:
            items += part["mm_kwargs"]["image"]
            hashes += part["mm_hashes"]["image"]
            places += [replace(at, offset=at.offset + start) for at in part["mm_placeholders"]["image"]]
    last = shown[-1][1]
    return {
        **last,
        "mm_kwargs": type(last["mm_kwargs"])({"image": items}),
        "mm_hashes": {"image": hashes},
        "mm_placeholders": {"image": places},
    }


class OpenGroup:
    """A prompt whose completions are being sampled."""

    def __init__(self, prompt: Prompt, request: EngineRequest, begun: dict[int, Trace | None]) -> None:
        """begun: what there is of each completion that is sampled, by index."""
        self.prompt, self.begun = prompt, begun
        self.prompt_ids = request.token_ids
        self.pixel_bytes = request.pixel_bytes
        self.images = request.images
        self.sampled = {index: len(trace.learned) if trace else 0 for index, trace in begun.items()}
        """Number of tokens of each completion that older weights sampled."""
        self.traces: dict[int, Trace] = {}
        self.rendered: dict[str, Any] = {}
        """The prompt as vLLM takes it."""
        self.shown: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        """Observations with images of each completion, as vLLM takes prompts, and where they start."""

    def so_far(self, index: int) -> list[int]:
        """What stands behind the prompt of a completion already."""
        trace = self.begun[index]
        return trace.completion.tolist() if trace else []

    def left(self, index: int, max_tokens: int) -> int:
        """Most tokens by which a completion's reply grows now; 0: it goes on in the next phase."""
        left = max_tokens - len(self.so_far(index))
        trace = self.begun[index]
        grown = len(trace.learned) - self.sampled[index] if trace else 0
        return min(left, self.prompt.cut - grown) if self.prompt.cut else left

    def extended(self, index: int) -> dict[str, Any]:
        """The prompt of a completion that goes on: the group's with the tokens so far and what they show."""
        rendered = with_shown(self.rendered, self.shown.get(index, ()))
        return {**rendered, "prompt_token_ids": [*self.rendered["prompt_token_ids"], *self.so_far(index)]}

    def seed(self, index: int) -> int:
        """Seed of what is sampled of a completion now."""
        trace = self.begun[index]
        if trace is None:
            return self.prompt.seed + index
        return seed_of(self.prompt.seed, index, len(trace.segments))
