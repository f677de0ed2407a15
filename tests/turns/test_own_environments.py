"""Environments of a user's: loaded by path, run in processes of their own, whatever they do there."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

import pytest
from PIL import Image

from tests.turns.test_dialogs import replied
from trainer.config import ConfigError, Turns, override
from trainer.data.dialog import dialogs_of
from trainer.data.reader import RowReader
from trainer.sampling.episodes import Episodes
from trainer.system import process_set
from trainer.system.backoff import Backoff
from trainer.turns import own_environment
from trainer.turns.environments import environment_of
from trainer.turns.episode import FAILED, SeenPicture, Situation
from trainer.turns.messages import packed, unpacked

MINE = """
import io, os, sys, time
from PIL import Image
from trainer.turns.episode import Environment, Observation

PATH = {path!r}

class Mine:
    tools = [{{"type": "function", "function": {{"name": "turn", "description": "Turns the picture."}}}}]
    shows_images = True

    def answer(self, situation, replies):
        said = replies[-1]
        if said == "turn":
            while os.path.exists(PATH + ".slow"):
                time.sleep(0.01)
            return Observation("Turned:", (situation.pictures[0].image.rotate(90, expand=True),), "user")
        if said == "row":
            return f"{{situation.row['question']}} {{situation.row['reference']}} {{situation.verdict(said)}}"
        if said == "hang":
            time.sleep(60)
        if said == "die":
            os._exit(1)
        if said == "once" and not os.path.exists(PATH):
            open(PATH, "w").close()
            os._exit(1)
        if said == "once":
            return "alive"
        if said == "raise":
            raise KeyError("no such thing")
        if said == "exit":
            sys.exit("no")
        if said == "text":
            return "x" * 1_000_000_000
        if said == "pictures":
            return Observation("", [Image.new("RGB", (16, 16))] * 17)
        if said == "bomb":
            return Observation("", [Image.open(PATH + ".png")])
        if said == "large":
            return Observation("", [Image.new("L", (8000, 8000))])
        if said == "memory":
            held = bytearray(600 << 20)
            time.sleep(5)
        if said == "none of it":
            return 5
        if said == "special":
            return "<|im_end|><|image_pad|><tool_call>"
        if said == "wait":
            while not os.path.exists(PATH + ".go"):
                time.sleep(0.01)
            return "waited"
        return None

class Scored(Mine):
    shows_images = False
    def score(self, situation, replies):
        if replies[-1] == "nan":
            return float("nan")
        return len(replies) - 0.5

class Unsure:
    shows_images = True
    replayable = False
    def answer(self, situation, replies): return None

class Dice:
    replayable = False
    def answer(self, situation, replies): return os.urandom(8).hex()

class Plain(Environment):
    def answer(self, situation, replies): return None

class Nothing: pass

def broken(): raise ValueError("not here")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Makes an environment of the file above; ends its processes."""
    monkeypatch.setattr(own_environment, "MOST_BYTES", 256 << 20)
    file = tmp_path / "mine.py"
    file.write_text(MINE.format(path=str(tmp_path / "seen")))
    made = []

    def environment(name="Mine", **options):
        made.append(environment_of(Turns(environment=f"{file}:{name}", **options)))
        return made[-1]

    yield environment
    for one in made:
        one.processes.close()
    environment_of.cache_clear()


def situation(*pictures):
    seen = [SeenPicture(picture, (28, 56)) for picture in pictures]
    row = {"question": "How many?", "reference": "3"}
    return Situation(seen, lambda reply: "wrong", row=row)


def test_it_sees_row_and_pictures_and_answers_with_text_and_pictures(own):
    mine = own()
    assert mine.tools[0]["function"]["name"] == "turn" and mine.shows_images and not mine.scores and mine.slow
    picture = Image.effect_noise((30, 50), 80).convert("RGB")
    turned = mine.answer(situation(picture), ["turn"])
    assert turned.text == "Turned:" and turned.role == "user"
    assert turned.images[0].tobytes() == picture.rotate(90, expand=True).tobytes()
    row = mine.answer(situation(picture), ["turn", "row"])
    assert (row.text, row.role, row.images) == ("How many? 3 wrong", "tool", [])
    assert mine.answer(situation(), ["It is 3."]) is None
    assert (
        own("Scored").score(situation(), ["a", "b"]) == 1.5
        and own("Scored").score(situation(), ["nan"]) is None
    )


@pytest.mark.parametrize(("said", "what"), [
    ("die", "the tool crashed"), ("raise", "KeyError: 'no such thing'"), ("exit", "SystemExit: no"),
    ("hang", "no result within 1 seconds"), ("text", "memory"), ("memory", "memory"),
    ("pictures", "17 images, more than 16"), ("bomb", "an image of 9000 x 9000"),
    ("large", "an image of 8000 x 8000"), ("none of it", "AttributeError"),
])  # fmt: skip
def test_what_it_does_wrong_is_an_observation(own, tmp_path, said, what):
    if said == "bomb":
        Image.new("1", (9000, 9000)).save(tmp_path / "seen.png")
    # Where memory is watched the deadline is far away: each must end by its own limit.
    mine = own(tool_seconds=1.0 if said == "hang" else 30.0)
    started = time.monotonic()
    observation = mine.answer(situation(), [said])
    assert observation.text.startswith(FAILED) and what in observation.text and not observation.images
    assert len(observation.text) < 400 and str(tmp_path) not in observation.text
    assert time.monotonic() - started < 20
    assert mine.answer(situation(), ["It is 3."]) is None, "the next is answered"


def test_one_that_was_killed_from_outside_is_asked_again(own):
    mine = own()
    assert mine.answer(situation(), ["once"]).text == "alive"


def test_a_reply_of_a_gigabyte_is_not_read(own, monkeypatch):
    monkeypatch.setattr(process_set, "LONGEST_REPLY", 1000)
    assert own().answer(situation(Image.new("RGB", (30, 50))), ["turn"]).text == f"{FAILED}the tool crashed"


@pytest.mark.parametrize(("name", "wrong"), [
    ("Nothing", "no method `answer"), ("broken", r"ValueError: not here \(mine.py:"),
    ("Missing", "has no function 'Missing'"), ("Unsure", "shows images and is not replayable"),
])  # fmt: skip
def test_one_that_cannot_be_used_is_refused_by_name(own, name, wrong):
    with pytest.raises(ConfigError, match=wrong) as refused:
        own(name)
    assert "turns.environment" in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="a file that exists"):
        environment_of(Turns(environment="nowhere.py:Mine"))


def test_messages_are_read_back(own):
    picture = Image.effect_noise((7, 5), 80).convert("RGB")
    about, images = unpacked(packed({"a": ["\u00e9", None]}, [picture, picture.convert("L")]))
    assert about == {"a": ["\u00e9", None]} and images[0].tobytes() == picture.tobytes() and len(images) == 2
    for damaged in (b"", b"\x00" * 8, packed({}, [picture])[:-1]):
        with pytest.raises(ValueError):
            unpacked(damaged)


@pytest.fixture
def episodes(own, small_config, picture_dataset):
    def made(name="Mine", **options):
        environment = own(name, **options)
        settings = [f"turns.{key}={value}" for key, value in options.items()]
        spec = f"{environment.spec}"
        settings += [f"turns.environment={spec}", f"data.path={picture_dataset}", "rollout.max_tokens=600"]
        config = override(small_config, settings)
        reader = RowReader(config)
        return reader, Episodes(dialogs_of(config, reader), config.train_split, 600)

    return made


def test_a_slow_tool_holds_nobody_and_comes_back_at_the_same_step(episodes, tmp_path):
    """Calls run while the engine goes on. However long they take, each result is taken
    `turns.tool_steps` steps after its call; where the engine has nothing to do, it skips to that step."""
    reader, under_way = episodes(tool_workers=4, tool_steps=3, tool_seconds=60)
    rows = [replied(reader, row, "wait") for row in range(4)]
    (first,) = under_way.answered([replied(reader, 5, "It is 3.")], idle=True)
    assert first.trace.row == 5, "and a process has started"
    assert under_way.waited_s > 0
    assert under_way.answered(rows[:3], idle=False) == [], "the engine goes on: no tool has ended"
    assert under_way.answered(rows[3:], idle=False) == []
    (tmp_path / "seen.go").touch()
    wait([call.result for call in under_way._calls])
    assert under_way.answered([], idle=False) == [], "and it is too early for one that has"
    came = under_way.answered([], idle=False)
    assert [(one.trace.row, one.trace.dialog[-1]) for one in came] == [(row, "waited") for row in range(3)]
    done = replied(reader, 5, "It is 3.")
    assert [one.trace.row for one in under_way.answered([done], idle=False)] == [3]
    assert [one.trace.row for one in under_way.answered([], idle=True)] == [5]
    assert under_way.answered([], idle=True) == [], "nothing waits: it does not block"
    under_way.close()


def test_a_tool_that_fails_costs_one_observation_and_pictures_are_made_again(episodes):
    reader, under_way = episodes()
    trace = None
    for said in ("raise", "turn", "special", "die", "turn"):
        told = under_way.answered([replied(reader, 0, said, trace)], idle=True)
        if told[0].trace.end == "turns":
            break
        trace = told[0].trace
        assert trace.end == "cut"
    assert told[0].trace.end == "turns", "turns.limit is 4"
    assert [said.partition(":")[0] for said in trace.dialog[1::2]] == [
        "Tool failure",
        "Turned",
        "<|im_end|><|image_pad|><tool_call>",
    ]
    shown = trace.tokens[trace.shared :] == reader.image_token_id
    dialogs = under_way._dialogs
    encoded = dialogs.encoded(reader.config.train_split, trace)
    assert encoded.grid_thw.shape[0] == 1 and int(encoded.grid_thw.prod()) == 4 * int(shown.sum())
    under_way.close()


@pytest.mark.parametrize("passes", [True, False])
def test_a_tool_that_is_too_slow_while_a_picture_is_made_again(episodes, tmp_path, monkeypatch, passes):
    """It answered once, so it is asked again and the run goes on; one that never does is named."""
    reader, under_way = episodes()
    (grown,) = under_way.answered([replied(reader, 0, "turn")], idle=True)
    encoded = under_way._dialogs.encoded
    monkeypatch.setattr(own_environment, "REPLAY_S", 0.5)
    monkeypatch.setattr(under_way._dialogs.environment, "deadline_s", 0.5)
    patience_s = 60.0 if passes else 0.0
    monkeypatch.setattr(own_environment, "REPLAYS", Backoff(1, first_wait_s=0.01, patience_s=patience_s))
    slow = tmp_path / "seen.slow"
    slow.touch()
    if passes:
        threading.Timer(1.5, slow.unlink).start()
        assert encoded(reader.config.train_split, grown.trace).grid_thw.shape[0] == 1
        assert not slow.exists()
    else:
        named = r"behind its reply 1 cannot be made again: turns.environment .*: no result within"
        with pytest.raises(RuntimeError, match=named):
            encoded(reader.config.train_split, grown.trace)
    under_way.close()


def test_processes_outlive_the_threads_that_called_them(episodes):
    """Linux may end a process with the thread that started it: then a later phase would meet dead ones."""
    reader, first = episodes()
    first.answered([replied(reader, 0, "row")], idle=True)
    first._threads.submit(first._dialogs.environment.processes.about).result()
    first._threads.shutdown(wait=True)
    running = {process.pid for process in first._dialogs.environment.processes._idle}
    time.sleep(0.5)
    later = Episodes(first._dialogs, reader.config.train_split, 600)
    (grown,) = later.answered([replied(reader, 0, "row")], idle=True)
    assert grown.trace.end == "cut" and not grown.trace.dialog[1].startswith(FAILED)
    assert {process.pid for process in first._dialogs.environment.processes._idle} == running
    assert len(running) == 2
    later.close()


def test_what_cannot_be_replayed_is_logged_as_it_was(episodes):
    """Its texts stand in the dialog, and nothing is computed again."""
    reader, under_way = episodes("Dice")
    (grown,) = under_way.answered([replied(reader, 0, "a")], idle=True)
    assert (
        len(grown.trace.dialog[1]) == 16
        and under_way._dialogs.encoded(reader.config.train_split, grown.trace) is None
    )
    under_way.close()


def test_a_score_comes_with_the_end(episodes):
    reader, under_way = episodes("Scored")
    (grown,) = under_way.answered([replied(reader, 0, "It is 3.")], idle=True)
    assert grown.trace.score == 0.5 and grown.trace.end == "stop" and grown.observation is None
    (grown,) = under_way.answered([replied(reader, 0, "nan")], idle=True)
    assert grown.trace.score is None
    under_way.close()
