"""Exit codes of the trainer's processes, and what a platform may do after each. Standard library only.

Every node of a job exits with the same code. How each platform learns which codes to restart after (a list, a
mapping to 0, no requeue) is data in recipes.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from trainer.system.errors import ConfigError, StorageError

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_PREEMPTED = 33
EXIT_NODE_LOST = 34
EXIT_STORAGE = 35
EXIT_PREFLIGHT = 36
EXIT_FENCED = 37
EXIT_GAVE_UP = 38
EXIT_RAY = 39
EXIT_INTERRUPTED = 130

MEANINGS = {
    EXIT_OK: "The run finished.",
    EXIT_ERROR: "A defect, or anything not foreseen; the traceback is in the run's launch.log.",
    EXIT_CONFIG: (
        "The configuration, the data, the credentials or the bucket cannot work; the last line says what "
        "to change."
    ),
    EXIT_PREEMPTED: (
        "The node received a preemption notice; the run resumes from its last committed checkpoint."
    ),
    EXIT_NODE_LOST: "Another node, or a rank, vanished, did not come, or hangs.",
    EXIT_STORAGE: (
        "The object store or the model hub failed for longer than the retries last; or the disk is full, "
        "read-only or failing."
    ),
    EXIT_PREFLIGHT: "This node failed its checks (GPU, network, disk): try another.",
    EXIT_FENCED: "A newer attempt of the same run replaced this one, which must not be started again.",
    EXIT_GAVE_UP: (
        "The restart budget is used up without a new checkpoint, the run's hours are over, or a process "
        "has died twice at one step; only `resume` opens it again."
    ),
    EXIT_RAY: (
        "Ray did not start on this machine, or failed, several times in a row; the machine is too busy or "
        "broken."
    ),
    EXIT_INTERRUPTED: "A person pressed Ctrl-C, or the platform's stop command was used.",
}
"""What each code means, in a sentence."""

RECOVER_EXIT_CODES = (EXIT_PREEMPTED, EXIT_NODE_LOST, EXIT_STORAGE, EXIT_PREFLIGHT, EXIT_RAY)
"""Codes after which the platform should start the job again (SkyPilot's `recover_on_exit_codes`)."""
FINAL_EXIT_CODES = (EXIT_CONFIG, EXIT_FENCED, EXIT_GAVE_UP)
"""No start of the same job can help: a platform that restarts after every other code is given 0."""


def describe_code(code: int) -> str:
    """`exit code 34: another node, or a rank, vanished, did not come, or hangs`; the number alone for a code
    that is none of the trainer's; of a process that a signal ended (-9), the signal."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}: nobody was told why"
    meaning = MEANINGS.get(code, "").rstrip(".")
    return f"exit code {code}: {meaning[0].lower()}{meaning[1:]}" if meaning else f"exit code {code}"


def exit_code(run: Callable[[], None]) -> int:
    """Runs a command that talks to a store and returns its exit code; what a user can change and what a store
    said is printed as one line."""
    try:
        run()
    except (ConfigError, FileNotFoundError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_STORAGE if isinstance(error, StorageError) else EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK
