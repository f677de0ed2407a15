"""A model that is never trained beside the policy: the reference, or the teacher that the policy is distilled
from, which may be of another size and family as long as it reads the same token ids."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import ConfigError, RunConfig, of_teacher
from trainer.data.processor import Prompter
from trainer.hardware import model_shapes
from trainer.hardware.model_shapes import Shape


@dataclass(frozen=True)
class FrozenModel:
    """What it takes to load one."""

    config: RunConfig
    """Its model is the frozen one."""
    shape: Shape
    banned: list[int]
    """Token ids that get no probability: those that the policy's engine never samples."""


def teacher_of(config: RunConfig, student: Prompter, pictures: bool) -> FrozenModel:
    """The teacher that a run names. student: what encodes the rows, which the teacher gets as they are.
    pictures: whether rows have images. Raises ConfigError where the teacher would read something else than
    the student does."""
    alone = of_teacher(config)
    try:
        prompter = Prompter(alone.model)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "algorithm.teacher")) from None
    check_reads_alike(config, student, prompter, pictures)
    known = len(student.tokenizer)
    banned = [token_id for token_id in student.banned_token_ids() if token_id < known]
    # Ids from `known` on are padding of the vocabulary, whose length differs between sizes of one family.
    banned += range(known, prompter.hf_config.get_text_config().vocab_size)
    return FrozenModel(alone, model_shapes.from_config(prompter.hf_config.to_dict()), banned)


def check_reads_alike(config: RunConfig, student: Prompter, teacher: Prompter, pictures: bool) -> None:
    """Raises ConfigError unless the teacher takes the student's token ids and pixels for what the student
    does."""
    both = f"algorithm.teacher {config.algorithm.teacher} and model.path {config.model.path}"
    same_family = "take a teacher of the student's family, such as a larger Qwen2.5-VL for a Qwen2.5-VL"
    if student.vocabulary() != teacher.vocabulary():
        raise ConfigError(
            f"{both} have different tokenizers ({teacher.vocabulary()[:8]}, {student.vocabulary()[:8]}), so"
            f" token ids mean different things: {same_family}"
        )
    if not pictures:
        return
    if not teacher.has_vision:
        raise ConfigError(f"{both}: rows have images and the teacher reads text only: {same_family}")
    if student.patches() != teacher.patches():
        raise ConfigError(f"{both} cut images into different patches: {same_family}")
