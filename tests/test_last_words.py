"""Why a process died, from what it left: a rank that really ends by a signal, under Ray and without."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import ray.exceptions

from tests.conftest import ROOT
from tests.ranks.counting import Dying
from trainer.loops.process import connect_ray, explain_error
from trainer.ranks.ray_ranks import RayRanks
from trainer.system import last_words

ABSL = """
*** SIGSEGV received at time=1795702749 on cpu 0 ***
PC: @     0x7f88d4f297da  (unknown)  c10::function_ref<>::callback_fn<>()
    @     0x7f8afb45a050       3440  (unknown)
    @     0x7f88cfef0258        416  at::internal::serial_for_each()
    @                0x4  (unknown)  (unknown)
Fatal Python error: Segmentation fault

Thread 0x00007fdf10bbc240 (most recent call first):
  File "/x/trainer/algorithm/batching.py", line 129 in sent
  File "/x/trainer/learning/policy.py", line 7 in update

Extension modules: numpy._core._multiarray_umath (total: 1)
"""


def test_rays_own_stack_is_read():
    found = "SIGSEGV in at::internal::serial_for_each, called at batching.py:129 in sent"
    assert last_words.cause_in_log(ABSL) == found
    assert last_words.cause_in_log("all went well\nSIGSEGV is a word\n") == ""
    thrown = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: busy\n"
    assert last_words.cause_in_log(thrown + "*** SIGABRT received at time=1 on cpu 0 ***\n") == (
        "SIGABRT after CUDA error: busy"
    )


def test_what_a_log_does_not_say_the_kernel_may(monkeypatch, tmp_path):
    monkeypatch.setattr(last_words, "memory_kills", lambda: 3)
    assert last_words.cause_outside_log(2).startswith("out of memory: its machine's kernel has killed 1")
    assert "not for memory" in last_words.cause_outside_log(3)
    monkeypatch.setattr(last_words, "memory_kills", lambda: None)
    assert all("does not tell" in last_words.cause_outside_log(before) for before in (3, None))
    why, log = last_words.describe_death(str(tmp_path / "none"), None)
    assert "does not tell" in why and "cannot be read" in log


def test_a_segmentation_fault_in_a_thread_of_a_tensor_operation_leaves_both_stacks():
    program = (
        "from trainer.ranks.process import RankProcess\n"
        "from trainer.config import RunConfig, Placement\n"
        "from tests.ranks.counting import Dying\n"
        "rank = RankProcess(RunConfig(placement=Placement(device='cpu', threads_per_worker=4)))\n"
        "rank.set_rank(0, 0, '127.0.0.1', 1)\n"
        "rank.call(Dying.by_memory_that_is_gone)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV
    said = last_words.cause_in_log(done.stderr)
    assert said.startswith("SIGSEGV in at::"), done.stderr[-3000:]
    assert said.endswith("in by_memory_that_is_gone")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_dies_under_ray_says_how(small_config, tmp_path):
    placement = replace(small_config.placement, workers_per_node=1)
    config = replace(small_config, run=replace(small_config.run, dir=str(tmp_path)), placement=placement)
    connect_ray(config)
    try:
        deaths = {Dying.by_memory_that_is_gone: "SIGSEGV in at::", Dying.by_a_kill: "killed from outside, "}
        for method, cause in deaths.items():
            ranks = RayRanks(config)
            ranks.start()
            with pytest.raises(ray.exceptions.ActorDiedError) as died:
                ranks.all(method)
            code, line = explain_error(died.value, ranks)
            assert code == 34 and ": rank " in line and cause in line, line
            assert f"; it was asked for {method.__qualname__} (its log: {tmp_path}/death-rank-" in line
            ranks.stop()
        logs = [path.read_text() for path in sorted(tmp_path.glob("death-rank-*"))]
        assert any("add__Tensor" in log and "by_memory_that_is_gone" in log for log in logs)
    finally:
        ray.shutdown()
