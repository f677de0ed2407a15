"""The part of a worker that computes: its mirror of the weights, and the ranks of its engine, one for each of
its GPUs; rank 0, which starts the others, and, as `python -m trainer.fleet.engine_ranks CONFIG RANK`, those
others themselves.

Rank 0 tells each of them by a line on its standard input what to do next. A collective that waits would end
after some minutes, and a worker may wait for its next unit for longer. Nothing comes back: a rank that cannot
go on ends, and then the worker does. They read no mail and write nothing to the bucket; a notice of the
machine is rank 0's to answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from trainer import config as configuration
from trainer.algorithm.traces import Trace
from trainer.config import ConfigError, RunConfig, Split
from trainer.fleet.fleet_records import AboutRun, Layout, RolloutUnit
from trainer.fleet.objects import Objects
from trainer.fleet.run_follower import SeenRun
from trainer.fleet.weight_mirror import WeightMirror, fill_from_anchor, load_pretrained
from trainer.ranks.process import RankProcess
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_ERROR, EXIT_NODE_LOST
from trainer.system.processes import end_with_parent
from trainer.weights.source import Broadcast, WeightSource

MEETING = "ranks"
"""File in the worker's own folder through which its ranks find each other."""
ON_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks of an engine are on one machine, whose network has no need to reach them."""


class EnginePart:
    """One rank of the engine. Its process is made as a trainer's rank is, so that both compute the same."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        """Raises ConfigError where the machine has no GPU for the rank, or the data is damaged."""
        self.config = config
        self.ranks = config.rollout.tensor_parallel
        if config.placement.device == "cuda" and torch.cuda.device_count() < self.ranks:
            raise ConfigError(
                f"rollout.tensor_parallel is {self.ranks}, and {torch.cuda.device_count()} GPUs are visible"
                " here: give the worker as many GPUs, or set rollout.tensor_parallel to less"
            )
        self.process = RankProcess(config)
        self.process.set_rank(rank, rank, "127.0.0.1", 0)  # they meet by a file, so no port is taken
        self.reader = self.process.reader
        if self.ranks > 1:
            self._check_heads()
        self._splits: dict[Literal["train", "evaluation"], Split] = {
            "train": config.train_split,
            "evaluation": config.evaluation_split,
        }

    def _check_heads(self) -> None:
        heads = self.reader.prompter.hf_config.get_text_config().num_attention_heads
        if heads % self.ranks:
            raise ConfigError(
                f"rollout.tensor_parallel {self.ranks} does not divide the model's {heads} attention heads:"
                f" use a divisor of {heads}"
            )

    def build(self) -> None:
        """Meets the other ranks and builds the engine, without weights. Collective."""
        # Here, so that the environment is set before anything of vLLM is loaded.
        from trainer.sampling.vllm_engine import Engine

        dist.init_process_group(
            "nccl" if self.process.device.type == "cuda" else "gloo",
            store=dist.FileStore(f"{self.config.run.dir}/{MEETING}", self.ranks),
            rank=self.process.rank,
            world_size=self.ranks,
        )
        self.engine = Engine(self.config, self.reader.prompter, self.reader.images_per_prompt())

    def load(self, version: int, source: WeightSource | None) -> None:
        """Replaces the engine's weights. source: where rank 0 has them; None on every other rank.
        Collective."""
        from trainer.weights import in_process

        if source is None or self.ranks > 1:
            source = Broadcast(version, self.process.device, source)
        in_process.push_weights(source, self.engine)

    def sample(self, unit: RolloutUnit) -> list[Trace]:
        """A unit's traces, which every rank gets. Collective."""
        split = self._splits[unit.split]
        groups = self.engine.generate(
            unit.prompts,
            lambda prompt: self.reader.request(split, prompt.row),
            samples_per_prompt=unit.samples_per_prompt,
            temperature=unit.temperature,
            top_p=unit.top_p,
            max_tokens=unit.max_tokens,
        )
        return [trace for group in groups for trace in group]

    def forget_prefixes(self) -> None:
        """Other units' prefixes were computed in other batches: a unit is a function of itself alone."""
        self.engine.reset_caches()


class OtherRanks:
    """Ranks 1 and above; none where an engine is one rank."""

    def __init__(self, config: RunConfig, lost: Callable[[str, int], None]) -> None:
        """lost: is told, from a thread, why a rank has ended, and the exit code for that. Call it in the main
        thread: the kernel ends a rank when the thread that started it is gone."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lost = lost
        if config.rollout.tensor_parallel == 1:
            return
        os.environ |= ON_ONE_MACHINE
        path = Path(config.run.dir) / "worker.yaml"
        path.write_text(configuration.dump(config))
        for rank in range(1, config.rollout.tensor_parallel):
            self._start(rank, path)

    def _start(self, rank: int, path: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.fleet.engine_ranks", str(path), str(rank)],
            stdin=subprocess.PIPE,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        self._processes.append(process)
        threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        self._lost(f"rank {rank} of its engine has ended {how}", EXIT_NODE_LOST if code < 0 else code)

    def tell(self, **order: Any) -> None:
        """Tells every other rank what to do next, and returns at once."""
        line = json.dumps(order).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, and its watcher says so
                process.stdin.write(line)
                process.stdin.flush()


class EngineWorker:
    """Rank 0 of the engine, which has the only copy of the weights on the host, and the other ranks. Whatever
    may fail, rank 0 does first and alone: the others only ever take part in what no store and no bucket can
    hold up."""

    def __init__(
        self,
        config: RunConfig,
        objects: Objects,
        about: AboutRun,
        lost: Callable[[str, int], None],
        known: Callable[[str], None] = lambda device: None,
    ) -> None:
        """about: what the head says of the run. lost: see `OtherRanks`. known: called with the device before
        the model is read. Raises ConfigError where data or model are others."""
        self.part = EnginePart(config, 0)
        fingerprint = self.part.reader.datasets[config.train_split].fingerprint
        if fingerprint != about.data:
            raise ConfigError(
                f"data.path {config.data.path} holds other rows than the trainer's ({fingerprint[:12]}, not"
                f" {about.data[:12]}): give this worker the dataset that the run trains on"
            )
        known(self.device)
        self.others = OtherRanks(config, lost)
        self.model = load_pretrained(config)
        check_layout(about.layout, self.model.tensors, config.model.path)
        self.mirror = WeightMirror(
            objects,
            about.layout,
            self.model.tensors,
            partial(fill_from_anchor, self.model, config),
            config.rollout.sync_bucket_bytes,
            self.model.merged,
        )
        self.others.tell(do="build")
        self.part.build()
        self._pushed = ""
        self.out_of_step = False
        """Whether the ranks may be at different calls, as after an error within one: then none can go on."""

    def follow(self, layout: Layout) -> None:
        """Goes on with a new attempt."""
        self.mirror.layout = layout

    def take_weights(self, seen: SeenRun) -> None:
        """Fetches the newest weights into the mirror. Raises as `Mirror.to`."""
        self.mirror.to(seen.version, seen.lineage, seen.anchors)

    @property
    def device(self) -> str:
        """The GPU's name, with their number where the engine has several; or cpu."""
        name = self.part.process.device_name or "cpu"
        return name if self.part.ranks == 1 else f"{self.part.ranks}x {name}"

    def sample(self, unit: RolloutUnit, seen: SeenRun) -> tuple[list[Trace], float]:
        """A unit's traces with the weights that it asks for, and the seconds that sampling took."""
        self.mirror.to(unit.version, unit.lineage, seen.anchors)
        self.out_of_step = self.part.ranks > 1
        if self._pushed != unit.lineage:
            self._pushed = ""
            self.others.tell(do="load", version=self.mirror.version)
            self.part.load(self.mirror.version, self.mirror)
            self._pushed = unit.lineage
        else:
            self.others.tell(do="forget")
            self.part.forget_prefixes()
        began = time.monotonic()
        self.others.tell(do="sample", unit=msgspec.to_builtins(unit))
        traces = self.part.sample(unit)
        self.out_of_step = False
        traces.sort(key=lambda trace: (trace.group, trace.index))
        return traces, time.monotonic() - began


def check_layout(layout: Layout, tensors: Mapping[str, Tensor], path: str) -> None:
    """Raises ConfigError where the tensors are not those that the trainer's ranks hold."""
    for shard in layout:
        for name, _, stop in shard:
            if name not in tensors or stop > tensors[name].numel():
                raise ConfigError(
                    f"model.path {path} is another model than the trainer's: it has no {name} of that size"
                )


def follow_orders(part: EnginePart, orders: Iterable[bytes]) -> None:
    """Does what the lines say, until there are no more: then rank 0 is gone."""
    for line in orders:
        order = json.loads(line)
        match order["do"]:
            case "build":
                part.build()
            case "load":
                part.load(order["version"], None)
            case "forget":
                part.forget_prefixes()
            case "sample":
                part.sample(msgspec.convert(order["unit"], RolloutUnit))


def main() -> NoReturn:
    """Command line; ends the process with the exit code that becomes the worker's, its engine still there. An
    engine that is taken down waits for the other ranks: rank 0 would not hear that this one has failed."""
    config, rank = Path(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGTERM, signal.SIGINT):  # a terminal and some platforms send them to all
        signal.signal(number, signal.SIG_IGN)
    code = EXIT_ERROR
    try:
        follow_orders(EnginePart(configuration.load(config), rank), sys.stdin.buffer)
    except ConfigError as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr, flush=True)
        code = EXIT_CONFIG
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
