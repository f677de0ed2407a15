"""Hosts on this machine: each has mount, pid, network, host-name and IPC namespaces of its own, and two
network cards.

    eth0  the same address on every host, with the default route, connected to nothing (as in RunPod's
          containers)
    eth1  10.50.0.11, .12, ... on a bridge that lives in a namespace of its own: no packet can leave the
          machine

The file system is shared, but for the folders that a lab asks to be private. Needs root; `missing()` says
what is lacking. Everything ends with the lab's process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
INIT = "import signal,time; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: time.sleep(3600)"
"""The first process of a host: reaps what is left to it."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The hosts share one machine's memory, and Ray on each would kill its ranks for what the others use.
SHARED = {"RAY_memory_monitor_refresh_ms": "0"}
"""What the hosts have in common."""


@functools.cache
def missing() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "namespaced hosts need root"
    for tool in ("ip", "nsenter", "unshare", "mount"):
        if not shutil.which(tool, path=PATH):
            return f"namespaced hosts need the program {tool} (packages iproute2, util-linux)"
    command = (
        "unshare --mount --pid --fork --net --uts --ipc --mount-proc ip link add v0 type veth peer name v1"
    )
    done = subprocess.run(command.split(), capture_output=True, text=True)
    refused = f"this kernel or container lets root make no namespaces: {done.stderr.strip()}"
    return refused if done.returncode else ""


def marks(lacking: str) -> list[pytest.MarkDecorator]:
    """Marks of a lab's tests. lacking: why there can be no such lab here; empty if there can."""
    return [pytest.mark.lab, pytest.mark.slow, pytest.mark.skipif(bool(lacking), reason=lacking)]


def until(
    condition: Callable[[], object],
    timeout_s: float,
    what: str,
    shown: Callable[[], str] = str,
    every_s: float = 0.2,
) -> None:
    """Waits until something is so. Raises TimeoutError with what is `shown`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {timeout_s:.0f} s\n{shown()}")
        time.sleep(every_s)


def copy_repository(folder: Path) -> None:
    """The working copy as a person has it, without what it has made."""
    left_out = [f"--exclude={name}" for name in (".git", ".venvs", ".cache", "runs", "__pycache__")]
    run("rsync", "-a", *left_out, f"{ROOT}/", f"{folder}/")


def run(*command: str) -> str:
    """Runs a command of the system; raises with its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Host:
    """One machine of the lab."""

    def __init__(self, name: str, address: str, scratch: Path, hosts_file: Path, private: Sequence[str] = ()):
        self.name = name
        self.address = address
        self.scratch = scratch
        scratch.mkdir(parents=True, exist_ok=True)
        self._init = _namespaces("--mount", "--pid", "--net", "--uts", "--ipc")
        self.pid = _child_of(self._init.pid)
        setup = (
            f"hostname {name} && mount -t proc proc /proc && mount -t tmpfs -o size=4g tmpfs /dev/shm && "
            f"mount --bind {hosts_file} /etc/hosts && ip link set lo up"
        )
        for folder in private:
            setup += f" && mkdir -p {folder} && mount -t tmpfs tmpfs {folder}"
        run(*self.enter, "sh", "-c", setup)

    @property
    def enter(self) -> list[str]:
        """What to put before a command to run it on this host."""
        return ["nsenter", "-t", str(self.pid), "-m", "-p", "-n", "-u", "-i", f"--wd={ROOT}", "--"]

    def start(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a command here, its output in `log`. Only `env` and the search path are given to it."""
        clean = {"PATH": f"{os.environ.get('PATH', '')}:{PATH}", "HOME": str(self.scratch), "LANG": "C.UTF-8"}
        clean |= {"SPOTRL_TMP": str(self.scratch), "SPOTRL_METADATA": "off", "HF_HUB_OFFLINE": "1"}
        clean |= SHARED | dict(env or {})
        with log.open("ab") as out:
            return subprocess.Popen(
                [*self.enter, *command],
                env=clean,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def run(self, *command: str) -> str:
        """Runs a command here to its end; raises if it fails."""
        return run(*self.enter, *command)

    def ip(self, words: str) -> None:
        """Runs `ip` here, with words that blanks separate."""
        self.run("ip", *words.split())

    def processes(self) -> list[str]:
        """Command lines of the processes that run here, but for the first one."""
        listing = run(*self.enter, "ps", "-eo", "pid=,stat=,args=")
        found = []
        for pid, stat, args in (line.split(None, 2) for line in listing.splitlines()):
            if pid != "1" and not stat.startswith("Z") and "ps -eo" not in args:
                found.append(args)
        return found

    @property
    def alive(self) -> bool:
        return self._init.poll() is None

    def kill(self) -> None:
        """The power cord: all processes of this host end at once."""
        if self._init.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._init.wait()


RANDOM = 0xFFFFF000 + 56
"""Where classic BPF reads a random number of 32 bits (SKF_AD_RANDOM)."""


class Rule(NamedTuple):
    """One condition on a packet, as seen from its Ethernet header."""

    load: int
    """40 loads two bytes, 48 one, 32 four."""
    offset: int
    value: int
    kind: Literal["equal", "more", "less"] = "equal"


def bytecode(rules: Sequence[Rule]) -> str:
    """A classic BPF program for `tc` that drops what meets all rules."""
    jumps = {"equal": "21 0 {on}", "more": "37 0 {on}", "less": "53 {on} 0"}
    lines = []
    for at, rule in enumerate(rules):
        passed_on = 2 * (len(rules) - at) - 1
        lines.append(f"{rule.load} 0 0 {rule.offset}")
        lines.append(f"{jumps[rule.kind].format(on=passed_on)} {rule.value}")
    return f"{len(lines) + 2}," + ",".join([*lines, "6 0 0 2", "6 0 0 0"])


class Lab:
    """A set of hosts on one bridge. Use as a context manager."""

    def __init__(self, names: Sequence[str], scratch: Path | None = None, private: Sequence[str] = ()):
        """private: folders that are empty and in memory on each host."""
        self._dropping: dict[str, list[str]] = {}
        self.scratch = scratch or Path(tempfile.mkdtemp(prefix="lab-"))
        self._own = scratch is None
        self._switch = _namespaces("--net")
        self.switch_pid = _child_of(self._switch.pid)
        self._in_switch = ["nsenter", "-t", str(self.switch_pid), "-n", "--"]
        self._switch_ip("link add br0 type bridge")
        self._switch_ip("link set br0 up")
        hosts_file = self.scratch / "hosts"
        addresses = {name: f"10.50.0.{11 + i}" for i, name in enumerate(names)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        self.scratch.mkdir(parents=True, exist_ok=True)
        hosts_file.write_text("\n".join(lines) + "\n")
        self.hosts: dict[str, Host] = {}
        for name, address in addresses.items():
            self.hosts[name] = Host(name, address, self.scratch / name, hosts_file, private)
        for number, host in enumerate(self.hosts.values(), start=11):
            self._connect(host, number)

    def _connect(self, host: Host, number: int) -> None:
        for card in ("eth0", "eth1"):
            self._switch_ip(f"link add {card}h{number} type veth peer name {card} netns {host.pid}")
            self._switch_ip(f"link set {card}h{number} up")
            host.ip(f"link set {card} up")
        self._switch_ip(f"link set eth1h{number} master br0")
        host.ip("addr add 172.17.0.2/16 dev eth0")
        host.ip(f"addr add {host.address}/24 dev eth1")
        host.ip("route add default via 172.17.0.1")

    def cut(self, name: str, up: bool = False) -> None:
        """Pulls the cable of a host's eth1 (or plugs it in again)."""
        self._switch_ip(f"link set {self._plug(name)} {'up' if up else 'down'}")

    # --- what can be wrong with the network: rules on the switch's end of a host's cable --------------------

    def shape(self, megabit: int) -> None:
        """Gives every host a link of that rate, so that a measurement shows the link and not this machine's
        load."""
        for name in self.hosts:
            plug = self._plug(name)
            self._tc(f"qdisc add dev {plug} root handle 1: htb default 1")
            self._tc(f"class add dev {plug} parent 1: classid 1:1 htb rate {megabit}mbit")

    def slow(self, source: str, to: str, megabit: int) -> None:
        """A slower rate from one host to another; `shape` comes first."""
        plug, address = self._plug(to), self.hosts[source].address
        self._tc(f"class add dev {plug} parent 1: classid 1:2 htb rate {megabit}mbit")
        self._tc(f"filter add dev {plug} parent 1: protocol ip u32 match ip src {address}/32 flowid 1:2")

    def drop(
        self, source: str, to: str, share: float = 1.0, only: Literal["", "syn", "high", "large"] = ""
    ) -> None:
        """Drops packets from one host to another: a share of all, or all that open a connection (high: to a
        port of the system's own range), or all that are longer than 1,000 bytes."""
        plug = self._plug(source)
        number = len(self._dropping.setdefault(plug, []))
        if not number:
            self._tc(f"qdisc add dev {plug} clsact")
        self._dropping[plug].append(to)
        rules = [Rule(40, 12, 0x0800), Rule(32, 30, int.from_bytes(socket.inet_aton(self.hosts[to].address)))]
        if only in ("syn", "high"):
            rules += [Rule(48, 23, 6), Rule(48, 47, 2)]  # TCP, and no flag but SYN
        if only == "high":
            rules += [Rule(40, 36, 32767, "more"), Rule(40, 36, 61000, "less")]
        if only == "large":
            rules += [Rule(40, 16, 1000, "more")]
        if share < 1.0:
            rules += [Rule(32, RANDOM, int(share * (1 << 32)), "less")]
        self._tc(f"filter add dev {plug} ingress prio {number + 1} bpf da bytecode", bytecode(rules))

    def _plug(self, name: str) -> str:
        return f"eth1h{self.hosts[name].address.rpartition('.')[2]}"

    def _tc(self, words: str, *more: str) -> None:
        run(*self._in_switch, "tc", *words.split(), *more)

    def _switch_ip(self, words: str) -> None:
        run(*self._in_switch, "ip", *words.split())

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        for host in self.hosts.values():
            host.kill()
        os.kill(self.switch_pid, signal.SIGKILL)
        self._switch.wait()
        if self._own:
            shutil.rmtree(self.scratch, ignore_errors=True)


def _die_with_the_lab() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no host outlives a killed test


def _namespaces(*kinds: str) -> subprocess.Popen[bytes]:
    own_mounts = ["--propagation", "private"] if "--mount" in kinds else []
    return subprocess.Popen(
        ["unshare", *kinds, "--fork", "--kill-child", *own_mounts, sys.executable, "-c", INIT],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_die_with_the_lab,
    )


def _child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    until(children.read_text, 10.0, "process of unshare", every_s=0.01)
    return int(children.read_text().split()[0])
