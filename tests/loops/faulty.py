"""The real loop with one fault built into its ranks: `python -m tests.loops.faulty --config run.yaml`,
FAULT=name.

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

from trainer.learning.learner_part import LearnerPart
from trainer.loops import grpo
from trainer.loops.process import main
from trainer.ranks import ray_ranks
from trainer.ranks.process import RankProcess

FAULT = os.environ["FAULT"]
AT = 4


def stuck() -> None:
    """Where the deadlocked rank is."""
    while True:
        time.sleep(60)


class FaultyLearner(LearnerPart):
    """One rank; the fault strikes rank 1, or all for `nan`."""

    updates = 0

    def update(self, *arguments: Any) -> Any:
        self.updates += 1
        if self.process.rank == 1:
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


class FaultyProcess(RankProcess):
    """A process whose learner is faulty."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._parts[LearnerPart] = FaultyLearner(self)


if __name__ == "__main__":
    ray_ranks.RankProcess = FaultyProcess
    main(grpo.train, grpo.total_updates)
