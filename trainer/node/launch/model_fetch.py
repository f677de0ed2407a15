"""Downloads a hub model's weights while Ray starts: `python -m trainer.node.launch.model_fetch --config
run.yaml`, per node.

The ranks find them in the hub's cache, or wait for the download under way. What fails here is told by the
ranks, who ask for the same files. Under ZeRO-3 a node downloads its share of the files, which its ranks pass
on to the others'. The policy's are not downloaded for a resume whose checkpoint holds every weight; a
teacher's always are.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from trainer import config as configuration
from trainer.checkpoint.attempt import committed_step
from trainer.config import ConfigError, RunConfig, by_model, checkpoint_suffices, nodes_share_weights
from trainer.storage import hub
from trainer.system.errors import StorageError


def needs_base_weights(config: RunConfig) -> bool:
    """Whether this start reads base weights. True where the store cannot tell."""
    if not checkpoint_suffices(config) or config.checkpoint.resume == "never":
        return True
    try:
        return not committed_step(config)
    except (ConfigError, StorageError):
        return True


def fetch_weights(
    config: RunConfig, node: int = 0, nodes: int = 1, cache_dir: str | Path | None = None
) -> list[Path]:
    """Downloads what this node reads of the weights, into the hub's cache."""
    names = hub.weight_files(config, cache_dir)
    return hub.fetch_files(config, names[node::nodes] if nodes_share_weights(config) else names, cache_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--node", type=int, default=0, help="this node's place")
    parser.add_argument("--nodes", type=int, default=1, help="that share the download")
    arguments = parser.parse_args()
    config = configuration.load(arguments.config)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # before the library is imported
    for role, fetched in zip(("model", "teacher"), by_model(config), strict=False):
        if not hub.from_hub(fetched):
            continue
        if role == "model" and not needs_base_weights(config):
            print("model: the checkpoint holds every weight; none is downloaded", flush=True)
            continue
        began = time.monotonic()
        try:
            files = fetch_weights(fetched, arguments.node, arguments.nodes)
        except Exception as error:
            print(f"{role}: not downloaded ahead ({str(error).splitlines()[0]})", flush=True)
            continue
        gib = sum(path.stat().st_size for path in files) / 2**30
        size = f"{gib:.2f} GiB of weights (files: {len(files)})"
        print(f"{role}: {size} are here after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
