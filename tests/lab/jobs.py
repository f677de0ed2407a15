"""A Ray job in place of training: where its tasks ran, seconds of work, notices obeyed, a given exit code."""

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

import ray


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def where() -> tuple[str, str, str]:
    time.sleep(0.5)
    return socket.gethostname(), os.environ.get("NCCL_SOCKET_IFNAME", ""), os.environ["VLLM_HOST_IP"]


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def hold(seconds: float) -> int:
    time.sleep(seconds)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--crash", action="store_true")
    a = parser.parse_args()
    ray.init(logging_level="ERROR")
    nodes = len(ray.nodes())
    codes: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: codes.append(33))
    signal.signal(signal.SIGINT, lambda *_: codes.append(130))
    for place in sorted(set(ray.get([where.remote() for _ in range(2 * nodes)]))):
        print("ran on", *place, flush=True)
    busy = [hold.remote(a.seconds) for _ in range(nodes)]
    print("working", flush=True)
    if a.crash:
        os.kill(os.getpid(), signal.SIGKILL)
    flag = Path(os.environ["SPOTRL_NOTICE_FILE"])
    end = time.monotonic() + a.seconds
    while time.monotonic() < end and not codes:
        if flag.exists():
            print("notice:", flag.read_text(), flush=True)
            codes.append(33)
        ray.wait(busy, timeout=0.2)
    return codes[0] if codes else a.code


if __name__ == "__main__":
    sys.exit(main())
