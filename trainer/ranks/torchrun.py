"""The ranks where torchrun has started one process per rank, without Ray: rank 0 drives, the others do as it
asks.

Calls and results go through torchrun's own store; what the ranks compute goes through their collectives, as
ever.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from trainer import config as configuration
from trainer.checkpoint.failures import CheckpointError
from trainer.config import ConfigError, RunConfig, fingerprint
from trainer.config.resume import resume_view
from trainer.data.dataset import Dataset
from trainer.ranks.environment import rank_environment
from trainer.ranks.heartbeat import Heartbeat
from trainer.ranks.process import RankProcess
from trainer.ranks.ranks import Ranks
from trainer.system import last_words, network
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_NODE_LOST

P = ParamSpec("P")
R = TypeVar("R")

LOOK_S = 0.1
"""Longest pause between two looks into the store."""
LOAD_S = 1800.0
"""How long a collective waits while models load, and the ranks are far apart."""
STEP_S = 600.0
"""How long one waits in a step. A host that vanishes is named long before (heartbeat.py)."""
MEET_S = 60.0
"""Until when the master must answer, and every rank or node must have come."""
NAMED = 3
"""Options that are named of those that differ."""
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PACKAGES = ("torch", "transformers", "deepspeed", "peft")


def started_by_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class SharedStore:
    """A store that all ranks (or nodes) share. Waiting in it lets signals through."""

    def __init__(self, inner: Any, rank: int, world: int) -> None:
        self.inner = inner
        self.rank = rank
        self.world = world
        self.heartbeat: Heartbeat | None = None

    def put(self, key: str, value: Any) -> None:
        """Any value that can be pickled."""
        self.inner.set(key, pickle.dumps(value))

    def look(self, key: str, timeout_s: float = math.inf) -> Any:
        """The value, once it is there. Raises TimeoutError."""
        end, pause = time.monotonic() + timeout_s, 0.001
        while not self.inner.check([key]):  # its own wait logs two lines whenever a timeout passes
            if time.monotonic() > end:
                raise TimeoutError(key)
            time.sleep(pause)
            pause = min(1.5 * pause, LOOK_S)
        return pickle.loads(self.inner.get(key))

    def take(self, key: str) -> Any:
        """The same, and removes it."""
        value = self.look(key)
        self.inner.delete_key(key)
        return value


def join_ranks(config: RunConfig) -> SharedStore:
    """The store of the ranks that torchrun has started, after `meet`. Before anything asks for a GPU.

    Raises ConfigError, in one line, for missing variables and for a world that is not that of the
    configuration.
    """
    if missing := [name for name in VARIABLES if name not in os.environ]:
        raise ConfigError(
            f"torchrun has not set {', '.join(missing)}: start with `torchrun ... -m trainer.loops.sft`"
        )
    place = config.placement
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    if config.method != "sft":
        raise ConfigError(
            "torchrun starts method sft only: GRPO's engines are placed by Ray, use `python3 launch.py up`"
        )
    if (world, local) != (place.world_size, place.workers_per_node):
        raise ConfigError(
            f"torchrun has started {world} ranks, {local} on this node, and placement is {place.nodes} nodes"
            f" x {place.workers_per_node}: make --nnodes and --nproc-per-node the same as placement"
        )
    os.environ |= rank_environment(config)
    with _said_in_a_line(f"rank {rank}", os.environ["MASTER_PORT"]):
        inner, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=MEET_S))))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = SharedStore(dist.PrefixStore(f"spotrl/{restart}", inner), rank, world)
    meet_others(store, config, "rank")
    places = []
    for other in range(world):
        of_other = store.look(f"facts/{other}/1")
        places.append((of_other["host"], of_other["address"]))
    host, address = places[rank]
    os.environ |= network.shared_variables(address, host, places, os.environ)
    hosts = [name for name, _ in places]
    store.heartbeat = Heartbeat(store.inner, rank, hosts).start()
    return store


@contextlib.contextmanager
def _said_in_a_line(who: str, port: str | int) -> Generator[None]:
    """Turns what torch says of a master that does not answer into one line."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        raise _no_answer(who, port, str(error).splitlines()[0]) from None


def _no_answer(who: str, port: str | int, reason: str) -> ConfigError:
    return ConfigError(
        f"{who} on {socket.gethostname()} got no answer from the master at"
        f" {os.environ['MASTER_ADDR']}:{port} ({reason}): start node 0, open the port, and give all nodes"
        " its MASTER_ADDR and MASTER_PORT"
    )


def meet_others(store: SharedStore, config: RunConfig, kind: str, wait_s: float = MEET_S) -> None:
    """Meets all others, and compares what they stand on. kind: "rank" or "node", for what is said.

    Raises ConfigError, on all of them, with one line on the first thing that is wrong: one that came twice,
    some that did not come within `wait_s`, other data, packages, configuration or GPUs.
    """
    times, facts = store.inner.add(f"start/{store.rank}", 1), rank_facts(config)
    store.put(f"facts/{store.rank}/{times}", facts)
    if times > 1:
        raise ConfigError(
            f"{kind} {store.rank} on {facts['host']} was started before: give every node its own NODE_RANK"
        )
    if store.rank == 0:
        store.put("verdict", disagreement(store, kind, wait_s))
    try:
        verdict = store.look("verdict", 2 * wait_s)
    except TimeoutError:
        verdict = f"{kind} 0 said nothing for {2 * wait_s:.0f} s: look at its output"
    store.inner.add("read", 1)
    end = time.monotonic() + 5.0
    while store.rank == 0 and store.inner.add("read", 0) < store.world and time.monotonic() < end:
        time.sleep(0.05)  # its process may hold the store
    if verdict:
        raise ConfigError(verdict)


def rank_facts(config: RunConfig) -> dict[str, Any]:
    """What must be equal everywhere, and where this is."""
    try:
        data = Dataset(config.data.path, config.data.split).fingerprint[:12]
    except (ConfigError, OSError) as error:
        data = f"none ({error})"
    gpu = ""
    if config.placement.device == "cuda":
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    facts = {"host": socket.gethostname(), "data": data, "packages": packages, "GPU": gpu}
    try:
        facts["address"] = network.route_address(os.environ["MASTER_ADDR"])
    except (KeyError, OSError):  # nobody else needs it where all are on this host
        facts["address"] = "127.0.0.1"
    return facts | {"configuration": fingerprint(config)[:12], "options": resume_view(config)}


def disagreement(store: SharedStore, kind: str, wait_s: float) -> str:
    """What is wrong, in one line; empty: nothing. On rank or node 0."""
    end = time.monotonic() + wait_s
    come: dict[int, dict[str, Any]] = {}
    while len(come) < store.world and time.monotonic() < end:
        for rank in range(store.world):
            if rank not in come and store.inner.check([f"facts/{rank}/1"]):
                come[rank] = store.look(f"facts/{rank}/1")
            if rank in come and store.inner.check([f"facts/{rank}/2"]):
                hosts = f"on {come[rank]['host']} and on {store.look(f'facts/{rank}/2')['host']}"
                return f"{kind} {rank} was started twice, {hosts}: give every node a NODE_RANK of its own"
        time.sleep(0.05)
    absent = sorted(set(range(store.world)) - come.keys())
    if absent:
        which = ", ".join(map(str, absent))
        return f"no word from {kind} {which} within {wait_s:.0f} s: start it, or look at its output"
    for rank, facts in come.items():
        for what in ("data", "packages", "configuration", "GPU"):
            if facts[what] != come[0][what]:
                if what == "configuration":
                    return _other_options(f"{kind} {rank} on {facts['host']}", facts, kind, come[0])
                return (
                    f"{what} differs: {kind} {rank} on {facts['host']} has {facts[what]}, {kind} 0 on "
                    f"{come[0]['host']} has {come[0][what]}: make them the same"
                )
    return ""


def _other_options(who: str, facts: dict[str, Any], kind: str, first: dict[str, Any]) -> str:
    """The options that differ from those of rank or node 0, with both values."""
    theirs = facts["options"]
    ours = first["options"]
    different = []
    for key in sorted(theirs.keys() | ours.keys()):
        if theirs.get(key) != ours.get(key):
            different.append(f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here")
    shown = "; ".join(different[:NAMED])
    more = f" and {len(different) - NAMED} more" if len(different) > NAMED else ""
    return (
        f"configuration differs: {who} has other options than {kind} 0 on {first['host']}: "
        f"{shown}{more}: give all nodes the same file"
    )


class TorchrunRanks(Ranks):
    """Rank 0's own process and the others, which `serve`."""

    def __init__(self, config: RunConfig, store: SharedStore) -> None:
        self.config, self.store = config, store
        self.process = RankProcess(config)
        self.world_size = store.world
        self.calls = 0

    def start(self) -> None:
        master = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        per_node = self.config.placement.workers_per_node
        meetings = []
        for rank in range(self.world_size):
            meetings.append((rank, rank % per_node, master, port))
        self.each(RankProcess.set_rank, meetings)

    def each(self, method: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> list[R]:
        self.calls += 1
        for rank in range(1, self.world_size):
            self.store.put(f"call/{self.calls}/{rank}", (method, arguments[rank]))
        results = [_called(self.process, method, arguments[0], self.store.heartbeat)]
        for rank in range(1, self.world_size):
            results.append(self.store.take(f"result/{self.calls}/{rank}"))
        for result in results:
            if isinstance(result, CheckpointError):
                raise result
        return results

    def first(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return _called(self.process, method, args, self.store.heartbeat)

    def stream(self, method: Callable[..., Iterator[R]], arguments: Sequence[tuple[Any, ...]]) -> Iterator[R]:
        raise ConfigError(
            "torchrun's ranks return whole results only: rollouts are started by Ray, use"
            " `python3 launch.py up`"
        )

    def stop(self) -> None:
        """Lets the other ranks end."""
        for rank in range(1, self.world_size):
            self.store.put(f"call/{self.calls + 1}/{rank}", None)
        if self.store.heartbeat:
            self.store.heartbeat.stop()


def serve_rank(config: RunConfig, store: SharedStore) -> None:
    """Every rank but 0: does as rank 0 asks, until it is told to end. A notice is rank 0's to act on."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    process = RankProcess(config)
    call = 1
    while (request := store.take(f"call/{call}/{store.rank}")) is not None:
        method, arguments = request
        store.put(f"result/{call}/{store.rank}", _called(process, method, arguments, store.heartbeat))
        call += 1
    if store.heartbeat:
        store.heartbeat.stop()


def _called(
    process: RankProcess, method: Any, arguments: tuple[Any, ...], heartbeat: Heartbeat | None
) -> Any:
    """The result, or a CheckpointError, which is rank 0's to handle; all ranks end after any other error, and
    the others say which rank it was."""
    try:
        return process.call(method, *arguments)
    except CheckpointError as error:
        return error
    except Exception as error:
        if heartbeat and is_collective(error):
            heartbeat.wait_for_cause()
        if heartbeat:
            heartbeat.failed((str(error).splitlines() or [type(error).__name__])[0])
        raise


def is_collective(error: Exception) -> bool:
    """Whether an error only says that another rank has left a collective."""
    message = str(error).lower()
    return isinstance(error, dist.DistError) or "gloo" in message or "connection closed by peer" in message


def main() -> int:
    """`python -m trainer.ranks.torchrun --config run.yaml`: checks the nodes by NNODES, NODE_RANK,
    MASTER_ADDR and MASTER_PORT, before torchrun, which would wait for minutes for one that never comes.
    Returns the exit code."""
    parser = argparse.ArgumentParser(description=(main.__doc__ or "").partition(": ")[2])
    parser.add_argument("--config", required=True, help="resolved configuration of the run (YAML)")
    parser.add_argument(
        "--wait", type=float, default=MEET_S, help="seconds for all nodes to come (%(default)s)"
    )
    parser.add_argument(
        "--start", type=int, default=0, metavar="N", help="then start N ranks here with torchrun"
    )
    options = parser.parse_args()
    try:
        needed = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if name not in os.environ]
        if missing:
            raise ConfigError(f"{', '.join(missing)} not set: give every node the same, but for NODE_RANK")
        node = int(os.environ["NODE_RANK"])
        nodes = int(os.environ["NNODES"])
        port = int(os.environ["MASTER_PORT"])
        config = configuration.load(options.config)
        if not 0 <= node < nodes or nodes != config.placement.nodes:
            raise ConfigError(
                f"NODE_RANK {node} of NNODES {nodes}, and placement.nodes is {config.placement.nodes}"
            )
        if node:
            _await_master(f"node {node}", port + 1, options.wait)
        with _said_in_a_line(f"node {node}", port + 1):
            inner = dist.TCPStore(
                os.environ["MASTER_ADDR"], port + 1, None, node == 0, timedelta(seconds=options.wait), False
            )
        meet_others(SharedStore(inner, node, nodes), config, "node", options.wait)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return start_ranks(options.config, options.start) if options.start else 0


def _await_master(who: str, port: int, wait_s: float) -> None:
    """Waits until the master's port is open. torch's own client would print 55 lines before it fails."""
    end, reason = time.monotonic() + wait_s, "no answer"
    while time.monotonic() < end:
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=2.0).close()
            return
        except OSError as error:
            reason = str(error)
            time.sleep(0.2)
    raise _no_answer(who, port, reason)


def start_ranks(config: str, ranks: int) -> int:
    """This node's part of the run, under torchrun in this process. Returns the code of the rank that failed
    first, after one line in place of torchrun's 60."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    memory_kills = last_words.memory_kills()
    logging.disable(logging.CRITICAL)  # the agent's own; the ranks are processes of their own
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    given = {
        "nnodes": "NNODES",
        "node-rank": "NODE_RANK",
        "master-addr": "MASTER_ADDR",
        "master-port": "MASTER_PORT",
    }
    words = [f"--{name}={os.environ[variable]}" for name, variable in given.items()]
    words += [f"--nproc-per-node={ranks}", "-m", "trainer.loops.sft", "--config", config]
    try:
        run.main(words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"with code {code}" if code > 0 else f"by signal {-code}"
        if -code == signal.SIGKILL:
            how += f" ({last_words.cause_outside_log(memory_kills)})"
        print(
            f"error: rank {rank} on {socket.gethostname()} ended {how}: the lines above say why, if any do",
            file=sys.stderr,
        )
        return code if code > 0 else EXIT_NODE_LOST
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
