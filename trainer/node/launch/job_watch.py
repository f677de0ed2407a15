"""What the head does while the job runs: shows its log, and answers everything that may happen to it."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Generator
from pathlib import Path

from trainer.checkpoint.attempt import SAVE_S
from trainer.config.growing_file import GrowingFile
from trainer.config.run_folder import LAUNCH_LOG, read_progress
from trainer.node.launch import rendezvous
from trainer.node.launch.joining_nodes import JoiningHead
from trainer.node.launch.launcher import POLL_S, STOPPED
from trainer.node.launch.ray_node import Job, JobEnd
from trainer.node.launch.rendezvous import LaunchEnded
from trainer.node.watch import preemption, watchdog
from trainer.node.watch.attempt_holder import AttemptHolder
from trainer.observe.node_monitor import NodeMonitor, append_sample
from trainer.system import last_words
from trainer.system.exit_codes import (
    EXIT_ERROR,
    EXIT_FENCED,
    EXIT_GAVE_UP,
    EXIT_INTERRUPTED,
    EXIT_NODE_LOST,
    EXIT_OK,
    EXIT_RAY,
    FINAL_EXIT_CODES,
    RECOVER_EXIT_CODES,
)
from trainer.system.redaction import without_secrets

RAY_LOOK_S = 2.0
"""Seconds between two checks of Ray's own processes."""
UNHEARD_S = 60.0
"""Seconds from the end of a job until it counts as over although Ray does not answer."""
SHOWN_OUTCOMES = 12
"""Most lines of the job that are printed below the live display at its end."""
DISPLAY_END_S = 5.0
"""Longest wait for the live display to show the end."""


ERROR = "error: "
"""Begins the line in which a loop says why it ended (trainer/loops/process.py)."""
RAYS_OWN = re.compile(r"^(Running entrypoint for job |.*job_manager\.py:\d+ -- Runtime env is setting up)")
"""Lines that Ray's job agent adds before the job's own."""
OUTCOMES = ("resumed from step ", "warning: ", "guards: ", "weights: ", "report: ")
"""Beginnings of the job's lines that a person needs after a live display, which shows none."""


class JobLog:
    """Copies new lines of the job's log to the run's `launch.log`, and with `show` to standard output."""

    def __init__(self, source: Path, run_dir: Path, show: bool):
        run_dir.mkdir(parents=True, exist_ok=True)
        self.source = GrowingFile(source)
        self.show = show
        self._copy = (run_dir / LAUNCH_LOG).open("a", encoding="utf-8")
        self._last: deque[str] = deque(maxlen=20)
        self.outcomes: list[str] = []
        """Lines for a person at the end, where `show` is off; each once."""

    def pump(self, last: bool = False) -> None:
        """Takes what is new; `last` also the line that is not finished."""
        new = self.source.read()
        if last:
            new += self.source.rest()
        *lines, unfinished = new.split(b"\n")
        if unfinished:
            lines.append(unfinished)
        for raw in lines:
            line = without_secrets(raw.decode(errors="replace"))
            if RAYS_OWN.match(line):
                continue
            self._last.append(line)
            self._copy.write(line + "\n")
            if self.show:
                print(line, flush=True)
            elif line.startswith(OUTCOMES) and line not in self.outcomes:
                self.outcomes.append(line)
        self._copy.flush()

    def tail(self) -> str:
        return "\n".join(self._last)

    def reason(self) -> str:
        """What the job said last about its end; "" where it said nothing."""
        for line in reversed(self._last):
            if line.startswith(ERROR):
                return line.removeprefix(ERROR)
        return ""

    def close(self) -> None:
        self.pump(last=True)
        self._copy.close()
        sys.stdout.flush()


class JobWatch:
    """One job from its start to its end."""

    def __init__(self, head: JoiningHead, job: Job):
        assert head.ray is not None
        self.head, self.others = head, head.others
        self.ray, self.job = head.ray, job
        self.ray_stopped = ""
        """The text about those of Ray's own processes on this node that were found stopped."""
        self._ray_looked = 0.0
        self.run_dir = head.config.run.dir
        self.beacons = head.beacons(head.ray)
        self.log = JobLog(job.log, Path(self.run_dir), show=not sys.stdout.isatty())
        self.dog = watchdog.Watchdog(head.config)
        self.monitor = NodeMonitor(0, self.run_dir, self.beacons)
        self.memory_kills = last_words.memory_kills()
        self.told_to_stop = False
        self.out_of_hours = False
        """Whether the run's hours are over."""
        self._over_since = 0.0
        """When the job was found to be over while Ray did not answer; 0: not yet."""

    @property
    def holder(self) -> AttemptHolder:
        """This attempt's right to write."""
        assert self.head.holder is not None
        return self.head.holder

    @property
    def job_why(self) -> str:
        """What the job said last about its end; "" where it said nothing."""
        return self.log.reason()

    def run(self) -> int:
        """Watches the job until it ends, whatever ends it; returns the exit code. Raises LaunchEnded."""
        try:
            code = self._until_the_end()
            if self.out_of_hours and code != EXIT_OK:
                raise LaunchEnded(EXIT_GAVE_UP, self._hours)
        except LaunchEnded as end:
            if self.out_of_hours and end.code not in (EXIT_FENCED, EXIT_GAVE_UP):
                raise LaunchEnded(EXIT_GAVE_UP, f"{self._hours}; {end}") from None
            if not self.ray_stopped:
                raise
            code = EXIT_NODE_LOST if end.code == EXIT_ERROR else end.code  # Ray has lost the job's own code
            raise LaunchEnded(code, f"{self.ray_stopped}: {end}", end.died) from None
        if self.ray_stopped and code in (EXIT_NODE_LOST, EXIT_RAY):  # no job can go on with this Ray
            raise LaunchEnded(code, f"{self.ray_stopped}: {self.log.reason()}")
        return code

    def _until_the_end(self) -> int:
        with _live_display(self.run_dir, shown=not self.log.show):
            while True:
                self.log.pump()
                self._look_at_ray()
                self._look_for_a_hang()
                self._take_messages()
                self._pass_on_own_signal()
                self._stop_if_replaced()
                self._stop_if_out_of_hours()
                end = self._ended()
                if end is not None:
                    self.log.close()
                    break
                time.sleep(POLL_S)
        for line in self.log.outcomes[-SHOWN_OUTCOMES:]:
            print(line, flush=True)
        return self._exit_code(end)

    # --- what may happen --------------------------------------------------------------------------------

    def _look_at_ray(self) -> None:
        """Says once which of Ray's own processes on this node is stopped: what depends on it hangs."""
        if self.ray_stopped or time.monotonic() - self._ray_looked < RAY_LOOK_S:
            return
        self._ray_looked = time.monotonic()
        if stopped := self.ray.stopped():
            self.ray_stopped = f"Ray's {stopped} on node 0 is stopped"
            self.head.say(f"warning: {self.ray_stopped} (state T): what needs it stands still")

    def _look_for_a_hang(self) -> None:
        if why := self.dog.overdue():
            self._hung(why)

    def _take_messages(self) -> None:
        """Passes on notices of other nodes, and keeps and judges all nodes' samples."""
        own = self.monitor.due()
        samples = [own] if own else []
        for rank, message in self.head.check_others():
            if message["kind"] == "notice":
                self._pass_on(f"node {rank}: {message['reason']}", signal.SIGTERM)
            elif message["kind"] == "sample":
                samples.append(message["sample"])
        for sample in samples:
            append_sample(self.run_dir, sample)
            for line in self.dog.look(sample):
                self.head.say(line)

    def _pass_on_own_signal(self) -> None:
        """Passes on SIGTERM or Ctrl-C of this process. Raises LaunchEnded once the time after it is over."""
        signals = self.head.signals
        if signals.number is not None and not self.told_to_stop:
            self.told_to_stop = True
            self.holder.lock.ending()
            if signals.number == signal.SIGINT:
                self.head.say("stopping after the current phase; press Ctrl-C again to end at once")
                self._pass_on("interrupted", signals.number)
            else:
                self.head.say("preemption notice: saving what can be saved")
                self._pass_on("SIGTERM", signals.number)
        if signals.expired:
            raise LaunchEnded(signals.code, "the time after the notice is over")

    def _stop_if_replaced(self) -> None:
        """Raises LaunchEnded where a newer attempt of the run has started."""
        if self.holder.fenced:
            self.job.signal(signal.SIGKILL)
            raise LaunchEnded(EXIT_FENCED, self.holder.fenced)

    @property
    def _hours(self) -> str:
        limit = self.head.config.checkpoint.max_hours
        return f"all attempts together have taken the {limit:g} hours of budget.max_hours"

    def _stop_if_out_of_hours(self) -> None:
        """Has the run save and stop shortly before its hours are over. Raises LaunchEnded once they are."""
        left_s = self.holder.until - time.monotonic()
        if left_s <= 0:
            raise LaunchEnded(EXIT_GAVE_UP, self._hours)
        if self.out_of_hours or left_s > min(SAVE_S, 360 * self.head.config.checkpoint.max_hours):
            return
        self.out_of_hours = True
        self.holder.lock.ending()
        self.head.say(f"{self._hours}: saving what can be saved")
        reason = f"{preemption.OUT_OF_HOURS} {left_s:.0f}"
        self.head.announce(reason)
        self.others.send({"kind": "notice", "reason": reason})

    def _ended(self) -> JobEnd | None:
        """How the job ended; None while it runs, and while Ray does not answer."""
        try:
            return self.job.ended()
        except OSError:
            return self._ended_unheard()

    def _ended_unheard(self) -> JobEnd | None:
        """How a job ended that Ray does not tell of: with its GCS stopped, all else goes on to the end."""
        state = read_progress(self.run_dir)
        began = state.get("started_unix_s", 0.0) >= self.head.began_unix_s
        status = state.get("status") if began else "running"
        gone = self.job.pid() is not None and not self.job.signal(0)
        if status == "running" and not gone:
            self._over_since = 0.0
            return None
        self._over_since = self._over_since or time.monotonic()
        if time.monotonic() - self._over_since < UNHEARD_S:
            return None
        if status == "finished":
            return JobEnd("SUCCEEDED", 0, "")
        return JobEnd("FAILED", EXIT_NODE_LOST, "Ray did not tell how the job ended")

    # --- what is done about it --------------------------------------------------------------------------

    def _pass_on(self, reason: str, number: int) -> None:
        """A preemption notice on one node applies to all."""
        signals = self.head.signals
        if number == signal.SIGTERM:
            self.head.announce(reason)
            self.others.send({"kind": "notice", "reason": reason})
        never_began = not self.job.signal(number) and self.job.pid() is None
        if never_began and signals.number is not None:
            raise LaunchEnded(signals.code, STOPPED)

    def _hung(self, why: str) -> None:
        """Writes all ranks' stacks, names the rank at fault. Raises LaunchEnded unless told to warn."""
        self.others.send({"kind": "dump"})
        ranks = [watchdog.HangingRank(**fields) for fields in watchdog.dump_stacks(self.beacons, 0)]
        waiting = set(self.others.links)
        deadline = time.monotonic() + watchdog.DUMPED_S
        while waiting and time.monotonic() < deadline:
            for rank, message in self.head.check_others():
                if message["kind"] == "dumped":
                    waiting.discard(rank)
                    ranks += [watchdog.HangingRank(**fields) for fields in message["ranks"]]
            time.sleep(POLL_S)
        text = watchdog.report_hang(self.beacons, ranks, why, self.run_dir)
        if self.head.config.watch.on_hang == "end":
            raise LaunchEnded(EXIT_NODE_LOST, text, died=True)
        self.head.say(f"warning: {text}")

    def _exit_code(self, end: JobEnd) -> int:
        """The run's exit code from how its job ended. Raises LaunchEnded where the job could not say why."""
        if end.status == "SUCCEEDED":
            return EXIT_OK
        if end.status == "STOPPED":
            raise LaunchEnded(EXIT_INTERRUPTED, "the job was stopped through Ray")
        if not self.log.show:
            print(self.log.tail(), file=sys.stderr, flush=True)
        if end.code in (*RECOVER_EXIT_CODES, *FINAL_EXIT_CODES, EXIT_INTERRUPTED):
            return end.code

        self._wait_for_late_heartbeats()
        if self.head.signals.number is not None:
            return self.head.signals.code
        if end.code is None:
            raise LaunchEnded(EXIT_ERROR, f"Ray ended the job: {end.message}")
        if end.code < 0:
            why = f"the job was killed by signal {-end.code}"
            if -end.code in (signal.SIGKILL, signal.SIGTERM):
                raise LaunchEnded(
                    EXIT_NODE_LOST, f"{why}: {last_words.cause_outside_log(self.memory_kills)}", died=True
                )
            cause = last_words.cause_in_log(self.log.tail())
            raise LaunchEnded(EXIT_ERROR, f"{why}: {cause}" if cause else why)  # it crashed: a defect
        return end.code if end.code < 126 else EXIT_ERROR

    def _wait_for_late_heartbeats(self) -> None:
        """The job may fail because of a lost node before its heartbeats show the loss. Raises LaunchEnded."""
        began = time.monotonic()
        while self.others.quiet() and time.monotonic() - began < rendezvous.SILENCE_S:
            self.head.check_others()
            time.sleep(POLL_S)


@contextlib.contextmanager
def _live_display(run_dir: str, shown: bool) -> Generator[None]:
    """The live display in a thread, while the block runs."""
    if not shown:
        yield
        return
    from trainer.observe.live import follow

    over = threading.Event()
    thread = threading.Thread(target=follow, args=(run_dir, over.is_set), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(DISPLAY_END_S)
