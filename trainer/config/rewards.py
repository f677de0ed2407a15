"""How completions are graded: by rule, by a user's functions, by a server, by a judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.ranges import ranged_field


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """One of several reward functions."""

    path: str = ""
    """`path/to/file.py:function`."""
    weight: float = 1.0
    """What its reward is multiplied by in the sum that is the accuracy."""
    name: str = ""
    """Its metric is `reward/function_NAME`; empty: the function's own name."""

    @property
    def metric(self) -> str:
        """How its metric ends."""
        return self.name or self.path.rpartition(":")[2]


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Grading."""

    answer: Literal["block", "boxed", "final", "whole", "any"] = "block"
    """Where completions state their answer: in an `<answer>` block, in the last box behind the reasoning,
    after `####` or "the answer is", all behind the reasoning, or any of these (docs/rewards.md)."""
    accuracy_weight: float = ranged_field(1.0, least=0)
    """Weight of the accuracy reward (1 for a correct answer, else 0)."""
    format_weight: float = ranged_field(0.5, least=0)
    """Weight of the format reward (1 for a completion that has `answer`'s form, else 0)."""
    workers: int = ranged_field(2, least=1)
    """Grader processes on the head node."""
    deadline_s: float = ranged_field(5.0, above=0)
    """A grader that takes longer for one completion is killed and replaced; the outcome is `timeout`."""
    max_timeout_rate: float = ranged_field(0.2, least=0, most=1)
    """End the run when a larger share of one step's completions timed out."""
    max_error_rate: float = ranged_field(0.2, least=0, most=1)
    """End the run when a larger share of one step's completions ended in an error of what grades them, the
    first step included."""
    remote_url: str = ""
    """Grade over HTTP at this /get_reward URL in place of local processes (the original's
    --remote_rm_url). A token belongs into SPOTRL_REWARD_TOKEN."""
    function: str = ""
    """`path/to/file.py:function` of a user's reward, run under the same deadline; replaces the accuracy
    reward. It gets what its parameters name (docs/rewards.md)."""
    functions: tuple[RewardFunction, ...] = ()
    """Several of them: their weighted sum replaces the accuracy reward, and each has a metric."""
    env: str = ""
    """Names of environment variables that the functions get, separated by commas: they find no token and no
    setting of the run otherwise."""
    judge_url: str = ""
    """OpenAI-compatible endpoint (https://HOST/v1) that decides what the rules call wrong among
    `judge_types`."""
    judge_model: str = ""
    """Name of the model that it serves."""
    judge_types: str = "text"
    """Answer types that it decides, separated by commas: text, math, number, letter."""
    judge_timeout_s: float = ranged_field(30.0, above=0)
    """For one reply. Where the judge answers others, the outcome is `timeout` after 3 further tries; where
    it answers none, it is waited for."""
    judge_requests: int = ranged_field(0, least=0)
    """Requests of the run, which ends when they are spent; 0: no limit. A restart counts on from its
    checkpoint."""

    @property
    def own(self) -> tuple[RewardFunction, ...]:
        """The user's functions: those of `functions`, or `function` alone."""
        return self.functions or ((RewardFunction(path=self.function),) if self.function else ())
