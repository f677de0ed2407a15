"""Which exit codes each platform starts a run again after: the retry rules of all targets.

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

import math
from typing import Any

from recipes.recipe.spec import Recipe
from recipes.targets import script
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_PREEMPTED, EXIT_PREFLIGHT, RECOVER_EXIT_CODES

FINAL = "spotrl: ended for good"
"""Start of the final line: `status` looks for it where a platform distinguishes success and failure by 0
alone."""
CAPACITY_HOURS = 8.0
"""How long dstack looks for machines before it gives up, hours."""


def restart_codes(recipe: Recipe) -> tuple[int, ...]:
    """Exit codes after which the recipe is started again. A preflight never is: its answer is the exit code.
    A machine that samples is, where it was preempted, and no more: nobody counts its attempts."""
    match recipe.kind:
        case "train":
            return RECOVER_EXIT_CODES
        case "sample":
            return (EXIT_PREEMPTED,)
    return ()


def sky_recovery(recipe: Recipe) -> dict[str, Any]:
    rule = {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 0}
    return rule | ({"recover_on_exit_codes": list(restart_codes(recipe))} if restart_codes(recipe) else {})


def dstack_retry(recipe: Recipe) -> dict[str, Any]:
    """dstack's `retry`. A node lost on RunPod, Kubernetes or own machines is an `error` to it, as is a failed
    job."""
    events = ["no-capacity", "interruption", "error"] if restart_codes(recipe) else ["no-capacity"]
    return {"on_events": events, "duration": duration(min(recipe.budget.max_hours, CAPACITY_HOURS))}


def duration(hours: float) -> str:
    """Hours as dstack writes them: it takes whole numbers only."""
    return f"{hours:g}h" if hours == int(hours) else f"{math.ceil(hours * 60)}m"


def dstack_command(recipe: Recipe, body: str) -> str:
    """The task's one command: `body`, then the node's process; dstack sees 0 for what it must not start
    again.

    In a shell of its own, because dstack's is interactive, where an unset variable ends less than it should.
    """
    node = script.node_command(recipe)
    if not restart_codes(recipe):
        return f"{body}exec {node}\n"
    keep = "|".join(map(str, (0, *restart_codes(recipe))))
    then = (
        "start this machine again"
        if recipe.kind == "sample"
        else "\\`python3 launch.py resume ${RUN_ID:-}\\`"
    )
    task = f"""\
final() {{
  code=$?
  case "$code" in
    {keep}) ;;
    *)
      echo "{FINAL}: exit code $code; fix what the lines above say, then {then}"
      exit 0 # dstack starts a job again after every other code
      ;;
  esac
}}
trap final EXIT
{body}{script.OUTLAST}{node} &
node=$!
trap 'kill -s INT "$node" 2>/dev/null || true' INT
trap 'kill -s TERM "$node" 2>/dev/null || true' TERM
outlast "$node"
"""
    return f'exec bash -c "$(cat <<"TASK"\n{task}TASK\n)"\n'


UNLIMITED = 2**31 - 1
"""Pods that a Job may replace: the run counts."""

EXCLUDE = f"""\
    # possible only once the job is pending again
    if [ "$code" -eq {EXIT_PREFLIGHT} ] && [ -s "$RUNS/$RUN_ID/refused" ]; then
      bad="$(sort -u "$RUNS/$RUN_ID/refused" | paste -sd,)"
      echo "machines that failed their checks are excluded: $bad"
      scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$bad" || true
    fi
"""
"""What a Slurm job that is requeued does with machines that its checks have refused."""


def slurm_begin(recipe: Recipe) -> str:
    """Ends a job that Slurm has started too often, whatever the reason, before it does anything."""
    most = recipe.budget.max_requeues
    return f"""\
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt {most} ]; then
  echo "{FINAL}: Slurm has restarted this job $SLURM_RESTART_COUNT times, budget.max_requeues is {most}" >&2
  exit {EXIT_CONFIG}
fi
"""


def slurm_end(recipe: Recipe) -> str:
    """Asks for the requeue after a code that a restart can cure, while the budget lasts; `code` is the
    job's."""
    if not restart_codes(recipe):
        return 'exit "$code"\n'
    most = recipe.budget.max_requeues
    who = "machine" if recipe.kind == "sample" else "run"
    return f"""\
case "$code" in
  {"|".join(map(str, restart_codes(recipe)))})
    if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {most} ]; then
      echo "{FINAL}: exit $code after ${{SLURM_RESTART_COUNT:-0}} restarts, budget.max_requeues is {most}" >&2
      exit "$code"
    fi
    echo "the {who} asks to be started again (exit $code): requeueing"
    scontrol requeue "$SLURM_JOB_ID" || true
{EXCLUDE if EXIT_PREFLIGHT in restart_codes(recipe) else ""}\
    sleep {recipe.site.grace_s + 30} # until Slurm ends this script: one that exits by itself is FAILED
    ;;
esac
exit "$code"
"""


def pbs_begin(recipe: Recipe) -> str:
    """Counts the starts of this job in a file, since PBS does not report them, and ends one that has had too
    many."""
    most = recipe.budget.max_requeues
    return f"""\
starts=".cache/$RUN_ID.$PBS_JOBID.starts"
echo >> "$starts"
if [ "$(wc -l < "$starts")" -gt {most + 1} ]; then
  echo "{FINAL}: PBS has restarted this job {most} times: that is budget.max_requeues" >&2
  exit {EXIT_CONFIG}
fi
"""


def kubernetes_job(recipe: Recipe, container: str) -> dict[str, Any]:
    """Fields of the Job: after which codes its pods are started again, and how often.

    One pod is replaced by its Job, whose deadline then holds for all attempts together. Several pods start
    and end together: the first that ends fails their Job, and the JobSet starts all of them again. Pods that
    sample are restarted each for itself.
    """
    again = restart_codes(recipe)
    if not again:
        return {"backoffLimit": 0}
    alone = recipe.cluster.nodes == 1
    disrupted = {
        "action": "Ignore" if alone else "Count",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    ended = {
        "action": "FailIndex" if recipe.kind == "sample" else "FailJob",
        "onExitCodes": {"containerName": container, "operator": "NotIn", "values": list(again)},
    }
    policy = {"podFailurePolicy": {"rules": [disrupted, ended]}}
    if recipe.kind == "sample":
        return {"backoffLimitPerIndex": recipe.budget.max_requeues} | policy
    return {"backoffLimit": UNLIMITED if alone else 0} | policy


def kubernetes_set(recipe: Recipe) -> dict[str, Any]:
    """The JobSet's `failurePolicy`: several nodes are started again together, unless a code or the deadline
    was final. What is no end of a pod counts against `budget.max_requeues`."""
    together = recipe.cluster.nodes > 1 and restart_codes(recipe)
    final = {
        "name": "endedForGood",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
    }
    if not together:
        return {"maxRestarts": 0, "rules": [final]}
    again = {
        "name": "countedByTheRun",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["BackoffLimitExceeded"],
    }
    return {"maxRestarts": recipe.budget.max_requeues, "rules": [final, again]}
