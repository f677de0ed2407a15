"""One process per node, the same on every platform: `python -m trainer.node --config run.yaml`.

    topology -> checks -> rendezvous -> network -> Ray -> a real transfer between all nodes -> the job

The head submits the training loop as a Ray job and every node exits with its exit code
(trainer/system/exit_codes.py). Every wait has a deadline and names the missing nodes; a lost node ends the
job on all others. No process is left running.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import traceback

try:
    from trainer import config as configuration
    from trainer.checkpoint.attempt import RunIsFinal
    from trainer.config import ConfigError, RunConfig
    from trainer.node import topology as environment
    from trainer.node.launch.head import HeadLauncher
    from trainer.node.launch.launcher import LaunchEnded, Launcher, signals_of_a_launch
    from trainer.node.launch.node_worker import NodeWorkerLauncher
    from trainer.node.launch.ray_node import RayEnded, adopt_orphans
    from trainer.node.topology import NodeEnvironment
    from trainer.system.errors import OF_THE_DISK, StorageError, describe_disk_error
    from trainer.system.exit_codes import EXIT_CONFIG, EXIT_ERROR, EXIT_NODE_LOST, EXIT_RAY, EXIT_STORAGE
except ImportError as missing:  # the other nodes must hear of it
    from trainer.node.launch.rendezvous import leave_for_missing_package

    leave_for_missing_package(missing, sys.argv[1:])


def main(argv: list[str] | None = None) -> int:
    """Runs this node's part; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.node", description=__doc__)
    parser.add_argument("--config", required=True, help="resolved configuration of the run (YAML)")
    parser.add_argument(
        "--preflight", action="store_true", help="checks and collectives, no training: two minutes at most"
    )
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="length of the all-reduce between all nodes (%(default)s)"
    )
    parser.add_argument("command", nargs="*", help="run this instead of the training loop (after --)")
    arguments = parser.parse_args(argv)
    try:
        config = configuration.load(arguments.config)
        node = environment.read_node_environment(os.environ)
        if not arguments.preflight:
            check_shape(config, node)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    arguments.config = os.path.abspath(arguments.config)
    raise_file_limit()
    adopt_orphans()
    kind = HeadLauncher if node.is_head else NodeWorkerLauncher
    launcher = kind(config, node, arguments, signals_of_a_launch())
    code = EXIT_ERROR
    try:
        code = launcher.run()
    except LaunchEnded as end:
        code, launcher.why = end.code, str(end)
        launcher.died = end.died
    except RunIsFinal as final:
        code, launcher.why = final.code, str(final)
    except ConfigError as error:
        code, launcher.why = EXIT_CONFIG, str(error)
    except StorageError as error:
        code, launcher.why = EXIT_STORAGE, str(error)
    except OSError as error:
        code, launcher.why = explain(error, launcher)
        launcher.died = code == EXIT_NODE_LOST
    except RayEnded as error:
        why = str(error).rstrip(".")
        code, launcher.why = EXIT_RAY, f"{why}: the machine is too busy, or Ray is broken on it"
    finally:
        code = launcher.settle(code)
        launcher.finish(code)
    if launcher.why:
        print(f"{'error: ' if code not in (0, 33, 130) else ''}{launcher.why}", file=sys.stderr, flush=True)
    return code


def explain(error: OSError, launcher: Launcher) -> tuple[int, str]:
    """Exit code and reason for an error of this machine's system; what the object store raises is no such.

    A process that Ray's end took away shows as a broken connection, often before Ray itself has ended.
    """
    if error.errno in OF_THE_DISK:
        return EXIT_STORAGE, describe_disk_error(error)
    ray = launcher.ray
    if ray is not None and ray.process is not None and not ray.alive():
        return EXIT_NODE_LOST, f"Ray ended on this node ({ray.complaint()}): {error}"
    if isinstance(error, ConnectionError | TimeoutError):
        return EXIT_NODE_LOST, f"a connection within the launch broke: {error}"
    return EXIT_ERROR, "".join(traceback.format_exception(error)).rstrip()


def check_shape(config: RunConfig, node: NodeEnvironment) -> None:
    """Raises ConfigError if the platform started a different number of nodes than `placement.nodes`."""
    if config.placement.nodes != node.nodes:
        raise ConfigError(
            f"placement.nodes is {config.placement.nodes}, and {node.platform} started {node.nodes}: "
            "make them equal"
        )


def raise_file_limit() -> None:
    """Raises the limit of open files to the hard limit: Ray's processes and the ranks hold hundreds each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
