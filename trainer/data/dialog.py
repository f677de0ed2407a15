"""What environments answer, as tokens behind a reply and as the pixels that the policy reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from PIL import Image

from trainer.algorithm.traces import Trace, Verdict
from trainer.config import ConfigError, RunConfig, Split
from trainer.config.turns import images_of
from trainer.data.processor import EncodedPrompt, Prompter
from trainer.data.reader import RowReader
from trainer.data.schema import Row, question_text
from trainer.turns.calls import as_result
from trainer.turns.environments import environment_of
from trainer.turns.episode import Environment, Observation, SeenPicture, Situation
from trainer.turns.own_environment import ToolFailure

ASKED = {"role": "user", "content": [{"type": "text", "text": "?"}]}
MARK = "a reply, 1e5d70b2"
REPLIED = {"role": "assistant", "content": [{"type": "text", "text": MARK}]}


@dataclass(frozen=True, eq=False)
class Shown:
    """An observation within an episode: where its tokens stand, and its images."""

    start: int
    stop: int
    images: Sequence[Image.Image]


@dataclass(frozen=True, eq=False)
class Grown:
    """An episode after a reply was answered, or after its end."""

    trace: Trace
    observation: Shown | None = None
    """What the trace ends with, so that it goes on; None: nothing answered its last reply."""


class Dialogs:
    """The episodes of a run in one process. What the model said is never tokenized again: an observation's
    tokens, with what the chat template writes around them, are put behind the sampled ones, and are not
    learned."""

    def __init__(
        self,
        config: RunConfig,
        environment: Environment,
        reader: RowReader,
        verdict: Callable[[Row, str], Verdict | None],
    ) -> None:
        """verdict: what the grader says of a reply at once. Raises ConfigError for a chat template in which
        an observation cannot be told from the rest."""
        self.config = config
        self.environment = environment
        self.reader = reader
        self._verdict = verdict
        images = (Image.new("RGB", (64, 64)),) if environment.shows_images else ()
        for role in ("tool", "user"):
            self.token_ids(Observation("?", images, role))

    @property
    def prompter(self) -> Prompter:
        """The model's processor."""
        return self.reader.prompter

    def situation(self, split: Split, index: int) -> Situation:
        """What the environment knows of a row."""
        row = self.reader.datasets[split][index]
        verdict = partial(self._verdict, row)
        facts = {
            "id": row.id,
            "source": row.source,
            "question": question_text(row.messages),
            "reference": row.answer,
            "answer_type": row.answer_type,
            "extra": row.extra,
        }
        if not self.environment.shows_images:
            return Situation((), verdict, row=facts)
        pictures = []
        for image in self.reader.decoded(split, index):
            pictures.append(SeenPicture(image, self.prompter.seen_size(image.width, image.height)))
        return Situation(pictures, verdict, self.prompter.cell, facts)

    def may_go_on(self, trace: Trace) -> bool:
        """Whether a reply is answered. One that ended with another token than the chat template ends replies
        with is the last one."""
        return trace.end == "stop" and trace.tokens[-1] == self.prompter.eos_token_id

    def grown(self, max_tokens: int, trace: Trace, observation: Observation | None) -> Grown:
        """An episode with what answered its last reply. Its end is `cut` where it goes on. max_tokens: most
        tokens behind the prompt. Without room for observation and reply it ends by `length`, at `turns.limit`
        replies by `turns`, and by `images` where it would show more than `turns.images`."""
        if observation is None:
            return Grown(trace)
        if 1 + len(trace.dialog) // 2 == self.config.turns.limit:
            return Grown(replace(trace, end="turns"))
        if self._shown(trace) + len(observation.images) > images_of(self.config.turns):
            return Grown(replace(trace, end="images"))
        ids = self.token_ids(observation)
        behind_prompt = len(trace.completion) + len(ids)
        if behind_prompt >= max_tokens or trace.shared + behind_prompt >= self.config.longest_sequence:
            return Grown(replace(trace, end="length"))
        tokens = np.concatenate([trace.tokens, np.asarray(ids, np.int32)])
        dialog = *trace.dialog, trace.text, observation.text
        shown = Shown(len(trace.tokens), len(tokens), observation.images)
        return Grown(replace(trace, tokens=tokens, dialog=dialog, end="cut"), shown)

    def _shown(self, trace: Trace) -> int:
        """Number of images that an episode's observations have shown."""
        return sum(self._images_in(trace, turn) for turn in range(len(trace.dialog) // 2))

    def _place(self, trace: Trace, turn: int) -> tuple[int, int]:
        """Where the tokens between reply `turn`, from 0, and the next start and stop."""
        ends = np.flatnonzero(np.diff(trace.learned) > 1)
        if turn < len(ends):
            return int(trace.learned[ends[turn]]) + 1, int(trace.learned[ends[turn] + 1])
        return int(trace.learned[-1]) + 1, len(trace.tokens)

    def _images_in(self, trace: Trace, turn: int) -> int:
        """Number of images between reply `turn` and the next."""
        image = trace.tokens[slice(*self._place(trace, turn))] == self.reader.image_token_id
        return int(image[0]) + int(np.count_nonzero(image[1:] & ~image[:-1])) if len(image) else 0

    def token_ids(self, observation: Observation) -> list[int]:
        """Token ids between the end token of a reply and the first token of the next, image placeholders
        expanded. Raises ConfigError as the constructor does."""
        whole = self._rendered(observation)
        eos = self.prompter.tokenizer.eos_token
        reply = whole.find(MARK)
        end = whole.find(eos, reply)
        image = self.prompter.image_token_id
        ids = self.prompter.tokenizer(whole[end + len(eos) :], add_special_tokens=False)["input_ids"]
        if reply < 0 or end < 0 or ids.count(image) != len(observation.images):
            raise ConfigError(
                f"turns.environment {self.config.turns.environment}: the model's chat template writes no"
                f" reply of role {observation.role} with {len(observation.images)} images: choose another"
                " environment, or another model"
            )
        counts = iter([self.prompter.tokens_of_size(*shown.size) for shown in observation.images])
        expanded = []
        for token in ids:
            expanded += [token] * (next(counts) if token == image else 1)
        return expanded

    def _rendered(self, observation: Observation) -> str:
        """The chat of a question, a reply and an observation, up to the next reply."""
        text = self.disarmed(observation.text)
        behind = ""
        role = observation.role
        if role == "tool" and not self.prompter.writes_results:
            role = "user"
            text, behind = as_result(text)
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        content += [{"type": "image"} for _ in observation.images]
        if behind:
            content.append({"type": "text", "text": behind})
        return self.prompter.texts([[ASKED, REPLIED, {"role": role, "content": content}]])[0]

    def disarmed(self, text: str) -> str:
        """A text in which no special token of the tokenizer stands: each gets a space behind its first
        character."""
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    @cached_property
    def _special(self) -> list[str]:
        return sorted(self.prompter.tokenizer.get_added_vocab(), key=len, reverse=True)

    def encoded(self, split: Split, trace: Trace) -> EncodedPrompt | None:
        """What an episode's observations showed, as the policy reads it: every picture is made again from
        row and replies. None: they showed none. Raises RuntimeError where they are not what they were."""
        image = self.reader.image_token_id
        shown = int(np.count_nonzero(trace.completion == image))
        if not shown:
            return None
        key = ("observed", split.path, split.name, trace.row, trace.completion.tobytes())
        encoded = self.reader.cache.get(
            key, partial(self._encode, split, trace), lambda made: made.size_bytes
        )
        patches = int(encoded.grid_thw.prod(-1).sum())
        if patches != shown * self.prompter.merge_size**2:
            raise RuntimeError(
                f"row {trace.row}: {shown} image tokens in its observations for {patches} patches:"
                " the environment is not the one that answered them"
            )
        return encoded

    def _encode(self, split: Split, trace: Trace) -> EncodedPrompt:
        images: list[Image.Image] = []
        for observation in self.shown(split, trace):
            images += observation.images
        out = self.prompter.processor.image_processor(
            images=images, size=self.prompter.size, return_tensors="pt"
        )
        return EncodedPrompt([], out["pixel_values"], out["image_grid_thw"])

    def shown(self, split: Split, trace: Trace) -> Iterator[Shown]:
        """An episode's observations that showed images, which are made again. Raises RuntimeError as
        `encoded` does."""
        # A text is logged, whatever it was: a tool may have been too slow for once.
        turns = [turn for turn in range(len(trace.dialog) // 2) if self._images_in(trace, turn)]
        if not turns:
            return  # nor is the row's picture decoded
        situation = self.situation(split, trace.row)
        for turn in turns:
            observation = self._answered_again(trace, turn, situation)
            if observation is None or observation.text != trace.dialog[2 * turn + 1]:
                raise RuntimeError(
                    f"row {trace.row}: its reply {turn + 1} is answered otherwise than it was:"
                    " the environment is not a function of row and replies"
                )
            yield Shown(*self._place(trace, turn), observation.images)

    def _answered_again(self, trace: Trace, turn: int, situation: Situation) -> Observation | None:
        """What answered a reply once. Raises RuntimeError that names the tool's failure."""
        try:
            return self.environment.answer_again(situation, trace.dialog[: 2 * turn + 1 : 2])
        except ToolFailure as failure:
            raise RuntimeError(
                f"row {trace.row}: the picture behind its reply {turn + 1} cannot be made again:"
                f" turns.environment {self.config.turns.environment}: {failure.fault}"
            ) from None


def no_verdict(row: Row, reply: str) -> None:
    """For processes that only make pictures again, which no verdict changes."""


def dialogs_of(
    config: RunConfig, reader: RowReader, verdict: Callable[[Row, str], Verdict | None] = no_verdict
) -> Dialogs | None:
    """The run's dialogs; None where one reply is the whole completion."""
    environment = environment_of(config.turns)
    return Dialogs(config, environment, reader, verdict) if environment else None
