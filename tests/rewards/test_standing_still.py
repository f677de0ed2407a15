"""What a run sees of graders that stand still, and of a reward function that loops, prints or leaks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest

from trainer import config
from trainer.hardware import host_memory
from trainer.rewards import process_pool
from trainer.rewards.scorer import Scorer
from trainer.system import process_set

FUNCTION = """
import time
held = []
def reward(text, reference, answer_type):
    while text == "prints":
        print("x" * 1000)
    while text.startswith("swells"):
        held.append(bytearray(b"1") * (16 << 20))
        time.sleep(0.01)
    if text == "leaks":
        held.append(bytearray(b"1") * (48 << 20))
    return 1.0
"""


@pytest.fixture
def own(tmp_path):
    """Settings of a reward function of one's own, with a deadline of four seconds."""
    (tmp_path / "own.py").write_text(FUNCTION)
    spec = f"{tmp_path}/own.py:reward"
    return config.Rewards(function=spec, workers=1, deadline_s=4.0, max_timeout_rate=0.6, max_error_rate=0.6)


def timed(scorer: Scorer, *texts: str) -> tuple[list[str], float]:
    began = time.monotonic()
    outcomes = scorer.score(texts, ["1"] * len(texts), ["math"] * len(texts))
    seconds = time.monotonic() - began
    print(f"{texts[0]}: {seconds:.1f} s", file=sys.stderr)
    return [outcome.verdict for outcome in outcomes], seconds


def test_a_function_that_prints_without_end_is_cut_off(own, capfd):
    with Scorer(own) as scorer:
        verdicts, seconds = timed(scorer, "prints", "fine")
    assert verdicts == ["timeout", "correct"] and seconds < 40
    said = capfd.readouterr().err
    assert "rewards.function prints more; the rest is dropped" in said
    assert len(said) < 2 * process_set.OUTPUT_BYTES


def test_a_function_that_leaks_is_started_again(own, capfd, monkeypatch):
    monkeypatch.setattr(process_pool, "LEAK_BYTES", 128 << 20)
    with Scorer(own) as scorer:
        for _ in range(8):
            assert timed(scorer, "leaks")[0] == ["correct"]
        assert scorer.stats()["perf/grader_restarts"] == 2
    assert "memory grew by" in capfd.readouterr().err


def test_a_call_that_takes_all_memory_is_ended_and_named(own, capfd, monkeypatch):
    """Before the kernel or Ray end a rank for it; its limit is a part of what was free at the start."""
    monkeypatch.setattr(process_pool, "LEAK_BYTES", 256 << 20)
    monkeypatch.setattr(process_pool, "CALLS_SHARE", 0.0)
    with Scorer(replace(own, deadline_s=60.0)) as scorer:
        verdicts, seconds = timed(scorer, "swells", "fine")
        assert verdicts == ["error", "correct"] and seconds < 40
        assert scorer.stats()["reward/error_rate"] == 0.5
        assert scorer.stats()["perf/grader_restarts"] == 1
    said = capfd.readouterr().err
    assert "rewards: one call of the function took 0." in said and "completion 'swells'" in said


def test_the_calls_of_all_graders_may_take_half_of_what_is_free(own):
    free = host_memory.available_memory()
    most = process_pool.ProcessPool(4, 1.0, own.function).processes.guard.most_bytes
    assert most == pytest.approx(free / 8, rel=0.1) or most == process_pool.LEAK_BYTES
    assert process_pool.ProcessPool(4, 1.0).processes.guard.most_bytes == 0, (
        "the built-in graders have a limit of their own"
    )


def test_a_grader_that_is_stopped_is_replaced(own):
    """SIGSTOP, as a debugger or a control group's freezer does it."""
    with Scorer(own) as scorer:
        assert timed(scorer, "fine")[0] == ["correct"]
        (stopped,) = scorer._pool.processes.pids()
        os.kill(stopped, signal.SIGSTOP)
        verdicts, seconds = timed(scorer, "stopped", "fine")
        assert verdicts == ["timeout", "correct"] and seconds < 40
        assert stopped not in scorer._pool.processes.pids()


def test_no_thread_is_left(own):
    with Scorer(own) as scorer:
        timed(scorer, "fine")
    end = time.monotonic() + 10
    while any(thread.name.startswith("grader") for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.05)
