import math
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.waiting import until
from trainer import config
from trainer.rewards import process_pool
from trainer.rewards.completion_facts import sample_completion as wrap
from trainer.rewards.grading import grader
from trainer.rewards.scorer import Scorer, TimeoutRateError
from trainer.system.processes import has_ended

ROOT = Path(__file__).resolve().parents[2]
CASES = [
    (*line.split("\t"), "")[:5] for line in (Path(__file__).parent / "cases.tsv").read_text().splitlines()[1:]
]
HANG = "\\sum_{a=1}^{4999} " + "(x+\\frac{1}{a})!" * 20 + "x"
"""A hundred thousand gamma functions in 150 digits, half a minute."""
ALGEBRA = [f"\\sin x + {i}" for i in range(30)]
REFERENCES = [f"{i} + \\sin x" for i in range(30)]
"""The same value."""


def settings(workers=2, deadline_s=20.0, max_timeout_rate=1.0, function="") -> config.Rewards:
    return config.Rewards(
        workers=workers,
        deadline_s=deadline_s,
        max_timeout_rate=max_timeout_rate,
        max_error_rate=1.0,
        function=function,
    )


def workers_of(scorer: Scorer) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in scorer._pool.processes.pids()]


@pytest.fixture(scope="module")
def scorer():
    with Scorer(settings()) as scorer:
        yield scorer


def test_order_is_kept_and_rewards_are_weighted(scorer):
    texts = [wrap("60"), wrap("\\sin(x)^2-1"), "no box", wrap("A") + "!", wrap("x")]
    outcomes = scorer.score(
        texts, ["60", "-1+\\sin(x)^2", "60", "A", "x+1"], ["number", "math", "number", "letter", "math"]
    )
    assert [o.verdict for o in outcomes] == ["correct", "correct", "no_answer", "correct", "wrong"]
    assert [o.format for o in outcomes] == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert [o.reward for o in outcomes] == [1.5, 1.5, 0.0, 1.0, 0.5]
    assert scorer.stats()["reward/no_answer_rate"] == pytest.approx(0.2)


def test_lengths_must_agree_and_may_be_zero(scorer):
    with pytest.raises(ValueError, match="lengths must agree"):
        scorer.score(["a", "b"], ["1"], ["number"])
    assert scorer.score([], [], []) == []


def test_unreadable_reference_answer_is_an_error_outcome(scorer):
    (outcome,) = scorer.score([wrap("5")], ["\\frac{"], ["math"])
    assert (outcome.verdict, outcome.accuracy) == ("error", 0.0)


def test_equal_input_gives_equal_outcomes_over_orders_and_worker_counts(scorer):
    rows = [(wrap(a), r, grader.classify(r), question) for _, r, a, _, question in CASES]
    rows = [row for row in rows if grader.decide_fast(row[0], *row[1:]) is None]
    expected = scorer.score(*map(list, zip(*rows, strict=True)))
    with Scorer(settings(workers=3)) as other:
        backwards = other.score(*map(list, zip(*rows[::-1], strict=True)))
        again = other.score(*map(list, zip(*rows, strict=True)))
    assert backwards[::-1] == expected == again


def test_timeout_kills_one_worker_and_the_batch_goes_on():
    with Scorer(settings(deadline_s=1.0)) as scorer:
        scorer.score([wrap(ALGEBRA[1])], REFERENCES[1:2], ["math"])
        texts = [wrap(HANG), *map(wrap, ALGEBRA[:20])]
        started = time.monotonic()
        outcomes = scorer.score(texts, ["x", *REFERENCES[:20]], ["math"] * 21)
        assert time.monotonic() - started < 15.0
        assert [o.verdict for o in outcomes] == ["timeout"] + ["correct"] * 20
        assert scorer.stats()["reward/timeout_rate"] == pytest.approx(1 / 21)
        assert scorer.stats()["perf/grader_restarts"] == 1.0


def test_a_function_that_hangs_ends_the_batch_as_soon_as_its_limit_cannot_be_met(tmp_path, capsys):
    (tmp_path / "own.py").write_text("def score(text, reference):\n    while True: pass\n")
    limits = settings(deadline_s=0.4, max_timeout_rate=0.2, function=f"{tmp_path / 'own.py'}:score")
    with Scorer(limits) as scorer:
        with pytest.raises(TimeoutRateError) as ended:
            scorer.score([f"completion {i}" for i in range(40)], ["1"] * 40, ["number"] * 40)
        assert scorer.stats()["perf/grader_restarts"] <= 11, "no further completion was graded"
    assert str(ended.value).startswith(
        "9 of 40 completions timed out in grading (31 are not graded), more than rewards.max_timeout_rate 0.2"
    )
    assert "raise rewards.deadline_s" in str(ended.value) and "own.py" in str(ended.value)
    assert "no result within rewards.deadline_s 0.4 s" in str(ended.value)
    warned = capsys.readouterr().out
    assert warned.count("warning: a completion was not graded, and earns nothing: rewards.function") == 1


def busy(process: psutil.Process) -> bool:
    return (
        process.is_running() and process.status() == psutil.STATUS_RUNNING and process.cpu_times().user > 0.3
    )


def test_what_is_killed_with_completions_in_hand_is_replaced_and_costs_nothing(tmp_path):
    """Each completion is graded once more; if that is what kills, it ends as an error (see `die` below)."""
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "def reward(text, reference, kind):\n"
        "    time.sleep(1.0 if text == 'slow' else 0.0)\n"
        "    return 1.0\n"
    )
    with Scorer(settings(deadline_s=20.0, function=f"{tmp_path / 'slow.py'}:reward")) as scorer:
        scorer.score(["a", "b"], ["", ""], ["text"] * 2)
        result: list = []
        thread = threading.Thread(
            target=lambda: result.extend(
                scorer.score(["slow"] + ["a"] * 5 + ["slow"], [""] * 7, ["text"] * 7)
            )
        )
        thread.start()
        time.sleep(0.4)
        assert workers_of(scorer)
        for process in workers_of(scorer):
            process.send_signal(signal.SIGKILL)
        thread.join(timeout=20)
        assert [o.verdict for o in result] == ["correct"] * 7
        assert scorer.stats()["perf/grader_restarts"] >= 1


def test_idle_workers_killed_from_outside_cost_nothing():
    with Scorer(settings(workers=1)) as scorer:
        scorer.score([wrap(ALGEBRA[1])], REFERENCES[1:2], ["math"])
        for process in workers_of(scorer):
            process.kill()
        outcomes = scorer.score(list(map(wrap, ALGEBRA[2:6])), REFERENCES[2:6], ["math"] * 4)
        assert [o.verdict for o in outcomes] == ["correct"] * 4


def test_close_leaves_no_process():
    scorer = Scorer(settings())
    scorer.score(list(map(wrap, ALGEBRA[1:3])), REFERENCES[1:3], ["math"] * 2)
    processes = workers_of(scorer)
    assert processes
    scorer.close()
    until(lambda: all(has_ended(p.pid) for p in processes))
    with pytest.raises(RuntimeError, match="closed"):
        scorer.score([wrap(ALGEBRA[9])], REFERENCES[9:10], ["math"])


def test_no_orphans_when_the_trainer_is_killed_while_grading():
    script = f"""
import threading, time
from trainer import config
from trainer.rewards.scorer import Scorer
scorer = Scorer(config.Rewards(workers=2, deadline_s=60.0))
rows = [{wrap(HANG)!r}, {wrap(HANG + "+ 1")!r}], ["x", "x"], ["math"] * 2
threading.Thread(target=scorer.score, args=rows).start()
processes = scorer._pool.processes._all
while len(processes) < 2 or any(process.pid == process.process.pid for process in list(processes)):
    time.sleep(0.05)
print(*scorer._pool.processes.pids(), flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
        until(lambda: all(busy(p) for p in processes), 30.0)
        trainer.kill()
        trainer.wait()
    until(lambda: all(has_ended(p.pid) for p in processes), 5.0)


def test_memory_of_all_workers_together_is_capped(monkeypatch):
    monkeypatch.setattr(process_pool, "MEMORY_BYTES", 1 << 30)
    with Scorer(settings(workers=4)) as scorer:
        scorer.score([wrap(a) for a in ALGEBRA], REFERENCES, ["math"] * len(ALGEBRA))
        limits = [psutil.Process(p.pid).rlimit(psutil.RLIMIT_AS)[0] for p in workers_of(scorer)]
        assert len(limits) == 4 and sum(limits) <= 1 << 30
        assert sum(p.memory_info().rss for p in workers_of(scorer)) < 400 << 20


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(
        "import time\n"
        "def reward(text, reference, answer_type):\n"
        "    if 'hang' in text:\n"
        "        while True: pass\n"
        "    if 'raise' in text: raise RuntimeError('boom')\n"
        "    if 'nan' in text: return float('nan')\n"
        "    if 'die' in text: import os; os._exit(3)\n"
        "    return len(text) / 10 if reference == 'long' else 0\n"
    )
    return path


def test_user_function_runs_under_the_same_deadline(user_file):
    with Scorer(settings(function=f"{user_file}:reward", deadline_s=1.0)) as scorer:
        texts = ["abcde", "hang", "raise", "nan", "die", "x" * 20, "x"]
        outcomes = scorer.score(texts, ["long"] * 6 + ["other"], ["text"] * 7)
    assert [o.verdict for o in outcomes] == [
        "correct",
        "timeout",
        "error",
        "error",
        "error",
        "correct",
        "wrong",
    ]
    assert math.isnan(outcomes[3].accuracy), "the run ends and names it: trainer/rewards/unusable_rewards.py"
    assert [o.accuracy for o in outcomes if o is not outcomes[3]] == [0.5, 0.0, 0.0, 0.0, 2.0, 0.0]


def test_rewards_import_neither_torch_nor_ray():
    modules = "trainer.rewards.scorer, trainer.rewards.pool_worker"
    code = f"import sys, {modules}; print(sorted({{'torch', 'ray', 'sympy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_answers_of_equal_value_are_spelled_alike():
    answers = [("1/2", 0.0), ("0.5", 0.0), ("\\frac{1}{2}", 0.0), ("0.7", 0.0), ("3", 1.0), ("3.0", 1.0)]
    with Scorer(config.Rewards(workers=1, answer="any")) as scorer:
        grouped = scorer.by_value([*answers, (None, 0.0)], "number")
    assert [answer for answer, _ in grouped] == ["1/2", "1/2", "1/2", "0.7", "3", "3", None]
