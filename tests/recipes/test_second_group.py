"""A recipe's second group of machines: how it is set and refused, what it needs, and what it costs."""

import re

import pytest

from recipes.commands import cli
from recipes.drivers import task_files
from recipes.plan import cost, memory, prices
from recipes.plan.resolving import resolve_groups
from recipes.platforms import targets
from recipes.presets import get, resolve
from recipes.recipe import recipe_files, sample_group
from recipes.recipe.resolved import GIB
from recipes.recipe.spec import SampleGroup, validate
from trainer.config import ConfigError

ONE, BIG = "grpo-qwen2.5-vl-7b-mathv60k", "grpo-qwen2.5-vl-72b-mathv60k"


def with_group(name, *overrides):
    return resolve(name, ["sample.gpu=L40S", *overrides])


def test_a_group_is_set_like_the_cluster_and_taken_away_again():
    recipe = resolve(ONE, ["sample.gpu=A100-80GB", "sample.nodes=4", "sample.spot=only"])
    assert recipe.sample == SampleGroup(gpu="A100-80GB", nodes=4, spot="only")
    assert recipe.cluster == get(ONE).cluster and recipe.config == get(ONE).config
    assert resolve(ONE, ["sample={gpu: L40S, nodes: 2}"]).sample == SampleGroup(nodes=2)
    assert resolve(ONE, ["sample.nodes=4", "sample=null"]) == get(ONE)


def test_a_group_is_set_in_a_recipe_file(tmp_path):
    (tmp_path / "mine.yaml").write_text(f"base: {ONE}\nsample:\n  gpu: L40S\n  nodes: 3\n")
    recipe = resolve(*recipe_files.expand_paths(str(tmp_path / "mine.yaml"), []))
    assert recipe.sample == SampleGroup(nodes=3)


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("sft-qwen2.5-72b-full", [], "method sft samples none: --set sample=null"),
        ("preflight", [], "preflight (preflight) trains nothing"),
        ("serve", [], "serve (serve) trains nothing"),
        (ONE, ["evaluation.pass_rate_samples=8"], "an evaluation trains nothing"),
        (ONE, ["evaluation.benchmarks=true"], "set evaluation.pass_rate_samples to 1 or more"),
        (
            ONE,
            ["evaluation.benchmarks=true", "evaluation.pass_rate_samples=1"],
            "an evaluation trains nothing",
        ),
        (ONE, ["checkpoint.remote="], "through its bucket alone, and checkpoint.remote is empty"),
        ("demo", ["sample.gpus_per_node=1"], "demo runs on CPU ranks: --set sample.gpus_per_node=0"),
        (ONE, ["sample.gpus_per_node=0"], "made for GPUs: give 1 or more"),
        (ONE, ["sample.gpus=2"], "did you mean sample.gpu"),
        (ONE, ["sample.gpu=L50S"], "L40S"),
        (ONE, ["sample.gpus_per_node=-1"], "sample.gpus_per_node"),
        (ONE, ["sample.nodes=0"], "sample.nodes"),
        (ONE, ["sample.spot=always"], "not one of prefer, only, never"),
        (ONE, ["sample.gpus_per_node=3"], "an engine of 2 GPUs does not divide the 3 GPUs"),
        (
            ONE,
            ["sample.gpus_per_node=4", "sample.tensor_parallel=3"],
            "an engine of 3 GPUs does not divide the 4",
        ),
        (ONE, ["sample=many"], "must be a mapping"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused_with_the_change(name, overrides, said):
    with pytest.raises(ConfigError) as refused:
        with_group(name, *overrides)
    assert said in str(refused.value)


def test_a_try_out_that_leaves_its_gpus_alone_may_have_machines_that_do_too():
    sets = ["setup=cpu", "cluster.gpus_per_node=1", "cluster.gpu=A100-80GB", "sample.gpu=A100-80GB"]
    recipe = with_group("demo", *sets)
    view = sample_group.sampling_machines(recipe)
    assert view is not None and (view.cluster.gpus_per_node, view.environment) == (1, "cpu")
    assert (view.config.placement.device, view.config.placement.workers_per_node) == ("cpu", 1)


def test_a_recipe_with_a_run_to_sample_for_is_one_machine_of_its_second_group():
    fleet = ("fleet.workers=only", "rollout.tensor_parallel=1")
    view = resolve(ONE, ["fleet.run=mine", *fleet])
    validate(view)
    assert (view.kind, view.jobs, view.cluster.gpu) == ("sample", 1, "L40S")
    assert view.config.fleet.run == "mine"
    four = with_group(ONE, "sample.nodes=4", "fleet.run=mine", *fleet)
    assert (
        four.jobs == 4
        and sample_group.sampling_machines(with_group(ONE)).config.fleet.run == sample_group.OWN_RUN
    )
    on_cpu = resolve("demo", ["fleet.run=mine", "fleet.workers=only"])
    assert (on_cpu.environment, on_cpu.config.placement.workers_per_node) == ("cpu", 1)


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        (ONE, [], "--set fleet.workers=only, or --set sample=null"),
        ("sft-qwen2.5-72b-full", [], "fleet.run names a run to sample for, and method sft samples none"),
    ],
)
def test_machines_that_would_sample_nothing_are_refused(name, overrides, said):
    with pytest.raises(ConfigError) as refused:
        resolve(name, ["fleet.run=mine", *overrides])
    assert said in str(refused.value)


def test_a_view_is_one_machine_with_engines_of_its_own():
    recipe = with_group(ONE, "sample.nodes=4", "storage.volume=cache", "cluster.image=mine:1")
    view = sample_group.sampling_machines(recipe)
    assert (view.name, view.jobs, view.cluster.nodes) == (f"{ONE}.sample", 4, 1)
    assert sample_group.run_name(view) == ONE and recipe.jobs == 1
    place, rollout = view.config.placement, view.config.rollout
    assert (place.nodes, place.workers_per_node) == (1, 1)
    assert (rollout.tensor_parallel, rollout.gpu_memory_utilization) == (1, 0.9)
    assert view.cluster.image == "mine:1" and view.storage.volume == ""
    engine = sample_group.sampling_machines(
        with_group(BIG, "sample.gpus_per_node=4")
    ).config.rollout.tensor_parallel
    assert engine == 4, "all GPUs of a machine that has fewer than an engine of the run"
    eight = sample_group.sampling_machines(with_group(ONE, "sample.gpus_per_node=8"))
    assert eight.config.rollout.tensor_parallel == 2, "else the run's"
    on_cpu = ["sample.gpus_per_node=0", "sample.nodes=3", "storage.bucket=file:///b"]
    pairs = sample_group.sampling_machines(
        resolve("demo", [*on_cpu, "rollout.tensor_parallel=2", "fleet.workers=only"])
    )
    assert pairs.config.placement.workers_per_node == pairs.config.rollout.tensor_parallel == 2
    (text,) = task_files.render(resolve_groups(pairs, "local")).values()
    assert "workers_per_node: 6\n" in text, "ranks of three engines"


# --- What it needs --------------------------------------------------------------------------------


def test_memory_of_a_sampling_machine_is_its_engine_alone():
    need = memory.plan_memory(sample_group.sampling_machines(with_group(ONE)))
    (phase,) = need.phases
    share, weights = 0.9 * 44.4 * GIB, 2.0 * need.shape.parameters
    assert phase.parts["engine weights"] == weights and phase.parts["engine workspace"] == 3 * GIB
    assert phase.total == pytest.approx(share + memory.CONTEXT)
    assert need.kv_cache_tokens == int((share - weights - 3 * GIB) / need.shape.kv_bytes_per_token(2))
    assert need.host["each worker's copy of the weights"] == weights and need.checkpoint_bytes == 0
    assert need.disk.keys() == {"environment", "model download", "data"}
    assert need.fits


def test_a_trainer_whose_completions_workers_sample_has_no_engine():
    fleet = ("fleet.workers=only", "rollout.tensor_parallel=1")
    alone, need = memory.plan_memory(get(ONE)), memory.plan_memory(resolve(ONE, list(fleet)))
    phases = {phase.name for phase in need.phases}
    assert {phase.name for phase in alone.phases} - phases == {"rollout", "sync"}
    assert not any("engine" in part for phase in need.phases for part in phase.parts)
    assert need.host["shards as rollout workers have them"] == pytest.approx(
        2.0 * need.shape.parameters, rel=0.1
    )
    assert "ZeRO-3 states while the engine is awake" not in need.host and need.host_bytes < alone.host_bytes


def test_engines_of_several_gpus_share_weights_and_talk():
    need = memory.plan_memory(sample_group.sampling_machines(with_group(BIG, "sample.gpus_per_node=8")))
    rollout, sync = need.phases
    parts = rollout.parts
    embedding = 2.0 * 152064 * 8192
    assert sync.parts["bucket and its copy"] == 2 * embedding, "larger than rollout.sync_bucket_bytes"
    assert "engine workspace" not in sync.parts and sync.parts["engine KV cache"] == parts["engine KV cache"]
    assert parts["engine weights"] == pytest.approx(2.0 * need.shape.parameters / 8)
    assert parts["NCCL's communicators"] == memory.COMMUNICATORS
    assert need.host["each worker's copy of the weights"] == 2.0 * need.shape.parameters, (
        "one, which all ranks read"
    )
    two = memory.plan_memory(sample_group.sampling_machines(with_group(ONE, "sample.gpus_per_node=4")))
    assert two.host["each worker's copy of the weights"] == 4.0 * two.shape.parameters, "one for each engine"


def test_plan_shows_the_group_and_ends_with_2_where_it_does_not_fit(capsys):
    asked = ["plan", ONE, "--all", "--target", "skypilot-runpod", "--set", "sample.nodes=4"]
    assert cli.main(asked) == 0
    said = capsys.readouterr().out
    assert "second group, each a job that samples:" in said and "second group: 4 x 1 L40S, 4" in said
    assert re.search(r"GiB of 44.4 \(L40S\) +rollout\n.*CUDA context +1.5\n.*engine weights +15.4\n", said)
    assert "1 x 8 A100-80GB/H100 + 4 x 1 L40S to sample" in said
    assert "(--fleet: hours and dollars of both)" in said
    assert cli.main(["plan", BIG, "--all", "--target", "dstack-runpod", "--set", "sample.gpu=L40S"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "does not fit: the second group: the engine's share of memory leaves nothing for the KV cache" in said
    )


def test_limits_are_not_chosen_by_the_time_of_another_run(capsys):
    assert cli.main(["plan", ONE, "--set", "sample.nodes=4", "--budget", "100"]) == 2
    assert "--set sample=null" in capsys.readouterr().err


# --- What it costs --------------------------------------------------------------------------------


def test_a_group_takes_its_cheapest_gpu_and_one_card_is_a_pcie_card():
    recipe = with_group(ONE, "sample.alternatives=[A100-80GB]", "sample.nodes=2")
    view = sample_group.sampling_machines(recipe)
    rate = cost.cheapest_machines(view, "skypilot-runpod")
    assert (rate.gpu, rate.usd) == ("L40S", pytest.approx(2 * prices.gpu_price("runpod", "L40S").spot))
    assert cost.cheapest_machines(view, "dstack-runpod").spot is False, "dstack rents no spot pods there"
    assert cost.cheapest_machines(view, "skypilot-gcp").gpu == "A100-80GB"
    pcie = sample_group.sampling_machines(with_group(ONE, "sample.gpu=A100-80GB"))
    usd = cost.cheapest_machines(pcie, "skypilot-runpod").usd
    assert usd == pytest.approx(prices.gpu_price("runpod", "A100-80GB", variant="A100-80GB").spot)


def test_a_group_without_memory_or_dollars_has_no_price():
    small = sample_group.sampling_machines(with_group(ONE, "sample.memory_gib=64"))
    assert cost.cheapest_machines(small, "skypilot-runpod") is None, "62 GiB come with an L40S"
    assert "62 GiB of RAM come with a GPU, 64 GiB are asked for" in cost.short_of_ram(small)[0]
    dear = sample_group.sampling_machines(with_group(ONE, "budget.max_hourly_usd=1"))
    assert cost.cheapest_machines(dear, "skypilot-runpod") is None
    assert cost.cheapest_machines(sample_group.sampling_machines(with_group(ONE)), "slurm") is None, (
        "machines of your own"
    )


def test_the_first_groups_offers_do_not_depend_on_the_second():
    with_both, alone = cost.offers(with_group(ONE)), cost.offers(get(ONE))
    targets = {offer.target for offer in with_both}
    assert with_both == [offer for offer in alone if offer.target in targets]


# --- Where it can run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "overrides", "said"),
    [
        ("local", ["sample.nodes=2"], "is one machine, and grpo-qwen2.5-vl-7b-mathv60k.sample wants 2"),
        ("slurm", ["sample.target=skypilot-gcp"], "skypilot-gcp has no L40S with 1 per node"),
        ("skypilot-gcp", [], "skypilot-gcp has no L40S with 1 per node"),
        (
            "skypilot-lambda",
            ["sample.gpu=A100", "sample.spot=only"],
            "has no spot nodes, and sample.spot is 'only'",
        ),
        ("skypilot-aws", ["sample.gpus_per_node=2"], "skypilot-aws has no L40S with 2 per node"),
    ],
)
def test_capabilities_are_checked_per_group(target, overrides, said):
    assert said in targets.refusal(with_group(ONE, *overrides), target)
    assert targets.refusal(get(ONE), target) == ""


def test_a_target_that_can_run_both_groups_is_named():
    assert targets.refusal(with_group(ONE, "sample.nodes=20"), "skypilot-runpod") == "", "20 jobs of one node"
    with pytest.raises(ConfigError, match="use .*skypilot-runpod"):
        targets.check_target(with_group(ONE), "skypilot-gcp")
    with pytest.raises(ConfigError, match="or those of sample"):
        targets.check_target(with_group(ONE, "sample.gpu=L4", "sample.gpus_per_node=16"), "slurm")


def test_a_recipe_whose_second_group_would_sample_nothing_is_not_launched(capsys):
    for command in (["render", ONE], ["up", ONE, "--bucket", "file:///mine", "--dry-run"]):
        assert cli.main([*command, "--target", "slurm", "--set", "sample.nodes=2"]) == 2
        assert "--set fleet.workers=only, or --set sample=null" in capsys.readouterr().err
