"""PyTorch on the device: memory, graphs, waits and their callers. Prints JSON."""

from __future__ import annotations

import json

import torch

from tests.nullgpu import counts


def error_of(body) -> str:
    try:
        body()
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def wait_while_capturing() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(4, device="cuda").sum().item()


def main() -> None:
    said = {
        "devices": torch.cuda.device_count(),
        "name": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
    }
    with counts.phase("train"):
        layer = torch.nn.Linear(64, 64, device="cuda")
        layer(torch.randn(4, 64, device="cuda")).sum().backward()
        said["gradient"] = list(layer.weight.grad.shape)
        said["launches"] = counts.count("launch", "train")
        said["waits"] = counts.count("wait", "train")
    with counts.phase("wait"):
        layer.weight.sum().item()
    numbers = torch.arange(1000)
    said["copied"] = bool((numbers.cuda().cpu() == numbers).all())

    before = counts.library().nullgpu_used_bytes(0)
    gib = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    said["gib"] = (counts.library().nullgpu_used_bytes(0) - before) / 2**30
    del gib
    said["too much"] = error_of(lambda: torch.empty(90 << 30, dtype=torch.uint8, device="cuda"))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.weight * 2
    graph.replay()
    said["wait in a graph"] = error_of(wait_while_capturing)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
