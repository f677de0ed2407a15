"""The records that flow through a run: Prompt -> Trace -> Outcome. Plain data: no behavior, no framework."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

Verdict = Literal["correct", "wrong", "no_answer", "timeout", "error"]
End = Literal["stop", "length", "turns", "error", "cut", "images"]


@dataclass(frozen=True)
class Prompt:
    """One row as it is asked at one step."""

    group: int
    """Position in the step's batch. The traces of one prompt share it; equal texts do not make a group."""
    row: int
    """Index of the row in its split."""
    seed: int
    """Base of the seeds of its completions: a hash of (run seed, step, row, epoch)."""
    cut: int = 0
    """Most tokens by which each of its completions grows before it is cut; 0: it is sampled to its end."""


@dataclass(frozen=True)
class ImageRef:
    """One image of a prompt: which row it stands in, and its place there."""

    row: int
    number: int


@dataclass(frozen=True, eq=False)
class Trace:
    """One conversation that a model can learn from: a prompt, what followed it, and which tokens are learned.
    A sampled completion, a worked solution and (later) several turns have the same form: all tokens in one
    array, and the positions that count in another."""

    group: int
    """The prompt's group."""
    row: int
    """Index of the prompt's row in its split."""
    index: int
    """Index of this trace in its group, from 0."""
    tokens: np.ndarray
    """Token ids of the whole context, [L] int32. Image placeholders are expanded to one id per merged
    patch."""
    shared: int
    """Number of first tokens that all traces of the group have in common. They are packed once per pass."""
    learned: np.ndarray
    """Positions of the tokens that are trained, [T] int32, ascending, never 0."""
    logprobs: np.ndarray | None = None
    """Log-probabilities that the engine gave the learned tokens, after temperature, [T] float32; None if no
    engine sampled them."""
    images: tuple[ImageRef, ...] = ()
    """Images of the prompt in the order of their placeholders. Those of later turns are made from row and
    replies (trainer/data/dialog.py)."""
    segments: tuple[tuple[int, int], ...] = ()
    """Which weights sampled what: (first position, version) of every stretch of tokens that one version
    sampled, in order; empty if no engine did."""
    end: End = "stop"
    """Why the trace ended: the model's end token, the limits of tokens, turns or images, or an error. `cut`:
    it has not, and goes on in the next rollout phase."""
    text: str = ""
    """What was sampled, as text without special tokens; of an episode of several turns, its last reply."""
    dialog: tuple[str, ...] = ()
    """What came before `text` in an episode: a reply, what was observed, a reply, ..."""
    score: float | None = None
    """What an environment that scores gave the episode; None: no environment scored it. The rollout log keeps
    the outcome instead."""

    @property
    def prompt(self) -> np.ndarray:
        """The shared tokens, [shared]."""
        return self.tokens[: self.shared]

    @property
    def completion(self) -> np.ndarray:
        """The tokens behind the shared ones, [L - shared]."""
        return self.tokens[self.shared :]

    @property
    def replies(self) -> list[np.ndarray]:
        """Token ids of each stretch of learned tokens: what the model said in each turn."""
        ends = np.flatnonzero(np.diff(self.learned) > 1) + 1
        return np.split(self.tokens[self.learned], ends)

    @property
    def transcript(self) -> str:
        """The whole episode as text, for a person: replies, and each observation in a paragraph of its
        own."""
        parts = []
        for i, turn in enumerate(self.dialog):
            parts.append(f"[observed] {turn}" if i % 2 else turn)
        return "\n\n".join([*parts, self.text])

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest version of the weights that sampled the trace; -1 if no engine did."""
        if not self.segments:
            return -1, -1
        return self.segments[0][1], self.segments[-1][1]

    @property
    def token_versions(self) -> np.ndarray:
        """Version of the weights that sampled each token behind the prompt, [L - shared]."""
        starts = [start for start, _ in self.segments]
        counts = np.diff([*starts, len(self.tokens)])
        return np.repeat([version for _, version in self.segments], counts)

    @property
    def finished(self) -> bool:
        """Whether the model ended the trace by itself."""
        return self.end == "stop"

    @property
    def sound(self) -> bool:
        """Whether all log-probabilities that the engine gave are finite numbers."""
        return self.logprobs is None or bool(np.isfinite(self.logprobs).all())

    @property
    def context(self) -> Hashable:
        """A key that two traces have in common if and only if they share a prompt: same row, same images,
        same first tokens."""
        return self.row, self.images, self.prompt.tobytes()


def completed_trace(
    prompt_ids: Sequence[int] | np.ndarray,
    completion_ids: Sequence[int] | np.ndarray,
    *,
    group: int,
    row: int,
    index: int = 0,
    learned_earlier: Sequence[int] = (),
    logprobs: Sequence[float] | np.ndarray | None = None,
    images: tuple[ImageRef, ...] = (),
    version: int = -1,
    end: End = "stop",
    text: str = "",
) -> Trace:
    """A trace of one prompt, [P], and one completion, [T], all of whose tokens are learned. learned_earlier:
    positions of the prompt that are learned too, such as earlier replies. version: of the weights that
    sampled the completion; -1 if no engine did. Other fields as in `Trace`."""
    shared = len(prompt_ids)
    tokens = np.concatenate([np.asarray(prompt_ids, np.int32), np.asarray(completion_ids, np.int32)])
    behind_prompt = np.arange(shared, len(tokens), dtype=np.int32)
    return Trace(
        group=group,
        row=row,
        index=index,
        tokens=tokens,
        shared=shared,
        learned=np.concatenate([np.asarray(learned_earlier, np.int32), behind_prompt]),
        logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
        images=images,
        segments=((shared, version),) if version >= 0 else (),
        end=end,
        text=text,
    )


def continue_trace(begun: Trace, piece: Trace) -> Trace:
    """A trace that was cut, and what other weights sampled behind it. piece: one whose prompt is all that
    there was of `begun`; its end and text are those of both."""
    assert begun.logprobs is not None and piece.logprobs is not None
    return replace(
        begun,
        tokens=piece.tokens,
        learned=np.concatenate([begun.learned, piece.learned]),
        logprobs=np.concatenate([begun.logprobs, piece.logprobs]),
        segments=begun.segments + piece.segments,
        end=piece.end,
        text=piece.text,
    )


@dataclass(frozen=True)
class Outcome:
    """The grader's result for one trace."""

    verdict: Verdict
    accuracy: float
    """1.0 for `correct`, else 0.0; a user's reward function may return any finite number."""
    format: float
    """1.0 for exactly one think and one answer block, else 0.0."""
    reward: float
    """accuracy_weight * accuracy + format_weight * format."""
    rule: str = ""
    """What decided (`grading.expression.Rule`): exact, points or text; "" where our grader did not."""
