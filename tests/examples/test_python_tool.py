"""Programs of a model's: what they print comes back, and whatever else they try does not happen."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from examples import python_tool
from examples.python_tool import CUT, OUTPUT_BYTES
from tests.turns.test_built_in_tools import BARE, called
from trainer.config import Turns
from trainer.turns.environments import environment_of
from trainer.turns.episode import ERROR


@pytest.fixture(scope="module")
def python():
    environment = environment_of(Turns(environment="examples/python_tool.py:Python", tool_seconds=60.0))
    assert environment.slow and not environment.shows_images
    yield environment
    environment.processes.close()
    environment_of.cache_clear()


def ran(python, code):
    observation = python.answer(BARE, [called("python", code=code)])
    return observation.text


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(6 * 7)", "42\n"),
        ("6 * 7", "42\n"),
        ("x = 6\nprint('x')\nx * 7", "x\n42\n"),
        ("from fractions import Fraction\nFraction(1, 3) + 1", "Fraction(4, 3)\n"),
        ("import math, itertools, statistics\nmath.comb(5, 2)", "10\n"),
        ("def f(n): return n if n < 2 else f(n - 1) + f(n - 2)\nf(15)", "610\n"),
        ("", "(the program printed nothing)"),
        ("None", "(the program printed nothing)"),
        ("print(hash('a') == hash('a'), '\\ud800')", "True ?\n"),
    ],
)
def test_what_a_program_prints_comes_back(python, code, printed):
    assert ran(python, code) == printed


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero (line 1)"),
        ("x = 1\nprint(y)", "NameError: name 'y' is not defined (line 2)"),
        ("print(1", "SyntaxError: '(' was never closed (program, line 1)"),
        ("import ftplib", "ModuleNotFoundError: No module named 'ftplib' (line 1)"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("(" * 5000, "SyntaxError"),
    ],
)
def test_what_a_program_raises_is_said_with_its_line(python, code, said):
    assert said in ran(python, code)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.open('/etc/passwd', os.O_RDONLY)",
        "import os; os.listdir('/')",
        "import os; os.stat('/')",
        "open('/proc/self/environ').read()",
        "import os; os.unlink('{file}')",
        "import os; os.rename('{file}', '{file}.gone')",
        "open('{file}', 'w')",
        "import os; os.fork()",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.kill({pid}, 9)",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.pipe()",
        "import os; os.setuid(0)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    ],
)
def test_nothing_but_computing_is_allowed(python, tmp_path, code):
    file = tmp_path / "precious"
    file.write_text("kept")
    said = ran(python, code.format(file=file, pid=os.getpid()))
    refusals = ("PermissionError", "ModuleNotFoundError", "not allowed to raise maximum limit")
    assert any(refusal in said for refusal in refusals)
    assert file.read_text() == "kept"
    assert ran(python, "1 + 1") == "2\n"


def test_there_is_no_network(python):
    """By the socket module, and by the kernel's call itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        port = server.getsockname()[1]
        assert "Error" in ran(python, f"import socket\nsocket.create_connection(('127.0.0.1', {port}))")
        raw = "import ctypes\nctypes.CDLL(None, use_errno=True).socket(2, 1, 0), ctypes.get_errno()"
        assert ran(python, raw) == "(-1, 1)\n" or "ModuleNotFoundError" in ran(python, raw)
        with pytest.raises(TimeoutError):
            server.accept()


def test_no_program_knows_of_another_or_of_the_run(python, monkeypatch):
    ran(python, "import math\nmath.pi = 3\nkept = 1")
    assert ran(python, "import math\nmath.pi") == "3.141592653589793\n"
    assert "NameError" in ran(python, "kept")
    given = ran(python, "import os\nprint(dict(os.environ))").replace("SPOTRL_GIVEN_IN", "")
    assert "SPOTRL" not in given, "where people's paths are read from is all that it knows"


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(60)", "10 ** 10 ** 10"])
def test_a_program_that_does_not_end_is_ended(python, code):
    started = time.monotonic()
    assert ran(python, code) == f"{ERROR}the program took longer than 2 seconds"
    assert time.monotonic() - started < 20
    assert ran(python, "1 + 1") == "2\n"


def test_output_is_bounded_and_the_same_each_time(python):
    code = "while True: print('spam')"
    said = ran(python, code)
    assert said == ("spam\n" * OUTPUT_BYTES)[:OUTPUT_BYTES] + CUT
    assert ran(python, "print('x' * 50_000_000)") == "x" * OUTPUT_BYTES + CUT
    assert ran(python, "import os\nwhile True: os.write(1, b'a' * 1000)") == "a" * OUTPUT_BYTES + CUT


def test_a_program_that_kills_its_process_is_an_observation(python):
    crash = "import ctypes\nctypes.string_at(0)"
    assert ran(python, crash) in (
        f"{ERROR}the program crashed",
        "ModuleNotFoundError: No module named 'ctypes' (line 1)",
    )
    assert ran(python, "1 + 1") == "2\n"


@pytest.mark.parametrize("code", [5, None, "x" * 20_001])
def test_what_is_no_program_is_refused(python, code):
    assert ran(python, code).startswith(ERROR)


@pytest.mark.parametrize(
    "code",
    [
        "import random\nrandom.random(), random.randint(1, 10**9), random.Random().random()",
        "import random\nrandom.seed()\nx = list(range(99))\nrandom.shuffle(x)\nx",
        "import random\nrandom.Random(None).gauss(0, 1)",
    ],
)
def test_random_numbers_are_a_function_of_the_program(python, code):
    first = ran(python, code)
    for pid in python.processes.pids():  # and of no process
        os.kill(pid, signal.SIGKILL)
    assert ran(python, code) == first
    assert ran(python, code + " ") != first


def test_a_generator_with_a_seed_is_as_it_always_is(python):
    import random

    code = "import random\nrandom.seed(7)\n(random.random(), random.Random(8).random())"
    random.seed(7)
    assert ran(python, code) == f"{(random.random(), random.Random(8).random())}\n"


def test_no_program_can_say_that_it_was_not_locked_up(python):
    said = "\0no sandbox: x"
    assert ran(python, f"import sys\nsys.stdout.write({said!r})\nNone") == said
    assert ran(python, f"import os\nos.write(0, b'x'), {said!r}").startswith("OSError")
    assert ran(python, "6 * 7") == "42\n"


def test_a_program_that_waits_for_a_processor_is_said_to_have_taken_longer(monkeypatch):
    """On a busy node its own time stretches."""
    monkeypatch.setattr(python_tool, "waited_for_cpu_s", lambda pid: 1000.0)
    began = time.monotonic()
    told = python_tool.run_program("while True: pass", 0.5)
    assert told == {"wrong": "the program took longer than 0.5 seconds"}
    assert 1.9 < time.monotonic() - began < 10
