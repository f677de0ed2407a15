"""Which exit codes a run is started again after; each platform's file has the rule that obeys them.

The run counts its own attempts in the bucket and leaves with a final code once they are spent. What stands
here makes every platform obey that code, and bounds what happens before the run can count:

    SkyPilot  restarts after the codes of a list without limit, after any other non-zero code
              `max_restarts_on_errors` times. When one node of several ends, it reports 137 for all others:
              137 must not be in the list.
    dstack    restarts after every non-zero code, and its clock starts again with each machine: final codes
              become 0.
    Slurm     restarts when asked (`scontrol requeue`), when it preempts and when a node fails; it counts, in
              SLURM_RESTART_COUNT, and limits nothing.
    PBS       restarts when it preempts and when a node fails; the job cannot see it.
    Kubernetes  restarts after every code but those of a list. A Job and a JobSet count restarts over the
              whole run, however much was committed between. So their limits are out of the way, as on
              SkyPilot, and the run's own count, which begins anew with each checkpoint, ends it.
"""

from __future__ import annotations

from recipes.recipe.spec import Recipe
from trainer.system.exit_codes import EXIT_PREEMPTED, RECOVER_EXIT_CODES

FINAL = "spotrl: ended for good"
"""Start of the final line: `status` looks for it where a platform distinguishes success and failure by 0
alone."""


def restart_codes(recipe: Recipe) -> tuple[int, ...]:
    """Exit codes after which the recipe is started again. A preflight never is: its answer is the exit code.
    A machine that samples is, where it was preempted, and no more: nobody counts its attempts."""
    match recipe.kind:
        case "train":
            return RECOVER_EXIT_CODES
        case "sample":
            return (EXIT_PREEMPTED,)
    return ()
