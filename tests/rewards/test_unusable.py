"""Rewards that nothing can be learned from end a run, which names them; smaller ones pass."""

import math

import pytest

from tests.servers import answering
from trainer.algorithm.advantages import RunningNorm
from trainer.algorithm.reward_shaping import LoopState
from trainer.algorithm.traces import Outcome, completed_trace
from trainer.config import ConfigError, Rewards, RunConfig
from trainer.rewards.scorer import Scorer
from trainer.rewards.unusable_rewards import describe_largest_reward, refuse_unusable


def traces(*texts):
    return [completed_trace([1], [2], group=0, row=40 + i, text=text) for i, text in enumerate(texts)]


def scored(rewards, asked):
    with Scorer(rewards) as scorer:
        return scorer.score([x.text for x in asked], ["1"] * len(asked), ["number"] * len(asked))


@pytest.mark.parametrize(
    ("returned", "shown"),
    [("float('nan')", "nan"), ("float('inf')", "inf"), ("-float('inf')", "-inf"), ("2e30", "2e+30")],
)
def test_a_functions_value_is_named_with_function_row_and_completion(tmp_path, returned, shown):
    path = tmp_path / "mine.py"
    path.write_text(f"def reward(text, *_):\n    return {returned} if 'odd' in text else 0.5\n")
    rewards = Rewards(function=f"{path}:reward", workers=1)
    asked = traces("even", "an odd\none", "even")
    outcomes = scored(rewards, asked)
    with pytest.raises(ConfigError) as error:
        refuse_unusable(rewards, asked, outcomes)
    said = str(error.value)
    assert said.startswith("1 of 3 rewards are not finite numbers up to 1e+30: ")
    assert f"{shown} by rewards.function {path}:reward for row 41, completion 'an odd one'" in said
    assert "learning rate" not in said and "\n" not in said


@pytest.mark.parametrize("reply", [b'{"rewards": [NaN]}', b'{"scores": [-Infinity]}'])
def test_a_servers_value_is_named_too_without_its_token(reply):
    asked = traces("what")
    with answering(lambda _: (200, reply, {})) as url:
        rewards = Rewards(remote_url=f"{url}/get_reward?model=secret")
        outcomes = scored(rewards, asked)
    with pytest.raises(
        ConfigError, match="by rewards.remote_url http.* for row 40, completion 'what'"
    ) as error:
        refuse_unusable(rewards, asked, outcomes)
    assert "secret" not in str(error.value)


def test_finite_rewards_pass_and_the_largest_is_known():
    asked = traces("a", "b", "c")
    outcomes = [Outcome("correct", x, 0.0, x) for x in (0.5, -1e29, 1.0)]
    refuse_unusable(Rewards(), asked, outcomes)
    assert (
        describe_largest_reward(Rewards(), asked, outcomes)
        == "-1e+29 by the built-in grader for row 41, completion 'b'"
    )
    assert describe_largest_reward(Rewards(), [], []) == ""


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_the_running_mean_is_never_poisoned(bad):
    import torch

    norm = RunningNorm()
    norm.normalize(torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    before = (norm.count, norm.mean, norm.m2)
    with pytest.raises(ValueError, match="not finite"):
        norm.normalize(torch.tensor([0.5, bad], dtype=torch.float64))
    assert (norm.count, norm.mean, norm.m2) == before


def test_a_checkpoint_of_older_code_does_not_bring_poison():
    saved = {"count": 8.0, "mean": math.nan, "m2": math.inf, "kl_coef": 0.5, "prompts": 7}
    loop_state = LoopState.resume(saved, RunConfig(), 2)
    assert (loop_state.count, loop_state.mean, loop_state.m2) == (0.0, 0.0, 0.0)
    assert (loop_state.kl_coef, loop_state.prompts) == (0.5, 7)
