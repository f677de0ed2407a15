"""The limits of the measurements, with the source of each number. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

TOGETHER = "Together AI's multi-node guide"
QWEN = "Qwen's multi-node fine-tuning guide"
OURS = "our own choice"


@dataclass(frozen=True)
class Threshold:
    value: float
    source: str


NVLINK_GB_PER_S = {
    "B200": Threshold(1600.0, f"{TOGETHER}, scaled by NVLink 5"),
    "H200": Threshold(800.0, TOGETHER),
    "H100": Threshold(800.0, TOGETHER),
    "A100": Threshold(530.0, f"{TOGETHER}, scaled by NVLink 3"),
}
"""Within a node, GB/s, both directions of a GPU's links together, as nvidia-smi and the guide count them.
NCCL's bus bandwidth counts one direction: it is held against half of this."""
NVLINK_SHARE_OF_BUS = 0.5
"""Bus bandwidth of an all-reduce per NVLink bandwidth of both directions."""

FABRIC_SHARE = Threshold(0.8, TOGETHER)
"""All-reduce between nodes: share of the InfiniBand or RoCE rate of the node."""
ETHERNET_GBIT_PER_S = Threshold(10.0, QWEN)
"""Rate of the link between any two nodes that train on GPUs over TCP."""
ETHERNET_SHARE = Threshold(0.85, "94% is the most that TCP over a 1,500-byte MTU leaves of a link; ours")
"""Share of that rate that must be measured."""

SLOW_PAIR_FAIL = Threshold(1 / 3, OURS)
"""A pair's bandwidth as a share of what the faster pairs of the same job reach."""
SLOW_PAIR_WARN = Threshold(1 / 2, OURS)
LOSS_FAIL = Threshold(0.004, "TCP's throughput goes with 1/sqrt(loss): Mathis et al. 1997")
"""Share of datagrams that never come back."""
LOSS_WARN = Threshold(0.001, OURS)
ROUND_TRIP_WARN_MS = Threshold(2.0, "nodes of one zone are under 1 ms apart")
"""Best round trip of a pair."""
CLOCK_FAIL_S = Threshold(
    60.0, "object stores refuse signatures that are 15 minutes off; logs must be readable together"
)
CLOCK_WARN_S = Threshold(5.0, OURS)

GPU_SPREAD = Threshold(0.10, "fleet median, as the issue trackers of large runs use it")
"""A GPU is flagged if its matmul rate or memory bandwidth is this far below the job's median."""
GPU_TEMPERATURE_MARGIN_C = Threshold(5.0, OURS)
"""Degrees below the GPU's slowdown temperature at which a warning is given."""
CHECKPOINT_WRITE_S = Threshold(900.0, OURS)
"""Longest time that a node should need to write its part of one checkpoint, or the model into its cache."""
SPILL_MB_PER_S = Threshold(25.0, OURS)
"""Write speed of the disk that Ray spills its object store to."""
FREE_DISK_GIB = Threshold(2.0, OURS)
"""Free where the run is written, beside what the plan needs."""
