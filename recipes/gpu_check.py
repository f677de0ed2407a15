"""What a rented card is asked first, in the order that teaches most: `python -m recipes.gpu_check --config
RUN`.

`launch.py up gpu-check` runs it through the node launcher, on the head. Each check is a process of its own of
a few minutes and is useful alone; what it finds is written, and sent to the bucket, before the next one
begins.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.plan import memory, step_seconds
from recipes.recipe.resolved import GIB
from trainer import config as configuration
from trainer.config import RunConfig
from trainer.config.run_folder import GPU_CHECK, GPU_CHECK_PAGE, METRICS, read_lines, write_whole
from trainer.config.run_store import RunStore
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK

MOST_S = 240.0
"""A check that hangs must not eat the half hour; most take a minute or two."""
TAIL = 40
"""Lines of a failed check that are shown; all of them are in its log."""
STACKS_S = 15.0
"""So long before a check is ended its threads' stacks go into its log."""
DEMO = "demo"
"""The check that is a run: the configuration's own."""
MODELS = "models"
"""Folder of what checks build once and share: weights of 3B's shape."""
LEARNED = 0.15
"""Held-out accuracy that the demo gains at least in its 60 steps (0.45 and more on CPUs)."""


@dataclass(frozen=True)
class Check:
    """One process of a few minutes."""

    name: str
    what: str
    """What it shows, in a few words."""
    cases: str = ""
    """Expression of pytest over tests/gpu."""
    env: dict[str, str] = field(default_factory=dict)
    gpus: int = 1
    """As many does it need."""
    limit_s: float = MOST_S
    """It is ended after so long."""


BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
"""A wrong address then shows at the kernel that used it, not at the next read."""
OTHER_MODES = "qwen3 and not families or other_sleep or host_memory or moving"
MEMORY = "process_before or communicators or page_locked"
OPTIONS = "adapters or four_bits or with_compiled or resume"
CHECKS = (
    Check("graphs", "engine and policy agree with CUDA graphs", "test_parity_in_bf16 and False"),
    Check("three-billion", "steps of 3B, their phases and memory", "test_three_billion", limit_s=420),
    Check("sleep", "memory given back, and no garbage behind it", "sleep_gives and not qwen", BLOCKING),
    Check("gradients", "packed gradients against padded ones", "packed_gradients and bf16"),
    Check("recurrence", "Qwen3.5's kernel against PyTorch, with gradients", "gated_delta and 32"),
    Check(DEMO, "60 steps of the demo, on all GPUs of all nodes", limit_s=420),
    Check("attention", "the packed kernel against plain attention, with gradients", "variable_length"),
    Check("experts", "grouped products with empty groups; a mixture's parity", "experts"),
    Check("parity", "engine and policy agree in bf16, eager", "test_parity_in_bf16 and True"),
    Check("options", "adapters, 4 bits, compiled kernels, resume", OPTIONS),
    Check("families", "packed gradients of all families, compiled kernels too", "of_families", limit_s=420),
    Check("policy", "3B without an engine: updates, states to the host and back, a save", "policy_alone"),
    Check("process", "memory before the model, of NCCL, page-locked", MEMORY),
    Check("decode", "seconds of a decode step, and the engine's workspace", "decode_step"),
    Check("rates", "3B: share of the peak, generating against bare vLLM, sync", "test_rates_of", limit_s=420),
    Check("modes", "Qwen3-VL, Qwen3.5, other sleep levels, states in host memory", OTHER_MODES, limit_s=420),
    Check("sizes", "Qwen3.5's kernel at its other sizes", "gated_delta and not 32"),
    Check("several", "tensor parallel, two engines", "tensor_parallel or two_engines", gpus=2, limit_s=420),
)  # fmt: skip
"""In the order that teaches most: the first six are a card of half an hour."""


CONSTANTS = {
    "CONTEXT": (memory, GIB),
    "COMMUNICATORS": (memory, GIB),
    "ENGINE_WORKSPACE": (memory, GIB),
    "ENGINE_ASLEEP": (memory, GIB),
    "MATMUL": (step_seconds, 1),
    "DECODE": (step_seconds, 1),
    "ENGINE_STEP_S": (step_seconds, 1),
    "SEQUENCE_S": (step_seconds, 1),
}
"""Assumptions of the plan that a card can answer: where each is, and its unit."""
OFF = 0.1
"""A constant that differs by more than this share of itself is worth another value."""


def constants_off(figures: dict[str, Any]) -> list[str]:
    """The constants that a card showed otherwise than the plan has them. figures: by what was measured, each
    with `value`, and `constant` where it is one."""
    lines = []
    for figure in figures.values():
        name = figure.get("constant", "")
        if name not in CONSTANTS:
            continue
        module, scale = CONSTANTS[name]
        assumed = getattr(module, name) / scale
        if abs(figure["value"] - assumed) > OFF * assumed:
            lines.append(f"{name}: {assumed:.3g} assumed, {figure['value']:.3g} measured {figure['unit']}")
    return lines


def check_page(check: dict[str, Any]) -> str:
    """What a check found, to be read: outcomes, constants of the plan that are off, all figures."""
    rows = [f"| {c['name']} | {c['outcome']} | {c['seconds']} s | {c['what']} |" for c in check["checks"]]
    machine = (
        f"{check['nodes']} x {check['gpus_per_node'] or 'no'} GPU, {check.get('device', 'no figure yet')}"
    )
    text = ["# What a card was asked", "", f"{machine}, torch {check.get('torch', 'unknown')}", ""]
    text += ["| check | outcome | took | shows |", "|---|---|---|---|", *rows, ""]
    off = [] if "CPU" in check.get("device", "") else constants_off(check["figures"])
    if off:
        text += ["## Constants of the plan that are off", "", *(f"- {line}" for line in off), ""]
    text += ["## Figures", "", "| what | measured | planned |", "|---|---|---|"]
    for name, figure in check["figures"].items():
        planned = f"{figure['planned']:g}" if "planned" in figure else ""
        escaped = name.replace("|", "\\|")
        text.append(f"| {escaped} | {figure['value']:g} {figure['unit']} | {planned} |")
    return "\n".join(text) + "\n"


class Runner:
    """Runs checks one after another, and keeps what they find in a file of the run's folder and of its
    bucket."""

    def __init__(self, config: RunConfig, config_path: Path, hours: float) -> None:
        self.config, self.config_path = config, config_path
        self.folder = Path(config.run.dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / GPU_CHECK
        self.store = RunStore.of(config)
        self.deadline = time.monotonic() + hours * 3600
        self.ended: list[dict[str, Any]] = []
        """How each check ended."""

    def run(self, checks: Sequence[Check]) -> int:
        """Runs them; returns the exit code."""
        for number, check in enumerate(checks, start=1):
            left = self.deadline - time.monotonic()
            print(f"[{number}/{len(checks)}] {check.name}: {check.what}", flush=True)
            started = time.monotonic()
            if left < 30:
                outcome = "not begun: the hours are over"
            elif check.name == DEMO:
                outcome = self.demo(min(left, check.limit_s))
            else:
                outcome = self.cases(check, min(left, check.limit_s))
            took = time.monotonic() - started
            print(f"[{number}/{len(checks)}] {check.name}: {outcome}, {took:.0f} s", flush=True)
            self.end(check, outcome, took)
        shutil.rmtree(self.folder / MODELS, ignore_errors=True)
        print((self.folder / GPU_CHECK_PAGE).read_text(), flush=True)
        good = all(check["outcome"] in ("passed", "skipped") for check in self.ended)
        return EXIT_OK if good else EXIT_ERROR

    def found(self) -> dict[str, Any]:
        """All that is known so far: the checks write figures themselves (tests/gpu/conftest.py)."""
        return json.loads(self.path.read_text()) if self.path.exists() else {"figures": {}}

    def write(self, report: dict[str, Any]) -> None:
        """Keeps what is known."""
        write_whole(self.path, f"{json.dumps(report, indent=1)}\n".encode())

    def end(self, check: Check, outcome: str, seconds: float) -> None:
        """Adds how a check ended, writes the page, and copies both into the bucket, where there is one. A
        store that fails is named, and no more."""
        ended = {"name": check.name, "what": check.what, "outcome": outcome, "seconds": round(seconds)}
        self.ended.append(ended)
        place = self.config.placement
        shape = {"nodes": place.nodes, "gpus_per_node": place.workers_per_node}
        self.write(self.found() | shape | {"checks": self.ended})
        write_whole(self.folder / GPU_CHECK_PAGE, check_page(self.found()).encode())
        bucket = self.store.root if self.store else ""
        for name in (GPU_CHECK, GPU_CHECK_PAGE) if bucket else ():
            copy = [sys.executable, "-m", "trainer.storage", "cp", str(self.folder / name), bucket]
            done = subprocess.run(copy, capture_output=True, text=True)
            if done.returncode:
                print(f"warning: {name} did not reach the bucket: {done.stderr.strip()}", flush=True)

    def cases(self, check: Check, seconds: float) -> str:
        """A process of pytest, apart from the launch that this is part of: it may start its own Ray. Returns
        the outcome in a word."""
        own = ("RAY_", "SPOTRL_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        env |= check.env | {"PYTHONUNBUFFERED": "1", "SPOTRL_GPU_JSON": str(self.path)}
        env["SPOTRL_GPU_MODELS"] = str(self.folder / MODELS)
        # Without capture: a check that is ended late leaves what it printed.
        command = [sys.executable, "-m", "pytest", "-v", "-s", "-p", "no:cacheprovider"]
        command += ["-o", f"faulthandler_timeout={max(1.0, seconds - STACKS_S):.0f}"]
        scratch = (self.folder / f"scratch-{check.name}").absolute()
        command += [f"--basetemp={scratch}", "tests/gpu", "-k", check.cases]
        code, printed = self.process(check.name, command, env, seconds)
        if code is None:  # what its ranks wrote
            for log in sorted(scratch.glob("**/*.log")):
                print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-TAIL:], sep="\n")
        shutil.rmtree(scratch, ignore_errors=True)  # a checkpoint of 3B is 36 GB
        if code != 0:
            return "too slow" if code is None else "failed"
        return "passed" if re.search(r"\d+ passed", printed) else "skipped"

    def demo(self, seconds: float) -> str:
        """The configuration's own run, as a part of the launch; how it learned and how fast."""
        command = [sys.executable, "-m", "trainer.loops.grpo", "--config", str(self.config_path)]
        code, _ = self.process(DEMO, command, dict(os.environ), seconds)
        if code is None:
            return "too slow"
        lines = read_lines(self.folder / METRICS)
        scores = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
        if code or not scores:
            return "failed"
        report = self.found()
        for title, value, unit in (
            ("held-out accuracy before", scores[0], ""),
            ("held-out accuracy after", scores[-1], ""),
            ("last step", lines[-1]["time/step_s"], "s"),
        ):
            report["figures"][f"demo: {title}"] = {"value": float(f"{value:.4g}"), "unit": unit}
        self.write(report)
        return "passed" if scores[-1] > scores[0] + LEARNED else "failed"

    def process(
        self, name: str, command: list[str], env: dict[str, str], seconds: float
    ) -> tuple[int | None, str]:
        """Runs one; (exit code, what it printed). None: it was late and has been ended, with all that it had
        started."""
        log = self.folder / f"gpu-check-{name}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_with_children(process)
        printed = log.read_text(errors="replace")
        if code != 0:
            print(*printed.splitlines()[-TAIL:], sep="\n", flush=True)
        return code, printed


def end_with_children(process: subprocess.Popen) -> None:
    """Ends a process that is still there, and whatever it had started, whichever session that is in."""
    if process.poll() is not None:
        return
    import psutil

    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=10)


def chosen_checks(names: str, config: RunConfig) -> list[Check]:
    """The checks to run: those named, or all that these machines allow. Several nodes share the demo alone:
    the others are of one node."""
    known = [check.name for check in CHECKS]
    wanted = names.split(",") if names else known
    for name in wanted:
        if name not in known:
            raise configuration.ConfigError(f"no check is called {name}: choose among {', '.join(known)}")

    place = config.placement
    chosen = []
    for check in CHECKS:
        enough_gpus = check.gpus <= place.workers_per_node
        of_several_nodes = place.nodes == 1 or check.name == DEMO
        if check.name in wanted and of_several_nodes and enough_gpus:
            chosen.append(check)
    return chosen


def main(argv: list[str] | None = None) -> int:
    """Runs the checks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m recipes.gpu_check", description=__doc__)
    parser.add_argument("--config", required=True, help="configuration of the check's own run (YAML)")
    parser.add_argument("--only", default="", metavar="NAME,...", help="only these checks")
    parser.add_argument("--hours", type=float, default=1.25, help="it ends after as many (%(default)g)")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        config = configuration.load(arguments.config)
        checks = chosen_checks(arguments.only, config)
        return Runner(config, Path(arguments.config), arguments.hours).run(checks)
    except configuration.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
