"""What a launch takes is measured by the runs that were launched from here."""

import json

import pytest
from desk import elsewhere as elsewhere
from desk import run

from recipes.plan import cost, start_time
from recipes.presets import get
from recipes.recipe.spec import override
from recipes.records.run_record import RunRecord

SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"


@pytest.fixture(autouse=True)
def fresh():
    start_time.start_seconds.cache_clear()
    yield
    start_time.start_seconds.cache_clear()


def launched(tmp_path, name, target, took, step=1, pulled=""):
    RunRecord(run_id=name, recipe=SEVEN, target=target, started_s=1000.0).save()
    row = {"step": step, "time/unix_s": 1000.0 + took + 30.0, "time/step_s": 30.0}
    folder = tmp_path / "runs" / name / pulled
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n" + json.dumps(row) + "\n")


def test_the_plan_takes_what_earlier_launches_took(tmp_path, capsys):
    before = {o.target: o.start_s for o in cost.offers(get(SEVEN), tmp_path)}
    assert start_time.start_seconds("skypilot-runpod") == (start_time.BOOT_S, 0)
    start_time.start_seconds.cache_clear()
    for i, took in enumerate((200.0, 260.0, 900.0)):
        launched(tmp_path, f"a{i}", "skypilot-runpod", took, pulled="pulled" if i else "")
    launched(tmp_path, "b", "skypilot-gcp", -50.0)  # resumed: the record is of a later launch
    launched(tmp_path, "c", "skypilot-gcp", 9000.0)  # waited for machines
    launched(tmp_path, "d", "skypilot-gcp", 300.0, step=9)  # its first steps are not here
    RunRecord(run_id="e", recipe=SEVEN, target="skypilot-runpod").save()
    assert (
        start_time.start_seconds("skypilot-runpod") == (260.0, 3)
        and start_time.start_seconds("skypilot-gcp")[1] == 0
    )
    after = {o.target: o.start_s for o in cost.offers(get(SEVEN), tmp_path)}
    assert after["skypilot-runpod"] == 260.0 < before["skypilot-runpod"]
    assert after["skypilot-gcp"] == before["skypilot-gcp"]
    assert {o.start_s for o in cost.offers(get(SEVEN))} == {before["skypilot-gcp"]}, (
        "files are rendered without it"
    )
    assert "skypilot-runpod 260 s (3 runs launched from here)" in " ".join(
        run(capsys, "plan", SEVEN, "--all")[1].split()
    )


def test_a_first_start_and_a_restart_go_by_one_model(tmp_path):
    share = cost.offers(get("grpo-qwen2.5-vl-72b-mathv60k"), tmp_path)[0]
    assert share.start_s == start_time.BOOT_S <= share.restart.total(), (
        "73 s of download come beside 120 s of start"
    )
    whole = cost.offers(get("grpo-qwen2.5-vl-72b-lora-mathv60k"), tmp_path)[0]
    assert whole.start_s == pytest.approx(
        start_time.MACHINE_S + start_time.ENVIRONMENT_S + 73_410_777_344 * 2 / 500e6
    )
    assert whole.restart.total() == pytest.approx(whole.start_s + whole.restart.checkpoint), (
        "the adapter's is small"
    )


def test_what_a_restart_waits_for(tmp_path):
    big = "grpo-qwen2.5-vl-72b-mathv60k"

    def spot(*changes):
        return next(o for o in cost.offers(override(get(big), [*changes]), tmp_path) if o.spot)

    kept, whole = spot().restart, spot("algorithm.kl_coef=0").restart
    assert 72 < kept.base_weights < 75 and whole.base_weights == 0, (
        "73.4e9 weights of 2 bytes, 4 nodes at 500 MB/s"
    )
    assert kept.total() - whole.total() == pytest.approx(kept.base_weights)
    assert spot().restart_s == kept.total() + kept.checkpoint, "the upload under way is lost"
    assert start_time.Restart(5.0, 6.0).total() == start_time.BOOT_S, "small weights come beside the start"
    assert start_time.Restart(5.0, 6.0, measured=100.0).total() == 106.0
    assert "base weights 73 + checkpoint 440" in str(kept) and "no base weights" in str(whole)
