"""GPUs of the clouds: what each is called there, how many a machine has, how fast machines are joined."""

from __future__ import annotations

from dataclasses import dataclass

RUNPOD = {"L4": "L4", "L40S": "L40S", "A100-80GB": "A100-80GB-SXM", "H100": "H100-SXM", "H200": "H200-SXM",
          "B200": "B200", "MI300X": "MI300X"}  # fmt: skip
GCP = {"L4": "L4", "A100": "A100", "A100-80GB": "A100-80GB", "H100": "H100", "H200": "H200", "B200": "B200"}
LABELLED = {name: name for name in ("L4", "L40S", "A100", "A100-80GB", "H100", "H200", "B200")}
DSTACK = {name: "A100" if name == "A100-80GB" else name for name in LABELLED}
DSTACK_RUNPOD = {name: DSTACK[name] for name in RUNPOD if name in DSTACK}
DSTACK_GCP = {name: DSTACK[name] for name in GCP}
AWS = {name: name for name in ("L4", "L40S", "A100", "A100-80GB", "H100", "H200", "B200")}
AZURE = {name: name for name in ("A100", "A100-80GB", "H100")}
LAMBDA = {name: name for name in ("A100", "A100-80GB", "H100", "B200")}
NEBIUS = {name: name for name in ("L40S", "H100", "H200", "B200")}
ANY = {name: name for name in (*LABELLED, "MI300X")}
"""Our name of a GPU -> the platform's, of each cloud; ANY: machines of your own."""
RUNPOD_CARDS = {
    "L4": "NVIDIA L4", "L40S": "NVIDIA L40S", "A100-80GB": "NVIDIA A100 80GB PCIe",
    "A100-80GB-SXM": "NVIDIA A100-SXM4-80GB", "H100-SXM": "NVIDIA H100 80GB HBM3",
    "H200-SXM": "NVIDIA H200", "B200": "NVIDIA B200",
}  # fmt: skip
"""RunPod's own names, which dstack takes for instance types, by SkyPilot's."""
NIC = {"A100-80GB": 100.0, "A100": 100.0, "H100": 200.0, "H200": 200.0, "B200": 200.0, "L4": 50.0}
"""Gb/s of GCP's machines by their first network interface, a gVNIC. Machines of eight H100 have four more,
which only GPUDirect's own images use."""

COUNTS = {
    ("gcp", "H100"): (1, 2, 4, 8), ("gcp", "H200"): (8,), ("gcp", "B200"): (8,),
    ("gcp", "A100-80GB"): (1, 2, 4, 8), ("aws", "A100"): (8,), ("aws", "A100-80GB"): (8,),
    ("aws", "H100"): (1, 8), ("aws", "H200"): (8,), ("aws", "B200"): (8,), ("aws", "L4"): (1, 4, 8),
    ("aws", "L40S"): (1, 4, 8), ("azure", "A100"): (8,), ("azure", "A100-80GB"): (1, 2, 4, 8),
    ("azure", "H100"): (1, 2), ("lambda", "A100"): (1, 2, 4, 8), ("lambda", "A100-80GB"): (8,),
    ("lambda", "H100"): (1, 2, 4, 8), ("lambda", "B200"): (1, 2, 4, 8), ("nebius", "L40S"): (1, 2, 4),
    ("nebius", "H100"): (1, 8), ("nebius", "H200"): (1, 8), ("nebius", "B200"): (1, 8),
}  # fmt: skip
"""GPUs per node that a cloud sells, where it is not every number up to 8."""


MIB = 1 << 20


@dataclass(frozen=True)
class CloudDisk:
    """A cloud's disk as a task file asks for it: how fast it takes a checkpoint, and what it costs."""

    tier: str
    """SkyPilot's `disk_tier`; "": it has nothing faster than its default."""
    bytes_per_s: float
    """Writing, whatever the size."""
    bytes_per_s_gib: float
    """Writing, for each GiB."""
    most_bytes_per_s: float
    usd_gib_month: float
    usd_month: float = 0.0
    """Besides, whatever the size."""

    def write_bytes_per_s(self, gib: float) -> float:
        """How fast a disk of that size is written."""
        return min(self.bytes_per_s + gib * self.bytes_per_s_gib, self.most_bytes_per_s)

    def usd_per_hour(self, gib: float) -> float:
        return (self.usd_month + gib * self.usd_gib_month) / 730


DISKS = {
    # gp3 of 7,000 IOPS and 437 MiB/s (SkyPilot 0.14.1), $0.005 an IOPS above 3,000 and $0.04 a MiB/s above
    # 125 a month; its `medium` has 218.
    "aws": CloudDisk("high", 437 * MIB, 0, 437 * MIB, 0.08, 32.5),
    # pd-ssd: 0.48 MiB/s a GiB, 1,200 at most (Google's page on disks); `medium`, pd-balanced, has 0.28.
    "gcp": CloudDisk("high", 0, 0.48 * MIB, 1200 * MIB, 0.17),
    "dstack-gcp": CloudDisk("", 0, 0.28 * MIB, 1200 * MIB, 0.10),
    # Premium SSD P30, 1 TiB, 200 MB/s, $135.17 a month: SkyPilot's `high` and `medium` are the same.
    "azure": CloudDisk("", 200e6, 0, 200e6, 0.132),
    # Network SSD IO M3 in place of Network SSD (assumptions: 1 GB/s, and its price).
    "nebius": CloudDisk("high", 1e9, 0, 1e9, 0.118),
}
"""Planning figures by cloud; prices as pages about AWS, Google Cloud and Azure state them, Nebius' is an
assumption. RunPod's and Lambda's disks are the hosts' own NVMe, in the machine's price."""


def runpod_card(gpu: str, count: int) -> str:
    """SkyPilot's name of `count` GPUs in one pod of RunPod: a single A100 does without NVLink, and is the
    cheaper PCIe card."""
    return "A100-80GB" if (gpu, count) == ("A100-80GB", 1) else RUNPOD[gpu]
