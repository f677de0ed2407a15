"""A call that fails is made again a few times, with growing waits."""

from __future__ import annotations

import pytest

from trainer.system.backoff import Backoff

QUICK = Backoff(attempts=3, first_wait_s=0.001)


class Flaky:
    """Fails a number of times, then answers."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise ConnectionError(f"failure {self.calls}")
        return "well"


def test_a_call_that_recovers_gives_its_result_and_tells_each_failure():
    action, told = Flaky(2), []
    answer = QUICK.call(action, lambda error: True, lambda error, n, wait_s: told.append((str(error), n)))
    assert answer == "well" and told == [("failure 1", 1), ("failure 2", 2)]


def test_the_last_failure_is_raised():
    action = Flaky(9)
    with pytest.raises(ConnectionError, match="failure 3"):
        QUICK.call(action, lambda error: True)
    assert action.calls == 3


def test_what_cannot_pass_is_raised_at_once():
    action = Flaky(9)
    with pytest.raises(ConnectionError, match="failure 1"):
        QUICK.call(action, lambda error: not isinstance(error, ConnectionError))


def test_waits_double_up_to_the_longest_and_vary():
    backoff = Backoff(attempts=9, first_wait_s=1.0, max_wait_s=5.0)
    for failures, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (8, 5.0)):
        waits = {backoff.wait_s(failures) for _ in range(20)}
        assert len(waits) > 1 and longest / 2 <= min(waits) and max(waits) <= longest
