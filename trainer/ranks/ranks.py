"""How the driver calls its ranks: one method on all of them, at once. Ray and torchrun are two ways to do
so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Ranks(ABC):
    """All ranks of a run. A method is named by its function, such as `LearnerPart.update`; it is called on
    every rank.

    Most methods are collective: inside them the ranks wait for each other, so they are never called on a few
    ranks. An exception on one rank is raised here.
    """

    world_size: int

    @abstractmethod
    def start(self) -> None:
        """Tells every rank its number and where rank 0 is (`RankProcess.set_rank`)."""

    @abstractmethod
    def each(self, method: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> list[R]:
        """Calls `method(*arguments[rank])` on every rank; returns the results by rank."""

    @abstractmethod
    def first(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a method that is not collective on rank 0 alone."""

    @abstractmethod
    def stream(self, method: Callable[..., Iterator[R]], arguments: Sequence[tuple[Any, ...]]) -> Iterator[R]:
        """Starts a generator method on every rank at once. The iterator yields results in the order in
        which the ranks yield them."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the ranks."""

    def all(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Calls `method(*args)` on every rank; returns the results by rank."""
        assert not kwargs, "arguments travel to the ranks by position"
        return self.each(method, [args] * self.world_size)

    def named(self, message: str) -> str:
        """The rank that an error message about a dead process refers to; empty if it refers to none."""
        return ""

    def cause(self, message: str) -> str:
        """Why that process died, in one line; empty if the message refers to no rank."""
        return ""
