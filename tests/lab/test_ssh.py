"""The ssh target: `launch.py up --target ssh` from one host, against real sshd on two others."""

from __future__ import annotations

import subprocess
import sys
import time

import checkout
import hosts
import pytest
import sshd

pytestmark = hosts.marks(sshd.missing())


class Desk:
    """A person's machine and two others that it can log in to."""

    def __init__(self, lab: hosts.Lab):
        self.lab, self.host = lab, lab.hosts["desk"]
        self.key = sshd.serve(lab, [lab.hosts["h1"], lab.hosts["h2"]])
        self.repository = sshd.home(self.host) / "repository"
        self.log = lab.scratch / "launch.log"
        hosts.copy_repository(self.repository)
        for name in ("h1", "h2"):
            checkout.make(sshd.home(lab.hosts[name]) / "spotrl", copy=True)

    def launch(self, *arguments: str) -> subprocess.Popen[bytes]:
        go = 'cd "$0" && exec setsid "$@"'  # a session inside the host, as a terminal's
        command = ["sh", "-c", go, str(self.repository), sys.executable, "launch.py", *arguments]
        return self.host.start(
            command, self.log, {"HOME": str(sshd.home(self.host)), "SPOTRL_METADATA": "off"}
        )

    def preflight(self) -> subprocess.Popen[bytes]:
        up = "up preflight --target ssh --hosts h1,h2 --run-id lab"
        up += f" --set cluster.gpus_per_node=0 --set setup=cpu --set site.ssh_key={self.key}"
        return self.launch(*up.split())

    def signal(self, name: str) -> None:
        """To `launch.py up` and all that it runs at the desk, as a terminal does it."""
        self.host.run("sh", "-c", f"kill -s {name} -- -$(pgrep -of 'launch.py up')")

    def wait_for_work(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + 300
        while "over 2 ranks" not in self.log.read_text():
            assert time.monotonic() < end and process.poll() is None, self.log.read_text()
            time.sleep(0.2)

    def ended_within(self, seconds: float) -> float:
        """Seconds until neither machine ran anything of ours."""
        began = time.monotonic()
        hosts.until(lambda: not sshd.left(self.lab, "h1", "h2"), seconds, "end on both machines")
        return time.monotonic() - began


@pytest.fixture
def desk():
    with hosts.Lab(["h1", "h2", "desk"], private=("/run",)) as lab:
        yield Desk(lab)


def test_preflight_runs_on_both_machines_and_its_log_comes_back(desk):
    assert desk.preflight().wait(400) == 0, desk.log.read_text()
    text = desk.log.read_text()
    assert "over 2 ranks" in text and "[0] [node 0] preflight passed" in text, text
    assert "[1] [node 1] joined the head h1" in text, text
    assert sshd.left(desk.lab, "h1", "h2") == []


def test_ctrl_c_at_the_desk_ends_both_machines(desk, figure):
    process = desk.preflight()
    desk.wait_for_work(process)
    began = time.monotonic()
    desk.signal("INT")
    assert process.wait(60) == 130, desk.log.read_text()
    desk.ended_within(10)
    figure("until both machines ended, after Ctrl-C over ssh", time.monotonic() - began)


def test_the_run_goes_on_without_the_desk_until_it_is_told_to_end(desk, figure):
    process = desk.preflight()
    desk.wait_for_work(process)
    desk.signal("KILL")
    desk.host.run("sh", "-c", "kill -KILL $(pgrep -x ssh)")
    time.sleep(5)
    assert desk.launch("status", "lab").wait(60) == 0
    assert "h1: running\nh2: running\n" in desk.log.read_text()
    began = time.monotonic()
    assert desk.launch("down", "lab").wait(60) == 0, desk.log.read_text()
    desk.ended_within(10)
    figure("until both machines ended, after launch.py down", time.monotonic() - began)
