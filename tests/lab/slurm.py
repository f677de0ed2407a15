"""A real Slurm of two nodes on namespaced hosts: munged, slurmctld and slurmd, and nothing of it outside the
lab."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import hosts

GRACE_S = 15
CONFIG = """\
ClusterName=lab
SlurmctldHost=h1(10.50.0.11)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={scratch}/state
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={scratch}/slurmctld.log
SlurmdLogFile={scratch}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
SlurmctldTimeout=30
SlurmdTimeout=30
InactiveLimit=0
KillWait=10
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=h1 NodeAddr=10.50.0.11 CPUs=16 RealMemory=200000 State=UNKNOWN
NodeName=h2 NodeAddr=10.50.0.12 CPUs=16 RealMemory=200000 State=UNKNOWN
PartitionName=normal Nodes=h1,h2 Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=urgent Nodes=h1,h2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    if why := hosts.missing():
        return why
    absent = [p for p in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(p, path=hosts.PATH)]
    return f"Slurm is not installed ({', '.join(absent)}): apt-get install slurm-wlm munge" if absent else ""


class Slurm:
    """The cluster. Use as a context manager."""

    def __init__(self, scratch: Path):
        self.scratch = scratch
        (scratch / "state").mkdir(parents=True)
        self.config = scratch / "slurm.conf"
        self.config.write_text(CONFIG.format(scratch=scratch, grace=GRACE_S))
        self.lab = hosts.Lab(["h1", "h2"], scratch, private=("/run", "/var/spool/slurmd"))
        key = scratch / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        for host in self.lab.hosts.values():
            host.run("sh", "-c", "mkdir -m 755 -p /run/munge /var/log/munge")
            places = {"key-file": key, "pid-file": "/run/munge/pid", "socket": "/run/munge/munge.socket.2"}
            places |= {"log-file": host.scratch / "munged.log", "seed-file": host.scratch / "munge.seed"}
            host.run("munged", "--force", *(f"--{name}={place}" for name, place in places.items()))
        env = {"SLURM_CONF": str(self.config)}
        first = self.lab.hosts["h1"]
        first.start(["slurmctld", "-D", "-f", str(self.config)], scratch / "slurmctld.out", env)
        for host in self.lab.hosts.values():
            host.start(
                ["slurmd", "-D", "-N", host.name, "-f", str(self.config)],
                scratch / f"slurmd.{host.name}.out",
                env,
            )
        idle = ("sinfo", "-h", "-p", "normal", "-o", "%T %D")
        self.until(lambda: self.command(*idle).strip() == "idle 2", 60, "both nodes idle")

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *error: object) -> None:
        self.lab.__exit__(*error)

    def command(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        """Runs one of Slurm's commands on the first host."""
        set_env = [f"{k}={v}" for k, v in {"SLURM_CONF": str(self.config), **env}.items()]
        first = self.lab.hosts["h1"]
        where = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd)] if cwd else []
        path = f"PATH={os.environ.get('PATH', '')}:{hosts.PATH}"
        return first.run("env", "-i", path, f"HOME={first.scratch}", *set_env, *where, *command)

    def state(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        words = self.command("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until(self, condition, timeout_s: float, what: str, log: Path | None = None) -> None:
        """Waits for something; shows `log` if it does not come."""

        def so() -> bool:
            with contextlib.suppress(RuntimeError):  # the controller is not up yet
                return bool(condition())
            return False

        hosts.until(so, timeout_s, what, lambda: log.read_text() if log and log.exists() else "")
