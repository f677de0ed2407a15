"""The signals that ask a process of a run to end: SIGTERM is a preemption notice, SIGINT is Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from trainer.system.exit_codes import EXIT_INTERRUPTED, EXIT_PREEMPTED

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Which of them came first, and whether Ctrl-C came again. Only for the main thread.

    Nothing ends by itself: who holds this decides what to do, between two pieces of its work.
    """

    def __init__(
        self, grace_s: dict[signal.Signals, float], on_signal: Callable[[Signals], None] | None = None
    ) -> None:
        """grace_s: seconds after the first signal, by its number, until `expired`.

        on_signal: called after every signal, inside its handler.
        """
        self.number: signal.Signals | None = None
        """The first one; None before it."""
        self.again = False
        """Whether Ctrl-C came after it."""
        self.deadline = float("inf")
        """When the time after the first one is over, on the monotonic clock."""
        self._grace_s = grace_s
        self._on_signal = on_signal
        self._previous = {number: signal.signal(number, self._came) for number in NUMBERS}

    @property
    def code(self) -> int:
        """The exit code for the first signal; that of a preemption before it."""
        return EXIT_INTERRUPTED if self.number == signal.SIGINT else EXIT_PREEMPTED

    @property
    def expired(self) -> bool:
        """Whether the time after the first signal is over, or Ctrl-C came again."""
        return self.again or time.monotonic() > self.deadline

    def close(self) -> None:
        """Puts the former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _came(self, number: int, frame: object) -> None:
        if self.number is None:
            self.number = signal.Signals(number)
            self.deadline = time.monotonic() + self._grace_s[self.number]
        elif number == signal.SIGINT:
            self.again = True
        if self._on_signal:
            self._on_signal(self)
