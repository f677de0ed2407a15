"""A transfer from every node to the next through Ray's object store.

`python -m trainer.node.launch.transfer_check ADDRESS...`, the head first.

A Ray that picked the wrong network shows every node alive, and the first task that crosses nodes then hangs.
"""

from __future__ import annotations

import logging
import sys
import time

from trainer.node.launch import ray_client
from trainer.system.errors import RayError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_RAY

BYTES = 16 << 20
DEADLINE_S = 90.0


def main(addresses: list[str]) -> int:
    """Returns 1 after naming the nodes or the pairs that did not work, EXIT_CONFIG where none did, EXIT_RAY
    if Ray cannot be joined."""
    import ray

    try:
        ray_client.connect_to_ray(logging_level=logging.ERROR, log_to_driver=False)
    except RayError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_RAY
    deadline = time.monotonic() + DEADLINE_S
    while True:
        alive = {n["NodeManagerAddress"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}
        missing = [a for a in addresses if a not in alive]
        if not missing:
            break
        if time.monotonic() > deadline:
            seen = ", ".join(sorted(alive))
            print(f"error: Ray does not see {', '.join(missing)}; it sees {seen}", file=sys.stderr)
            return 1 if len(missing) < len(addresses) - 1 else EXIT_CONFIG
        time.sleep(0.2)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def on(address: str):
        return NodeAffinitySchedulingStrategy(alive[address], soft=False)

    @ray.remote(num_cpus=0)
    def give() -> bytes:
        return bytes(range(256)) * (BYTES // 256)

    @ray.remote(num_cpus=0)
    def take(block: bytes) -> tuple[int, bool]:
        return len(block), block[:256] == bytes(range(256))

    pairs = list(zip(addresses, addresses[1:] + addresses[:1], strict=True))
    began = time.monotonic()
    results = []
    for source, to in pairs:
        block = give.options(scheduling_strategy=on(source)).remote()
        results.append(take.options(scheduling_strategy=on(to)).remote(block))
    ready, late = ray.wait(results, num_returns=len(results), timeout=max(1.0, deadline - time.monotonic()))
    lost = 0
    for pair, result in zip(pairs, results, strict=True):
        if result in late or ray.get(result) != (BYTES, True):
            lost += 1
            remedy = "open all ports between the nodes, or check the network interface"
            failure = f"{pair[0]} could not send {BYTES >> 20} MiB to {pair[1]} through Ray"
            print(f"error: {failure}: {remedy}", file=sys.stderr)
    if not lost:
        took_s = time.monotonic() - began
        print(f"every node sent {BYTES >> 20} MiB to the next in {took_s:.1f} s", flush=True)
    return EXIT_CONFIG if lost == len(pairs) else int(bool(lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
