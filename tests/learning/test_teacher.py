"""A teacher must read token ids and pixels as the student does; and what it adds to advantages, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from trainer import config as c
from trainer.algorithm.credit import add_teacher_advantages, teacher_metrics
from trainer.config import LoRA, Optimizer
from trainer.data.processor import Prompter
from trainer.learning.teacher import teacher_of


@pytest.fixture
def student(tiny_model):
    return Prompter(c.Model(path=str(tiny_model)))


def asked(student_path, teacher_path):
    options = [f"model.path={student_path}", f"algorithm.teacher={teacher_path}", "algorithm.kl_coef=0"]
    return c.override(c.RunConfig(), options)


def test_a_larger_one_of_the_family(student, tiny_model, larger_model):
    found = teacher_of(asked(tiny_model, larger_model), student, pictures=True)
    assert found.config.model.path == str(larger_model)
    assert found.banned == student.banned_token_ids(), "the vocabularies have the same padding here"
    assert found.shape.hidden > 128 and found.shape.layers > 2


def test_one_that_reads_text_only(student, tiny_model, family_model):
    config = asked(tiny_model, family_model("qwen2"))
    assert teacher_of(config, student, pictures=False).shape.vision is None
    with pytest.raises(
        c.ConfigError, match="the teacher reads text only: take a teacher of the student's family"
    ):
        teacher_of(config, student, pictures=True)


def test_one_that_cuts_images_into_other_patches(student, tiny_model, family_model):
    config = asked(tiny_model, family_model("qwen3_vl"))
    with pytest.raises(c.ConfigError, match="cut images into different patches"):
        teacher_of(config, student, pictures=True)


def test_another_tokenizer(student, tiny_model, tmp_path, monkeypatch):
    from examples.demo import tiny_model as builder

    monkeypatch.setattr(builder, "MERGES", 60)
    other = builder.build(tmp_path / "other", 0)
    with pytest.raises(c.ConfigError, match="different tokenizers .* token ids mean different things: take"):
        teacher_of(asked(tiny_model, other), student, pictures=False)


def test_one_that_is_not_there(student, tiny_model, tmp_path):
    with pytest.raises(c.ConfigError, match=r"^algorithm\.teacher "):
        teacher_of(asked(tiny_model, tmp_path / "nothing"), student, pictures=False)


def test_what_a_teacher_adds_to_an_advantage():
    """Two completions, the first of a group's advantage 1."""
    own = [np.ones(2, np.float32), np.zeros(1, np.float32)]
    teacher = [np.array([-0.5, -2.0], np.float32), np.array([-1.0], np.float32)]
    old = [np.array([-1.0, -1.0], np.float32), np.array([-3.0], np.float32)]
    out = add_teacher_advantages(own, teacher, old, 0.5)
    assert [values.tolist() for values in out] == [[1.25, 0.5], [1.0]]
    assert all(values.dtype == np.float32 for values in out)
    stats = teacher_metrics(teacher, old)
    assert stats["teacher/kl"] == pytest.approx((-0.5 + 1.0 - 2.0) / 3)
    assert stats["teacher/gap_max"] == 2.0 and stats["teacher/likelier_fraction"] == pytest.approx(2 / 3)
    assert teacher_metrics([], []) == {}


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
