"""The limits of the measurements, with the source of each number. Standard library only.

Where no source stands, the number is our own choice.
"""

from __future__ import annotations

TOGETHER = "Together AI's multi-node guide"

NVLINK_GB_PER_S = {
    "B200": (1600.0, f"{TOGETHER}, scaled by NVLink 5"),
    "H200": (800.0, TOGETHER),
    "H100": (800.0, TOGETHER),
    "A100": (530.0, f"{TOGETHER}, scaled by NVLink 3"),
}
"""Within a node, GB/s and source, both directions of a GPU's links together, as nvidia-smi and the guide
count them. NCCL's bus bandwidth counts one direction: it is held against half of this."""
FABRIC_SHARE = 0.8
"""All-reduce between nodes: share of the InfiniBand or RoCE rate of the node (Together AI)."""
ETHERNET_GBIT_PER_S = 10.0
"""Rate of the link between any two nodes that train on GPUs over TCP (Qwen's multi-node guide)."""
ETHERNET_SHARE = 0.85
"""Share of that rate that must be measured: TCP over a 1,500-byte MTU leaves 94% of a link."""

SLOW_PAIR_FAIL = 1 / 3
"""A pair's bandwidth as a share of what the faster pairs of the same job reach."""
SLOW_PAIR_WARN = 1 / 2
LOSS_FAIL = 0.004
"""Share of datagrams that never come back: TCP's throughput goes with 1/sqrt(loss) (Mathis et al. 1997)."""
LOSS_WARN = 0.001
ROUND_TRIP_WARN_MS = 2.0
"""Best round trip of a pair: nodes of one zone are under 1 ms apart."""
CLOCK_FAIL_S = 60.0
"""Object stores refuse signatures that are 15 minutes off; logs must be readable together."""
CLOCK_WARN_S = 5.0

GPU_SPREAD = 0.10
"""A GPU is flagged if its matmul rate or memory bandwidth is this far below the job's median, as the issue
trackers of large runs use it."""
SPREAD_TARGET = f"within {GPU_SPREAD:.0%} of the job's median"
GPU_TEMPERATURE_MARGIN_C = 5.0
"""Degrees below the GPU's slowdown temperature at which a warning is given."""
CHECKPOINT_WRITE_S = 900.0
"""Longest time that a node should need to write its part of one checkpoint, or the model into its cache."""
SPILL_MB_PER_S = 25.0
"""Write speed of the disk that Ray spills its object store to."""
FREE_DISK_GIB = 2.0
"""Free where the run is written, beside what the plan needs."""
