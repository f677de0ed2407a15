"""One GPU's process: its part of the ZeRO-3 policy, the reference and the rollout engine, and the rows they read."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from trainer.algorithm.batching import MicroBatch, TrainItem, collate
from trainer.algorithm.losses import discounted, token_weights
from trainer.algorithm.records import Prompt, Sample
from trainer.algorithm.scheduling import Cost
from trainer.checkpoint.format import CheckpointError
from trainer.checkpoint.reader import Found, ShardReader, fetch_rank
from trainer.checkpoint.writer import RankStatus, ShardWriter
from trainer.config import RunConfig, budget, checkpoint_holds_policy
from trainer.data import lengths
from trainer.data.byte_cache import ByteCache
from trainer.data.dataset import Dataset
from trainer.data.images import decode
from trainer.data.processor import Encoded, Prompter, Request
from trainer.data.schema import Row
from trainer.hardware import model_shapes
from trainer.learning.prefetch import ahead
from trainer.observe import beacon, post_mortem
from trainer.observe.step_profile import Recorder, Taken, profiled
from trainer.ranks import cpu_matmul
from trainer.ranks.heap import Heap

if TYPE_CHECKING:
    from trainer.learning.policy import TrainMicroBatch

PROBE_TOKENS = 16


class Worker:
    """A Ray actor. Methods that compute are collective: the driver calls them on all workers at once."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = torch.device(config.placement.device)
        self.datasets: dict[tuple[str, str], Dataset] = {}
        self.images = ByteCache(int(config.data.image_cache_gib * 2**30))
        self._ahead = ThreadPoolExecutor(1, "images")
        self._fetching: Future[None] | None = None
        self._heap = Heap()
        self.engine: Any = None
        self._asleep_bytes = 0
        self.recorder: Recorder | None = None
        if self.device.type == "cpu":
            torch.set_num_threads(config.placement.threads_per_worker)
            self._matmul = cpu_matmul.install()

    def where(self) -> tuple[str, int, int, int]:
        """(node address, GPU index or process id, a free port, process id): the driver sorts ranks by it."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket() as s:
            s.bind((address, 0))
            port = s.getsockname()[1]
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return address, int(gpus[0]) if gpus else os.getpid(), port, os.getpid()

    def start(
        self, rank: int, local_rank: int, master: str, port: int, total_updates: int, found: Found | None = None
    ) -> dict[str, Any]:
        """Meets the other ranks, loads model and engine. Returns what the driver wants to know of them.

        found: a checkpoint whose files are fetched meanwhile; what fails there, `load` tells.
        """
        if found is not None:
            self._fetching = self._ahead.submit(fetch_rank, found, rank, self.config.placement.world_size)
        beacon.start(rank)  # before DeepSpeed and vLLM bind torch.distributed's functions
        post_mortem.install(handled=(CheckpointError,))
        # Here, so that the driver, which only names this class, loads no DeepSpeed.
        from trainer.learning.policy import Policy, init_distributed

        self.rank, world = rank, self.config.placement.world_size
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": "0" if self.device.type == "cuda" else str(local_rank),  # Ray shows each actor one GPU
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(port),
        }
        if self.device.type == "cuda":
            torch.cuda.set_device(0)
            self.device = torch.device("cuda", 0)
            if self.config.optimizer.offload_optimizer:  # Adam on the CPU; Ray would leave it one thread
                torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.config.placement.workers_per_node))
        torch.manual_seed(self.config.run.seed)
        init_distributed(self.device.type)
        banned = self.prompter.banned_token_ids() if self.config.method == "grpo" else []
        shape = model_shapes.from_config(self.prompter.hf_config.to_dict())
        empty = found is not None and checkpoint_holds_policy(self.config)
        self.policy = Policy(self.config, shape, banned, self.device, total_updates, empty)
        self.writer = ShardWriter(self.config, rank, world)
        if self.config.method == "grpo":
            from trainer.sampling.vllm_engine import Engine

            self.policy.offload()
            before = self._allocated()
            self.engine = Engine(self.config, self.prompter, self._images_per_prompt())
            self._asleep_bytes = self._allocated() - before if self.engine.sleeps else 0
            self.engine.sleep()
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else ""
        image_token_id = -1 if self.prompter.image_token_id is None else self.prompter.image_token_id
        return {
            "device_name": name,
            "image_token_id": image_token_id,
            "micro_batch_tokens": budget.micro_batch_tokens(self.config, shape),
            "logprob_tokens": budget.logprob_tokens(self.config, shape),
            "cost": Cost(attended=budget.attended_cost(shape), image_token=budget.image_token_cost(shape)),
        }

    def _dataset(self, path: str, split: str) -> Dataset:
        if (path, split) not in self.datasets:
            self.datasets[path, split] = Dataset(path, split)
        return self.datasets[path, split]

    @cached_property
    def prompter(self) -> Prompter:
        """The model's processor; loaded before the model, for the rows' lengths."""
        prompter = Prompter(self.config.model)
        if self.config.method == "grpo":
            prompter.check_longest(self.config.data.prompt_max_tokens + self.config.rollout.max_tokens)
        return prompter

    @cached_property
    def train_set(self) -> Dataset:
        return self._dataset(self.config.data.path, self.config.data.split)

    def _images_per_prompt(self) -> int:
        """Most images of any prompt that the engine will see: it takes no more than it was built for."""
        sets = [self.train_set]
        if self.config.evaluation.every_steps:
            sets.append(self._dataset(self.config.evaluation_path, self.config.evaluation.split))
        return max(1, *(dataset.images_per_row for dataset in sets))

    def fingerprint(self) -> str:
        """Of the processor: equal ones give equal lengths."""
        return self.prompter.fingerprint()

    def lengths(self, path: str, split: str, start: int, stop: int) -> np.ndarray:
        """`trainer.data.lengths.measure` of a slice of a dataset. Needs no `start`."""
        return lengths.measure(self.prompter, self._dataset(path, split), start, stop, self.config.method == "sft")

    def _decoded(self, path: str, split: str, index: int, row: Row | None = None) -> list[Image.Image]:
        def read() -> list[Image.Image]:
            found = row or self._dataset(path, split)[index]
            return [decode(data, found.id) for data in found.images]

        return self.images.get(("decoded", path, split, index), read, _bytes)

    def _prompt(self, index: int, path: str = "", split: str = "") -> Encoded:
        """A row as the policy reads it, of the training split if no other is named."""
        path, split = path or self.config.data.path, split or self.config.data.split

        def encode() -> Encoded:
            row = self._dataset(path, split)[index]
            return self.prompter.encode(row, self._decoded(path, split, index, row))

        return self.images.get(("encoded", path, split, index), encode, lambda encoded: encoded.size_bytes)

    def _request(self, path: str, split: str, index: int) -> Request:
        """A row as the engine reads it."""
        row = self._dataset(path, split)[index]
        return self.prompter.request(row, self._decoded(path, split, index, row))

    def _look_ahead(self, rows: Sequence[int]) -> None:
        """Decodes what is asked for next, up to half of the cache: the other half is at work."""
        room = self.images.limit_bytes // 2
        for row in rows:
            if room > 0:
                room -= _bytes(self._decoded(self.config.data.path, self.config.data.split, row))

    # --- the profile of one step

    def record(self, step: int) -> None:
        """Records the calls that follow, until `recorded`."""
        self.recorder = Recorder(self.config, step, self.rank)

    def recorded(self) -> Taken:
        """Ends that and pushes what was recorded."""
        assert self.recorder is not None
        taken, self.recorder = self.recorder.push(), None
        return taken

    # --- generation

    @profiled
    def generate(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        temperature: float,
        path: str = "",
        split: str = "",
        upcoming: Sequence[int] = (),
    ) -> list[Sample]:
        """Completions of this engine's prompts. All ranks of an engine compute; only its first returns them.

        upcoming: training rows that it will be asked next; their images are decoded while the engine samples.
        """
        path, split = path or self.config.data.path, split or self.config.data.split
        self._ahead.submit(self._look_ahead, upcoming)
        samples = self.engine.generate(
            prompts,
            lambda prompt: self._request(path, split, prompt.row),
            samples_per_prompt=samples_per_prompt,
            temperature=temperature,
            max_tokens=self.config.rollout.max_tokens,
        )
        return samples if self.rank % self.config.rollout.tensor_parallel == 0 else []

    @profiled
    def sync(self, version: int) -> None:
        """Brings the policy's weights into the engine. Before: engine asleep. After: awake, policy's states away."""
        from trainer.weights import in_process as weight_sync

        self.policy.offload()
        self.engine.wake_weights()
        weight_sync.push(self.policy.weight_groups(self.config.rollout.sync_bucket_bytes), self.engine)
        self.engine.wake_cache()
        self.engine.version = version

    def probe(self, rows: Sequence[int]) -> dict[str, float]:
        """Compares log-probabilities of engine and policy on one of `rows` per engine, after a sync."""
        row = rows[(self.rank // self.config.rollout.tensor_parallel) % len(rows)]
        path, split = self.config.data.path, self.config.data.split
        samples = self.engine.generate(
            [Prompt(group=0, row=row, seed=7)],
            lambda prompt: self._request(path, split, prompt.row),
            samples_per_prompt=2,
            temperature=self.config.rollout.temperature,
            max_tokens=min(PROBE_TOKENS, self.config.rollout.max_tokens),
        )
        batch = self._collate([(s.row, s.prompt_token_ids, s.token_ids) for s in samples])
        gap = (self.policy.logprobs([batch])["old"][0] - torch.tensor([x for s in samples for x in s.logprobs])).abs()
        return {"mean": float(gap.mean()), "max": float(gap.max())}

    # --- learning

    def prepare_update(self) -> None:
        """Puts the engine to sleep and takes the policy's states back."""
        if self.engine is not None:
            self.engine.sleep()
        self._forget_peak()
        self.policy.reload()

    @profiled
    def logprobs(
        self, passes: list[list[TrainItem]], old: bool, reference: bool, path: str = "", split: str = ""
    ) -> dict[str, list[list[float]]]:
        """Log-probabilities of the completions under policy and reference: `old`, `reference`; flat, per pass.

        path, split: where the items' rows are, if not in the training split.
        """
        found = self.policy.logprobs(ahead(lambda items: self._batch(items, path, split), passes), old, reference)
        return {name: [x.tolist() for x in parts] for name, parts in found.items()}

    @profiled
    def update(self, passes: list[list[TrainItem]], tokens: int, sequences: int, kl_coef: float) -> dict[str, float]:
        """One optimizer step over this rank's passes; tokens and sequences are counts over all ranks, kl_coef the
        weight of the KL in the loss.
        """
        if self.engine is None:
            self._forget_peak()
        batches = ahead(lambda items: self._train_batch(items, tokens, sequences), passes)
        found = self.policy.update(batches, len(passes), kl_coef)
        self._heap.trim()
        return found | {"perf/peak_memory_gib": self._peak_memory_gib()}

    def _train_batch(self, items: list[TrainItem], tokens: int, sequences: int) -> TrainMicroBatch:
        from trainer.learning.policy import TrainMicroBatch

        algorithm = self.config.algorithm
        lengths = torch.tensor([item.targets for item in items], dtype=torch.long)
        denominator, longest = algorithm.loss_denominator, self.config.rollout.max_tokens
        mean = "sequences" if denominator == "sequences" else "tokens"
        flat = lambda name: torch.tensor([x for item in items for x in getattr(item, name)])  # noqa: E731
        known = lambda name: not any(getattr(item, name) is None for item in items)  # noqa: E731
        return TrainMicroBatch(
            batch=self._batch(items),
            advantages=_advantages(items, lengths, algorithm.gamma),
            weights=token_weights(lengths, denominator, tokens, sequences, longest),
            shares=token_weights(lengths, mean, tokens, sequences),
            lengths=lengths,
            rollout_logprobs=flat("rollout_logprobs") if known("rollout_logprobs") else None,
            old_logprobs=flat("old_logprobs") if known("old_logprobs") else None,
            ref_logprobs=flat("ref_logprobs") if known("ref_logprobs") else None,
        )

    def _batch(self, items: list[TrainItem], path: str = "", split: str = "") -> MicroBatch:
        parts = [(item.row, item.prompt_token_ids, item.token_ids) for item in items]
        return self._collate(parts, path, split, [item.learned for item in items])

    def _collate(
        self,
        parts: list[tuple[int, list[int], list[int]]],
        path: str = "",
        split: str = "",
        learned: Sequence[Sequence[int]] = (),
    ) -> MicroBatch:
        beacon.tick()
        encoded = partial(self._prompt, path=path, split=split) if path else self._prompt
        return collate(parts, encoded, self.prompter.positions, learned)

    def _allocated(self) -> int:
        """Bytes of the GPU's tensors. vLLM's sleep takes their memory away and leaves them in torch's count."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def _forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _peak_memory_gib(self) -> float:
        if self.device.type == "cuda":
            return (torch.cuda.max_memory_allocated() - self._asleep_bytes) / 2**30
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    # --- checkpoints

    def save(self, step: int, keep: list[int], send: bool, attempt: str) -> float:
        """Starts writing this rank's shard of step `step`; returns the seconds that training stood still for it.

        keep: steps whose local files stay. send: upload it as soon as it is written. attempt: into whose folder.
        """
        started = time.monotonic()
        self.writer.start(step, self.policy.shards(self.writer.host), {}, keep, send, attempt)
        if not self.config.checkpoint.asynchronous:
            self.writer.wait()
        return time.monotonic() - started

    def send(self, step: int) -> None:
        """Starts uploading what was written of step `step`."""
        self.writer.send(step)

    def save_status(self) -> RankStatus:
        """Steps whose files are written, and uploaded; raises CheckpointError if this rank could not write."""
        return self.writer.status()

    def load(self, found: Found) -> None:
        """Reads this rank's part of a committed checkpoint, written by any number of ranks. Raises CorruptCheckpoint.

        Waits for no other rank: one whose files are damaged must not leave the others in a collective.
        """
        wait([self._fetching] if self._fetching else [])  # what came of it is on the disk; the rest is read by ranges
        self.policy.load(ShardReader(found, ranged=True).stream)

    def loaded(self, updates: int, skipped: int) -> None:
        """Resumes from the loaded checkpoint, after all ranks have loaded it."""
        self.policy.loaded(updates, skipped)


def _bytes(images: Sequence[Image.Image]) -> int:
    """Memory that decoded images take."""
    return sum(4 * image.width * image.height for image in images)  # Pillow pads RGB


def _advantages(items: list[TrainItem], lengths: torch.Tensor, gamma: float) -> torch.Tensor:
    """Of all completion tokens, [sum of lengths]."""
    if items and items[0].token_advantages is not None:
        return torch.tensor([a for item in items for a in item.token_advantages or ()])
    return discounted(torch.tensor([item.advantage for item in items]), lengths, gamma)
