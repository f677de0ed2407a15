"""The plan counts a teacher's memory, disk, passes and download by the teacher's own shape."""

from dataclasses import replace

import pytest

from recipes.drivers import uploads
from recipes.plan import cost, memory, passes, step_seconds
from recipes.platforms import script
from recipes.presets import get
from recipes.recipe.recipe_files import expand_paths
from recipes.recipe.spec import override
from trainer.hardware.gpus import gpu_named
from trainer.hardware.model_shapes import KNOWN

NAME = "opd-qwen2.5-vl-7b-from-72b-mathv60k"
PARAMETERS = 73_410_777_344
"""Qwen2.5-VL-72B has so many."""


@pytest.fixture
def recipe():
    return get(NAME)


def phase(need, name):
    return next(phase for phase in need.phases if phase.name == name)


def test_memory_and_disk(recipe):
    need = memory.plan_memory(recipe)
    assert need and need.fits
    assert {phase.parts["teacher shard"] for phase in need.phases} == {PARAMETERS * 2 / 8}
    assert "reference shard" not in need.peak.parts
    # What may stay whole and a block on top: four matrices of attention, three of the feed-forward network.
    block = 2 * 8_192**2 + 2 * 8_192 * 1_024 + 3 * 8_192 * 29_568
    gathered = phase(need, "logprobs").parts["gathered layers of the teacher"]
    assert gathered == pytest.approx(2 * (1e9 + block), rel=2e-3)
    assert need.disk["teacher download"] == PARAMETERS * 2

    alone = memory.plan_memory(override(recipe, ["algorithm.teacher="]))
    assert alone and alone.disk_bytes == need.disk_bytes - PARAMETERS * 2
    moved = memory.plan_memory(override(recipe, ["optimizer.offload_reference=true"]))
    assert moved and "teacher shard" not in phase(moved, "rollout").parts
    assert moved.host["reference shards"] == PARAMETERS * 2


def test_a_teacher_of_twice_the_nodes_is_cut_and_downloaded_in_halves(recipe):
    need = memory.plan_memory(override(recipe, ["cluster.nodes=2"]))
    assert need
    assert need.peak.parts["teacher shard"] == PARAMETERS * 2 / 16
    assert PARAMETERS < need.disk["teacher download"] < PARAMETERS + (6 << 30)


def test_seconds_of_a_step(recipe):
    need = memory.plan_memory(recipe)
    alone = override(recipe, ["algorithm.teacher="])
    assert need
    with_teacher, without = (step_seconds.step_time(one, "H100", 100.0, need) for one in (recipe, alone))
    step = passes.of_step(recipe, need.shape)
    teacher = KNOWN["Qwen/Qwen2.5-VL-72B-Instruct"]
    card = gpu_named("H100")
    assert len(step.teacher) == len(step.logprobs) and step.models == 1
    assert passes.of_step(alone, need.shape).models == 0, (
        "the policy's own are what the teacher's are held against"
    )

    products = sum(step.teacher) * 2 * teacher.matmul_parameters / (card.bf16_tflops * 1e12)
    judged = step_seconds.teacher_seconds(recipe, card, 100.0, step)
    assert products / 0.7 < judged < products / 0.3
    assert with_teacher.logprobs - without.logprobs > judged
    assert with_teacher.update == without.update


def test_every_start_downloads_the_teacher(recipe):
    """A resume takes the policy from its checkpoint, and no checkpoint has the teacher."""
    alone = override(recipe, ["algorithm.teacher="])
    now, then = (cost.offers(one, None, ["skypilot-gcp"])[0] for one in (recipe, alone))
    assert now.start_s > then.start_s
    teacher_s = PARAMETERS * 2 / cost.DOWNLOAD_BYTES_S
    for offer, download_s in ((now, teacher_s), (then, 0.0)):
        assert offer.waited_s == pytest.approx(
            cost.ready_seconds(download_s + offer.restart_s - offer.waited_s)
        )


def test_a_folder_of_this_machine_goes_to_the_nodes(recipe, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    ours = override(recipe, expand_paths(NAME, ["algorithm.teacher=mine"])[1])
    assert ours.config.algorithm.teacher == str(tmp_path / "mine")
    (upload,) = uploads.with_uploads(ours, "skypilot-gcp", {}).uploads
    assert (upload.field, upload.local) == ("algorithm.teacher", str(tmp_path / "mine"))
    seen = script.on_node(replace(ours, uploads=(upload,)))
    assert seen.config.algorithm.teacher == upload.there


def test_a_login_node_downloads_both_models(recipe):
    offline = override(recipe, ["site.offline=true"])
    (text,) = script.login_files(offline, "$WORK/runs").values()
    for size in ("7B", "72B"):
        assert f"hf download Qwen/Qwen2.5-VL-{size}-Instruct\n" in text
