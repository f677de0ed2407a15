"""A trainer and three rollout workers on namespaced hosts that speak with an S3 server alone, by links of
200 Mbit/s."""

from __future__ import annotations

import hosts

from benchmarks import fleet_links

pytestmark = hosts.marks(hosts.missing())
STEPS = 5


def test_every_host_passes_on_what_a_step_needs_and_all_end(tmp_path, figure):
    """Every process ends with 0, or `measure` says who did not."""
    fleet_links.prepare(tmp_path, "tiny")
    found = fleet_links.measure(tmp_path, 200, STEPS)
    config = fleet_links.settings(tmp_path, tmp_path, STEPS)
    assert sum(found.completions_by_worker.values()) >= STEPS * config.samples_per_step
    assert found.patch_bytes > 0
    assert found.worker_received_bytes > found.patch_bytes, "every worker fetches the weights of every step"
    assert found.trainer_sent_bytes > found.patch_bytes
    assert found.store_sent_bytes > len(fleet_links.WORKERS) * found.patch_bytes
    figure("step of a trainer with three workers at 200 Mbit/s", found.step_s)
