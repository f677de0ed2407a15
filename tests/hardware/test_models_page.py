"""docs/models.md says for each family which parity tests it is a case of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import test_export
from tests.families import FAMILIES, VISION, dtype
from tests.learning import test_lora, test_packing
from tests.recipes import test_memory
from tests.weights import test_parity, test_sync

PAGE = Path(__file__).parents[2] / "docs/models.md"
HEAD = (
    "| | packed gradients, one process | two ranks, ZeRO-3 | engine against policy | exports are read by"
    " | LoRA | base in 4 bits | parameters |"
)


def cases(test: Any, family: str) -> Iterator[dict[str, Any]]:
    """A test's parameters of this family, by name."""
    for mark in test.pytestmark:
        if mark.name != "parametrize" or "family" not in mark.args[0]:
            continue
        names = (mark.args[0],) if isinstance(mark.args[0], str) else mark.args[0]
        for case in mark.args[1]:
            values = getattr(case, "values", case)
            found = dict(zip(names, (values,) if isinstance(values, str) else values, strict=True))
            if found["family"] == family:
                yield found


def row(family: str) -> str:
    """The family's row."""
    images = ", images" if family in VISION else ""
    packed = any(cases(test_packing.test_gradients_are_those_of_the_padded_computation, family))
    ranks = cases(test_packing.test_ranks_reproduce_the_padded_gradients, family)
    two = any(case["world"] == 2 for case in ranks)
    engines = sorted({case["tp"] for case in cases(test_parity.test_engine_agrees_with_policy, family)})
    readers = {
        "transformers": test_export.test_transformers_reads_back_every_family,
        "vLLM": test_sync.test_export_loads_everywhere,
    }
    read = [name for name, test in readers.items() if any(cases(test, family))]
    adapted = cases(test_lora.test_adapters_are_those_of_plain_peft, family)
    methods = sorted({case["method"].upper() for case in adapted})
    four = any(cases(test_lora.test_on_a_base_in_4_bits_that_is_evaluated_first, family))
    cells = [
        f"`{family}`",
        f"fp32{images}" if packed else "",
        f"fp32{images}" if two else "",
        f"{dtype(family)}{images}, TP {' and '.join(map(str, engines))}" if engines else "",
        ", ".join(read),
        ", ".join(methods),
        "SFT" if four else "",
        "yes" if any(cases(test_memory.test_parameters_of_a_built_model, family)) else "",
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_row_of_its_cases(family):
    lines = PAGE.read_text().splitlines()
    assert HEAD in lines
    assert row(family) in lines, f"docs/models.md: the row of {family} must read: {row(family)}"
