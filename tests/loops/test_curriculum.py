"""A run that goes from easy rows to harder ones by its pass rate, and is resumed exactly."""

import pytest

from tests.loops.test_replay import SAVED, Killed, Run, train
from trainer import config as c
from trainer.algorithm.curriculum import CurriculumState
from trainer.algorithm.traces import Outcome
from trainer.data.prompt_stream import PromptStream
from trainer.loops import grpo

STEPS = 12
DIFFICULTY = {row: 1 + row // 10 for row in range(30)}
"""Rows 0 to 29 in three levels; rows 30 to 39 state none."""


def test_the_level_rises_by_the_pass_rate_of_the_last_steps():
    data = c.Data(curriculum=0.5, curriculum_steps=2)
    standing = CurriculumState()
    levels = []
    for rate in (1.0, 0.0, 0.0, 0.9, 0.6, 0.6, 1.0, 1.0):
        standing.passed(rate, data, 3)
        levels.append(standing.level)
    # 0.5 in the mean is enough; 0.45 is not; there is no level after the third
    assert levels == [0, 1, 1, 1, 1, 2, 2, 2]
    assert standing == CurriculumState(level=2)


def test_a_level_has_its_rows_and_those_without_one():
    stream = PromptStream(range(40), 4, 0, DIFFICULTY)
    assert stream.levels == [1, 2, 3]
    for level in range(3):
        drawn = {prompt.row for prompt in stream.draw(0, 20, 1, level=level)}
        assert drawn == {*range(10 * level, 10 * level + 10), *range(30, 40)}
    assert stream.draw(7, 9, 3, level=1) == stream.draw(0, 16, 3, level=1, group=-7)[7:]


def test_without_levels_the_order_is_what_it_was():
    stream = PromptStream(range(40), 4, 0)
    assert stream.draw(4, 4, 2) == stream.batch(2)
    assert stream.draw(4, 4, 2) == PromptStream(range(40), 4, 0, {}).draw(4, 4, 2, level=0)


def test_a_level_with_too_few_rows_is_refused():
    with pytest.raises(c.ConfigError, match="3 usable rows of difficulty 2 are too few for steps of 4"):
        PromptStream(range(9), 4, 0, {row: 1 + (row > 5) for row in range(9)})


class Leveled(Run):
    """Completions are correct by their text alone, so that the pass rate of a step depends on its prompts."""

    def __init__(self, config, saved=(0, 0, None, ()), dies_in=0) -> None:
        super().__init__(config, saved, dies_in)
        self.stream = PromptStream(self.train_rows, config.rows_per_step, config.run.seed, DIFFICULTY)
        self.drawn = {}

    def score(self, samples):
        self.drawn[self.model.step] = {trace.row for trace in samples}
        outcomes = []
        for trace in samples:
            right = len(trace.completion) % 2 == 0
            verdict = "correct" if right else "wrong"
            outcomes.append(Outcome(verdict, float(right), 0.0, len(trace.completion) / 7))
        return outcomes


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "evaluate", lambda *_: {})
    return c.RunConfig(
        run=c.Run(name="curriculum", dir=str(tmp_path), max_steps=STEPS),
        data=c.Data(curriculum=0.4, curriculum_steps=3),
        rollout=c.Rollout(prompts_per_step=4, samples_per_prompt=4),
        algorithm=c.Algorithm(kl_coef=0.0),
        logging=c.Logging(samples_per_step=0),
    )


@pytest.mark.parametrize(("killed_at", "staleness"), [(4, 0), (7, 0), (8, 0), (8, 2)])
def test_a_resumed_run_draws_the_same_levels(config, tmp_path, killed_at, staleness):
    config = c.override(config, [f"rollout.staleness={staleness}"])
    calm = train(Leveled(c.override(config, [f"run.dir={tmp_path}/calm"])))
    levels = [calm.lines[step]["data/level"] for step in range(1, STEPS + 1)]
    assert levels[:3] == [1, 1, 1] and levels[-1] > 1 and levels == sorted(levels)
    for step, rows in calm.drawn.items() if not staleness else ():
        assert {DIFFICULTY.get(row, levels[step - 1]) for row in rows} == {levels[step - 1]}

    killed = Leveled(config, dies_in=killed_at)
    with pytest.raises(Killed):
        train(killed)
    again = train(Leveled(config, killed.saves[SAVED]))
    assert again.model.value == calm.model.value != 0
    assert {**killed.lines, **again.lines} == calm.lines
    assert again.saves[STEPS][2] == calm.saves[STEPS][2]
