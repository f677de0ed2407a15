"""sshd on the hosts of a lab: each has a home directory of its own, and one key opens all of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import hosts

NEEDS = ("sshd", "ssh-keygen", "ssh", "rsync")
CONFIG = """\
HostKey {folder}/host_key
AuthorizedKeysFile {key}.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
Subsystem sftp internal-sftp
"""
PASSWD = """\
root:x:0:0:root:{home}:/bin/bash
sshd:x:105:65534::/run/sshd:/usr/sbin/nologin
"""


def missing() -> str:
    """Why there can be none here; empty if there can."""
    absent = [tool for tool in NEEDS if not shutil.which(tool, path=hosts.PATH)]
    return hosts.missing() or (
        f"not installed: {', '.join(absent)} (openssh-server, rsync)" if absent else ""
    )


def home(host: hosts.Host) -> Path:
    """The host's own home directory."""
    return host.scratch / "home"


def serve(lab: hosts.Lab, servers: Iterable[hosts.Host]) -> Path:
    """Gives every host of the lab a home and starts sshd on `servers`; returns the key. Wants /run to be
    private."""
    key = lab.scratch / "key"
    hosts.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    for host in lab.hosts.values():
        home(host).mkdir()
        passwd = host.scratch / "passwd"
        passwd.write_text(PASSWD.format(home=home(host)))
        host.run("mount", "--bind", str(passwd), "/etc/passwd")
    for host in servers:
        config = host.scratch / "sshd_config"
        config.write_text(CONFIG.format(folder=host.scratch, key=key))
        hosts.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host.scratch / "host_key"))
        host.run("mkdir", "-p", "/run/sshd")
        host.start(["/usr/sbin/sshd", "-D", "-e", "-f", str(config)], host.scratch / "sshd.log")
    return key


def left(lab: hosts.Lab, *names: str) -> list[str]:
    """Processes on the hosts `names` besides sshd's own."""
    return [p for name in names for p in lab.hosts[name].processes() if "sshd" not in p]
