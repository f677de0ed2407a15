"""vLLM's OpenAI-compatible server of the run's model: `python -m trainer.sampling.serve --config run.yaml`.

VLLM_API_KEY is what callers give. One line says when it answers; after `--hours` it ends, so that a machine
that was forgotten is given back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from trainer import config as configuration
from trainer.config import ConfigError, RunConfig
from trainer.config.run_folder import PROGRESS, SERVING, write_whole
from trainer.hardware.model_shapes import KNOWN, config_file
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK
from trainer.system.processes import end_with_parent, own_stamp
from trainer.system.web_request import send_request
from trainer.turns.environments import tools_of

READY_S = 3600.0
"""Until the server must answer: weights, graphs."""
END_S = 30.0
"""Until a server that was told to end is killed."""


def server_command(config: RunConfig, host: str, port: int) -> list[str]:
    """The server's command line, with the engine settings of training."""
    model, rollout = config.model, config.rollout
    options: dict[str, Any] = {
        "host": host,
        "port": port,
        "model": model.path,
        "served-model-name": config.run.name,
        "tensor-parallel-size": rollout.tensor_parallel,
        "dtype": "bfloat16" if model.dtype == "bf16" else "float32",
        "max-model-len": config.longest_sequence,
        "generation-config": "vllm",
    }
    if model.revision:
        options["revision"] = model.revision
    # Not `vllm serve`: it asks for the version of a package vllm, and the CPU's is called otherwise.
    words = [sys.executable, "-m", "trainer.sampling.api_server"]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    if rollout.eager or config.placement.device == "cpu":
        words.append("--enforce-eager")
    if config.placement.device == "cuda":
        words += ["--gpu-memory-utilization", str(rollout.gpu_memory_utilization)]
        # vLLM's own kernel for CPUs computes this wrongly.
        words += ["--enable-expert-parallel"] if rollout.expert_parallel else []
    else:
        words += ["--kv-cache-memory-bytes", str(int(rollout.kv_cache_gib * 2**30))]
    if has_vision(model.path):
        size = {"shortest_edge": model.min_pixels, "longest_edge": model.max_pixels}
        words += ["--mm-processor-kwargs", json.dumps({"size": size})]
    return words


def tool_words(config: RunConfig, folder: Path) -> list[str]:
    """What the command line of a model that calls tools has besides: vLLM's parser of its calls, and a chat
    template in `folder` where its own would offer them in other words than training."""
    if not tools_of(config.turns):
        return []
    # Loaded where they are needed: torch takes seconds.
    from trainer.data.processor import Prompter
    from trainer.data.tool_template import tool_template

    words = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    if template := tool_template(Prompter(config.model)):
        file = folder / "tools.jinja"
        file.write_text(template, encoding="utf-8")
        words += ["--chat-template", str(file)]
        if has_vision(config.model.path):
            # vLLM cannot tell it of this template, and would put images in front of the text.
            words += ["--chat-template-content-format", "openai"]
    return words


def has_vision(path: str) -> bool:
    """Whether a model's folder, or its name on the hub, is that of a vision-language model."""
    if file := config_file(path):
        return "vision_config" in json.loads(file.read_text())
    shape = KNOWN.get(path)
    return shape.vision is not None if shape else "-VL-" in path or "Qwen3.5-" in path


def serve(config: RunConfig, host: str, port: int, hours: float) -> int:
    """Runs the server to its end, a signal or the last hour. Returns the exit code. Raises ConfigError."""
    if not os.environ.get("VLLM_API_KEY"):
        raise ConfigError("VLLM_API_KEY is not set: whoever finds the port could use the machine")
    began = time.monotonic()
    scratch = tempfile.TemporaryDirectory(prefix="serve-")
    server = subprocess.Popen(
        server_command(config, host, port) + tool_words(config, Path(scratch.name)),
        start_new_session=True,
        # Without us, even after SIGKILL, vLLM would answer, and cost, without an end.
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
    )
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: signals.append(got))
    ready = False
    try:
        while server.poll() is None and not signals:
            after = time.monotonic() - began
            if not ready and server_answers(port):
                ready = True
                print(
                    f"serving {config.run.name} on port {port} after {after:.0f} s, for {hours:g} hours",
                    flush=True,
                )
                note_state(config, SERVING)
            if not ready and after > READY_S:
                print(f"error: the server does not answer after {after:.0f} s", file=sys.stderr, flush=True)
                return EXIT_ERROR
            if after > 3600 * hours:
                print(f"{hours:g} hours are over: serving ends (budget.max_hours)", flush=True)
                signals.append(signal.SIGTERM)
                return EXIT_OK
            time.sleep(0.5)
    finally:
        end_server(server)
        scratch.cleanup()
        note_state(config, "finished" if signals else "failed")
    if signals:
        return EXIT_INTERRUPTED if signal.SIGINT in signals else EXIT_OK
    print(f"error: vLLM ended with {server.returncode}: the lines above say why", file=sys.stderr, flush=True)
    return EXIT_ERROR


def note_state(config: RunConfig, status: str) -> None:
    """Writes what `status` reads on this machine."""
    path = Path(config.run.dir) / PROGRESS
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(own_stamp() | {"status": status, "phase": status}).encode())


def server_answers(port: int) -> bool:
    """Whether the server on this machine is ready for requests."""
    try:
        send_request(f"http://127.0.0.1:{port}/health", timeout_s=5.0)
    except OSError:
        return False
    return True


def end_server(server: subprocess.Popen[bytes]) -> None:
    """Ends the server and the processes of its engine."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(END_S)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.sampling.serve", description=__doc__)
    parser.add_argument("--config", required=True, help="resolved configuration (YAML)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--hours", type=float, default=8.0)
    args = parser.parse_args(argv)
    try:
        return serve(configuration.load(args.config), args.host, args.port, args.hours)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
