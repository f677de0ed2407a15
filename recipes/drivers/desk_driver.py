"""Starts, follows and ends the runs that no platform drives: on this machine, over ssh, on Kubernetes.

`python -m recipes.drivers.desk_driver up|start|status|logs|down RUN_ID`; launch.py calls it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

from recipes.records import run_record
from trainer.config import ConfigError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED


def main(command: str, run_id: str) -> int:
    try:
        record = run_record.load_record(run_id)
        driver = importlib.import_module(f"recipes.drivers.{record.target}_driver")
        return getattr(driver, command)(record)
    except ConfigError as error:
        print(f"launch.py: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    sys.exit(main(*sys.argv[1:]))
