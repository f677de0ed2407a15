"""The rollout workers of one of the run's own nodes, on the GPUs that `fleet.gpus_per_node` keeps from the
ranks.

They are those of a machine that only samples (trainer/fleet/machine.py): they read weights from the run's
bucket and write completions there. So they go on while the job starts again on the same machines.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer import config as configuration
from trainer.config import RunConfig, override
from trainer.config.schema import SHARED_BY, WORKER_GPU_SHARE
from trainer.hardware.visible_gpus import gpu_names, gpu_variable
from trainer.node.topology import NodeEnvironment
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_NODE_LOST, EXIT_OK, EXIT_PREEMPTED

PROGRAM = "trainer.fleet.machine"
FILE = "own-workers-{rank}.yaml"
"""Their configuration, in the run's folder."""
UNTIL_THE_LAUNCH_ENDS_S = 365 * 86_400
"""Their `fleet.idle_s`: the launch ends them, and no other machine takes their place."""


def own_worker_config(config: RunConfig) -> RunConfig:
    """What a machine of the run's own workers is told."""
    own = [
        f"fleet.run={config.run_id}",
        "fleet.gpus_per_node=0",
        "placement.nodes=1",
        f"placement.workers_per_node={config.fleet.gpus_per_node}",
        f"rollout.gpu_memory_utilization={WORKER_GPU_SHARE}",
        f"fleet.idle_s={UNTIL_THE_LAUNCH_ENDS_S}",
    ]
    return override(config, own)


def worker_variables(config: RunConfig, env: Mapping[str, str]) -> dict[str, str]:
    """Variables that give the workers the GPUs behind those of the ranks; none on CPU."""
    if config.placement.device == "cpu":
        return {}
    names = gpu_names(env)
    cards = [str(i) for i in range(config.processes_per_node)] if names is None else names
    spare = cards[config.placement.workers_per_node : config.processes_per_node]
    return {gpu_variable(env): ",".join(spare), SHARED_BY: str(config.processes_per_node)}


def worker_command(config: RunConfig, node: NodeEnvironment) -> list[str]:
    """Writes their configuration, and returns the command that starts them."""
    path = Path(config.run.dir) / FILE.format(rank=node.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(configuration.dump(own_worker_config(config)))
    return [sys.executable, "-m", PROGRAM, "--config", str(path)]


def worker_failure(process: subprocess.Popen[str] | None) -> tuple[int, str]:
    """The exit code and reason with which the launch must end, since the trainer would wait in vain; (0, "")
    while they run, and where they ended as they should."""
    code = process.poll() if process else None
    if code in (None, EXIT_OK, EXIT_PREEMPTED):
        return EXIT_OK, ""
    why = f"this node's rollout workers ended with {code}: their lines above say why"
    return EXIT_CONFIG if code == EXIT_CONFIG else EXIT_NODE_LOST, why
