"""What Slurm and PBS have in common: jobs that are submitted where all nodes see the repository."""

from __future__ import annotations

import re
import socket
from typing import ClassVar
from urllib.parse import SplitResult

from recipes.platforms import script
from recipes.platforms.base import Commands, LaunchGiven, Platform, for_each, ssh_tunnel
from recipes.recipe.spec import Recipe
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError

OFFLINE = "export HF_HUB_OFFLINE=1 UV_OFFLINE=1 # prepared where the job was submitted"
"""No way to the hub where there is none."""
FOLLOW = ["tail", "-n", "+1", "--retry", "-F"]


class Batch(Platform):
    hint = "submit from a login node of the cluster"
    shared_files = True
    submits = True
    follows_one_job = True
    log_program = "tail"

    job_id: ClassVar[str]
    """What a job's number looks like: `qdel all` would end all of a person's jobs."""
    asks: ClassVar[str]
    """Program that says how a job is."""
    cancels: ClassVar[str]
    """Program that ends a job."""
    index: ClassVar[str]
    """The index of a job of an array in the name of its log, as the platform writes it."""

    OBEYS = frozenset({
        "cluster.cpus", "cluster.memory_gib", "budget.max_requeues", "site.shared_dir", "site.partition",
        "site.account", "site.walltime_hours", "site.offline",
    })  # fmt: skip

    def head(self, recipe: Recipe, program: str, ending: str, job_id: str) -> tuple[list[str], str]:
        """(Comment lines of a script, the line that names its run). job_id: a job's number in shell. Machines
        that sample are an array of jobs."""
        again = "the same RUN_ID resumes from its last committed checkpoint"
        named = f'export RUN_ID="${{RUN_ID:-{script.job_name(recipe)}-{job_id}}}"'
        if recipe.kind == "sample":
            again = "RUN_ID is that of the run"
            named = f'export SPOTRL_MACHINE="{job_id}"'
        comment = [
            f"# {recipe.description}.",
            f"# {program} recipes/generated/{self.name}/{recipe.name}.{ending}"
            "   (from the repository's root, on a file",
            f"# system that all nodes see; {again})",
        ]
        return comment, named

    def begin_shell(self, recipe: Recipe) -> str:
        """What the shell begins with. Machines that sample have no way to the run but the bucket."""
        sampling = recipe.kind == "sample"
        return script.preamble(recipe, work_folder(recipe), asks_bucket=sampling, runs=runs_folder(recipe))

    def submit(self, record: RunRecord, given: LaunchGiven, output: str) -> list[str]:
        """The command that submits the jobs. output: the log's file."""
        raise NotImplementedError

    def commands(self, record: RunRecord, given: LaunchGiven) -> Commands:
        if record.cluster and not re.fullmatch(self.job_id, record.cluster):
            raise ConfigError(
                f"{record.cluster!r} is no job of {self.name}: end it by your platform's own program"
            )
        job = record.cluster or "JOBID"
        log = f"runs/{record.run_id}/{self.name}.log"
        output, logs = log, [log]
        if record.jobs > 1:
            output = f"runs/{record.run_id}/{self.name}.{self.index}.log"
            logs = [f"runs/{record.run_id}/{self.name}.{i}.log" for i in range(record.jobs)]
        # Set-up on this node, where the compute nodes have no internet.
        up = [*for_each(["bash"], given.files[1:]), self.submit(record, given, output)]
        if not given.detach:
            up.append([*FOLLOW, log])
        return Commands(
            up=up,
            status=[[*self.asks.split(), job]],
            logs=for_each(["tail", "-n", "100", "-F"], logs),
            down=[[self.cancels, job]],
        )

    def tunnel(self, record: RunRecord, port: int, there: SplitResult) -> list[str]:
        """From the login node to the head."""
        if there.hostname in ("127.0.0.1", socket.gethostname()):
            return []
        return ssh_tunnel(["ssh", str(there.hostname)], port, there)


def work_folder(recipe: Recipe) -> str:
    """Where environment, data and models go, as a shell expression."""
    return recipe.site.shared_dir or "$PWD/.cache"


def runs_folder(recipe: Recipe) -> str:
    """Where runs go, as a shell expression."""
    return "$WORK/runs" if recipe.site.shared_dir else "$PWD/runs"
