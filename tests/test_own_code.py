"""People's code in its process: what it finds there, what it may start, and what its faults are called.
Reward functions and environments alike."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator

import pytest

from trainer.config import ConfigError, RewardFunction, Turns
from trainer.rewards import process_pool
from trainer.rewards.completion_facts import facts_of, function_specs
from trainer.system.own_file import load_named
from trainer.turns import own_environment
from trainer.turns.episode import FAILED, Situation
from trainer.turns.own_environment import OwnEnvironment

SAYS = """
def reward(text, reference):
    return float({body})

class Mine:
    def answer(self, situation, replies):
        text = replies[-1]
        return str(float({body}))
"""
Call = Callable[[str], str]
"""Gives a text to the code; what comes back, or its fault."""


@contextlib.contextmanager
def rewarding(path, env: str = "") -> Generator[Call]:
    specs = function_specs([RewardFunction(path=f"{path}:reward")])
    pool = process_pool.ProcessPool(1, 20.0, specs, env=env)

    def call(text: str) -> str:
        result = pool.submit(["user", text, facts_of("1", "number", "", {})]).result()
        return result[2] or str(result[1])

    yield call
    pool.close()


@contextlib.contextmanager
def answering(path, **options) -> Generator[Call]:
    environment = OwnEnvironment(Turns(environment=f"{path}:Mine", tool_seconds=20.0, **options))

    def call(text: str) -> str:
        return environment.answer(Situation((), lambda reply: None), [text]).text.removeprefix(FAILED)

    yield call
    environment.processes.close()


both = pytest.mark.parametrize("opened", [rewarding, answering])


def written(tmp_path, head: str, body: str):
    path = tmp_path / "mine.py"
    path.write_text(head + SAYS.format(body=body))
    return path


@both
def test_what_stands_beside_a_file_can_be_imported(tmp_path, opened):
    (tmp_path / "helper.py").write_text("def half(text):\n    return len(text) / 2\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("ONE = 1\n")
    head = "from helper import half\nfrom parts import ONE\n"
    with opened(written(tmp_path, head, "half(text) + ONE")) as call:
        assert call("abc") == "2.5"


@both
def test_a_file_beside_it_takes_no_name_of_python_s_and_comes_before_packages(tmp_path, opened):
    (tmp_path / "statistics.py").write_text("raise RuntimeError('not me')\n")
    (tmp_path / "tqdm.py").write_text("MINE = 3\n")
    head = "import statistics, tqdm\n"
    with opened(written(tmp_path, head, "statistics.mean([1, 3]) + tqdm.MINE")) as call:
        assert call("abc") == "5.0"


def test_a_fault_in_a_file_beside_it_is_said_with_its_line(tmp_path):
    (tmp_path / "helper.py").write_text("def half(text):\n    return 1 / 0\n")
    with rewarding(written(tmp_path, "from helper import half\n", "half(text)")) as call:
        assert call("abc").endswith("ZeroDivisionError: division by zero (helper.py:2)")


def test_a_message_says_where_a_file_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"a file that exists \(looked in {tmp_path} and /.*\)"):
        load_named("rewards.function", "nope.py:reward")
    assert str(tmp_path) not in sys.path


LOOP = """
import asyncio
lock = queue = None

async def worker(text):
    global lock, queue
    if queue is None:
        queue = asyncio.Queue()
        lock = asyncio.Lock()
        asyncio.create_task(serve())
    async with lock:
        reply = asyncio.get_running_loop().create_future()
        await queue.put((text, reply))
        return await reply

async def serve():
    while True:
        text, reply = await queue.get()
        reply.set_result(float(len(text)))

async def canceled(text):
    asyncio.current_task().cancel()
    await asyncio.sleep(1)

async def reward(text, reference):
    return await (canceled if text == "cancel" else worker)(text)

class Mine:
    async def answer(self, situation, replies):
        return str(await reward(replies[-1], ""))
"""


@both
def test_what_a_file_keeps_of_its_event_loop_is_right_each_time(tmp_path, opened):
    """A queue with its server, as an HTTP client or a session has them."""
    path = tmp_path / "mine.py"
    path.write_text(LOOP)
    with opened(path) as call:
        assert [call("a" * n) for n in (1, 2, 3)] == ["1.0", "2.0", "3.0"]
        assert "CancelledError" in call("cancel")
        assert call("abcd") == "4.0"


ENDS = """
import multiprocessing, os, signal, subprocess, sys, time

def ended(text):
    if text == "popen":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(0.3)
        child.terminate()
        return child.wait(10) == -signal.SIGTERM
    if text == "interrupt":
        child = subprocess.Popen(["sleep", "600"])
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        return child.wait(10) == -signal.SIGINT
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join(10)
    return child.exitcode == -signal.SIGTERM
"""


@both
@pytest.mark.parametrize("way", ["popen", "interrupt", "process"])
def test_what_it_started_can_be_terminated(tmp_path, opened, way):
    with opened(written(tmp_path, ENDS, "ended(text)")) as call:
        assert call(way) == "1.0"


TOKENS = "HF_TOKEN WANDB_API_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY SPOTRL_JUDGE_KEY SPOTRL_REWARD_TOKEN"
TOKENS += " GITHUB_TOKEN OPENAI_API_KEY RUNPOD_API_KEY MY_OWN RANK"


@both
def test_it_finds_no_token_but_what_was_asked_for(tmp_path, opened, monkeypatch):
    for name in TOKENS.split():
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    path = written(tmp_path, "import os\n", "'secret' in os.environ.values() or not os.environ['LANG']")
    with opened(path) as call:
        assert call("a") == "0.0"
    path = written(tmp_path, "import os\n", "list(os.environ.values()).count('secret')")
    with opened(path, env="OPENAI_API_KEY, MY_OWN") as call:
        assert call("a") == "2.0"


def test_the_built_in_graders_find_none(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    pool = process_pool.ProcessPool(1, 5.0)
    pool.check()
    (pid,) = pool.processes.pids()
    with open(f"/proc/{pid}/environ", "rb") as file:
        assert b"secret" not in file.read()
    pool.close()


SWELLS = """
import subprocess, sys
def held(text):
    subprocess.run([sys.executable, "-c", "x = bytearray(b'1') * (700 << 20); import time; time.sleep(20)"])
    return 1
"""


@both
def test_memory_of_what_it_started_counts(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(process_pool, "LEAK_BYTES", 256 << 20)
    monkeypatch.setattr(process_pool, "CALLS_SHARE", 0.0)
    monkeypatch.setattr(own_environment, "MOST_BYTES", 256 << 20)
    with opened(written(tmp_path, SWELLS, "held(text)")) as call:
        assert "GiB" in call("a")


SHARES = """
import os, time
held = bytearray(b'1') * (200 << 20)
def forked(text):
    for _ in range(4):
        if not os.fork():
            time.sleep(600)
    time.sleep(1)
    return 1
"""


def test_pages_that_children_share_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr(process_pool, "LEAK_BYTES", 256 << 20)
    monkeypatch.setattr(process_pool, "CALLS_SHARE", 0.0)
    with rewarding(written(tmp_path, SHARES, "forked(text)")) as call:
        assert call("a") == "1.0"


BREAKS = """
import os, sys
def breaks(text):
    if text == "fork":
        os.fork()
    if text == "modules":
        sys.modules.clear()
    return len(text)
"""


@both
@pytest.mark.parametrize("way", ["fork", "modules"])
def test_code_that_breaks_its_process_costs_no_other_completion(tmp_path, opened, way):
    with opened(written(tmp_path, BREAKS, "breaks(text)")) as call:
        call(way)
        assert [call("a" * n) for n in (1, 2, 3)] == ["1.0", "2.0", "3.0"]
