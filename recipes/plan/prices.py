"""Dollars per GPU-hour: from SkyPilot's catalog where it is cached on this machine, else from the dated
snapshot."""

from __future__ import annotations

import csv
import functools
import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SNAPSHOT = Path(__file__).with_name("prices.json")


@dataclass(frozen=True)
class Price:
    """Dollars per hour of one GPU with its share of the machine."""

    cloud: str
    gpu: str
    engine_gpu: str
    """The GPU's name in the platform's catalog."""
    on_demand: float
    spot: float | None
    read: str
    """Date."""
    source: str
    host_gib: float | None = None
    """RAM that comes with it, GiB; None: not known."""
    sizes: tuple[int, ...] = ()
    """GPUs per machine that the price is for; (): the same for every machine that the cloud sells."""


@functools.cache
def price_snapshot() -> tuple[Price, ...]:
    """The prices in this repository."""
    rows = json.loads(SNAPSHOT.read_text())["rows"]
    listed = []
    for row in rows:
        sizes = tuple(row.pop("sizes", ()))
        listed.append(Price(**row, sizes=sizes))
    return tuple(listed)


def gpu_price(
    cloud: str, gpu: str, catalogs: Path | None = None, variant: str = "", count: int = 0
) -> Price | None:
    """The price of a GPU on a cloud, None if nobody here knows it.

    `catalogs`: SkyPilot's catalog directory; its cheapest row of that GPU goes before the snapshot.
    `variant`: the platform's name of what is rented, where a cloud sells the GPU in two forms (PCIe, SXM) at
    two prices. `count`: GPUs of the machine, where machines differ in price per GPU; 0: any.
    """
    known = None
    for row in price_snapshot():
        right_size = not count or not row.sizes or count in row.sizes
        if (row.cloud, row.gpu) == (cloud, gpu) and right_size and variant in ("", row.engine_gpu):
            known = row
            break
    if catalogs is None:
        return known
    wanted = known or Price(cloud, gpu, variant or gpu, 0.0, None, "", "")
    return from_catalog(wanted, catalogs, count) or known


def sky_catalogs() -> Path:
    """Where SkyPilot keeps its catalogs."""
    return Path(os.environ.get("SKY_RUNTIME_DIR", Path.home())) / ".sky/catalogs/v8"


@dataclass(frozen=True)
class CatalogEntry:
    """What SkyPilot's catalog says of one GPU on one cloud."""

    regions: dict[str, dict[str, float]]
    """By market, `Price` or `SpotPrice`: dollars per GPU-hour of every region that has it, cheapest first."""
    ram: float | None
    """GiB that come with a GPU, at most."""
    date: str
    path: Path


HOSTS = {"A100-80GB": "a2-ultragpu-1g", "H100": "a3-highgpu-1g"}
"""GCP's machine of one GPU: its price comes on top of the GPU's in SkyPilot's catalog."""


@functools.cache
def catalog_entry(
    cloud: str, gpu: str, engine_gpu: str, catalogs: Path, count: int = 0
) -> CatalogEntry | None:
    """From `vms.csv`, of machines with `count` GPUs where there are any, else of the smallest; on GCP, the
    GPU and the machine that it is attached to. None where it is not listed."""
    path = catalogs / cloud / "vms.csv"
    if not path.is_file():
        return None
    sold = set()
    by_size: dict[float, list[defaultdict[str, str]]] = {}
    hosts = {}
    for row in _rows(path, cloud, engine_gpu):
        size = _number(row, "AcceleratorCount")
        if row["AcceleratorName"] == engine_gpu and size:
            by_size.setdefault(size, []).append(row)
            if _number(row, "Price"):
                sold.add(size)
        if not row["AcceleratorName"] and row["InstanceType"] == HOSTS.get(gpu):
            hosts[row["AvailabilityZone"]] = row
    if not sold:
        return None
    # Some clouds (AWS) sell eight at a time only: then their eighth. On others (Lambda) an eighth of a large
    # machine costs something else than the smallest.
    size = float(count) if count in sold and cloud != "gcp" else min(sold)
    gpus = by_size[size]

    regions: dict[str, dict[str, float]] = {}
    for column in ("Price", "SpotPrice"):
        lowest: dict[str, float] = {}
        for row in gpus:
            host = hosts.get(row["AvailabilityZone"])
            price_usd = _number(row, column)
            if not price_usd or (cloud == "gcp" and not (host and _number(host, column))):
                continue
            usd = price_usd / size + (_number(host, column) if host else 0.0)
            lowest[row["Region"]] = min(usd, lowest.get(row["Region"], usd))
        regions[column] = dict(sorted(lowest.items(), key=lambda item: item[1]))
    most = max(_number(row, "MemoryGiB") for row in [*gpus, *hosts.values()])
    ram = most / size if most else None
    date = time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))
    return CatalogEntry(regions, ram, date, path) if regions["Price"] else None


def _rows(path: Path, cloud: str, engine_gpu: str) -> list[defaultdict[str, str]]:
    """The rows of a GPU, and of GCP's machines that it is attached to; a column that a cloud lacks is
    empty."""
    rows = []
    with path.open() as file:
        header = next(csv.reader([file.readline()]), [])
        for line in file:
            machine = cloud == "gcp" and line.startswith(tuple(HOSTS.values()))
            if machine or f",{engine_gpu}," in line:
                values = zip(header, next(csv.reader([line])), strict=False)
                rows.append(defaultdict(str, values))
    return rows


def _number(row: Mapping[str, str], column: str) -> float:
    """A row's number; 0 where it is missing or none."""
    try:
        return float(row[column] or 0)
    except ValueError:
        return 0.0


def from_catalog(known: Price, catalogs: Path, count: int = 0) -> Price | None:
    """A price as the catalog has it in the cheapest region of each market, for machines of `count` GPUs."""
    entry = catalog_entry(known.cloud, known.gpu, known.engine_gpu, catalogs, count)
    if entry is None:
        return None
    on_demand = next(iter(entry.regions["Price"].values()))
    spot = next(iter(entry.regions["SpotPrice"].values()), None)
    source = f"SkyPilot catalog {entry.path}"
    return Price(known.cloud, known.gpu, known.engine_gpu, on_demand, spot, entry.date, source, entry.ram)


def region_prices(
    cloud: str, gpu: str, spot: bool, catalogs: Path, variant: str = "", count: int = 0
) -> dict[str, float]:
    """Dollars per GPU-hour by region in SkyPilot's catalog, cheapest first; empty where that is not on this
    machine."""
    known = gpu_price(cloud, gpu, None, variant)
    entry = catalog_entry(cloud, gpu, known.engine_gpu if known else variant or gpu, catalogs, count)
    return entry.regions["SpotPrice" if spot else "Price"] if entry else {}
