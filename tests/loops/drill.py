"""A fault drill: plays the spot market against a real run and holds the result against an undisturbed one.

    python -m tests.loops.drill [--kills 30] [--steps 120] [--ranks 2] [--seed 0] [--standin]
                          [--staleness 2]      # steps that are sampled ahead

The job is `trainer.loops.grpo` on a tiny Qwen2.5-VL (with --standin: the same session around ranks that only
pretend to train, which starts in seconds); its checkpoints go to a real S3 server on loopback behind a proxy.
Until `--kills` faults have struck, the supervisor lets the job live for a random time and then does one of
`FAULTS`; a full disk needs root, for a small tmpfs. Ends with 1 if metrics or weights differ in a single bit
from those of the undisturbed run, or if anything is left over.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import processor
from tests import servers
from tests.loops.fault_run import weights_of
from tests.loops.jobs import REWARD, Job
from trainer import config as c
from trainer.storage.storage import Storage
from trainer.system.exit_codes import EXIT_CONFIG, RECOVER_EXIT_CODES

FAULTS = (
    "kill, fresh node",
    "kill, same node",
    "notice",
    "network cut",
    "server killed",
    "disk full",
    "byte flipped",
)
DISK_BYTES = 192 << 20
MOST_LOST = 4
"""Steps that a kill costs on a node that stays, with store and files whole: the interval, the save and the
step under way."""


@dataclass
class Drill:
    folder: Path
    config: c.RunConfig
    job: Job
    server: servers.S3Server
    relay: servers.Proxy
    rng: random.Random
    small_disk: bool
    strikes: list[tuple[str, int]] = field(default_factory=list)
    """Each fault and the step under way; 0 while the job was starting."""
    lost_with_disks: int = 0
    """Steps that were made again because their node's disk was gone."""
    restarts: int = 0
    reported: int = 0
    flipped: dict[str, int] = field(default_factory=dict)

    def run(self, kills: int) -> None:
        """Strikes `kills` times, then lets the job end."""
        while True:
            self.reported = len(self.job.tail(10**9))
            self.job.start()
            if self._struck_down(kills):
                continue
            code, output = self.job.wait(900), self._output()
            if code == 0:
                return
            print(f"  the job ended with {code}: started again", flush=True)
            no_room = code == EXIT_CONFIG and "larger disk" in output  # at the start, while it was full
            assert code in RECOVER_EXIT_CODES or no_room, f"exit code {code}\n{output[-4000:]}"

    def _struck_down(self, kills: int) -> bool:
        """Lets the job live and strikes, until it has to be started again (True), has ended, or has had its
        share."""
        while len(self.strikes) < kills:
            life = self.rng.uniform(0.0, 3.0)
            if self.rng.random() < 0.8:  # most preemptions hit a running step, some the start
                self._until_a_step()
            self._live(life)
            if not self._runs():
                return False
            if self._strike():
                self.restarts += 1
                return True
        return False

    def _runs(self) -> bool:
        return self.job.process is not None and self.job.process.poll() is None

    def _output(self) -> str:
        """The output of this start."""
        return self.job.tail(10**9)[self.reported :]

    def _until_a_step(self) -> None:
        """Waits for a running step, and checks what the last kill has cost."""
        end = time.monotonic() + 300
        while self._runs() and self.job.progress().get("phase", "start") in ("start", "resume"):
            assert time.monotonic() < end, f"the job hangs\n{self.job.tail()}"
            time.sleep(0.05)
        resumed = re.search(r"resumed from step (\d+)|starting from scratch", self._output())
        if resumed and self.strikes and self.restarts:
            fault, step = self.strikes[-1]
            lost = max(0, step - int(resumed[1] or 0))
            if fault == "kill, fresh node":
                self.lost_with_disks += lost
            assert fault != "kill, same node" or lost <= MOST_LOST, f"{lost} steps lost by a kill"

    def _live(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._runs():
            time.sleep(0.01)

    def _strike(self) -> bool:
        """Does something bad. Returns whether the job has to be started again."""
        step = self.job.progress().get("step", 0)
        fault = self.rng.choice([f for f in FAULTS if self.small_disk or f != "disk full"])
        self.strikes.append((fault, step))
        print(f"{len(self.strikes)}: {fault} at step {step}", flush=True)
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
            case "notice" if self._runs():
                assert self.job.process is not None
                os.kill(self.job.process.pid, signal.SIGTERM)
                self._live(10)
        self.job.kill()
        if fault == "byte flipped":
            self._flip()
        if fault == "kill, fresh node":
            shutil.rmtree(self.job.run_dir, ignore_errors=True)
        return True

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


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def play(folder: Path, kills: int, steps: int, ranks: int, seed: int, standin=False, staleness=0) -> dict:
    """Runs the whole drill. Raises AssertionError on any difference or left-over."""
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
        drill = Drill(folder, disturbed, job, server, relay, random.Random(seed), small)
        try:
            drill.run(kills)
        finally:
            left_over = job.left_over()
            job.kill()
        assert not left_over, f"processes are left over: {left_over}"
        mine, theirs = job.metrics(), calm.metrics()
        different = [a["step"] for a, b in zip(mine, theirs, strict=False) if a != b]
        assert len(mine) == len(theirs) and not different, f"metrics differ at steps {different}"
        assert weights_of(job) == weights_of(calm), "the final weights differ"
        store = Storage(f"s3://bucket/runs/{config.run_id}/checkpoints", env=server.env)
        kept = sorted({key.partition("/")[0] for key, _ in store.list() if key.startswith("step-")})
        assert len(kept) <= 2 and kept[-1] == f"step-{steps:08d}", f"checkpoints in the store: {kept}"
        assert not list(job.run_dir.rglob("*.partial")), "partial files are left over"
        segments = {name for name in shared_memory() - segments if not standin}
        assert not segments, f"shared memory is left over: {sorted(segments)}"
        graded = {run: folder / run / "graded" for run in ("calm", "job")}
        counts = {run: path.stat().st_size if path.exists() else 0 for run, path in graded.items()}
        # A kill amid grading, or a disk lost before the store had the log, samples a step's completions once
        # more; at the start, those that are ahead of it too.
        again = counts["job"] - counts["calm"]
        at_most = (drill.restarts * (1 + staleness) + drill.lost_with_disks) * config.samples_per_step
        assert again <= at_most, f"{again} completions were sampled again"
    faults = Counter(fault for fault, _ in drill.strikes)
    return {"faults": {name: faults[name] for name in FAULTS}, "completions_sampled_again": again}


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30, help="faults in all")
    parser.add_argument("--steps", type=int, default=120, help="steps of the run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--standin", action="store_true", help="pretend to train: minutes, not an hour")
    parser.add_argument("--staleness", type=int, default=0, help="steps that are sampled ahead")
    with tempfile.TemporaryDirectory(prefix="drill-") as name:
        try:
            show(play(Path(name), **vars(parser.parse_args())), None)
        except AssertionError as error:
            sys.exit(f"the drill failed: {error}")
