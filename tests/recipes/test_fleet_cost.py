"""Seconds and dollars of fleets of rollout workers: by hand, against the plan's own model, and as they are
told."""

import heapq
import re
import shlex
from dataclasses import replace

import pytest

from recipes.commands import cli
from recipes.plan import cost, fleet_cost, memory, passes, step_seconds
from recipes.plan.fleet_cost import FleetRow, Fleets
from recipes.presets import get
from recipes.recipe.spec import SampleGroup, override
from recipes.screens import fleet_screen
from trainer.config.budget import trained

ONE, BIG = "grpo-qwen2.5-vl-7b-mathv60k", "grpo-qwen2.5-vl-72b-mathv60k"
PIECES = ("--set", "rollout.staleness=1", "--set", "rollout.tokens_per_step=1024")


@pytest.fixture(scope="module")
def found():
    return fleet_cost.compare_fleets(get(ONE), None, None)


def kind(recipe, gpu, gpus=1):
    """A worker of one GPU kind."""
    named = replace(recipe, sample=SampleGroup(gpu=gpu, gpus_per_node=gpus, tensor_parallel=gpus))
    return fleet_cost.worker_kinds(named, None, None)[0]


@pytest.mark.parametrize(
    ("units", "workers", "ahead", "expected"),
    [
        ([10.0], 1, 0, 2 + 3 + 10 + 4),  # announced, loaded, sampled, learned: nothing at once
        ([10.0, 10.0], 1, 0, 2 + 3 + 20 + 4),
        ([10.0, 10.0], 2, 0, 2 + 3 + 10 + 4),
        ([10.0], 1, 1, 3 + 10),  # the only worker is what is waited for
        ([10.0], 2, 1, (2 + 3 + 10 + 4) / 2),  # two steps in each round
        ([10.0], 4, 3, (2 + 3 + 10 + 4) / 4),
        ([10.0], 5, 4, 4),  # the trainer waits for nothing
        ([10.0], 8, 8, 4),
    ],
)
def test_a_step_by_hand_and_as_its_schedule_is_played(units, workers, ahead, expected):
    assert fleet_cost.fleet_step_seconds(units, workers, ahead, 4.0, 3.0) == pytest.approx(expected)
    assert played(units, workers, ahead, 4.0, 3.0) == pytest.approx(expected, rel=0.03)


def played(units, workers, ahead, update_s, switch_s, steps=400):
    """Mean seconds of a step as the head gives units out: in order, each to the worker that is free first,
    which changes weights between units; a step is asked for when its weights are announced."""
    free = [(0.0, 0)] * workers
    published, end = [0.0], 0.0
    for step in range(1, steps + 1):
        version = max(0, step - 1 - ahead)
        asked = sampled = published[version] + (fleet_cost.POLL_S if version else 0.0)
        for seconds in units:
            at, held = free[0]
            done = max(at, asked) + seconds + (0.0 if held == version else switch_s)
            heapq.heapreplace(free, (done, version))
            sampled = max(sampled, done)
        end = max(end, sampled) + update_s
        published.append(end)
    return end / steps


def test_the_formula_is_the_played_schedule_within_what_the_plan_promises(found):
    """A step of a real run may take 0.77 to 2.4 times as long as the plan says."""
    recipe = get(ONE)
    rows = [row for row in found.fleets if row.ahead in (0, 1, 3)]
    apart = []
    for row in rows[::7]:
        shape = row.worker.need.shape
        units = fleet_cost.unit_seconds(row.worker, shape, passes.of_step(recipe, shape), row.unit_prompts)
        update = fleet_cost.update_seconds(recipe, shape, row.offer.step)
        switch = fleet_cost.switch_seconds(recipe, shape, row.worker)
        apart.append(row.step_s / played(units, row.count, row.ahead, update, switch, 48))
    assert len(apart) > 100 and min(apart) > 0.77 and max(apart) < 1.3


@pytest.mark.parametrize(
    ("latency", "update", "steps"), [(10.0, 4.0, 4), (10.0, 10.0, 2), (25.0, 4.0, 8), (7.0, 9.0, 2)]
)
def test_with_enough_steps_ahead_the_trainer_never_waits_and_with_one_less_it_does(latency, update, steps):
    assert fleet_cost.steps_enough(latency, fleet_cost.POLL_S + 3.0, update) == steps
    seconds = [
        fleet_cost.fleet_step_seconds([latency], 16, ahead, update, 3.0) for ahead in (steps, steps - 1)
    ]
    assert seconds[0] == pytest.approx(update) and seconds[1] > 1.01 * update


def test_patches_have_the_measured_sizes():
    recipe = get(ONE)
    for rate, measured in fleet_cost.PATCHES:
        at = override(recipe, [f"optimizer.learning_rate={rate}"])
        assert fleet_cost.patch_rate(at.config) == pytest.approx(measured)
    between = fleet_cost.patch_rate(override(recipe, ["optimizer.learning_rate=7e-7"]).config)
    assert 0.0068 < between < 0.0117
    assert fleet_cost.patch_rate(override(recipe, ["optimizer.learning_rate=1.0"]).config) == 2.0
    assert fleet_cost.patch_rate(override(recipe, ["model.dtype=fp32"]).config) == 2.4
    need = memory.plan_memory(recipe)
    assert fleet_cost.patch_rate(recipe.config) * trained(recipe.config, need.shape) == pytest.approx(
        97e6, rel=0.01
    )


def test_egress_is_the_stores_price_and_nothing_in_its_own_cloud():
    recipe = get(ONE)
    prices = {}
    for bucket in ("s3://mine", "gs://mine", "r2://mine", ""):
        stored = override(recipe, [f"storage.bucket={bucket}"])
        prices[bucket] = fleet_cost.egress_per_gb(stored, "skypilot-runpod")
    assert prices == {"s3://mine": 0.09, "gs://mine": 0.12, "r2://mine": 0.0, "": 0.09}
    on_s3 = override(recipe, ["storage.bucket=s3://a"])
    assert fleet_cost.egress_per_gb(on_s3, "skypilot-aws") == 0
    assert fleet_cost.egress_per_gb(on_s3, "skypilot-gcp") > 0
    offer = cost.offers(recipe)[0]
    trainer = override(recipe, ["fleet.workers=only"])
    (row, *_) = fleet_cost.fleets_of(trainer, offer, kind(recipe, "L40S"), (4,))
    assert row.egress_usd == pytest.approx(4 * 97e6 / 1e9 * 0.09, rel=0.01)


def test_dollars_of_a_step_by_hand():
    recipe = get(ONE)
    offer = replace(cost.offers(recipe)[0], usd_per_hour=10.0)
    worker = replace(kind(recipe, "L40S"), usd_per_hour=1.0)
    row = FleetRow(offer, 8, 30.0, worker, 2, 1, egress_usd=0.018)
    assert row.usd == pytest.approx(12 * 30 / 3600 + 0.018)
    assert FleetRow(offer, 8, 30.0).usd == pytest.approx(10 * 30 / 3600)


def test_a_worker_decodes_as_the_plan_says_of_an_engine():
    """One GPU samples the step of a run on one GPU in the time that the plan has for its rollout."""
    recipe = override(get("grpo-qwen2.5-vl-3b-mathv60k"), [])
    need = memory.plan_memory(recipe)
    worker = kind(recipe, recipe.cluster.gpu)
    step = passes.of_step(recipe, need.shape)
    planned = step_seconds.step_time(recipe, recipe.cluster.gpu, 100.0, need)
    (whole,) = fleet_cost.unit_seconds(worker, need.shape, step, recipe.config.rollout.prompts_per_step)
    assert whole == pytest.approx(planned.rollout, rel=1e-6)
    parts = fleet_cost.unit_seconds(worker, need.shape, step, 8)
    assert len(parts) == recipe.config.rollout.prompts_per_step // 8
    assert max(parts) < whole < sum(parts)


def test_losses_are_told_from_gains(found):
    offer = found.colocated[0].offer
    alone = FleetRow(replace(offer, usd_per_hour=10.0), 8, 30.0)
    some = Fleets([alone], [], [])
    worker = replace(kind(get(ONE), "L40S"), usd_per_hour=1.0)

    def fleet(step_s, usd_per_hour):
        return FleetRow(replace(offer, usd_per_hour=usd_per_hour), 8, step_s, worker, 1)

    said = {
        fleet_screen.row_verdict(fleet(*one), some).partition(":")[0]
        for one in ((40.0, 10.0), (30.0, 10.0))  # slower; as fast and dearer
    }
    assert said == {"loss"}
    assert fleet_screen.row_verdict(fleet(20.0, 10.0), some) == "gain: 1.50x speed, 0.73x dollars"
    assert fleet_screen.row_verdict(fleet(29.0, 12.0), some).startswith("faster, dearer")
    assert fleet_screen.row_verdict(fleet(40.0, 5.0), some).startswith("cheaper, slower")
    assert some.taken(float("inf"), float("inf")) is alone


def test_slow_cards_one_step_ahead_are_a_loss_and_enough_ahead_are_faster(found):
    """7B: on an L40S the longest completion takes several updates, of an H100 more than are planned."""
    slow = [row for row in found.fleets if row.worker.name == "L40S"]
    late = [row for row in slow if row.ahead == 1]
    assert late and all(row.enough > 1 and found.beaten_by(row) for row in late)
    best = min((row for row in slow if row.ahead >= row.enough), key=lambda row: row.step_s)
    assert best.offer.gpu == "A100-80GB"
    alone = [row for row in found.colocated if row.offer.gpu == best.offer.gpu]
    assert best.step_s < 0.6 * min(row.step_s for row in alone)


def test_more_ahead_and_more_workers_are_never_slower(found):
    by = {}
    for row in found.fleets:
        by[row.offer.gpu, row.gpus, row.worker.name, row.unit_prompts, row.ahead, row.count] = row.step_s
    for (*rest, ahead, count), step_s in by.items():
        assert by.get((*rest, ahead + 1, count), 0.0) <= step_s * 1.02
        assert by.get((*rest, ahead, count + 1), 0.0) <= step_s * 1.02


def test_an_engine_takes_the_fewest_gpus_that_hold_the_model():
    workers = {worker.gpu: worker for worker in fleet_cost.worker_kinds(get(BIG), None, None)}
    # Eight L40S hold 72B and its cache, but not the weights that come in beside an engine's CUDA graphs.
    assert workers["A100-80GB"].gpus == 4 and not {"L40S", "L4"} & workers.keys()
    assert {worker.gpus for worker in fleet_cost.worker_kinds(get(ONE), None, None)} == {1}


def test_weights_reach_the_first_gpu_of_an_engine_and_from_there_the_others():
    recipe = get(BIG)
    worker = kind(recipe, "A100-80GB", 4)
    patch = fleet_cost.patch_rate(recipe.config) * trained(recipe.config, worker.need.shape)
    whole = 2.0 * worker.need.shape.parameters
    by_hand = patch / 125e6 + whole / 4e9 + whole / 25e9 + whole / 300e9
    assert fleet_cost.switch_seconds(recipe, worker.need.shape, worker) == pytest.approx(by_hand)


@pytest.mark.parametrize(("ranks", "said"), [(8, ""), (2, " --set sample.tensor_parallel=4")])
def test_the_named_command_has_engines_of_as_many_gpus_as_were_planned(ranks, said):
    recipe = override(get(BIG), [f"rollout.tensor_parallel={ranks}"])
    offer = cost.offers(get(BIG))[0]
    row = FleetRow(offer, 32, 40.0, kind(recipe, "A100-80GB", 4), 2, 3, unit_prompts=64)
    assert f"--set rollout.staleness=3{said} --fleet 2x4xA100-80GB:" in fleet_screen.row_options(recipe, row)


def run(capsys, *arguments):
    code = cli.main(["plan", "--all", *arguments])
    out = capsys.readouterr()
    return code, " ".join((out.out + out.err).split())


def test_the_table_names_the_cheapest_and_the_egress(capsys):
    code, said = run(capsys, ONE, "--fleet", "--deadline", "4h")
    assert code == 0
    assert re.search(
        r"warning: egress out of s3:// is up to \d+% of a step's dollars: keep the bucket on R2", said
    )
    assert re.search(
        r"cheapest: .* h, \$\d+ .*--set rollout.staleness=\d .*--fleet \d+x[\w-]+:(spot|on-demand)@\w+", said
    )
    assert "warning" not in run(capsys, ONE, "--fleet", "--set", "storage.bucket=r2://mine")[1]


def test_the_named_command_starts_what_was_planned(capsys):
    """With every option of the plan, as a shell takes it."""
    asked = ["rollout.max_tokens=1024", 'data.system_prompt="Think first."']
    sets = [word for one in asked for word in ("--set", one)]
    code, said = run(capsys, ONE, "--fleet", "--deadline", "9h", *sets)
    assert code == 0
    words = shlex.split(re.search(r"launch.py up .*?(?= warning| A model)", said)[0])
    given = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert given[:2] == asked and "cluster.alternatives=[]" in given


def test_machines_that_the_recipe_names_are_refused_as_a_loss(capsys):
    group = ("--set", "sample.gpu=L40S", "--set", "sample.nodes=3")
    small, unit = (("--set", f"fleet.unit_prompts={size}") for size in (8, 32))
    code, said = run(capsys, ONE, "--fleet", *group, *small, "--set", "rollout.staleness=1")
    assert code == 2 and "loss: 8 x H100 alone is better" in said
    assert re.search(
        r"8 x H100 with 3 workers: --set fleet.unit_prompts=32 takes .* in units of 8 prompts", said
    )
    group = (*group, "--set", "sample.nodes=6")
    code, said = run(capsys, ONE, "--fleet", *group, *unit, "--set", "rollout.staleness=1")
    assert code == 2 and re.search(
        r"H100 with 6 workers: the trainer waits .*; 10 steps ahead would be", said
    )
    assert run(capsys, ONE, "--fleet", *group, "--set", "rollout.staleness=4")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sft-qwen2.5-vl-7b-full"], "--fleet: method sft samples none"),
        (["serve"], "--fleet: serve (serve) trains nothing"),
        (["demo"], "--fleet: demo runs on CPU workers"),
        ([ONE, *PIECES], "workers carry no completion over"),
        ([ONE, "--deadline", "1h"], "nothing is expected to keep the limits: the quickest takes"),
        ([ONE, "--deadline", "soon"], "write it as 90m, 24h or 3d"),
    ],
)
def test_what_has_no_fleet_is_refused(arguments, said, capsys):
    code, out = run(capsys, *arguments, "--fleet")
    assert code == 2 and said in out


def test_one_line_names_the_unit_that_lets_all_workers_sample(capsys):
    """With the whole step as a unit, more machines bring nothing but their bill."""
    group = ("--set", "sample.gpu=L40S", "--set", "sample.nodes=32", "--set", "rollout.staleness=3")
    _, said = run(capsys, ONE, "--fleet", *group)
    line = r"8 x H100 with 32 workers: --set fleet.unit_prompts=(\d+) takes ([\d.]+) s and .* not ([\d.]+) s"
    named = re.search(line, said)
    assert named, said
    unit, seconds, before = named.groups()
    assert float(seconds) < float(before)
    _, said = run(capsys, ONE, "--fleet", *group, "--set", f"fleet.unit_prompts={unit}")
    assert re.search(rf"8 x H100 [^|]*? 32 x L40S, \S+ spot 3 {seconds} [^|]*? {unit} ", said)
