"""The long soak: `python -m tests.soak --minutes 60 --json benchmarks/soak.json`. Two cores, about 10 GB of
memory.

A run of at least two epochs that is killed after a quarter of its time and resumed, whose memory,
descriptors, /dev/shm and folders must be flat from then on; then, a few steps each: two ranks per engine, a
vocabulary of 152k, and supervised fine-tuning on the same rows. The exit code says whether all of it held.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import processor
from tests.families import VISION, dtype
from tests.loops.jobs import REWARD, ROOT, Job
from tests.soak import model, rows
from tests.soak.lengths import environment
from tests.soak.sampling import Sampler, by_command, command
from tests.soak.settings import LONGEST, PROMPTS, settings
from trainer import config as c
from trainer.system.exit_codes import EXIT_PREEMPTED

EPOCH_STEPS = 12
GROUP = 8
SEED = 1
LONG_STEPS = (2, 9)
MEAN_TOKENS = 60
VOCABULARY = 49_152
QWEN = 152_064
GRACE_S = 10
"""A busy machine's time to end what the driver told to end."""
SHARES = {"long": 0.7, "tensor_parallel": 0.1, "vocabulary": 0.1, "sft": 0.1}


class Soak:
    """The phases, each in a folder of its own under `folder`."""

    def __init__(self, folder: Path, minutes: float, layers: int, family: Any) -> None:
        self.family = family
        self.folder, self.seconds = folder, {name: 60 * minutes * share for name, share in SHARES.items()}
        self.ray = Path(tempfile.mkdtemp(prefix="soak"))  # its sockets' names must be short
        (folder / "reward.py").write_text(REWARD)
        self.path = {
            n: model.build(folder / f"model-{n}", layers, n, family=family) for n in (VOCABULARY, QWEN)
        }
        count = EPOCH_STEPS * PROMPTS
        self.data = rows.write(folder / "data", count, PROMPTS, SEED)
        long_rows = [rows.first(step, count, PROMPTS, SEED) for step in LONG_STEPS]
        self.env = {"RAY_TMPDIR": str(self.ray), **environment(long_rows, LONGEST, MEAN_TOKENS)}
        self.failed: list[str] = []

    def job(self, name: str, vocabulary: int = VOCABULARY, method: str = "grpo", **rollout: int) -> Job:
        config = settings(self.folder, self.path[vocabulary], self.data, name, self.family)
        config = replace(
            config,
            method=method,
            run=replace(config.run, max_steps=10**6, seed=SEED),
            rollout=replace(
                config.rollout, **{"prompts_per_step": PROMPTS, "samples_per_prompt": GROUP} | rollout
            ),
            algorithm=replace(config.algorithm, samples_per_update=PROMPTS * GROUP // 4),
            checkpoint=replace(config.checkpoint, keep_last=2),
            evaluation=replace(config.evaluation, every_steps=0 if method == "sft" else EPOCH_STEPS // 2),
            sft=c.SFT(batch_size=PROMPTS, max_tokens=8000),
        )
        module = "trainer.loops.sft" if method == "sft" else "tests.soak.lengths"
        return Job(config, self.folder / name, self.env, module=module)

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            self.failed.append(text)
            print(f"FAILED: {text}", flush=True)

    def until(self, job: Job, seconds: float, least_steps: int) -> None:
        """Lets it run that long and that many steps, and has it end as a preempted one does."""
        end = time.time() + seconds
        job.until(
            lambda: time.time() > end and job.progress().get("step", 0) > least_steps, 10 * seconds, poll_s=1
        )
        assert job.process
        os.kill(job.process.pid, signal.SIGTERM)
        self.check(job.wait(600) == EXIT_PREEMPTED, f"{job.path}: it did not end after the notice")
        end = time.time() + GRACE_S
        while (left := [command(pid) for pid in job.pids()]) and time.time() < end:
            time.sleep(1)
        self.check(left == [], f"{job.path}: processes are left over: {left}")

    def long(self) -> dict[str, Any]:
        """Two epochs and more, one SIGKILL; what is held is compared from the first step after the resume
        on."""
        job, seconds = self.job("long"), self.seconds["long"]
        end = time.time() + seconds / 4
        job.start().until(lambda: time.time() > end and job.in_phase("update", 4), 10 * seconds)
        killed = job.progress()["step"]
        job.kill()
        folders = {"shm_mib": Path("/dev/shm"), "ray_mib": self.ray, "run_mib": job.run_dir}
        sampler = Sampler(lambda: by_command(job.pids()), folders)
        job.start().until(lambda: job.progress().get("step", 0) > killed, 10 * seconds)
        start = time.time()
        sampler.start()
        self.until(job, 3 / 4 * seconds, 2 * EPOCH_STEPS)
        sampler.stop()
        grown = sampler.growth(start, sampler.series["shm_mib"][-1][0])
        for name, held in grown.items():
            self.check(held["flat"], f"{name}: {held['second_quarter']} -> {held['last_quarter']}")
        return self.facts(job) | {"killed_in_step": killed, "held": grown}

    def short(self, name: str, **options: Any) -> dict[str, Any]:
        """A few steps of another kind."""
        job = self.job(name, **options)
        job.start()
        self.until(job, self.seconds[name], 2)
        return self.facts(job)

    def facts(self, job: Job) -> dict[str, Any]:
        """Steps, lengths, and whether engine and policy differ more where completions are long."""
        lines = [line for line in job.metrics() if line["step"]]
        out: dict[str, Any] = {"steps": len(lines), "tokens": sum(line["tokens/step"] for line in lines)}
        if job.config.method == "sft":
            return out | {"loss_first": lines[0]["sft/loss"], "loss_last": lines[-1]["sft/loss"]}
        gaps: dict[str, list[float]] = {"long": [], "short": []}
        for line in lines:
            kind = "long" if line["tokens/response_max"] == LONGEST else "short"
            gaps[kind].append(line["mismatch/logprob_abs_mean"])
            self.check(
                line["mismatch/logprob_abs_max"] < 1e-2, f"{job.path}: mismatch in step {line['step']}"
            )
        medians = {kind: statistics.median(found) for kind, found in gaps.items() if found}
        self.check(bool(gaps["long"]), f"{job.path}: no completion of {LONGEST} tokens")
        self.check(
            medians.get("long", 0) < 10 * medians.get("short", 1),
            f"{job.path}: the mismatch grows with length",
        )
        return out | {"steps_with_long_completions": len(gaps["long"]), "mismatch_mean": medians}

    def run(self, phase: str) -> dict[str, Any]:
        """What came of a phase, with what failed in it."""
        self.failed = []
        match phase:
            case "long":
                found = self.long()
            case "tensor_parallel":
                found = self.short(phase, tensor_parallel=2)
            case "vocabulary":
                found = self.short(phase, vocabulary=QWEN)
            case _:
                found = self.short(phase, method="sft")
        return found | {"failed": self.failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--layers", type=int, default=36, help="of 3B: 36; of 7B: 28")
    families = [family for family in VISION if dtype(family) == "fp32"]
    parser.add_argument("--family", choices=families, default="qwen2_5_vl", help="of the model")
    parser.add_argument(
        "--phases", nargs="+", choices=SHARES, default=list(SHARES), help="others in the file stay"
    )
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    about = {
        "revision": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "machine": {"cpus": os.cpu_count(), "processor": processor()},
        "minutes": options.minutes,
        "family": options.family,
        "layers": options.layers,
    }
    found = json.loads(options.json.read_text()) if options.json.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), options.minutes, options.layers, options.family)
        for phase in options.phases:
            found[phase] = about | soak.run(phase)
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(found[phase]["failed"] for phase in options.phases))


if __name__ == "__main__":
    sys.exit(main())
