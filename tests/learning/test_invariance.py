"""One optimizer step does not depend on the token budget, on the number of ranks, or on who holds the
images."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.learning.rank_scripts.steps_of_papers import LONGEST, OPTIONS
from trainer import config as c
from trainer.checkpoint import staging
from trainer.hardware.architectures import FAMILIES
from trainer.learning.zero import offload


def same(a: dict, b: dict, tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance), name


@pytest.mark.slow
def test_step_is_invariant_to_micro_batch_and_ranks(run_ranks, small_config):
    config = replace(small_config, optimizer=replace(small_config.optimizer, max_grad_norm=1e9, eps=1e-3))
    results = []
    for world in (1, 2):
        ranks = run_ranks(
            "invariance", replace(config, placement=replace(config.placement, workers_per_node=world))
        )
        for micro in ranks[0]:
            stats = {
                f"{objective}: {k}": sum(r[micro]["stats"][objective][k] for r in ranks)
                for objective in ranks[0][micro]["stats"]
                for k in ("loss/policy", "loss/total", "kl/mean", "entropy/mean", "ratio/mean", "mismatch/kl")
            }
            results.append((world, micro, stats, ranks[0][micro]))
    assert [(w, m) for w, m, _, _ in results] == [(w, m) for w in (1, 2) for m in ("1", "120", "10000")]
    assert [d["stats"]["grpo"]["perf/passes"] for w, _, _, d in results if w == 1][0::2] == [8, 1]
    _, _, stats, first = results[0]
    assert len(first["stats"]) == 5 and all(s["grad/norm"] > 0.01 for s in first["stats"].values())
    for _, _, other, detail in results[1:]:
        same(stats, other, 1e-5)
        for objective, s in detail["stats"].items():
            assert s["grad/norm"] == pytest.approx(first["stats"][objective]["grad/norm"], rel=1e-5), (
                objective
            )
        same(first["weights"], detail["weights"], 1e-5)


@pytest.mark.slow
def test_ranks_without_images_do_not_hang(run_ranks, small_config):
    config = replace(small_config, optimizer=replace(small_config.optimizer, eps=1e-3))
    result = run_ranks("imageless", config)[0]
    same(result["mixed"], result["apart"], 1e-5)


def test_an_update_without_completions_moves_nothing(run_ranks, small_config):
    """A step of Adam moves weights by momentum and decay even where the gradient is 0."""
    decay = replace(small_config.optimizer, learning_rate=1e-2, weight_decay=0.1)
    for result in run_ranks("emptied", replace(small_config, optimizer=decay)):
        before, passed_over, made = result["shards"]
        assert before == passed_over != made and result["updates"] == [1, 2]


@pytest.mark.parametrize("live", [0, 10_000_000])
def test_a_bad_gradient_leaves_weights_alone_and_gathers_are_counted(run_ranks, small_config, live):
    config = replace(small_config, optimizer=replace(small_config.optimizer, live_parameters=live))
    for result in run_ranks("skipping", config):
        skipped = [s["optim/skipped_updates"] for s in result["stats"]]
        assert skipped == [0, 1, 0] and "grad/norm" not in result["stats"][1]
        assert result["shards"][0] == result["shards"][1] != result["shards"][2]
        assert result["resumed"] == result["shards"][2]
        # Kept from forward to backward pass, a pass gathers the sharded weights once; let go of, once more.
        once = 2 if live == 0 else 1
        assert [gib / result["model_gib"] for gib in result["update_gib"]] == [once, 4 * once]


@pytest.mark.parametrize("accumulate", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
def test_gradients_add_up_without_loss(run_ranks, small_config, accumulate):
    """64 equal shares of a gradient are the gradient, in fp32; in bf16 the later ones are small beside the
    sum."""
    config = replace(
        small_config,
        model=replace(small_config.model, dtype="bf16"),
        optimizer=replace(
            small_config.optimizer, learning_rate=0.0, max_grad_norm=1e9, grad_accum_dtype=accumulate
        ),
        placement=replace(small_config.placement, workers_per_node=1),
    )
    result = run_ranks("accumulation", config)[0]
    assert result["buffer"] == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[accumulate]
    off = abs(result["many"] / result["one"] - 1)
    assert off < 1e-6 if accumulate == "fp32" else 1e-4 < off < 0.1, off


def test_moving_states_away_and_back_changes_nothing(run_ranks, small_config):
    config = replace(
        small_config,
        model=replace(small_config.model, dtype="bf16"),
        placement=replace(small_config.placement, workers_per_node=1),
    )
    result = run_ranks("moving", config)[0]
    assert result["moved"] == result["kept"]
    assert any(
        abs(total) > 0 for name, (total, _) in result["kept"]["shards"].items() if name.endswith("/exp_avg")
    )
    assert len(result["rotary"]) == 2 and all(result["rotary"])  # zero.Init would round them to bf16
    assert result["linear"]  # vLLM compiles calls of it in the same process


def test_pages_are_locked_while_the_engine_samples(monkeypatch):
    """The weights', and those of the moments that the first update will make. The first move needs none; the
    move back waits for what it moves."""
    card = torch.device("cuda", 0)
    weights = torch.arange(4.0)
    optimizer = SimpleNamespace(state={})
    states = offload.OffloadedStates(SimpleNamespace(), torch.device("cpu"))
    states.zero = SimpleNamespace(
        empty_partition_cache=lambda: None,
        grad_partitions_flat_buffer=torch.zeros(2),
        ipg_buckets={},
        fp32_partitioned_groups_flat=[weights],
        optimizer=optimizer,
    )
    locked, may_end = [], threading.Event()

    def lock(pages, tensor, device):
        assert device is card
        may_end.wait(10)
        locked.append(tensor.data_ptr())

    monkeypatch.setattr(staging, "LARGE", 1)
    monkeypatch.setattr(staging.HostPages, "lock", lock)
    states._memory.like(("master", 0), weights, card)  # as if the weights lay on a card
    states.offload()
    host = weights.data_ptr()
    states.device = card
    states.lock_behind()
    assert not locked
    threading.Timer(0.3, may_end.set).start()
    began = time.monotonic()
    states.device = torch.device("cpu")
    states.reload()
    assert time.monotonic() - began > 0.2 and locked[0] == host
    assert torch.equal(weights, torch.arange(4.0))

    optimizer.state[weights] = {"step": 1, "exp_avg": weights + 10, "exp_avg_sq": weights + 20}
    states.offload()
    moments = [optimizer.state[weights][name].data_ptr() for name in offload.MOMENTS]
    assert locked == [host, *moments], "the first move of the moments finds memory that is touched and locked"
    states.reload()
    assert torch.equal(optimizer.state[weights]["exp_avg_sq"], torch.arange(4.0) + 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "world", "live", "budget", "names"),
    [
        ("qwen2_5_vl", 2, 0, 150, "grpo gspo"),
        *(
            pytest.param(*case, " ".join(OPTIONS), marks=pytest.mark.long)
            for case in (
                ("qwen2_5_vl", 1, 0, 150),
                ("qwen2_5_vl", 2, 10_000_000, 1),
                ("qwen2_5_vl", 4, 0, 100_000),
                ("qwen3_vl", 2, 0, 150),
                ("qwen2", 1, 0, 100_000),
                ("qwen3", 2, 10_000_000, 150),
                ("llama", 4, 0, 150),
            )
        ),
    ],
)
def test_a_step_is_the_papers(run_ranks, small_config, family_model, family, world, live, budget, names):
    """Groups of 1 to 5 with several images, one or none, cut between passes and ranks; matrices gathered for
    each half of a pass or kept."""
    config = replace(
        small_config,
        run=replace(small_config.run, name=names),
        model=replace(small_config.model, path=str(family_model(family))),
        placement=replace(small_config.placement, workers_per_node=world),
        rollout=replace(small_config.rollout, max_tokens=LONGEST),
        algorithm=replace(small_config.algorithm, micro_batch_tokens=budget),
        optimizer=replace(
            small_config.optimizer,
            learning_rate=1e-2,
            weight_decay=0.1,
            eps=1e-3,
            max_grad_norm=1e9,
            live_parameters=live,
        ),
    )
    results = run_ranks("steps_of_papers", config)
    for name in names.split():
        first = results[0][name]
        ours = sum(result[name]["loss"] for result in results)
        print(f"{family} on {world}, {name}: loss {ours:.6g}, weights {first['weights']:.1e} of theirs")
        assert ours == pytest.approx(first["their_loss"], rel=1e-5, abs=1e-8), name
        assert first["norm"] < 1e-5 and first["weights"] < 1e-6 < 1e-3 < first["moved"], (name, first)


OTHERS = [name for name, row in FAMILIES.items() if row.experts or row.gated_delta]


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "lora", "offload", "dtype", "family"),
    [
        (2, 0, False, "fp32", "qwen2_5_vl"),
        (1, 0, False, "fp32", "qwen2_5_vl"),
        (1, 4, False, "fp32", "qwen2_5_vl"),
        (2, 4, False, "fp32", "qwen2_5_vl"),
        (2, 0, True, "fp32", "qwen2_5_vl"),
        (2, 0, False, "bf16", "qwen2_5_vl"),
        (2, 4, False, "bf16", "qwen2_5_vl"),
        *((2, 0, False, "fp32", name) for name in OTHERS),
    ],
)
def test_every_stage_learns_what_plain_torch_learns(
    run_ranks, small_config, family_model, world, lora, offload, dtype, family
):
    """Loss and gradients of a step, packed and in several passes; a resume, bit for bit; checkpoints of all
    stages."""
    config = replace(
        small_config,
        model=replace(
            small_config.model, path=str(family_model(family)), gradient_checkpointing=True, dtype=dtype
        ),
        lora=c.LoRA(rank=lora, alpha=8),
        optimizer=replace(small_config.optimizer, learning_rate=1e-2, offload_optimizer=offload),
        placement=replace(small_config.placement, workers_per_node=world),
    )
    exact = dtype == "fp32"  # plain torch always is
    loose, near = (1e-5, 1e-4) if exact else (2e-2, 5e-2)
    for result in run_ranks("zero_stages", config):
        for stage, found in result["stages"].items():
            assert found["losses"] == pytest.approx([result["loss"]] * 2, rel=loose), stage
            for together, worst in found["gradients"]:
                assert together < (1e-5 if exact else near) and (worst < near or not exact), (
                    stage,
                    together,
                    worst,
                )
            assert found["norm"] == pytest.approx(result["stages"]["3"]["norm"], rel=loose)
            assert found["moved"] and found["resumed"] and found["again"], stage
        assert len(result["elsewhere"]) == 9
        for where, (whole, loss) in result["elsewhere"].items():
            origin = where.split()[0]
            assert whole and loss == pytest.approx(
                result["elsewhere"][f"{origin} at {origin}"][1], rel=loose
            ), where


def test_another_stage_may_resume():
    one, three = (c.RunConfig(method="sft", optimizer=c.Optimizer(zero_stage=n)) for n in (1, 3))
    assert c.resume_view(one) == c.resume_view(three)
