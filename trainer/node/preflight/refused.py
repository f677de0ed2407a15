"""Counts a machine that was refused before installation: `python -m trainer.node.preflight.refused LOSSES`.

The platform replaces a machine after exit code 36 without limit; the run's record of attempts has a limit.
Needs RUN_ID, BUCKET and an object-store client; exits with the code that the machine should exit with.
"""

from __future__ import annotations

import os
import sys

from trainer.checkpoint.attempt import LAUNCH_VARIABLE, Attempts, Final
from trainer.config import ConfigError
from trainer.config.run_store import RunStore
from trainer.errors import StorageError
from trainer.exit_codes import EXIT_CONFIG, EXIT_PREFLIGHT
from trainer.node.preflight import machine
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage


def refused(losses: int) -> int:
    """Records an attempt lost to this machine; returns EXIT_PREFLIGHT, or the final code when the budget is
    used up."""
    run_id = os.environ["RUN_ID"]
    store = RunStore.in_bucket(os.environ["BUCKET"], run_id)
    record = Attempts(Storage(store.attempts), max_losses=losses, seal=Seal.of_environment(run_id))
    past = record.past()
    committed = past[-1].committed if past else 0
    launch = os.environ.get(LAUNCH_VARIABLE, "")
    here = machine.this()
    return record.count(committed, launch, EXIT_PREFLIGHT, f"{here.name} cannot run the environment", [here])


if __name__ == "__main__":
    try:
        sys.exit(refused(int(sys.argv[1])))
    except Final as final:
        print(f"error: {final}", file=sys.stderr)
        sys.exit(final.code)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except StorageError as error:
        print(f"attempt: this refusal is not counted: {error}", file=sys.stderr)
        sys.exit(EXIT_PREFLIGHT)
