"""A teacher's judgment, and the step that follows from it, are those of plain transformers."""

from dataclasses import replace

import pytest

from trainer.config import LoRA, Optimizer


def distilling(config, teacher, **algorithm):
    return replace(
        config,
        rollout=replace(config.rollout, temperature=0.8),
        algorithm=replace(
            config.algorithm,
            teacher=str(teacher),
            teacher_coef=0.5,
            kl_coef=0.0,
            micro_batch_tokens=150,
            **algorithm,
        ),
        optimizer=Optimizer(learning_rate=1e-2, weight_decay=0.1, eps=1e-3, max_grad_norm=1e9),
    )


@pytest.mark.long
def test_a_step_towards_a_larger_teacher_is_the_plain_one(run_ranks, small_config, larger_model):
    """Two ranks, images, groups cut between passes; the teacher has other widths, depths and untied
    embeddings."""
    results = run_ranks("distillation_step", distilling(small_config, larger_model))
    ours = sum(result["loss"] for result in results)
    first = results[0]
    print(
        f"weights {first['weights']:.1e} of theirs; the teacher's logprobs {first['judged']:.1e} nats apart"
    )
    assert ours == pytest.approx(first["their_loss"], rel=1e-4)
    assert first["judged"] < 1e-4 and first["weights"] < 1e-5 < 1e-3 < first["moved"]
    assert first["teacher/gap_max"] > 0.5 and 0.05 < first["teacher/likelier_fraction"] < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_a_teacher_that_is_the_student_teaches_nothing(run_ranks, small_config, tiny_model, rank):
    """Adapters change nothing at the first step, and the teacher has none."""
    config = replace(distilling(small_config, tiny_model), lora=LoRA(rank=rank))
    first = run_ranks("undistilled", config)[0]
    assert first["teacher/gap_max"] < 1e-4 and first["tokens"] > 40
