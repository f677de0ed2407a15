"""Rank 1 or above of a worker's engine, as `other_ranks.py` starts it: it does what rank 0 does.

It reads no mail and writes nothing to the bucket. A notice of the machine is rank 0's to answer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from trainer import config as configuration
from trainer.config import ConfigError
from trainer.exit_codes import EXIT_CONFIG, EXIT_ERROR
from trainer.fleet.engine_part import EnginePart
from trainer.fleet.units import RolloutUnit


def follow(part: EnginePart, orders: Iterable[bytes]) -> None:
    """Does what the lines say, until there are no more: then rank 0 is gone."""
    for line in orders:
        order = json.loads(line)
        match order["do"]:
            case "build":
                part.build()
            case "load":
                part.load(order["version"], None)
            case "forget":
                part.forget_prefixes()
            case "sample":
                part.sample(RolloutUnit.read(order["unit"]))


def main() -> int:
    """Command line; returns the exit code, which becomes the worker's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the worker's own configuration")
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):  # a terminal and some platforms send them to all
        signal.signal(number, signal.SIG_IGN)
    try:
        follow(EnginePart(configuration.load(options.config), options.rank), sys.stdin.buffer)
    except ConfigError as error:
        print(f"error: rank {options.rank}: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    except Exception:
        traceback.print_exc()
    return EXIT_ERROR


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the engine's threads need no further ceremony
