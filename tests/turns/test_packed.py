"""Images of later turns in a packed row, the record of an episode, and what cannot be combined with turns."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.learning.one_rank import same, trace
from tests.metric_table import unknown_names
from tests.turns.test_built_in_tools import called
from trainer.algorithm.batching import collate, trace_length
from trainer.algorithm.scheduling import PassCost
from trainer.algorithm.traces import Outcome
from trainer.checkpoint.rollout_archive import FORMAT as LOG_FORMAT
from trainer.checkpoint.rollout_archive import GradedStep, archive_of, graded_of
from trainer.config import ConfigError, RunConfig, Turns, override, validate
from trainer.config.turns import images_of
from trainer.data.processor import mrope_positions
from trainer.turns.counts import describe_episodes, usual_failure

IMAGE = 9
PROMPT = [1, IMAGE, IMAGE, 3]
GRID = torch.tensor([[1, 4, 2]])
SHOWN = torch.tensor([[1, 2, 4]])


def positions(ids, grid):
    return mrope_positions(tuple(ids), () if grid is None else tuple(map(tuple, grid.tolist())), IMAGE, 2)


def episode(index, reply, observed, last, **about):
    """A prompt, a reply, tokens that are not learned, and another reply."""
    whole = trace(7, PROMPT, [*reply, *observed, *last], index=index)
    first = np.arange(4, 4 + len(reply))
    start = 4 + len(reply) + len(observed)
    learned = np.concatenate([first, np.arange(start, start + len(last))]).astype(np.int32)
    said = np.linspace(-1, 0, len(learned), dtype=np.float32)
    return replace(whole, learned=learned, logprobs=said, segments=((4, 2), (start, 2)), **about)


EPISODES = [
    episode(0, [20, 21], [5, IMAGE, IMAGE, 6], [22], dialog=("a", "Picture 1:"), text="b"),
    episode(1, [23], [], [24, 25], text="c"),
    episode(2, [26], [IMAGE, IMAGE, 8], [27, 28], dialog=("d", "Error: no"), text="e", end="turns"),
]


def pixels(value, patches):
    return torch.full((patches, 3), float(value))


def test_images_of_later_turns_stand_behind_what_called_for_them():
    """Positions are those of each episode alone in the row; pixels come in the order of the image tokens."""
    prompt = SimpleNamespace(pixel_values=pixels(0, 8), grid_thw=GRID)
    shown = {
        0: SimpleNamespace(pixel_values=pixels(1, 8), grid_thw=SHOWN),
        2: SimpleNamespace(pixel_values=pixels(2, 8), grid_thw=SHOWN),
    }
    batch = collate(EPISODES, lambda t: prompt, positions, lambda t: shown.get(t.index))
    ids = batch.input_ids[0].tolist()
    assert ids == [*PROMPT, 20, 21, 5, IMAGE, IMAGE, 6, 22, 23, 24, 25, 26, IMAGE, IMAGE, 8, 27, 28]
    assert batch.targets.tolist() == [20, 21, 22, 23, 24, 25, 26, 27, 28]
    assert batch.logits_at.tolist() == [3, 4, 9, 3, 11, 12, 3, 17, 18]
    assert batch.pixel_values is not None
    assert batch.pixel_values[:, 0].tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert batch.grids == ((1, 4, 2), (1, 2, 4), (1, 2, 4))
    start = 4
    for one in EPISODES:
        grids = [GRID] + ([SHOWN] if one.index in shown else [])
        alone = positions(one.tokens.tolist(), torch.cat(grids))
        stop = start + len(one.completion)
        packed = torch.cat([batch.position_ids[:, 0, :4], batch.position_ids[:, 0, start:stop]], 1)
        assert torch.equal(packed, alone)
        start = stop


def test_the_schedule_counts_images_of_later_turns():
    with_image, bare, _ = [trace_length(one, IMAGE) for one in EPISODES]
    assert with_image.image_tokens == bare.image_tokens == 2
    assert (with_image.shown_later, bare.shown_later) == (2, 0)
    cost, free = PassCost(image_token=5.0), PassCost()
    assert cost.completion(with_image) == free.completion(with_image) + 10
    assert cost.completion(bare) == free.completion(bare)


def test_an_episode_is_in_the_rollout_log_without_loss():
    outcomes = [Outcome("correct", 1.0, 1.0, 1.0)] * 3
    about = {"format": LOG_FORMAT, "stats": {}}
    arrays = dict(np.load(io.BytesIO(archive_of(about, GradedStep(EPISODES, outcomes, {})))))
    read = graded_of(about, arrays)
    assert all(map(same, read.traces, EPISODES))
    assert [one.dialog for one in read.traces] == [("a", "Picture 1:"), (), ("d", "Error: no")]


def test_what_episodes_did_is_counted_by_hand():
    told = describe_episodes(EPISODES)
    assert told == {
        "turns/replies_mean": pytest.approx(5 / 3),
        "turns/errors_mean": pytest.approx(1 / 3),
        "turns/error_fraction": pytest.approx(1 / 2),
        "turns/failed_fraction": 0,
        "turns/images_fraction": 0,
        "turns/limit_fraction": pytest.approx(1 / 3),
        "turns/observed_tokens_mean": pytest.approx(7 / 3),
    }
    dialog = called("zoom", box=[0, 0, 9, 9]), "Picture 1:", called("zoom"), "Tool failure: it crashed"
    dialog += called("rm"), "Error: there is no tool 'rm'", "<tool_call>", "Error: not valid JSON"
    busy = replace(EPISODES[0], dialog=dialog, end="images")
    told = describe_episodes([busy, EPISODES[1]], ["zoom"])
    assert told["turns/calls_zoom_mean"] == 1 and "turns/calls_rm_mean" not in told
    assert (told["turns/error_fraction"], told["turns/failed_fraction"]) == (0.5, 0.25)
    assert told["turns/images_fraction"] == 0.5
    assert unknown_names(list(told)) == []
    assert usual_failure([busy, busy, EPISODES[1]]) == "'Tool failure: it crashed' (2 times)"
    assert usual_failure(EPISODES) == ""
    assert EPISODES[0].transcript == "a\n\n[observed] Picture 1:\n\nb" and EPISODES[1].transcript == "c"
    assert [reply.tolist() for reply in EPISODES[0].replies] == [[20, 21], [22]]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["fleet.workers=only", "checkpoint.remote=s3://b/c"], "fleet.workers only"),
        (["algorithm.teacher=x", "algorithm.kl_coef=0"], "algorithm.teacher"),
        (["method=sft"], "method sft"),
        (["turns.image_pixels=100"], "turns.image_pixels 100"),
        (["turns.image_pixels=9999999"], "turns.image_pixels 9999999"),
        (["turns.limit=1"], "turns.limit"),
        (["turns.environment=python"], "turns.environment is 'python': .* among the examples"),
        (["turns.environment=zom"], "did you mean zoom"),
        (["turns.environment=mine.txt:Mine"], "path/to/file.py:NAME"),
        (["turns.environment=mine.py:0"], "path/to/file.py:NAME"),
    ],
)
def test_what_is_not_built_is_refused_by_name(options, named):
    with pytest.raises(ConfigError, match=named):
        validate(override(RunConfig(), ["turns.environment=zoom", *options]))


def test_what_may_show_images():
    assert images_of(Turns(environment="zoom", limit=5)) == 4
    assert images_of(Turns(environment="zoom", limit=5, images=2)) == 2
    assert images_of(Turns(environment="mine.py:Mine", limit=5)) == 4, "it may"
    assert images_of(Turns(images=3)) == 0
