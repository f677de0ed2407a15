"""Reward functions of a user's: what they ask for by name, TRL's and verl's, several at once, their faults,
and what they leave behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trainer import config
from trainer.config import ConfigError, RewardFunction
from trainer.rewards.completion_facts import facts_of
from trainer.rewards.functions import CallSignature, LoadedFunction, rewards_of
from trainer.rewards.grade import ErrorRateError
from trainer.rewards.scorer import Scorer
from trainer.system.own_file import OwnFileError, load_named
from trainer.system.processes import has_ended

TEXT = "<think>a</think><answer>42</answer>"
ROW = {
    "id": "r1",
    "source": "mathv60k/IconQA",
    "solution": "worked",
    "image_count": 2,
    "extra": {"task": "math", "precision": 2, "ground_truth": "forty-two"},
}


def facts(text=TEXT, row=ROW):
    return json.loads(facts_of("42", "number", "What is it?", row)) | {"text": text}


def ours(text, reference, answer_type):
    return float((text, reference, answer_type) == (TEXT, "42", "number"))


def the_row_s(question, image_count, precision, *, extra, source="", missing=7):
    return float(
        (question, image_count, precision, missing) == ("What is it?", 2, 2, 7) and extra["task"] == "math"
    )


def positional_only(text, /, reference):
    return float(text == TEXT and reference == "42")


def names_of_its_own(t, r, k):
    return float((t, r, k) == (TEXT, "42", "number"))


def all_by_name(text, **others):
    return float(others["precision"] == 2 and others["question"] == "What is it?" and "text" not in others)


# --- as TRL's documentation has them


def reward_len(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def of_plain_completions(completions, ground_truth, **kwargs):
    matches = [re.search(r"<answer>(.*?)</answer>", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth, strict=True)]


def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for _prompt, completion, t in zip(prompts, completions, task, strict=True):
        rewards.append(len(completion) / 2 if t == "math" else None)
    return rewards


def of_chats(prompts, completions, **kwargs):
    """Both are lists of messages in TRL, too."""
    pairs = zip(prompts, completions, strict=True)
    said = [(p[-1]["role"], p[-1]["content"], c[0]["role"], c[0].get("content")) for p, c in pairs]
    return [float(one == ("user", "What is it?", "assistant", TEXT)) for one in said]


def coding_reward_func(prompts, completions, task, **kwargs):
    return [1.0 if t == "coding" else None for t in task]


async def asynchronous(completions, **kwargs):
    return [0.25 for _ in completions]


# --- as verl's documentation has them


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "mathv60k/IconQA" and extra_info["precision"] == 2
    return 1.0 if ground_truth in solution_str else 0.5


def with_options(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    return {"score": score if method == "strict" else format_score, "acc": True}


def of_geometry(
    predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    return (1.0 - format_score) * bool(predict_str) + format_score * use_boxed


def in_batches(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [{"score": 0.75} for _ in solution_strs]


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        (ours, 1.0),
        (the_row_s, 1.0),
        (positional_only, 1.0),
        (names_of_its_own, 1.0),
        (all_by_name, 1.0),
        (reward_len, len(TEXT)),
        (by_tokens, 3.0),
        (format_reward_func, 1.0),
        (of_plain_completions, 0.0),
        (math_reward_func, len(TEXT) / 2),
        (of_chats, 1.0),
        (coding_reward_func, None),
        (asynchronous, 0.25),
        (compute_score, 0.5),
        (with_options, 1.0),
        (of_geometry, 1.0),
        (in_batches, 0.75),
        (lambda text: True, 1.0),
    ],
)
def test_a_function_gets_what_it_asks_for_by_name(function, reward):
    assert CallSignature(function)(facts() | {"completion_ids": [5, 6, 7]}) == reward


def test_a_column_of_the_row_comes_before_what_stands_in_for_it():
    def reward(ground_truth, solution):
        return float(ground_truth == "42" and solution == "42")

    assert CallSignature(reward)(facts(row={})) == 1.0 and CallSignature(reward)(facts()) == 0.0


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("def reward(): return 1.0", "it has no parameters"),
        (
            "def reward(text, gold): return 1.0",
            r"asks for gold, and there is text, .*columns: ground_truth, precision",
        ),
        ("def reward(text): return 'good'", "it returned 'good': return a number"),
        ("def reward(text): return None", "it returned None"),
        ("def reward(completions): return 1.0", "return a list of one number"),
        ("def reward(completions): return [1.0, 2.0]", "return a list of one number"),
        ("def reward(text): return {'acc': 1}", "without `score`"),
        (
            "def reward(text):\n    x = 1\n    return x / 0",
            r"ZeroDivisionError: division by zero \(mine.py:3\)",
        ),
        ("def reward(text):\n    import sys\n    sys.exit(2)", r"SystemExit: 2 \(mine.py:3\)"),
        ("import no_such_module", r"no_such_module' \(mine.py:1\)"),
        ("x = (", r"SyntaxError: .*\(mine.py:1\)"),
        ("y = 1\nreward = 3", "has no function 'reward'"),
    ],
)
def test_what_is_wrong_with_a_function_is_said_with_its_line(tmp_path, program, message):
    (tmp_path / "mine.py").write_text(program + "\n")
    with pytest.raises(OwnFileError, match=message) as error:
        LoadedFunction(f"{tmp_path}/mine.py:reward", 1.0, "reward")(facts())
    assert "\n" not in str(error.value) and f"{tmp_path}/mine.py" in str(error.value)


def test_a_function_may_be_made_of_dataclasses(tmp_path):
    """They look up their module by its name."""
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass R:\n    x: float = 0.5\ndef reward(text): return R().x\n"
    )
    assert load_named("rewards.function", f"{tmp_path}/mine.py:reward")("t") == 0.5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:reward", "file that exists"),
        ("{file}", "path/to/file.py:function"),
        ("{file}:other", "no function"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_once(tmp_path, spec, message):
    (tmp_path / "mine.py").touch()
    with pytest.raises(ConfigError, match=message):
        Scorer(config.Rewards(function=spec.format(file=tmp_path / "mine.py")))


SEVERAL = """
def good(text): return 1.0
def short(text): return -len(text) / 10
def rare(completions, task=(None,), **kwargs): return [2.0 if task[0] == "rare" else None]
def broken(text): return 1 / 0
"""


@pytest.fixture
def several(tmp_path):
    (tmp_path / "several.py").write_text(SEVERAL)
    return lambda *names: tuple(
        RewardFunction(path=f"{tmp_path}/several.py:{name}", weight=0.5 + i, name="" if i else "first")
        for i, name in enumerate(names)
    )


def test_several_functions_are_weighted_and_have_metrics_of_their_own(several):
    rewards = config.Rewards(functions=several("good", "short", "rare"), workers=1, format_weight=0.0)
    with Scorer(rewards) as scorer:
        rows = [{"extra": {"task": "rare"}}, {}]
        outcomes = scorer.score(["ab", "abcd"], ["1", "1"], ["number"] * 2, None, rows)
        stats = scorer.stats()
    assert [o.reward for o in outcomes] == [pytest.approx(5.2), pytest.approx(-0.1)]
    assert stats["reward/function_first"] == 1.0 and stats["reward/function_short"] == pytest.approx(-0.3)
    assert stats["reward/function_rare"] == 2.0, "of those to which it applies"


def test_one_broken_function_of_several_makes_the_completion_an_error(several):
    functions = [LoadedFunction(f.path, f.weight, f.metric) for f in several("good", "broken")]
    verdict, value, why, parts = rewards_of(functions, facts())
    assert (verdict, value, parts) == ("error", 0.0, {}) and "ZeroDivisionError" in why


def test_a_function_that_raises_on_every_completion_ends_the_run_in_its_first_batch(tmp_path, capfd):
    (tmp_path / "mine.py").write_text("def reward(text, reference):\n    return text.no_such()\n")
    path = f"{tmp_path}/mine.py:reward"
    with Scorer(config.Rewards(function=path, workers=1)) as scorer, pytest.raises(ErrorRateError) as ended:
        scorer.score(["a", "b", "c"], ["1"] * 3, ["number"] * 3)
    said = str(ended.value)
    assert "of 3 completions could not be graded" in said
    assert ", more than rewards.max_error_rate 0.2: " in said
    assert (
        f"rewards.function {path}: AttributeError: 'str' object has no attribute 'no_such' (mine.py:2)"
        in said
    )
    assert capfd.readouterr().err.count("AttributeError") == 1, "once, however many completions"


def test_few_errors_are_told_once_and_the_run_goes_on(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def reward(text):\n    return 1 / len(text)\n")
    with Scorer(config.Rewards(function=f"{tmp_path}/mine.py:reward", workers=1)) as scorer:
        for _ in range(3):
            outcomes = scorer.score(["", *"abcdefgh"], ["1"] * 9, ["number"] * 9)
    assert [o.verdict for o in outcomes] == ["error"] + ["correct"] * 8
    assert capsys.readouterr().out.count("ZeroDivisionError") == 1


FORKS = """
import os, subprocess, sys, time
def reward(text, reference):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    pids = [subprocess.Popen(command).pid, subprocess.Popen(command, start_new_session=True).pid]
    between = os.fork()
    if not between:  # a daemon's way: an orphan in a session of its own
        if os.fork() == 0:
            os.setsid()
            open(reference + ".orphan", "w").write(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.waitpid(between, 0)
    while not os.path.exists(reference + ".orphan"):
        time.sleep(0.01)
    open(reference, "w").write(" ".join(map(str, pids)))
    while text == "hangs":
        time.sleep(0.1)
    return 1.0
"""


TRAINER = """
import sys
from trainer import config
from trainer.rewards.scorer import Scorer
scorer = Scorer(config.Rewards(function=sys.argv[1], workers=1, deadline_s=60.0))
scorer.score(["hangs"], [sys.argv[2]], ["text"])
"""


def test_what_a_function_started_ends_with_a_trainer_that_is_killed(tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    note = tmp_path / "pids"
    command = [sys.executable, "-c", TRAINER, f"{tmp_path}/forks.py:reward", str(note)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as trainer:
        deadline = time.monotonic() + 60
        while not note.exists() or not note.read_text():
            assert time.monotonic() < deadline and trainer.poll() is None
            time.sleep(0.05)
        trainer.kill()
    _gone([*map(int, note.read_text().split()), int(Path(f"{note}.orphan").read_text())])


@pytest.mark.parametrize("end", ["closed", "deadline", "killed"])
def test_what_a_function_started_ends_with_its_grader(tmp_path, end):
    (tmp_path / "forks.py").write_text(FORKS)
    note = tmp_path / "pids"
    rewards = config.Rewards(
        function=f"{tmp_path}/forks.py:reward", workers=1, deadline_s=1.5, max_timeout_rate=1.0
    )
    with Scorer(rewards) as scorer:
        scorer.score(["hangs" if end == "deadline" else "well"], [str(note)], ["text"])
        started = [int(pid) for pid in note.read_text().split()]
        started.append(int(Path(f"{note}.orphan").read_text()))
        if end == "killed":
            for pid in scorer._pool.processes.pids():
                psutil.Process(pid).send_signal(signal.SIGKILL)
            _gone(started)
    _gone(started)


def _gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    for pid in pids:
        while not has_ended(pid):
            assert time.monotonic() < deadline, f"process {pid} has outlived its grader"
            time.sleep(0.02)
