"""The real loop with one fault built into its ranks: `python -m tests.loops.faulty --config run.yaml`, FAULT=name.

deadlock   rank 1 skips the update of step 4 and sleeps, while the others wait for it in a collective
straggler  rank 1 takes its time in every update
killed     rank 1 gets SIGKILL in the update of step 4
nan        the loss of every update from step 4 on is not finite
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from trainer.loops import grpo
from trainer.loops.process import main
from trainer.ranks import worker_group
from trainer.ranks.gpu_worker import Worker

FAULT = os.environ["FAULT"]
AT = 4


def stuck() -> None:
    """Where the deadlocked rank is."""
    while True:
        time.sleep(60)


class FaultyWorker(Worker):
    """One rank; the fault strikes rank 1, or all for `nan`."""

    updates = 0

    def update(self, *arguments: Any) -> Any:
        self.updates += 1
        if self.rank == 1:
            match FAULT:
                case "deadlock" if self.updates == AT:
                    stuck()
                case "killed" if self.updates == AT:
                    os.kill(os.getpid(), signal.SIGKILL)
                case "straggler":
                    time.sleep(4.0)
        stats = super().update(*arguments)
        if FAULT == "nan" and self.updates >= AT:
            stats["loss/total"] = float("nan")
        return stats


if __name__ == "__main__":
    worker_group.Worker = FaultyWorker
    main(grpo.train, grpo.total_updates)
