"""Counts a start that ended before the node's own code: `python -m trainer.node.preflight.refused LOSSES` for
a machine that was refused before installation, `... LOSSES RESTARTS CODE WHY` for a set-up that failed.

The platform starts again after such codes without limit; the run's record of attempts has limits. Needs
RUN_ID, BUCKET and an object-store client; exits with the code that the machine should exit with.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

from trainer.checkpoint.attempt import LAUNCH_VARIABLE, Attempts, Machine, RunIsFinal
from trainer.config import ConfigError
from trainer.config.run_store import RunStore
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_PREFLIGHT


def this_machine(root: Path = Path("/")) -> Machine:
    """This machine, which a run recognizes once it has refused it: its host name and its GPUs' own numbers,
    without GPUs the name alone. An address is the same on every host, or new each time."""
    ids = []
    for path in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        if match := re.search(r"GPU UUID:\s*(GPU-[0-9a-f-]+)", _text(path)):
            ids.append(match[1])
    for path in (root / "sys/class/drm").glob("card*/device/unique_id"):
        ids.append(f"AMD-{_text(path).strip()}")
    name = socket.gethostname()
    return Machine(name, tuple(sorted(ids)) or (name,))


def machine_from_message(message: dict[str, Any]) -> Machine:
    """A machine from another node's JSON."""
    return Machine(message["name"], tuple(message["marks"]))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def count_start(losses: int, restarts: int, code: int, why: str, machines: list[Machine]) -> int:
    """Records an attempt lost with `code`; returns that, or the final code when the budget is used up."""
    run_id = os.environ["RUN_ID"]
    store = RunStore.in_bucket(os.environ["BUCKET"], run_id)
    record = Attempts(Storage(store.attempts), restarts, losses, seal=Seal.of_environment(run_id))
    past = record.past()
    committed = past[-1].committed if past else 0
    return record.count(committed, os.environ.get(LAUNCH_VARIABLE, ""), code, why, machines)


def main(arguments: list[str]) -> int:
    """The command line. Returns the exit code."""
    code = EXIT_PREFLIGHT
    try:
        if len(arguments) == 1:
            here = this_machine()
            return count_start(int(arguments[0]), 3, code, f"{here.name} cannot run the environment", [here])
        losses, restarts, code = map(int, arguments[:3])
        return count_start(losses, restarts, code, arguments[3], [])
    except RunIsFinal as final:
        print(f"error: {final}", file=sys.stderr)
        return final.code
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except StorageError as error:
        print(f"attempt: this start is not counted: {error}", file=sys.stderr)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
