"""Which findings take another machine, and which only the user can mend."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer.node.preflight import speed
from trainer.node.preflight.findings import ANOTHER_MACHINE_HELPS, Finding, exit_code


def test_every_check_that_takes_another_machine_has_its_reason_on_the_page():
    page = (Path(__file__).parents[3] / "docs/preflight.md").read_text()
    section = page.partition("## When another machine is taken")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE))
    assert rows.pop("failed check") == "why another machine helps"
    rows.pop("---", None)
    assert rows == ANOTHER_MACHINE_HELPS and all(rows.values())


@pytest.mark.parametrize("check", ["compiler", "open files", "all-reduce between nodes", "a new one"])
def test_what_the_next_machine_shares_never_takes_one(check):
    assert exit_code([Finding(check=check, nodes=(0,), level="fail", figure="1", machine=True)]) == 2


def rank(number: int, node: int, inside: float, between: float, gpu: str = "") -> dict:
    speeds = {"inside_gb_per_s": inside, "between_gb_per_s": between}
    return {"node": node, "rank": number, "gpu": gpu} | speeds


@pytest.mark.parametrize(("slow_nodes", "code"), [((1,), 36), ((0, 1), 2)])
def test_collectives_that_are_slow_on_all_nodes_have_a_cause_that_all_share(slow_nodes, code):
    ranks = []
    for number in range(4):
        bus = 40.0 if number // 2 in slow_nodes else 400.0
        ranks.append(rank(number, number // 2, bus, 400.0, "NVIDIA H100"))
    assert exit_code(speed.judge_speed(ranks, 3200.0)) == code


def test_an_image_without_the_library_of_infiniband_takes_no_other_machine():
    (finding,) = speed.judge_speed([rank(0, 0, 0.0, 12.0), rank(1, 1, 0.0, 12.0)], 3200.0)
    assert (finding.level, finding.figure) == ("fail", "all-reduce between all nodes reaches 12 GB/s")
    assert exit_code([finding]) == 2
