"""What is known of each feature of the GPU path, and by what: the table of docs/planned.md, and a
sentence of the README.

    python -m benchmarks.gpu_features           # writes both anew
    python -m benchmarks.gpu_features --check   # says what is wrong, and changes nothing

*Run* means on the card of gpu.json, and names figures of it. *Executed* means on a CUDA device that is not
there (tests/nullgpu), and names tests whose last result nullgpu.json has (`SPOTRL_RECORD=1 pytest -m
nullgpu`). *Rehearsed* means on a CPU, or on tensors that hold nothing. What none of them shows was only read.
"""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.allocated import allocated_by_phase

ROOT = Path(__file__).parents[1]
CARD = Path(__file__).with_name("gpu.json")
EXECUTED = Path(__file__).with_name("nullgpu.json")
PAGE = ROOT / "docs/planned.md"
README = ROOT / "README.md"
BEGIN = "<!-- features: python -m benchmarks.gpu_features -->"
END = "<!-- end of features -->"


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One row of the table."""

    name: str
    run: tuple[str, ...] = ()
    """Beginnings of the names of figures in gpu.json."""
    executed: tuple[str, ...] = ()
    """Tests under tests/nullgpu, as FILE::TEST or FILE::TEST[CASE]."""
    at_size: tuple[str, ...] = ()
    """Recipes of which one rank was executed at its true shape (allocated.json)."""
    rehearsed: tuple[str, ...] = ()
    """Tests elsewhere, as FILE under tests/, or FILE::TEST."""


RECIPE = "grpo-qwen2.5-vl-3b-mathv60k"
STEPS = "test_steps.py::test_two_steps"
CHECK = "test_card_checks.py::test_a_check_of_a_card_ends"
UNDER_RAY = "test_runs.py::test_a_run_under_ray_ends_and_resumes"

FEATURES = (
    Feature(
        name="every import of the GPU environment",
        run=(RECIPE,),
        executed=("test_start.py::test_every_module_of_a_gpu_run_imports",),
    ),
    Feature(
        name="preflight's readings of NVML, with faults",
        executed=("test_preflight_faults.py::test_a_fault_is_named",),
        rehearsed=("node/preflight/test_gpus.py",),
    ),
    Feature(
        name="attention, forward and backward",
        run=("varlen attention",),
        executed=(f"{CHECK}[attention]",),
        rehearsed=("learning/test_packing.py",),
    ),
    Feature(
        name="gradients of packed rows",
        run=("packed gradients",),
        executed=(f"{CHECK}[gradients]",),
        rehearsed=("learning/test_packing.py",),
    ),
    Feature(
        name="load, rollout, scoring, update, sync on one card",
        run=(f"{RECIPE}, random weights, step 2: whole step",),
        executed=(f"{STEPS}[one card]",),
        rehearsed=("loops/test_resume.py",),
    ),
    Feature(
        name="CUDA graphs", run=(f"{RECIPE}, random weights, step 2: mean",), executed=(f"{STEPS}[one card]",)
    ),
    Feature(
        name="sleep level 1",
        run=("GPU memory used, sleep level 1, asleep",),
        executed=(f"{STEPS}[eager, sleep level 1]",),
    ),
    Feature(
        name="sleep level 2",
        run=(f"{RECIPE}, random weights, step 2: weight sync",),
        executed=(f"{STEPS}[one card]",),
        rehearsed=("sampling/test_rollout.py",),
    ),
    Feature(
        name="two ranks, ZeRO-3 over NCCL",
        executed=("test_runs.py::test_sft_on_two_cards[all weights]",),
        rehearsed=("learning/test_invariance.py",),
    ),
    Feature(
        name="an engine of two GPUs (tensor parallel)",
        executed=(f"{STEPS}[tensor parallel, eager]",),
        rehearsed=("rehearsal/test_split_order.py",),
    ),
    Feature(name="CUDA graphs of such an engine", executed=(f"{STEPS}[tensor parallel]",)),
    Feature(
        name="every recipe's engine with its graphs, at true width, vocabulary and sequences",
        executed=("test_engines.py::test_an_engine_starts_with_its_graphs",),
    ),
    Feature(name="several nodes", rehearsed=("lab/test_nodes.py",)),
    Feature(name="Ray's placement of GPUs", run=(RECIPE,), executed=(UNDER_RAY,)),
    Feature(name="checkpoint and resume", executed=(UNDER_RAY,), rehearsed=("loops/test_resume.py",)),
    Feature(name="optimizer and reference in host memory", executed=(f"{STEPS}[states in host memory]",)),
    Feature(name="LoRA", executed=(f"{STEPS}[lora]",), rehearsed=("learning/test_lora.py",)),
    Feature(
        name="weights in 4 bits",
        executed=("test_runs.py::test_sft_on_two_cards[weights in 4 bits]",),
        rehearsed=("learning/test_lora.py",),
    ),
    Feature(name="Qwen3-VL", executed=(f"{STEPS}[qwen3-vl]",)),
    Feature(
        name="Qwen3.5 and the kernel of its recurrence",
        executed=(f"{STEPS}[qwen3.5]",),
        rehearsed=("learning/test_delta_kernel.py",),
    ),
    Feature(
        name="mixture of experts",
        executed=(f"{STEPS}[experts]",),
        rehearsed=("learning/test_experts.py",),
    ),
    Feature(
        name="staleness",
        executed=("test_runs.py::test_steps_that_are_sampled_ahead",),
        rehearsed=("fleet/test_fleet_equals_colocated.py",),
    ),
    Feature(
        name="SFT",
        executed=("test_runs.py::test_sft_on_two_cards[all weights]",),
        rehearsed=("loops/test_sft.py",),
    ),
    Feature(
        name="on-policy distillation",
        executed=("test_runs.py::test_two_steps_of_a_recipe[distilled]",),
        rehearsed=("learning/test_teacher.py",),
    ),
    Feature(
        name="rollout workers",
        executed=("test_runs.py::test_a_run_fed_by_a_worker",),
        rehearsed=("fleet/test_fleet_equals_colocated.py",),
    ),
    Feature(name="`run.deterministic=cuda`"),
    Feature(
        name="one rank of 72B on 32 GPUs",
        at_size=("grpo-qwen2.5-vl-72b-mathv60k",),
    ),
)


def shown(feature: Feature, card: dict, results: dict) -> tuple[list[str], list[str], list[str]]:
    """(figures, tests and recipes that executed it, tests that rehearse it)."""
    figures = []
    for beginning in feature.run:
        figures += [name for name in card["figures"] if name.startswith(beginning)]
    passed = []
    for test in feature.executed:
        found = [
            result for name, result in results["tests"].items() if name.split("[")[0] == test or name == test
        ]
        if found and all(result["passed"] for result in found):
            passed.append(test)
    passed += [recipe for recipe in feature.at_size if allocated_by_phase(recipe)]
    return figures, passed, list(feature.rehearsed)


def functions(path: Path) -> set[str]:
    """Names of a file's functions."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def problems() -> list[str]:
    """Names that mean nothing: tests and figures that are not there."""
    card = json.loads(CARD.read_text())
    wrong = []
    for feature in FEATURES:
        for beginning in feature.run:
            if not any(name.startswith(beginning) for name in card["figures"]):
                wrong.append(f"{feature.name}: gpu.json has no figure {beginning!r}")
        places = [f"nullgpu/{test}" for test in feature.executed] + list(feature.rehearsed)
        for place in places:
            file, _, test = place.partition("::")
            path = ROOT / "tests" / file
            if not path.exists() or (test and test.split("[")[0] not in functions(path)):
                wrong.append(f"{feature.name}: there is no test {place}")
    return wrong


def table() -> str:
    """The table in Markdown."""
    card = json.loads(CARD.read_text())
    results = json.loads(EXECUTED.read_text())
    lines = [f"| feature | run on one {card['device']} | executed | rehearsed |", "|---|---|---|---|"]
    for feature in FEATURES:
        figures, passed, rehearsed = shown(feature, card, results)
        cells = ["yes" if figures else "", "yes" if passed else ""]
        cells.append(", ".join(f"`{test}`" for test in rehearsed))
        if not any(cells):
            cells = ["", "", "only read"]
        lines.append(f"| {feature.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def status() -> str:
    """The README's sentence."""
    card = json.loads(CARD.read_text())
    results = json.loads(EXECUTED.read_text())
    run, executed = 0, 0
    rehearsed_only: list[str] = []
    read_only: list[str] = []
    for feature in FEATURES:
        figures, passed, rehearsed = shown(feature, card, results)
        run += bool(figures)
        executed += bool(passed)
        if not figures and not passed:
            (rehearsed_only if rehearsed else read_only).append(feature.name)
    return (
        f"Of {len(FEATURES)} features of the GPU path {run} were run on that card and {executed} executed on"
        f" [a device that computes nothing](tests/nullgpu/README.md).\nOnly rehearsed on CPUs:"
        f" {', '.join(rehearsed_only) or 'none'}. Only read: {', '.join(read_only) or 'none'}."
    )


def page(path: Path, text: str) -> str:
    """A page with its generated part as it is now."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(arguments: list[str]) -> int:
    wrong = problems()
    pages = {PAGE: page(PAGE, table()), README: page(README, status())}
    for path, text in pages.items():
        if "--check" in arguments and text != path.read_text():
            wrong.append(f"{path.name}: what it says of features is old: python -m benchmarks.gpu_features")
    if wrong:
        print("\n".join(wrong))
        return 1
    for path, text in pages.items():
        if "--check" not in arguments:
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
