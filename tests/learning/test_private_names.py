"""Names of DeepSpeed's inside stand in one file, which says at import which of them a release lacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer.learning.zero import private_names
from trainer.learning.zero.private_names import GATHERING, NEEDED, RELEASE, STAGE_3

ROOM = Path(private_names.__file__).parents[1]
READ_ELSEWHERE = {"ds_shape", "ds_numel", "ds_tensor", "empty_partition_cache", "parameter_offload"}
ABSENT = {STAGE_3: "grad_position name_of_no_release", "runtime.zero.no_module": "other_name"}


def test_the_release_that_is_pinned_has_every_name():
    assert private_names.absent(NEEDED) == private_names.absent(GATHERING) == private_names.LACKING == []
    pinned = (ROOM.parents[1] / "requirements/gpu.txt").read_text()
    assert f"deepspeed=={RELEASE}" in pinned


def test_a_name_that_is_gone_is_said_with_the_release_that_has_it():
    gone = f"has no {STAGE_3}.name_of_no_release, runtime.zero.no_module.other_name"
    with pytest.raises(ImportError, match=f"{re.escape(gone)}: install deepspeed=={RELEASE}"):
        private_names.lacking(ABSENT, GATHERING)
    with pytest.warns(UserWarning, match=f"{re.escape(gone)}, so it gathers and reduces by itself"):
        assert len(private_names.lacking(NEEDED, ABSENT)) == 2


def test_no_other_file_of_the_room_reads_one():
    names = {name for listed in (*NEEDED.values(), *GATHERING.values()) for name in listed.split()}
    pattern = re.compile(rf"\.({'|'.join(map(re.escape, names - READ_ELSEWHERE))})\b")
    for path in ROOM.rglob("*.py"):
        if path.name != "private_names.py":
            assert pattern.findall(path.read_text()) == [], path
