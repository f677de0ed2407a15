"""The process around a loop: its command line, its Ray cluster, its exit code."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from trainer import config as configuration
from trainer.checkpoint.attempt import AttemptFenced, RunIsFinal
from trainer.config import ConfigError, RunConfig
from trainer.node.launch import ray_client
from trainer.node.preflight.precheck import precheck
from trainer.node.watch.run_lock import LAUNCHER_VARIABLE, die_with_launcher
from trainer.observe import beacon
from trainer.ranks.ray_ranks import RayRanks
from trainer.run.saving import Preempted
from trainer.run.session import Session
from trainer.system import last_words
from trainer.system.errors import OF_THE_DISK, RayError, StorageError, describe_disk_error
from trainer.system.exit_codes import (
    EXIT_CONFIG,
    EXIT_ERROR,
    EXIT_FENCED,
    EXIT_NODE_LOST,
    EXIT_PREEMPTED,
    EXIT_RAY,
    EXIT_STORAGE,
)

DEAD = (
    ray.exceptions.ActorDiedError,
    ray.exceptions.ActorUnavailableError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
    ConnectionError,
)

LOW_ON_MEMORY = "running low on memory"
"""What Ray says where it has ended a process itself because its machine's memory was nearly full."""


def main(train: Callable[[RunConfig, Session], None], total_updates: Callable[[RunConfig, int], int]) -> None:
    """Command line of a loop: `--config run.yaml`. Exits with a code of trainer/system/exit_codes.py."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--config", required=True, help="resolved configuration of the run (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one value")
    arguments = parser.parse_args()
    code = _run(train, total_updates, arguments.config, arguments.set)
    if code == EXIT_PREEMPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the interpreter takes seconds to tear down torch, and the notice is running out
    sys.exit(code)


def _run(train: Any, total_updates: Any, path: str, overrides: list[str]) -> int:
    session: Session | None = None
    try:
        config = configuration.override(configuration.load(path), overrides)
        configuration.validate(config)
        beacon.start_driver()
        precheck(config)
        check_device(config)
        check_launcher(config)
        die_with_launcher()
        connect_ray(config)
        session = Session(config, total_updates)
        with session:
            try:
                train(config, session)
            except Preempted as notice:
                session.saving.flush()
                session.mark("interrupted" if session.saving.notice.reason == "interrupted" else "preempted")
                step = session.checkpoints.progress.committed or 0
                print(f"stopping: {notice}; the run resumes from step {step}", file=sys.stderr, flush=True)
                return session.saving.notice.exit_code
        return 0
    except KeyboardInterrupt:
        if session is not None:
            session.mark("interrupted")
        return 130
    except Exception as error:
        code, text = explain_error(error, session.ranks if session else None)
        print(text, file=sys.stderr, flush=True)
        if session is not None:
            session.mark("fenced" if code == EXIT_FENCED else "failed")
        return code
    finally:
        if ray.is_initialized():
            ray.shutdown()
        if session is not None:
            session.saving.notice.close()  # last: until here it ends the process before the provider does


def explain_error(error: Exception, ranks: RayRanks | None = None) -> tuple[int, str]:
    """Exit code and what to print: one line for what a person can change, the traceback for a defect."""
    if isinstance(error, AttemptFenced):
        return EXIT_FENCED, f"error: {error}"
    if isinstance(error, RunIsFinal):
        return error.code, f"error: {error}"
    if isinstance(error, ConfigError):
        message = str(getattr(error, "cause", None) or error).strip()
        return EXIT_CONFIG, f"error: {message}"
    cause = getattr(error, "cause", None) or error  # what a rank raised
    disk = isinstance(cause, OSError) and cause.errno in OF_THE_DISK
    if isinstance(error, StorageError) or disk:
        return EXIT_STORAGE, f"error: {describe_disk_error(cause) if disk else cause}"
    if isinstance(error, DEAD):
        text = str(error)
        who = ranks.named(text) if ranks else ""
        why = (text.splitlines() or ["no reason given"])[0]
        if who and LOW_ON_MEMORY in text:
            why = f"out of memory: Ray ended it. {last_words.SEE}"
        elif who and ranks:
            why = ranks.cause(text)
        return EXIT_NODE_LOST, f"error: a rank or node was lost: {f'{who}: ' if who else ''}{why}"
    infrastructure = RayError | ray.exceptions.LocalRayletDiedError | ray.exceptions.RuntimeEnvSetupError
    if isinstance(error, infrastructure):
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return (
            EXIT_RAY,
            f"error: {line}: the machine is too busy, or Ray is broken on it; start the run again",
        )
    return EXIT_ERROR, "".join(traceback.format_exception(error))


def check_device(config: RunConfig) -> None:
    """Raises ConfigError where torch does not see the GPU that the run asks for."""
    if config.placement.device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"placement.device is cuda and torch sees no GPU: install a driver for CUDA {torch.version.cuda}"
            " or newer (nvidia-smi shows which the one here is for), or set placement.device=cpu"
        )


def check_launcher(config: RunConfig) -> None:
    """Raises ConfigError where nothing has started the workers of `fleet.gpus_per_node`, for which the run
    would wait."""
    own = config.fleet.gpus_per_node
    if own and LAUNCHER_VARIABLE not in os.environ:
        raise ConfigError(
            f"fleet.gpus_per_node is {own}, and a node's launcher alone starts these workers: start the run"
            " with `python -m trainer.node --config FILE`, or set fleet.gpus_per_node to 0 and start"
            " `python -m trainer.fleet.worker` yourself"
        )


def connect_ray(config: RunConfig) -> None:
    """Joins the Ray cluster at RAY_ADDRESS, or starts one on this machine. Raises RayError."""
    common: dict[str, Any] = {
        "log_to_driver": bool(os.environ.get("SPOTRL_WORKER_LOGS")),
        "logging_level": "WARNING",
    }
    # A rank imports what this process can; Ray would give it a variable in place of its machine's own.
    paths = [str(Path(__file__).resolve().parents[2])]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    common["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}
    if not os.environ.get("RAY_ADDRESS"):
        # Ray's own 15 is for background work; training is not
        os.environ.setdefault("RAY_worker_niceness", "0")
        cpus = config.placement.workers_per_node * config.placement.threads_per_worker
        common |= {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
        if config.placement.device == "cpu":
            common["num_gpus"] = 0
    ray_client.connect_to_ray(**common)
