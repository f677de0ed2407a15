"""The rows of the zoom demo: what they ask, and that a worked episode has the tokens of a sampled one."""

from __future__ import annotations

import numpy as np
import pytest

from examples.demo import tiny_model
from examples.zoom import framed
from tests.turns.test_dialogs import answered, replied
from trainer.config import RunConfig, override
from trainer.data.dataset import Dataset
from trainer.data.dialog import dialogs_of
from trainer.data.processor import Prompter
from trainer.data.reader import RowReader
from trainer.loops.sft import solution_trace
from trainer.turns.episode import SeenPicture
from trainer.turns.zoom import in_original


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("framed")
    framed.prepare(out, 8, 8, 8)
    return str(out)


def test_the_box_of_the_worked_call_has_the_digit_and_lies_in_the_frame():
    for index in range(30):
        one = framed.picture(0, "train", index)
        assert one.image.tobytes() == framed.picture(0, "train", index).image.tobytes()
        seen = SeenPicture(one.image, (framed.SEEN, framed.SEEN))
        left, top, right, bottom = framed.box_of(one.place)
        box = in_original((left, top, right, bottom), seen)
        shown = np.asarray(one.image.crop(box))
        digit = (shown == 0).all(axis=-1)
        rows, columns = np.nonzero(digit)
        assert rows.min() > 0 and rows.max() < len(shown) - 1
        assert columns.min() > 0 and columns.max() < shown.shape[1] - 1
        assert (shown[~digit] == 255).all(), "nothing else is in it"
        around = np.asarray(one.image.crop((box[0] - framed.FRAME, box[1], box[2] + framed.FRAME, box[3])))
        assert any((around == color).all(axis=-1).any() for color in framed.COLORS.values())


def test_questions_have_no_solution_and_worked_rows_are_crops_places_episodes_and_answers_at_once(data):
    splits = ("train", "test", "short", "warm", "plain")
    train, test, short, warm, plain = (Dataset(data, split) for split in splits)
    assert not train[0].solution and not test[0].solution and train[0].images != test[0].images
    assert [framed.WHERE in str(short[i].messages) for i in range(4)] == [False, True, False, True]
    assert [len(short[i].images) for i in range(4)] == [1, 1, 1, 1]
    assert [len(warm[i].images) for i in range(8)] == [1, 2, 2, 2, 1, 2, 2, 2]
    for i in range(8):
        assert "<tools>" in str(warm[i].messages)
        assert "<tools>" not in str(plain[i].messages) + str(short[i].messages)
        assert warm[i].images[0] == plain[i].images[0]
        assert warm[i].answer in warm[i].solution == plain[i].solution
        assert short[i].answer in short[i].solution


def test_a_worked_episode_has_the_tokens_of_a_sampled_one(data, tmp_path):
    """What supervised training learns is what GRPO samples: prompt, call, what the tool showed, answer."""
    model = tiny_model.build(tmp_path / "model", tokenizer=framed.tokenizer())
    changes = [f"model.path={model}", f"data.path={data}", "data.split=plain", "model.min_pixels=784"]
    changes += ["model.max_pixels=7056", "turns.environment=zoom", "turns.image_pixels=7056"]
    changes += ["data.prompt_max_tokens=320", "rollout.max_tokens=224"]
    reader = RowReader(override(RunConfig(), changes))
    told = dialogs_of(reader.config, reader)
    warm = Dataset(data, "warm")
    worked = solution_trace(Prompter(reader.config.model), 2, warm[2])

    one = framed.picture(0, "warm", 2)
    sampled = replied(reader, 2, framed.looked(one)[0][0]["content"])
    sampled, _, (shown,) = answered(told, sampled)
    assert framed.png(shown) == warm[2].images[1]
    sampled = replied(reader, 2, one.solution, sampled)
    assert sampled.tokens.tolist() == worked.tokens.tolist()
    assert sampled.learned.tolist() == worked.learned.tolist()
    assert answered(told, sampled)[1] == []
