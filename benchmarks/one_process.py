"""A run of one rank in the driver's own process, without Ray: `python -m benchmarks.one_process CONFIG`.

For benchmarks of what is learned, on machines where Ray takes longer to start than it waits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.servers import free_port
from trainer import config as c
from trainer.observe import beacon
from trainer.ranks.environment import rank_environment
from trainer.ranks.process import RankProcess
from trainer.ranks.ranks import Ranks


class OwnProcess(Ranks):
    """One rank, which is this process."""

    world_size = 1

    def __init__(self, config: c.RunConfig) -> None:
        self.process = RankProcess(config)

    def start(self) -> None:
        self.process.set_rank(0, 0, "127.0.0.1", free_port())

    def each(self, method: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        (own,) = arguments
        return [self.process.call(method, *own)]  # ty: ignore[invalid-argument-type]

    def first(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.each(method, [args])[0]

    def stream(self, method: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        (own,) = arguments
        return self.process.stream(method, *own)  # ty: ignore[invalid-argument-type]

    def stop(self) -> None:
        pass


def run(config: c.RunConfig) -> None:
    """Makes a run, or goes on with it, in a process of its own; raises SystemExit with the end of its log."""
    path = Path(f"{config.run.dir}.yaml")
    path.write_text(c.dump(config))
    log = Path(f"{config.run.dir}.log")
    with open(log, "a") as written:
        command = [sys.executable, "-m", "benchmarks.one_process", str(path)]
        env = os.environ | rank_environment(config)
        code = subprocess.run(command, env=env, stdout=written, stderr=written).returncode
    if code:
        raise SystemExit(f"the run of {path} ended with {code}\n{log.read_text()[-3000:]}")


def main() -> None:
    config = c.load(sys.argv[1])
    c.validate(config)
    from trainer.loops import grpo, sft  # DeepSpeed reads the environment, which `run` sets
    from trainer.run.session import Session

    loop = sft if config.method == "sft" else grpo
    beacon.start_driver()
    with Session(config, loop.total_updates, OwnProcess(config)) as session:
        loop.train(config, session)


if __name__ == "__main__":
    main()
