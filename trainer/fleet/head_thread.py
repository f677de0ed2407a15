"""The head's thread: a round a second, and patience with a store that is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from trainer.system.errors import StorageError, StoreRefused


class HeadThread:
    """Calls a round again and again, until it is told to stop or the round raises."""

    def __init__(
        self,
        play_round: Callable[[], None],
        store_is_back: Callable[[], None],
        changed: threading.Condition,
        *,
        poll_s: float,
        wait_s: float,
        say: Callable[[str], None],
    ) -> None:
        """poll_s: seconds between two rounds. wait_s: how long the store may be away. changed: notified when
        the thread ends with an error."""
        self._play_round, self._store_is_back = play_round, store_is_back
        self._changed = changed
        self._poll_s, self._wait_s = poll_s, wait_s
        self._say = say
        self.error: Exception | None = None
        """What ended the thread."""
        self.stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-head", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Begins the next round at once."""
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread after its round, and waits for that."""
        self.stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def check(self) -> None:
        """Raises what ended the thread."""
        if self.error is not None:
            raise self.error

    def fail(self, error: Exception) -> None:
        """Lets `check` raise an error from now on."""
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def _run(self) -> None:
        away_since: float | None = None
        served = False
        while True:
            self._wake.wait(self._poll_s)
            self._wake.clear()
            if self.stopping.is_set():
                return None
            try:
                self._play_round()
                served = True
                if away_since is not None:
                    self._store_is_back()
                    self._say(f"the store is back after {time.monotonic() - away_since:.0f} s")
                    away_since = None
            except (StorageError, StoreRefused) as error:  # Storage has tried it for minutes
                if isinstance(error, StoreRefused) and not served:
                    return self.fail(error)
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > self._wait_s:
                    return self.fail(error)
                self._say(f"{error}; workers go on with what they have")
            except Exception as error:
                return self.fail(error)
