"""`python -m tests.nullgpu [OPTIONS] COMMAND...`: a command on the device that is not there."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tests.nullgpu import null_device

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--card", default="H100", help="H100 (default), H200, A100, A100-40GB, L40S or B200")
    parser.add_argument("--record", type=Path, help="folder for counts and collectives")
    parser.add_argument("--no-hooks", action="store_true", help="leave checks on that need computed values")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    env = null_device.environment(
        devices=asked.devices, card=asked.card, record=asked.record, hooks=not asked.no_hooks
    )
    # Settings such as NULLGPU_COPY=65536 pass through from the caller's own environment.
    os.execvpe(asked.command[0], asked.command, env)
