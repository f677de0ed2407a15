"""Preemption: providers' notices, and what a process does in the time left.

Standard library only, so that recipes and the node's first process can import it before anything is
installed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.config.run_folder import write_whole
from trainer.system.exit_codes import EXIT_INTERRUPTED, EXIT_PREEMPTED
from trainer.system.web_request import send_request

Provider = Literal["runpod", "gcp", "aws", "kubernetes", "slurm", "none"]
VARIABLES: dict[str, Provider] = {
    "RUNPOD_POD_ID": "runpod", "GCE_METADATA_HOST": "gcp", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "aws"
}  # fmt: skip
"""Variables that name the provider; the last two also move its metadata server."""

TOLD_AFTER = 6
"""Looks in a row at a metadata service that fail before a person is told."""
NOTICE_S: dict[Provider, float] = {"runpod": 5.0, "gcp": 30.0, "aws": 120.0, "kubernetes": 30.0}
NOTICE_S |= {"slurm": 30.0, "none": 10.0}
"""Seconds from notice to kill. Kubernetes and Slurm: the defaults; state your own in SPOTRL_NOTICE_S."""

FLAG_VARIABLE = "SPOTRL_NOTICE_FILE"
"""Names the node-local file through which the node's first process passes a notice to its ranks."""


OUT_OF_HOURS = "budget.max_hours is over, seconds to save:"
"""How a notice begins that the run gives to itself; the seconds that it has follow."""


def provider(env: Mapping[str, str] = os.environ, dmi: Path = Path("/sys/class/dmi/id")) -> Provider:
    """Where this process runs, from the environment and the machine's DMI strings: no packet is sent."""
    for name, provided in VARIABLES.items():
        if env.get(name):
            return provided
    vendor = " ".join(_text(dmi / name) for name in ("sys_vendor", "product_name", "bios_vendor"))
    if "Google" in vendor:
        return "gcp"
    if "Amazon EC2" in vendor:
        return "aws"
    if "KUBERNETES_SERVICE_HOST" in env:
        return "kubernetes"
    return "slurm" if "SLURM_JOB_ID" in env else "none"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def notice_s(env: Mapping[str, str] = os.environ) -> float:
    """Seconds between this provider's notice and the kill: SPOTRL_NOTICE_S, else the table above."""
    stated = env.get("SPOTRL_NOTICE_S", "")
    return float(stated) if stated else NOTICE_S[provider(env)]


# --- metadata servers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MetadataServer:
    """A cloud's metadata server, polled every few seconds."""

    kind: Literal["gcp", "aws"]
    base_url: str
    timeout_s: float = 2.0

    def ask(self) -> str | None:
        """Why this machine is about to be preempted, else None. Raises OSError if it is unreachable."""
        if self.kind == "gcp":
            value = self._get("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
            return "gcp: instance preempted" if value.strip().upper() == "TRUE" else None
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        token = self._get("/latest/api/token", ttl, method="PUT", missing="")
        headers = {"X-aws-ec2-metadata-token": token} if token else {}
        action = self._get("/latest/meta-data/spot/instance-action", headers, missing="")
        return f"aws: spot instance will {json.loads(action)['action']}" if action.strip() else None

    def _get(
        self, path: str, headers: dict[str, str], method: str = "GET", missing: str | None = None
    ) -> str:
        url = self.base_url.rstrip("/") + path
        try:
            reply = send_request(
                url, method=method, headers=headers, timeout_s=self.timeout_s, most_bytes=1 << 20, direct=True
            )
        except urllib.error.HTTPError as error:
            if missing is not None and error.code == 404:
                return missing
            raise
        return reply.decode()


def metadata_server(env: Mapping[str, str] = os.environ) -> MetadataServer | None:
    """The metadata server to poll. SPOTRL_METADATA=off stops it; the clouds' own variables move it."""
    if env.get("SPOTRL_METADATA") == "off":
        return None
    match provider(env):
        case "gcp":
            return MetadataServer("gcp", "http://" + env.get("GCE_METADATA_HOST", "metadata.google.internal"))
        case "aws":
            url = env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
            return MetadataServer("aws", url)
    return None


def _unanswered(error: Exception) -> str:
    """The line about a metadata service that has failed for a while."""
    answered = isinstance(error, urllib.error.HTTPError)
    fault = f"answers {error.code}" if answered else f"cannot be asked ({error or type(error).__name__})"
    return (
        f"the cloud's metadata service {fault}: a spot notice is learned from SIGTERM alone, if that comes;"
        " allow it to this machine's processes, or set SPOTRL_METADATA=off"
    )


NUMBERS = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a process of a run to end: a preemption notice, and Ctrl-C."""


class Signals:
    """Which of them came first, and whether Ctrl-C came again. Only for the main thread.

    Nothing ends by itself: who holds this decides what to do, between two pieces of its work.
    """

    def __init__(
        self, grace_s: dict[signal.Signals, float], on_signal: Callable[[Signals], None] | None = None
    ) -> None:
        """grace_s: seconds after the first signal, by its number, until `expired`.

        on_signal: called after every signal, inside its handler.
        """
        self.number: signal.Signals | None = None
        """The first one; None before it."""
        self.again = False
        """Whether Ctrl-C came after it."""
        self.deadline = float("inf")
        """When the time after the first one is over, on the monotonic clock."""
        self._grace_s = grace_s
        self._on_signal = on_signal
        self._previous = {number: signal.signal(number, self._came) for number in NUMBERS}

    @property
    def code(self) -> int:
        """The exit code for the first signal; that of a preemption before it."""
        return EXIT_INTERRUPTED if self.number == signal.SIGINT else EXIT_PREEMPTED

    @property
    def expired(self) -> bool:
        """Whether the time after the first signal is over, or Ctrl-C came again."""
        return self.again or time.monotonic() > self.deadline

    def close(self) -> None:
        """Puts the former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _came(self, number: int, frame: object) -> None:
        if self.number is None:
            self.number = signal.Signals(number)
            self.deadline = time.monotonic() + self._grace_s[self.number]
        elif number == signal.SIGINT:
            self.again = True
        if self._on_signal:
            self._on_signal(self)


# --- the notice -----------------------------------------------------------------------------------------


def flag_file(env: Mapping[str, str] = os.environ) -> Path:
    """The node-local file that carries a notice between the processes of one job on one node."""
    return Path(env.get(FLAG_VARIABLE) or Path(tempfile.gettempdir()) / f"spotrl-notice-{os.getuid()}")


def announce_notice(reason: str, path: Path | None = None) -> None:
    """Writes the notice for every process of this job on this node; the first one does so on SIGTERM."""
    write_whole(path or flag_file(), reason.encode())


class PreemptionNotice:
    """Watches for preemption: SIGTERM, SIGINT, the node's flag file and the cloud's metadata server.

    Make it after `ray.init`, which installs a SIGTERM handler of its own. `signals` only works in the main
    thread. When a notice comes, `on_notice(reason)` runs once in a thread of its own (flush, mark), so that a
    phase that outlasts the notice loses nothing; with `exit_at_deadline` the process leaves with
    EXIT_PREEMPTED shortly before the provider would kill it, because after SIGKILL the platform cannot
    distinguish a preemption from a crash.
    """

    def __init__(
        self,
        *,
        signals: bool = True,
        on_notice: Callable[[str], None] | None = None,
        exit_at_deadline: bool = False,
        poll_s: float = 5.0,
        env: Mapping[str, str] = os.environ,
    ):
        self.reason: str | None = None
        self.notice_s = notice_s(env)
        self.margin_s = min(1.0, 0.2 * self.notice_s)
        """Seconds before the provider's kill at which the process exits by itself."""
        self._deadline = math.inf
        self._on_notice, self._exit_at_deadline = on_notice, exit_at_deadline
        self._flag = flag_file(env)
        self._server = metadata_server(env)
        self._born = time.time()
        self._before = self._flagged()
        """The flag file that lay there already: of an earlier run, if it is old."""
        self._stop = threading.Event()
        self._seen = threading.Event()
        self._signals = None
        if signals:
            after_a_notice = {signal.SIGTERM: self.notice_s, signal.SIGINT: math.inf}
            self._signals = Signals(after_a_notice, self._on_signal)
        if self._server:
            threading.Thread(target=self._watch, args=(poll_s,), name="metadata", daemon=True).start()
        threading.Thread(target=self._act, name="notice", daemon=True).start()

    @property
    def exit_code(self) -> int:
        """The code to leave with when this process stops for the notice."""
        return self._signals.code if self._signals else EXIT_PREEMPTED

    def poll(self) -> str | None:
        """The reason if this process should stop, else None. Costs one stat(); called between phases."""
        if self.reason is None:
            flagged = self._flagged()
            # another file than before counts whatever its time is: clocks are set back, too
            if flagged is not None and (flagged != self._before or flagged[1] >= self._born - 1.0):
                with contextlib.suppress(OSError):
                    reason = self._flag.read_text() or "notice"
                    own = reason.removeprefix(OUT_OF_HOURS) if reason.startswith(OUT_OF_HOURS) else ""
                    self._notice(reason, float(own) if own else None)
        return self.reason

    def _flagged(self) -> tuple[int, float] | None:
        """The flag file's inode and the time of its last change; None without one."""
        try:
            status = self._flag.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime

    def remaining_s(self) -> float:
        """Seconds until the kill is expected; infinite without a notice."""
        return self._deadline - time.monotonic()

    def left_s(self) -> float:
        """Seconds that can be used: those left, minus the margin for exiting."""
        return self.remaining_s() - 1.5 * self.margin_s

    def close(self) -> None:
        """Stops watching and puts the former signal handlers back."""
        self._stop.set()
        self._seen.set()
        if self._signals:
            self._signals.close()

    def _on_signal(self, signals: Signals) -> None:
        if signals.again:
            raise KeyboardInterrupt
        if signals.number == signal.SIGINT:
            self._notice("interrupted", math.inf)
        else:
            self._notice("SIGTERM")

    def _notice(self, reason: str, within_s: float | None = None) -> None:
        if self.reason is None:
            self._deadline = time.monotonic() + (self.notice_s if within_s is None else within_s)
            self.reason = reason
            self._seen.set()

    def _watch(self, poll_s: float) -> None:
        assert self._server is not None
        failures = 0
        while not self._stop.is_set():
            reason = None
            try:
                reason = self._server.ask()
                failures = 0
            except (OSError, ValueError, KeyError) as error:  # for a moment, perhaps
                failures += 1
                if failures == TOLD_AFTER:
                    print(_unanswered(error), file=sys.stderr, flush=True)
            if reason:
                return self._notice(reason)
            self._stop.wait(poll_s)

    def _act(self) -> None:
        self._seen.wait()
        if self._stop.is_set() or self.reason is None:
            return
        if self._on_notice:
            self._on_notice(self.reason)
        if not self._exit_at_deadline or not math.isfinite(self._deadline):
            return
        if not self._stop.wait(max(0.0, self.remaining_s() - self.margin_s)):
            os._exit(self.exit_code)
