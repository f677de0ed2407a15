import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from trainer import config
from trainer.config import ConfigError
from trainer.rewards.grading import grader
from trainer.rewards.scorer import Rewards, TimeoutRateError

ROOT = Path(__file__).resolve().parents[2]
CASES = [tuple(line.split("\t")) for line in (Path(__file__).parent / "cases.tsv").read_text().splitlines()[1:]]
HANG = "9^{9^{9^{9}}} + x"
ALGEBRA = [f"\\sin x + {i}" for i in range(30)]
GOLDS = [f"{i} + \\sin x" for i in range(30)]
"""The same, and only math-verify can tell."""


def wrap(content: str) -> str:
    return f"<think>t</think><answer>\\boxed{{{content}}}</answer>"


def settings(workers=2, deadline_s=20.0, max_timeout_rate=1.0, function="") -> config.Rewards:
    return config.Rewards(workers=workers, deadline_s=deadline_s, max_timeout_rate=max_timeout_rate, function=function)


def nursery_of(rewards: Rewards) -> psutil.Process:
    assert rewards._pool._nursery is not None
    return psutil.Process(rewards._pool._nursery.process.pid)


def workers_of(rewards: Rewards) -> list[psutil.Process]:
    return nursery_of(rewards).children()


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def rewards():
    with Rewards(settings()) as pool:
        yield pool


def test_order_is_kept_and_rewards_are_weighted(rewards):
    texts = [wrap("60"), wrap("\\sin(x)^2-1"), "no box", wrap("A") + "!", wrap("x")]
    outcomes = rewards.score(
        texts, ["60", "-1+\\sin(x)^2", "60", "A", "x+1"], ["number", "math", "number", "letter", "math"]
    )
    assert [o.verdict for o in outcomes] == ["correct", "correct", "no_answer", "correct", "wrong"]
    assert [o.format for o in outcomes] == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert [o.reward for o in outcomes] == [1.5, 1.5, 0.0, 1.0, 0.5]
    assert rewards.stats()["reward/no_answer_rate"] == pytest.approx(0.2)


def test_lengths_must_agree(rewards):
    with pytest.raises(ValueError, match="lengths must agree"):
        rewards.score(["a", "b"], ["1"], ["number"])


def test_empty_batch(rewards):
    assert rewards.score([], [], []) == []


def test_unparseable_gold_is_an_error_outcome(rewards):
    (outcome,) = rewards.score([wrap("5")], ["\\frac{"], ["math"])
    assert (outcome.verdict, outcome.accuracy) == ("error", 0.0)


def test_equal_input_gives_equal_outcomes_over_orders_and_worker_counts(rewards):
    rows = [
        (wrap(a), g, grader.classify(g)) for _, g, a, _ in CASES if grader.decide_fast(a, g, grader.classify(g)) is None
    ]
    expected = rewards.score(*map(list, zip(*rows, strict=True)))
    with Rewards(settings(workers=3)) as other:
        backwards = other.score(*map(list, zip(*rows[::-1], strict=True)))
        again = other.score(*map(list, zip(*rows, strict=True)))
    assert backwards[::-1] == expected == again


def test_timeout_kills_one_worker_and_the_batch_goes_on():
    with Rewards(settings(deadline_s=1.0)) as rewards:
        rewards.score([wrap(ALGEBRA[1])], GOLDS[1:2], ["math"])
        texts = [wrap(HANG), *map(wrap, ALGEBRA[:20])]
        started = time.monotonic()
        outcomes = rewards.score(texts, ["x", *GOLDS[:20]], ["math"] * 21)
        assert time.monotonic() - started < 15.0
        assert [o.verdict for o in outcomes] == ["timeout"] + ["correct"] * 20
        assert rewards.stats()["reward/timeout_rate"] == pytest.approx(1 / 21)
        assert rewards.stats()["perf/grader_restarts"] == 1.0


def test_too_many_timeouts_abort():
    with Rewards(settings(deadline_s=0.5, max_timeout_rate=0.2)) as rewards:
        rewards.score([wrap(ALGEBRA[1])], GOLDS[1:2], ["math"])
        with pytest.raises(TimeoutRateError, match="max_timeout_rate"):
            rewards.score([wrap(HANG), wrap("60"), wrap("61")], ["x", "60", "61"], ["math", "number", "number"])


def busy(process: psutil.Process) -> bool:
    return process.is_running() and process.status() == psutil.STATUS_RUNNING and process.cpu_times().user > 0.3


@pytest.mark.parametrize("victims", [workers_of, lambda rewards: [nursery_of(rewards)]], ids=["workers", "nursery"])
def test_what_is_killed_with_answers_in_hand_is_replaced_and_costs_nothing(tmp_path, victims):
    """Each answer is graded once more; if that answer is what kills, it ends as an error (see `die` below)."""
    (tmp_path / "slow.py").write_text(
        "import time\ndef reward(text, gold, kind):\n    time.sleep(1.0 if text == 'slow' else 0.0)\n    return 1.0\n"
    )
    with Rewards(settings(deadline_s=20.0, function=f"{tmp_path / 'slow.py'}:reward")) as rewards:
        rewards.score(["a", "b"], ["", ""], ["text"] * 2)
        result: list = []
        thread = threading.Thread(
            target=lambda: result.extend(rewards.score(["slow"] + ["a"] * 5 + ["slow"], [""] * 7, ["text"] * 7))
        )
        thread.start()
        time.sleep(0.4)
        assert victims(rewards)
        for process in victims(rewards):
            process.send_signal(signal.SIGKILL)
        thread.join(timeout=20)
        assert [o.verdict for o in result] == ["correct"] * 7
        assert rewards.stats()["perf/grader_restarts"] >= 1


def test_idle_workers_killed_from_outside_cost_nothing():
    with Rewards(settings(workers=1)) as rewards:
        rewards.score([wrap(ALGEBRA[1])], GOLDS[1:2], ["math"])
        for process in workers_of(rewards):
            process.kill()
        outcomes = rewards.score(list(map(wrap, ALGEBRA[2:6])), GOLDS[2:6], ["math"] * 4)
        assert [o.verdict for o in outcomes] == ["correct"] * 4


def test_nursery_killed_from_outside_costs_nothing():
    with Rewards(settings(deadline_s=20.0)) as rewards:
        rewards.score([wrap(ALGEBRA[1])], GOLDS[1:2], ["math"])
        old = workers_of(rewards)
        nursery_of(rewards).kill()
        outcomes = rewards.score(list(map(wrap, ALGEBRA[2:8])), GOLDS[2:8], ["math"] * 6)
        assert [o.verdict for o in outcomes] == ["correct"] * 6
        assert until(lambda: not any(p.is_running() for p in old))


def test_close_leaves_no_process():
    rewards = Rewards(settings())
    rewards.score(list(map(wrap, ALGEBRA[1:3])), GOLDS[1:3], ["math"] * 2)
    nursery = nursery_of(rewards)
    processes = [nursery, *nursery.children()]
    rewards.close()
    assert until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes))
    with pytest.raises(RuntimeError, match="closed"):
        rewards.score([wrap(ALGEBRA[9])], GOLDS[9:10], ["math"])


def test_no_orphans_when_the_trainer_is_killed_while_grading():
    script = f"""
import threading
from trainer import config
from trainer.rewards.scorer import Rewards
rewards = Rewards(config.Rewards(workers=2, deadline_s=60.0))
rewards.score([{wrap(ALGEBRA[1])!r}], [{GOLDS[1]!r}], ["math"])
print(rewards._pool._nursery.process.pid, flush=True)
rewards.score([{wrap(HANG)!r}, {wrap(HANG + "+ 1")!r}], ["x", "x"], ["math"] * 2)
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        nursery = psutil.Process(int(trainer.stdout.readline()))
        assert until(lambda: len(nursery.children()) == 2 and any(busy(p) for p in nursery.children()))
        processes = [nursery, *nursery.children()]
        trainer.kill()
        trainer.wait()
    assert until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes), 5.0)


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(
        "import time\n"
        "def reward(text, gold, answer_type):\n"
        "    if 'hang' in text:\n"
        "        while True: pass\n"
        "    if 'raise' in text: raise RuntimeError('boom')\n"
        "    if 'nan' in text: return float('nan')\n"
        "    if 'die' in text: import os; os._exit(3)\n"
        "    return len(text) / 10 if gold == 'long' else 0\n"
    )
    return path


def test_user_function_runs_under_the_same_deadline(user_file):
    with Rewards(settings(function=f"{user_file}:reward", deadline_s=1.0)) as rewards:
        texts = ["abcde", "hang", "raise", "nan", "die", "x" * 20, "x"]
        outcomes = rewards.score(texts, ["long"] * 6 + ["other"], ["text"] * 7)
    assert [o.verdict for o in outcomes] == ["correct", "timeout", "error", "error", "error", "correct", "wrong"]
    assert [o.accuracy for o in outcomes] == [0.5, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:reward", "file that exists"),
        ("{file}", "path/to/file.py:function"),
        ("{file}:other", "no function"),
    ],
)
def test_user_function_that_cannot_be_loaded_is_refused_at_once(user_file, spec, message):
    with pytest.raises(ConfigError, match=message):
        Rewards(settings(function=spec.format(file=user_file)))


def test_user_file_that_does_not_import_is_refused_with_its_error(tmp_path):
    (tmp_path / "bad.py").write_text("import no_such_module\n")
    with pytest.raises(ConfigError, match="no_such_module"):
        Rewards(settings(function=f"{tmp_path / 'bad.py'}:reward"))


def test_rewards_import_neither_torch_nor_ray():
    modules = "trainer.rewards.scorer, trainer.rewards.pool_worker"
    code = f"import sys, {modules}; print(sorted({{'torch', 'ray', 'sympy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
