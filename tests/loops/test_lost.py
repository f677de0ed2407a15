"""The line that names a rank which died, from what Ray says of it."""

from __future__ import annotations

import ray.exceptions

from trainer.loops.process import explain_error
from trainer.ranks.process import RankPlace
from trainer.ranks.ray_ranks import RayRanks

PLACES = [
    RankPlace("10.0.0.1", 0, 30001, 700, "a", "", 0),
    RankPlace("10.0.0.2", 0, 30001, 700, "b", "", 0),
    RankPlace("10.0.0.2", 1, 30002, 701, "b", "", 0),
]
KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: Worker
\tactor_id: 1f2e
\tpid: 701
\tnamespace: 5a
\tip: 10.0.0.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker
unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process is
killed by SIGKILL by OOM killer due to high memory usage."""
EVICTED = """Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.2, ID: 9c) where the task (actor ID: 1f2e, name=Worker.update, pid=700, memory used=90GB)
was running was 119.10GB / 120.00GB (0.99), which exceeds the memory usage threshold of 0.95."""


def test_the_rank_is_named_by_its_process_and_address(monkeypatch):
    """Ray names the out-of-memory killer among the causes that any death may have."""
    workers = object.__new__(RayRanks)
    workers._places = PLACES
    monkeypatch.setattr(workers, "cause", lambda said: "SIGSEGV in at::native::add")
    killed, evicted = ray.exceptions.ActorDiedError(), ray.exceptions.OutOfMemoryError(EVICTED)
    killed.error_msg = KILLED
    assert str(killed) == KILLED
    line = "error: a rank or node was lost: "
    assert explain_error(killed, workers) == (
        34,
        f"{line}rank 2 (process 701 on 10.0.0.2): SIGSEGV in at::native::add",
    )
    evicted_line = (
        f"{line}rank 1 (process 700 on 10.0.0.2): out of memory: Ray ended it. See docs/failures.md"
    )
    assert explain_error(evicted, workers) == (34, evicted_line)
    assert explain_error(ConnectionError("refused"), workers) == (34, f"{line}refused")
    assert explain_error(evicted)[1] == f"{line}Task was killed due to the node running low on memory."
