"""One rank: the process of one GPU (or of a share of the CPU), and the parts of the trainer that live in
it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
import torch

from trainer.config import RunConfig, Split
from trainer.config.schema import SHARED_BY
from trainer.data.reader import RowReader
from trainer.observe import beacon
from trainer.observe.step_profile import RankProfile, Recorder
from trainer.ranks import cpu_matmul
from trainer.ranks.environment import device_position
from trainer.system import last_words

T = TypeVar("T")


def threads_of_a_gpu(config: RunConfig) -> int:
    """A rank's share of the cores that its node gives to this run. Ray would leave it one thread for images,
    for copies to the host, and for Adam where that is on the host."""
    sharing = max(config.processes_per_node, int(os.environ.get(SHARED_BY, "0")))
    return max(1, len(os.sched_getaffinity(0)) // sharing)


@dataclass(frozen=True, order=True)
class RankPlace:
    """Where a rank runs. The driver sorts ranks by it."""

    address: str
    """The node's."""
    position: int
    """torch's index of the rank's GPU; on a CPU the process id."""
    port: int
    """A free one."""
    pid: int
    node: str
    """Ray's id of the node."""
    log: str
    """Path of what the process prints; "" where that is no file."""
    memory_kills: int | None
    """`last_words.memory_kills` when it started."""


class RankProcess:
    """What one rank holds. The driver reaches it through `RayRanks`, which calls the methods of its parts. A
    part is any class whose constructor takes the process. It is made at its first use and lives as long as
    the process: `LearnerPart` holds the policy, `SamplerPart` the rollout engine."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.device = torch.device(config.placement.device)
        self.rank = 0
        self.reader = RowReader(config)
        self._parts: dict[type, Any] = {RankProcess: self}
        self._recorder: Recorder | None = None
        if self.device.type == "cpu":
            torch.set_num_threads(config.placement.threads_per_worker)
            self._matmul = cpu_matmul.install_matmul()

    def part(self, kind: type[T]) -> T:
        """The process's only instance of a part."""
        if kind not in self._parts:
            self._parts[kind] = kind(self)  # ty: ignore[too-many-positional-arguments]
        return self._parts[kind]

    def call(self, method: FunctionType, *args: Any) -> Any:
        """Calls a method of a part, such as `LearnerPart.update`."""
        self._take_device()
        return getattr(self.part(owner_of_method(method)), method.__name__)(*args)

    def stream(self, method: FunctionType, *args: Any) -> Iterator[Any]:
        """Calls a method of a part that yields its results one by one."""
        self._take_device()
        yield from getattr(self.part(owner_of_method(method)), method.__name__)(*args)

    def _take_device(self) -> None:
        """Selects this rank's GPU in the current thread. A new thread starts with the machine's first GPU,
        and Ray decides which thread makes a call."""
        if self.device.index is not None:
            torch.cuda.set_device(self.device)

    # --- meeting the other ranks

    def where(self) -> RankPlace:
        """Where this rank runs."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket() as s:
            s.bind((address, 0))
            port = s.getsockname()[1]
        here = ray.get_runtime_context()
        gpus = here.get_accelerator_ids().get("GPU", [])
        at = device_position(gpus[0], os.environ) if gpus else os.getpid()
        log = os.readlink("/proc/self/fd/2")
        log = log if os.path.isfile(log) else ""
        return RankPlace(address, at, port, os.getpid(), here.get_node_id(), log, last_words.memory_kills())

    def set_rank(self, rank: int, local_rank: int, master: str, port: int) -> None:
        """Gives this process its rank, before DeepSpeed or vLLM is loaded. local_rank: position of the rank's
        GPU among those that this process sees."""
        # A signal that ends this process leaves the Python and the C++ stacks of all threads in its log.
        # Python's are first, since what is set last is called first: writing the others takes long, and
        # another thread that dies meanwhile ends it.
        faulthandler.disable()
        torch._C._set_print_stack_traces_on_fatal_signal(True)
        faulthandler.enable(all_threads=True)
        beacon.start_beacon(rank)  # before DeepSpeed and vLLM bind torch.distributed's functions
        self.rank = rank
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(port),
        }
        if self.device.type == "cuda":
            torch.cuda.set_device(local_rank)
            self.device = torch.device("cuda", local_rank)
            torch.set_num_threads(threads_of_a_gpu(self.config))
            if self.config.run.deterministic == "cuda":
                torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(self.config.run.seed)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.config.placement.world_size

    @cached_property
    def device_name(self) -> str:
        """The GPU's name; empty on CPU."""
        return torch.cuda.get_device_name() if self.device.type == "cuda" else ""

    def allocated_bytes(self) -> int:
        """Bytes of the tensors on the GPU. vLLM's sleep mode frees their memory, but torch goes on
        counting it."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    # --- rows

    def processor_fingerprint(self) -> str:
        """A hash of the model's processor. Processors with the same hash give the same lengths."""
        return self.reader.prompter.fingerprint()

    def opening(self) -> str:
        """The first characters of every reply, where the chat template writes them itself."""
        return self.reader.prompter.opening

    def lengths(self, split: Split, start: int, stop: int) -> np.ndarray:
        """`RowReader.lengths`. Needs neither model nor engine."""
        return self.reader.lengths(split, start, stop)

    # --- the profile of one step

    def record(self, step: int) -> None:
        """Records the calls that follow, until `recorded`."""
        self._recorder = Recorder(self.config, step, self.rank)

    def recorded(self) -> RankProfile:
        """Ends the recording and pushes its files to the bucket."""
        assert self._recorder is not None
        taken, self._recorder = self._recorder.push(), None
        return taken

    @contextlib.contextmanager
    def recording(self, name: str) -> Generator[None]:
        """Records the body under this name, if a profile was asked for."""
        with self._recorder(name) if self._recorder else contextlib.nullcontext():
            yield


def owner_of_method(method: FunctionType) -> type:
    """The class that defines a method."""
    name = method.__qualname__.rpartition(".")[0]
    return getattr(sys.modules[method.__module__], name)
