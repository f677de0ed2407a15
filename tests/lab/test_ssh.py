"""The ssh target: `launch.py up --target ssh` from one host, against real sshd on two others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkout
import hosts
import pytest

NEEDS = ("sshd", "ssh-keygen", "ssh", "rsync")
ABSENT = [tool for tool in NEEDS if not shutil.which(tool, path=hosts.PATH)]
WHY = hosts.missing() or (f"not installed: {', '.join(ABSENT)} (openssh-server, rsync)" if ABSENT else "")
pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.skipif(bool(WHY), reason=WHY)]

SSHD = """\
HostKey {folder}/host_key
AuthorizedKeysFile {key}.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
Subsystem sftp internal-sftp
"""


class Desk:
    """A person's machine and two others that it can log in to."""

    def __init__(self, lab: hosts.Lab):
        self.lab, self.host = lab, lab.hosts["desk"]
        self.repository = lab.scratch / "desk" / "repository"
        self.key = lab.scratch / "key"
        hosts.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
        left_out = [f"--exclude={name}" for name in (".git", ".venvs", ".cache", "runs", "__pycache__")]
        hosts.run("rsync", "-a", *left_out, f"{hosts.ROOT}/", f"{self.repository}/")
        for host in lab.hosts.values():
            home = host.scratch / "home"
            passwd = host.scratch / "passwd"
            passwd.write_text(f"root:x:0:0:root:{home}:/bin/bash\nsshd:x:105:65534::/run/sshd:/usr/sbin/nologin\n")
            home.mkdir()
            host.run("mount", "--bind", str(passwd), "/etc/passwd")
            if host is self.host:
                continue
            checkout.make(home / "spotrl", copy=True)
            config = host.scratch / "sshd_config"
            config.write_text(SSHD.format(folder=host.scratch, key=self.key))
            hosts.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host.scratch / "host_key"))
            host.run("mkdir", "-p", "/run/sshd")
            host.start(["/usr/sbin/sshd", "-D", "-e", "-f", str(config)], host.scratch / "sshd.log")

    def launch(self, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.lab.scratch / "launch.log"
        command = [sys.executable, "launch.py", *arguments]
        env = {"HOME": str(self.host.scratch / "home"), "SPOTRL_METADATA": "off"}
        return self.host.start(["sh", "-c", 'cd "$0" && exec "$@"', str(self.repository), *command], log, env), log


@pytest.fixture
def desk():
    with hosts.Lab(["h1", "h2", "desk"], private=("/run",)) as lab:
        yield Desk(lab)


def preflight(desk: Desk) -> tuple[subprocess.Popen[bytes], Path]:
    return desk.launch("up", "preflight", "--target", "ssh", "--hosts", "h1,h2", "--run-id", "lab",
                       "--set", "cluster.gpus_per_node=0", "--set", f"site.ssh_key={desk.key}")  # fmt: skip


def test_preflight_runs_on_both_machines_and_its_log_comes_back(desk):
    process, log = preflight(desk)
    assert process.wait(400) == 0, log.read_text()
    text = log.read_text()
    assert "over 2 ranks" in text and "[0] [node 0] preflight passed" in text, text
    for name in ("h1", "h2"):
        assert [p for p in desk.lab.hosts[name].processes() if "sshd" not in p] == []


def test_ctrl_c_at_the_desk_ends_both_machines(desk):
    process, log = preflight(desk)
    end = time.monotonic() + 200
    while "over 2 ranks" not in log.read_text():
        assert time.monotonic() < end and process.poll() is None, log.read_text()
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130, log.read_text()
    end = time.monotonic() + 60
    while left := [p for name in ("h1", "h2") for p in desk.lab.hosts[name].processes() if "sshd" not in p]:
        assert time.monotonic() < end, left
        time.sleep(0.2)
