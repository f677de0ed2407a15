"""The plan's activations against passes at the recipes' true shapes, on fake tensors."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from benchmarks.rehearsal import (
    EACH,
    OUT,
    SHOWN,
    distinct,
    planned_bytes,
    played,
    plays,
    seconds,
)
from recipes.plan import hub_config
from recipes.presets import get
from trainer.config.algorithm import SurrogateKind
from trainer.config.budget import logprob_tokens, micro_batch_tokens
from trainer.config.schema import Algorithm
from trainer.hardware import adapters

AGREE = "import_utils.py"
"""transformers' check that image tokens and features agree: it reads a count."""
DEEPSTACK = {False: "modeling_qwen3_vl.py", True: "modeling_qwen3_vl_moe.py"}
"""Features of three blocks of Qwen3-VL's tower are added by a mask, which is read for getting and for
putting; with experts or without."""
WITHIN = (0.9, 1.1)
"""Peak over plan."""
PLAYED = sorted(distinct())


def again(recipe: str) -> str:
    """What to do when the file is older than the recipe."""
    return f"`.venvs/test/bin/python -m benchmarks.rehearsal {recipe}` plays it again"


def recorded() -> dict[str, dict[str, Any]]:
    """What each recipe's passes did when they were played last."""
    return json.loads(OUT.read_text())["passes"]


def reads(recipe: str) -> dict[str, int]:
    """How often a forward pass waits for the GPU, by the file that reads."""
    shape = hub_config.shape(get(recipe).config.model)
    assert shape is not None
    if shape.vision is None:
        return {}
    return {AGREE: 1} | (
        {DEEPSTACK[bool(shape.experts)]: 2 * shape.vision.deepstack} if shape.vision.deepstack else {}
    )


def check(recipe: str, what: str, one: dict[str, Any]) -> None:
    """One pass: whole model, one device, as few reads as are known."""
    config = get(recipe).config
    shape = hub_config.shape(config.model)
    assert shape is not None
    assert one["parameters"] == shape.parameters
    lora = config.lora
    assert one["adapters"] == (sum(adapters.adapter_sizes(shape, lora.rank, lora.vision)) if lora.rank else 0)
    assert one["mixed"] == {}
    if what == "update":  # on fake CPU tensors
        return
    found: dict[str, int] = {}
    for place, count in one["waits"].items():
        file = place.split(" at ")[1].split(":")[0]
        found[file] = found.get(file, 0) + count
    assert found == reads(recipe)


@pytest.mark.parametrize("recipe", PLAYED)
def test_a_pass_takes_what_is_planned_on_one_device_with_few_reads(recipe):
    """Recipes with the same shape and budget share their passes."""
    passes = recorded().get(recipe, {})
    assert set(passes) >= {f"{what}, {kind}" for what, kind in plays(recipe)}, again(recipe)
    config = get(recipe).config
    shape = hub_config.shape(config.model)
    assert shape is not None
    for what in ("logprobs", "update"):
        tokens = (micro_batch_tokens if what == "update" else logprob_tokens)(config, shape)
        of_kind = [one for name, one in passes.items() if name.startswith(what)]
        assert 0.99 * tokens < max(one["tokens"] for one in of_kind) <= tokens, again(recipe)
        peak = max(one["peak_bytes"] for one in of_kind)
        ratio = peak / planned_bytes(config, shape, learns=what == "update")
        assert WITHIN[0] <= ratio <= WITHIN[1], f"{recipe} {what}: {ratio:.3f} of the plan; {again(recipe)}"
    for name, one in passes.items():
        check(recipe, name.split(",")[0], one)


def same(recipe: str, what: str, kind: str) -> None:
    """Plays a pass anew and compares it with the file: work may differ by a hundredth, as a changed loss does
    a few operations more."""
    one = played(recipe, what, kind)
    check(recipe, what, one)
    before = recorded()[recipe][f"{what}, {kind}"]
    for name in ("tokens", "parameters", "adapters"):
        assert one[name] == before[name], again(recipe)
    for name in ("peak_bytes", "operations", "matrix_flops", "moved_bytes"):
        assert one[name] == pytest.approx(before[name], rel=0.01), again(recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "kind"),
    [one if "usual" in one else pytest.param(*one, marks=pytest.mark.long) for one in plays(SHOWN[0])],
)
def test_a_pass_of_three_billion_is_what_the_file_says(what, kind):
    same(SHOWN[0], what, kind)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", PLAYED)
def test_every_pass_is_what_the_file_says(recipe):
    for what, kind in plays(recipe):
        same(recipe, what, kind)


@pytest.mark.parametrize(("what", "kind"), EACH)
@pytest.mark.parametrize("recipe", SHOWN)
def test_the_plan_stays_above_the_roofline(recipe, what, kind):
    roof, planned = seconds(recipe, what, recorded()[recipe][f"{what}, {kind}"])
    assert 0.96 <= planned / roof <= 1.5


CHOICES: list[dict[str, Any]] = [
    *({"surrogate": kind} for kind in get_args(SurrogateKind)),
    {"rollout_correction": "mask", "correction_level": "token"},
    {"rollout_correction": "mask", "correction_level": "sequence"},
    {"rollout_correction": "mask", "correction_level": "geometric"},
    {"rollout_correction": "off"},
    {"kl_estimator": "k1", "dual_clip": 3.0},
    {"kl_estimator": "k2"},
]
PARTS = ("advantages", "weights", "shares", "rollout_logprobs", "old_logprobs", "ref_logprobs")


def lose(algorithm: Algorithm) -> tuple[Any, Any]:
    """(the loss of three completions on fake CUDA tensors, what was watched)."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.rehearsal.fake_pass import Watch, loss_of
    from trainer.config import RunConfig
    from trainer.learning.policy import TrainMicroBatch

    watch, batch = Watch("cuda", 0), SimpleNamespace()
    with FakeTensorMode(), watch:
        parts = {name: torch.zeros(30, device="cuda") for name in PARTS}
        logp, entropy = torch.zeros(30, device="cuda", requires_grad=True), torch.zeros(30, device="cuda")
        item = TrainMicroBatch(batch=batch, lengths=torch.tensor([10, 12, 8], device="cuda"), **parts)

        class GivenLogprobs:
            """What the loss asks of a model."""

            def __call__(self, batch: Any) -> tuple[Any, Any, Any]:
                return logp, entropy, entropy

        return loss_of(RunConfig(algorithm=algorithm), GivenLogprobs(), item), watch


@pytest.mark.slow
@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_no_loss_waits_for_the_gpu_or_mixes_devices(chosen):
    loss, watch = lose(Algorithm(**chosen, kl_coef=0.1))
    assert loss.requires_grad and loss.device.type == "cuda"
    assert not watch.waits and not watch.mixed
