"""Whether a process is still there."""

from __future__ import annotations

import os
import subprocess
import sys

from trainer.system import processes
from trainer.system.exit_codes import EXIT_ERROR


def sleeper() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def stamp_of(pid: int) -> dict:
    return processes.own_stamp() | {"pid": pid, "pid_started": processes.started_ticks(pid)}


def test_a_process_is_gone_when_it_was_killed_even_while_it_is_a_zombie():
    child = sleeper()
    stamped = stamp_of(child.pid)
    assert not processes.is_gone(stamped)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.process_state(child.pid) == "Z" and processes.is_gone(stamped)
    child.wait()
    assert processes.process_state(child.pid) == "" and processes.is_gone(stamped)


def test_another_process_of_the_same_id_is_another():
    stamped = processes.own_stamp() | {"pid_started": processes.started_ticks(os.getpid()) - 1}
    assert processes.is_gone(stamped) and not processes.is_gone(processes.own_stamp())


def test_nothing_is_known_of_another_machine():
    assert not processes.is_gone(stamp_of(2**30) | {"pid_space": "elsewhere pid:[1]"})


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    code = (
        "import os; from trainer.system.processes import end_with_parent; end_with_parent(os.getppid() + {})"
    )
    for other, ended in ((0, 0), (1, EXIT_ERROR)):
        assert subprocess.run([sys.executable, "-c", code.format(other)]).returncode == ended
