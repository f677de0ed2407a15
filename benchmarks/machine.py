"""What a figure's JSON says of the machine that it is from."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def processor() -> str:
    """The processor's own name; Python's `platform` knows its architecture only."""
    return next((x.split(":")[1].strip() for x in CPUINFO.read_text().splitlines() if "model name" in x), "")
