"""Any row, file, archive, picture, message or manifest gives the right thing or a named reason."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import code_doors, doors, hostile
from data_prep.ingest.images import inspect
from trainer.images.decoding import ImageLimits

SLOW = {doors.prepared: 3, doors.archive: 60, code_doors.code: 3}
SLOW |= {code_doors.reward_function: 12, code_doors.own_environment: 12}
"""Inputs of doors that take longer than milliseconds."""


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    code_doors.end_processes()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", doors.DOORS.values(), ids=list(doors.DOORS))
def test_every_input_is_right_or_named(door):
    @settings(
        max_examples=SLOW.get(door, 100),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**32))
    def passes(seed):
        folder = Path(tempfile.mkdtemp())
        try:
            assert door(random.Random(seed), folder) in ("right", "named")
        finally:
            shutil.rmtree(folder)

    passes()


TEXT = st.text(st.characters(), max_size=300)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.sampled_from(hostile.TEXTS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(record=st.dictionaries(st.sampled_from(hostile.COLUMNS), VALUE, max_size=5))
def test_a_record_of_any_structure_costs_itself_alone(record):
    sound = hostile.sound_records(random.Random(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.jsonl"
        path.write_text("\n".join(map(json.dumps, [*sound, record])))
        doors.expect_sound(doors.read_rows(path), sound, len(sound) + 1)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.binary(max_size=300))
def test_bytes_that_are_no_image_have_a_reason(data):
    assert inspect(data, ImageLimits()).error
