"""Dollars per GPU-hour: from SkyPilot's catalog where it is cached on this machine, else from the dated snapshot."""

from __future__ import annotations

import csv
import functools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

SNAPSHOT = Path(__file__).with_name("prices.json")


@dataclass(frozen=True)
class Price:
    """Of one GPU with its share of the machine, dollars per hour."""

    cloud: str
    gpu: str
    engine_gpu: str
    """The GPU's name in the engine's catalog."""
    on_demand: float
    spot: float | None
    read: str
    """Date."""
    source: str
    host_gib: float | None = None
    """RAM that comes with it, GiB; None: not known."""


@functools.cache
def snapshot() -> tuple[Price, ...]:
    """The prices in this repository."""
    return tuple(Price(**row) for row in json.loads(SNAPSHOT.read_text())["rows"])


def price(cloud: str, gpu: str, catalogs: Path | None = None, variant: str = "") -> Price | None:
    """The price of a GPU on a cloud, None if nobody here knows it.

    `catalogs`: SkyPilot's catalog directory; its cheapest row of that GPU goes before the snapshot. `variant`: the
    engine's name of what is rented, where a cloud sells the GPU in two forms (PCIe, SXM) at two prices.
    """
    rows = (row for row in snapshot() if (row.cloud, row.gpu) == (cloud, gpu))
    known = next((row for row in rows if variant in ("", row.engine_gpu)), None)
    if catalogs is None:
        return known
    return from_catalog(known or Price(cloud, gpu, variant or gpu, 0.0, None, "", ""), catalogs) or known


def sky_catalogs() -> Path:
    """Where SkyPilot keeps its catalogs."""
    return Path(os.environ.get("SKY_RUNTIME_DIR", Path.home())) / ".sky/catalogs/v8"


@functools.cache
def from_catalog(known: Price, catalogs: Path) -> Price | None:
    """The same from `vms.csv`: the cheapest region; on GCP, the GPU and the machine that it is attached to."""
    path = catalogs / known.cloud / "vms.csv"
    if not path.is_file():
        return None
    with path.open() as file:
        header = next(csv.reader([next(file)]))
        rows = [
            dict(zip(header, next(csv.reader([line])), strict=False))
            for line in file
            if f",{known.engine_gpu}," in line
            or (known.cloud == "gcp" and line.startswith(("a2-ultragpu-1g", "a3-highgpu-1g")))
        ]
    gpus = [r for r in rows if r["AcceleratorName"] == known.engine_gpu]
    # Some clouds (AWS) sell eight at a time only: then their eighth.
    fewest = min((float(r["AcceleratorCount"]) for r in gpus), default=0.0)
    gpus = [r for r in gpus if float(r["AcceleratorCount"]) == fewest]
    if not gpus:
        return None
    hosts = {
        r["AvailabilityZone"]: r for r in rows if not r["AcceleratorName"] and r["InstanceType"] == HOSTS.get(known.gpu)
    }

    def cheapest(column: str) -> float | None:
        values = []
        for row in gpus:
            host = hosts.get(row["AvailabilityZone"])
            if row[column] and (known.cloud != "gcp" or host):
                values.append(float(row[column]) / fewest + (float(host[column]) if host else 0.0))
        return min(values, default=None)

    on_demand = cheapest("Price")
    if on_demand is None:
        return None
    date = time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))
    ram = max((float(row["MemoryGiB"]) / fewest for row in [*gpus, *hosts.values()] if row["MemoryGiB"]), default=None)
    source = f"SkyPilot catalog {path}"
    return Price(known.cloud, known.gpu, known.engine_gpu, on_demand, cheapest("SpotPrice"), date, source, ram)


HOSTS = {"A100-80GB": "a2-ultragpu-1g", "H100": "a3-highgpu-1g"}
"""GCP's machine of one GPU: its price comes on top of the GPU's in SkyPilot's catalog."""
