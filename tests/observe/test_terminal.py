"""The live display in a terminal emulator: it fits, nothing scrolls away, and the least important rows go."""

import json
import os
import pty
import random
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from fcntl import ioctl
from pathlib import Path

import pyte
import pytest
from written_run import values, write_run

ROOT = Path(__file__).parents[2]
FULL = {"tokens/turns": 1.0} | {f"fleet/{name}": 1.0 for name in ("wait_s", "workers", "idle_share")}
FULL |= {"perf/slots_used": 0.5, "staleness/logprob_abs_mean": 1e-3, "sft/loss": 0.1}


class Terminal:
    """The display of a run in a terminal of a size, as a process of its own sees it."""

    def __init__(self, folder: Path, columns: int, lines: int) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        leader, follower = pty.openpty()
        ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainer.observe.live", str(folder)],
            cwd=ROOT,
            env=env | {"TERM": "xterm-256color"},
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)
        self._leader = leader
        self.refreshes = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            if not select.select([self._leader], [], [], 60)[0]:
                return
            try:
                data = os.read(self._leader, 65536)
            except OSError:  # the process has ended
                return
            self.refreshes += data.count(b"\x1b[1A")
            self._stream.feed(data)

    def close(self) -> list[str]:
        """Waits for the end; the lines of the screen."""
        self.process.wait(60)
        self._reader.join(10)
        os.close(self._leader)
        return [line.rstrip() for line in self.screen.display]

    @property
    def scrolled_away(self) -> list[str]:
        """Lines above the screen."""
        return ["".join(char.data for char in line.values()).rstrip() for line in self.screen.history.top]


def running(folder: Path) -> None:
    """A run with every row there is, nodes, workers and a warning, which goes on."""
    write_run(folder, 40)
    progress = folder / "progress.json"
    progress.write_text(progress.read_text().replace('"finished"', '"running"').replace('"pid"', '"id"'))
    now = time.time()
    nodes = [{"node": n, "unix_s": now, "cpu_fraction": 0.5, "memory_fraction": 0.2} for n in range(2)]
    (folder / "nodes.jsonl").write_text("".join(f"{node}\n".replace("'", '"') for node in nodes))
    worker = '{"worker": "w", "device": "L40S", "lives": true, "why": "", "completions": 3}'
    (folder / "fleet.json").write_text(f'{{"workers": [{worker}]}}')
    (folder / "launch.log").write_text(
        "warning: step 3: a first one\nwarning: " + "the newest warning " * 9 + "\n"
    )


def add_steps(folder: Path, first: int, last: int) -> None:
    for step in range(first, last + 1):
        line = {"step": step} | values(step, 60, random.Random(step)) | FULL
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(1.1)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (60, 20), (120, 40)])
def test_the_display_fits_the_terminal_and_leaves_nothing_behind(tmp_path, columns, lines):
    running(tmp_path)
    terminal = Terminal(tmp_path, columns, lines)
    add_steps(tmp_path, 41, 44)
    progress = tmp_path / "progress.json"
    progress.write_text(progress.read_text().replace('"running"', '"finished"'))
    shown = terminal.close()
    assert terminal.refreshes > 20, "it was drawn several times"
    assert terminal.scrolled_away == []
    box = [number for number, line in enumerate(shown) if line.startswith(("╭", "╰"))]
    assert len(box) == 2 and box[0] == 0, shown
    assert "finished" in shown[box[1]]
    text = "\n".join(shown)
    for row in ("step 44 of 40", "reward", "held-out accuracy", "rollout", "the newest warning"):
        assert row in text, text
    assert "a first one" not in text
    least = ("workers idle", "training tokens/s", "node 1")
    assert [row in text for row in least] == [lines == 40] * len(least), text


def test_a_run_of_few_values_is_spread_as_far_as_there_is_room(tmp_path):
    write_run(tmp_path, 12)
    shown = Terminal(tmp_path, 100, 50).close()
    assert shown[1].strip("│ ") == "" and "step 12" in shown[2]
