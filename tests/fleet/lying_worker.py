"""`trainer.fleet.worker` with an engine that holds other weights than it says: each is 5% larger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.fleet import worker


class Scaled:
    """A source of the weights of another, all scaled."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.version = source.version

    def groups(self) -> Iterator[list[tuple[str, Any]]]:
        for group in self.source.groups():
            yield [(name, 1.05 * tensor) for name, tensor in group]


def lie() -> None:
    """Loaded late, as the worker itself does."""
    from trainer.weights import in_process

    push = in_process.push_weights
    in_process.push_weights = lambda source, engine: push(Scaled(source), engine)


class LyingWorker(worker.Worker):
    """Lies once its engine is there."""

    def _loop(self, engine: Any) -> int:
        lie()
        return super()._loop(engine)


if __name__ == "__main__":
    worker.Worker = LyingWorker
    worker.main()
