"""A fault drill: plays the spot market against a real run and holds the result against an undisturbed one.

    python -m tests.loops.drill [--kills 30] [--steps 120] [--ranks 2] [--seed 0] [--standin] [--json FILE]
                          [--seconds 500]      # no more faults after that: the run then comes to its end
                          [--staleness 2]      # steps that are sampled ahead

The job is `trainer.loops.grpo` on a tiny Qwen2.5-VL (with --standin: the same session around ranks that only
pretend to train, which starts in seconds); its checkpoints go to a real S3 server on loopback behind a proxy.
Until `--kills` faults have struck, the supervisor lets the job live for a random time and then does one of
these: SIGKILL of everything (the next node is a fresh one, or the same), SIGTERM with a short notice, the
store's network cut for some seconds, the store's server killed and started again, the disk full for some
seconds (needs root, for a small tmpfs), a byte flipped in the newest checkpoint before a kill. Prints work
lost per preemption and time to resume; exits with 1 if metrics or weights differ in a single bit from those
of the undisturbed run, or if anything is left over.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import processor
from tests import servers
from tests.loops.drill_figures import FAULTS, Strike, summary
from tests.loops.jobs import REWARD, Job
from trainer import config as c
from trainer.storage.storage import Storage
from trainer.system.exit_codes import EXIT_CONFIG, RECOVER_EXIT_CODES

DISK_BYTES = 192 << 20


@dataclass
class Drill:
    folder: Path
    config: c.RunConfig
    job: Job
    server: servers.S3Server
    relay: servers.Proxy
    rng: random.Random
    small_disk: bool
    strikes: list[Strike] = field(default_factory=list)
    starts: int = 0
    reported: int = 0
    flipped: dict[str, int] = field(default_factory=dict)
    deadline: float = float("inf")
    """When the faults end, on the monotonic clock."""
    recovering: Strike | None = None
    """The last kill, until something new is committed."""
    killed_at: float = 0.0

    def run(self, kills: int) -> None:
        """Strikes `kills` times, then lets the job end."""
        while True:
            self._start()
            if self._struck_down(kills):
                continue
            code, said = self._wait(), self._said()
            if code == 0:
                return
            print(f"  the job ended with {code}: started again", flush=True)
            no_room = code == EXIT_CONFIG and "larger disk" in said  # at the start, while it was full
            assert code in RECOVER_EXIT_CODES or no_room, f"exit code {code}\n{said[-4000:]}"

    def _struck_down(self, kills: int) -> bool:
        """Lets the job live and strikes, until it has to be started again (True), has ended, or has had its
        share."""
        while len(self.strikes) < kills and time.monotonic() < self.deadline:
            life = self.rng.uniform(0.0, 3.0)
            if self.rng.random() < 0.8:  # most preemptions hit a running step, some the start
                self._until_a_step()
            self._live(life)
            if self.job.process is None or self.job.process.poll() is not None:
                return False
            if self._strike():
                return True
        return False

    def _start(self) -> None:
        self.starts += 1
        self.reported = len(self.job.tail(10**9))
        self.job.start()

    def _until_a_step(self) -> None:
        end = time.monotonic() + 300
        while self.job.process is not None and self.job.process.poll() is None and not self._running_step():
            assert time.monotonic() < end, f"the job hangs\n{self.job.tail()}"
            time.sleep(0.05)
        self._note_resume()

    def _running_step(self) -> bool:
        state = self.job.progress()
        return state.get("step", 0) > 0 and state.get("phase") not in ("start", "resume")

    def _note_resume(self) -> None:
        """Fills in what the last start cost, once it shows."""
        found = re.search(r"resumed from step (\d+)|starting from scratch", self._said())
        waiting = [s for s in self.strikes if s.start_to_step_s is None and s.resumed_step == -1]
        if not found or not waiting:
            return
        for strike in waiting:
            strike.resumed_step = int(found.group(1) or 0)
            strike.start_to_step_s = round(time.time() - self.job.started, 2)
            print(f"  resumed from step {strike.resumed_step} after {strike.start_to_step_s} s", flush=True)
        self.recovering = waiting[-1]

    def _note_commit(self) -> None:
        """Fills in when the recovery was over, and the parts of its start."""
        strike = self.recovering
        if strike is None or strike.resumed_step is None:
            return
        committed = (
            int(p.parent.name[5:]) for p in self.job.run_dir.glob("checkpoints/step-*/manifest.json")
        )
        if max(committed, default=0) > strike.resumed_step:
            strike.kill_to_commit_s = round(time.monotonic() - self.killed_at, 2)
            if told := re.search(r"^ready .* after the launch: (.*)$", self._said(), re.MULTILINE):
                strike.start_parts_s = {
                    k: float(s) for k, s in (part.split() for part in told[1].split(", "))
                }
            self.recovering = None

    def _said(self) -> str:
        """The output of this start."""
        return self.job.tail(10**9)[self.reported :]

    def _live(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.job.process is not None and self.job.process.poll() is None:
            self._note_commit()
            time.sleep(0.01)

    def _wait(self) -> int:
        assert self.job.process is not None
        end = time.monotonic() + 900
        while self.job.process.poll() is None:
            if self._running_step():
                self._note_resume()
            self._note_commit()
            assert time.monotonic() < end, f"the job hangs\n{self.job.tail()}"
            time.sleep(0.05)
        self._note_resume()
        return self.job.process.returncode

    def _strike(self) -> bool:
        """Does something bad. Returns whether the job has to be started again."""
        state = self.job.progress()
        fault = self.rng.choice([f for f in FAULTS if self.small_disk or f != "disk full"])
        strike = Strike(fault, state.get("step", 0), state.get("phase", "start"))
        self.strikes.append(strike)
        print(f"{len(self.strikes)}: {fault} at step {strike.step} ({strike.phase})", flush=True)
        match fault:
            case "network cut":
                self.relay.cut()
                self._live(self.rng.uniform(1, 4))
                self.relay.restore()
                return False
            case "server killed":
                self.server.kill()
                self._live(self.rng.uniform(1, 4))
                self.server.start()
                return False
            case "disk full":
                filler = self.folder / "disk" / "filler"
                with contextlib.suppress(OSError), open(filler, "wb") as file:
                    while True:
                        file.write(bytes(1 << 20))
                self._live(self.rng.uniform(1, 4))
                filler.unlink()
                return False
            case "notice":
                self._kills(strike)
                if self.job.process is not None and self.job.process.poll() is None:
                    os.kill(self.job.process.pid, signal.SIGTERM)
                    self._live(10)
                self.job.kill()
            case _:
                self._kills(strike)
                self.job.kill()
                if fault == "byte flipped":
                    self._flip()
        if fault == "kill, fresh node":
            shutil.rmtree(self.job.run_dir, ignore_errors=True)
        return True

    def _kills(self, strike: Strike) -> None:
        strike.resumed_step = -1
        self.recovering = None
        self.killed_at = time.monotonic()

    def _flip(self) -> None:
        store = self.folder / "store/bucket/runs" / self.config.run_id / "checkpoints"
        for place in (self.job.run_dir / "checkpoints", store):
            manifests = sorted(place.glob("step-*/**/manifest.json"))
            if len(manifests) < 2:
                continue  # nothing to fall back to
            newest = int(manifests[-1].relative_to(place).parts[0][5:])
            # the rest is whole
            if newest >= self.flipped.get(str(place), 0) + 3 * self.config.checkpoint.every_steps:
                self.flipped[str(place)] = newest
                path = self.rng.choice(sorted(manifests[-1].parent.glob("rank-*.safetensors")))
                data = bytearray(path.read_bytes())
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                path.write_bytes(data)


@contextlib.contextmanager
def small_disk(path: Path) -> Generator[bool]:
    """A tmpfs of DISK_BYTES at `path` where we are root, else a plain folder. Yields whether it is small."""
    path.mkdir(parents=True)
    mounted = (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)], capture_output=True
        ).returncode
        == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=False)


def configure(folder: Path, steps: int, ranks: int, standin: bool, staleness: int = 0) -> c.RunConfig:
    """A tiny model with random weights, a reward that always has a gradient, a checkpoint every second
    step."""
    from examples.demo import shapes

    shapes.prepare(folder / "data", 64, 16, seed=0)
    for run in ("calm", "job"):  # each counts what it grades
        (folder / run).mkdir()
        count = f"    open({str(folder / run / 'graded')!r}, 'a').write('.')\n    return"
        (folder / run / "reward.py").write_text(REWARD.replace("    return", count))
    if standin:
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text("{}")
    else:
        from examples.demo import tiny_model

        tiny_model.build(folder / "model", 0)
    return c.RunConfig(
        run=c.Run(name="drill", dir=str(folder / "undisturbed"), max_steps=steps),
        model=c.Model(path=str(folder / "model"), dtype="fp32", gradient_checkpointing=False, min_pixels=784),
        data=c.Data(path=str(folder / "data"), prompt_max_tokens=300),
        rollout=c.Rollout(
            prompts_per_step=4,
            samples_per_prompt=4,
            max_tokens=12,
            staleness=staleness,
            kv_cache_gib=0.25,
            sleep_level=0,
        ),
        algorithm=c.Algorithm(micro_batch_tokens=400, kl_coef=0.01, normalize_reward=True),
        optimizer=c.Optimizer(learning_rate=1e-3),
        rewards=c.Rewards(function=f"{folder}/calm/reward.py:reward", workers=1),
        checkpoint=c.Checkpoint(every_steps=2, keep_last=2, keep_last_remote=2),
        placement=c.Placement(workers_per_node=ranks, device="cpu"),
        logging=c.Logging(tensorboard=False, samples_per_step=0),
    )


def weights_of(job: Job) -> str:
    """sha256 of the exported weights."""
    return hashlib.sha256((job.run_dir / "hf/model.safetensors").read_bytes()).hexdigest()


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def play(
    folder: Path,
    kills: int,
    steps: int,
    ranks: int,
    seed: int,
    standin: bool = False,
    seconds: float = 0.0,
    staleness: int = 0,
) -> dict:
    """Runs the whole drill, with faults for `seconds`. Raises AssertionError on any difference or
    left-over."""
    deadline = time.monotonic() + seconds if seconds else float("inf")
    config = configure(folder, steps, ranks, standin, staleness)
    module = "tests.loops.standin" if standin else "trainer.loops.grpo"
    segments = shared_memory()
    calm = Job(config, folder / "calm", module=module).start()
    assert calm.wait(1200) == 0, calm.tail()
    with (
        small_disk(folder / "disk") as small,
        servers.rclone(folder / "store") as server,
        servers.proxy(server.port) as relay,
    ):
        disturbed = replace(
            config,
            run=replace(config.run, dir=str(folder / "disk/run")),
            checkpoint=replace(config.checkpoint, remote="s3://bucket/runs"),
            rewards=replace(config.rewards, function=f"{folder}/job/reward.py:reward"),
        )
        env = servers.s3_environment(relay.port) | {"SPOTRL_NOTICE_S": "5"}
        job = Job(disturbed, folder / "job", env, module)
        drill = Drill(folder, disturbed, job, server, relay, random.Random(seed), small, deadline=deadline)
        begun = time.monotonic()
        try:
            drill.run(kills)
        finally:
            left_over = job.left_over()
            job.kill()
        wall_s = time.monotonic() - begun
        assert not left_over, f"processes are left over: {left_over}"
        mine, theirs = job.metrics(), calm.metrics()
        different = [a["step"] for a, b in zip(mine, theirs, strict=False) if a != b]
        assert len(mine) == len(theirs) and not different, f"metrics differ at steps {different}"
        assert weights_of(job) == weights_of(calm), "the final weights differ"
        store = Storage(f"s3://bucket/runs/{config.run_id}/checkpoints", env=server.env)
        kept = sorted({key.partition("/")[0] for key, _ in store.list() if key.startswith("step-")})
        assert len(kept) <= 2 and kept[-1] == f"step-{steps:08d}", (
            f"checkpoints left over in the store: {kept}"
        )
        assert not list(job.run_dir.rglob("*.partial")), "partial files are left over"
        segments = {name for name in shared_memory() - segments if not standin}
        assert not segments, f"shared memory is left over: {sorted(segments)}"
        graded = {run: folder / run / "graded" for run in ("calm", "job")}
        counts = {run: path.stat().st_size if path.exists() else 0 for run, path in graded.items()}
        replays = re.findall(
            r"^rollout log: steps (\d+) to (\d+) are replayed", job.tail(10**9), re.MULTILINE
        )
        # A kill amid grading, or a disk lost before the store had the log, samples a step's completions once
        # more; at the start, those that are ahead of it too.
        again, kills = counts["job"] - counts["calm"], sum(s.resumed_step is not None for s in drill.strikes)
        lost = sum(s.lost_steps or 0 for s in drill.strikes if s.fault == "kill, fresh node")
        at_most = (kills * (1 + staleness) + lost) * config.samples_per_step
        assert again <= at_most, f"{again} completions were sampled again"
    return summary(drill.strikes, config) | {
        "job": module,
        "small_disk": small,
        "starts": drill.starts,
        "completions": counts["calm"],
        "completions_sampled_again": again,
        "steps_replayed": sum(int(last) - int(first) + 1 for first, last in replays),
        "wall_s": round(wall_s, 1),
        "equal_to_undisturbed": True,
    }


def show(figures: dict[str, Any], out: Path | None) -> None:
    """Prints what a drill found, with revision and processor, and writes it to a file if there is one."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    figures |= {"revision": git.stdout.strip(), "processor": processor()}
    text = re.sub(
        r"[\[{]\s+([^\[\]{}]+?)\s+[\]}]", lambda m: " ".join(m[0].split()), json.dumps(figures, indent=1)
    )
    print(text)
    if out:
        out.write_text(text + "\n")


def main() -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30, help="faults in all")
    parser.add_argument("--steps", type=int, default=120, help="steps of the run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--standin", action="store_true", help="pretend to train: minutes in place of an hour"
    )
    parser.add_argument("--folder", type=Path, help="keep everything here, to look at")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="strike only for so long; 0: until all have struck"
    )
    parser.add_argument(
        "--staleness", type=int, default=0, help="steps that are sampled ahead; not with --standin"
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    a = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = a.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            figures = play(folder, a.kills, a.steps, a.ranks, a.seed, a.standin, a.seconds, a.staleness)
        except AssertionError as error:
            print(f"the drill failed: {error}", file=sys.stderr)
            return 1
    show(figures, a.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
