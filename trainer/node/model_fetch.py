"""Downloads a hub model's weights while Ray starts: `python -m trainer.node.model_fetch --config run.yaml`, per node.

The ranks find them in the hub's cache, or wait for the download under way. What fails here is told by the ranks, who
ask for the same files. Nothing is downloaded for a resume whose checkpoint holds every weight.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer import config as configuration
from trainer.checkpoint.layout import newest_step, remote_url
from trainer.config import ConfigError, RunConfig, checkpoint_suffices
from trainer.storage.storage import Storage, StorageError

PARALLEL_FILES = 4
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


def from_hub(config: RunConfig) -> bool:
    """Whether the model is one of the hub, which may be asked."""
    return not Path(config.model.path).is_dir() and os.environ.get("HF_HUB_OFFLINE") != "1"


def needed(config: RunConfig) -> bool:
    """Whether this start reads base weights. True where the store cannot tell."""
    if not checkpoint_suffices(config) or config.checkpoint.resume == "never":
        return True
    try:
        remote = remote_url(config)
        return not newest_step(config, Storage(remote) if remote else None)
    except (ConfigError, StorageError):
        return True


def fetch(config: RunConfig, cache_dir: str | Path | None = None) -> Path:
    """Downloads the weight files that `from_pretrained` reads, into the hub's cache. Returns their folder."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    def get(name: str) -> Path:
        revision, endpoint = config.model.revision or None, os.environ.get("HF_ENDPOINT") or None
        got = hf_hub_download(config.model.path, name, revision=revision, endpoint=endpoint, cache_dir=cache_dir)
        return Path(str(got))

    names = {WHOLE}
    with contextlib.suppress(EntryNotFoundError):
        names = set(json.loads(get(INDEX).read_text())["weight_map"].values())
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        return list(pool.map(get, sorted(names)))[0].parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    config = configuration.load(parser.parse_args().config)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # before the library is imported
    if not needed(config):
        print("model: the checkpoint holds every weight; none is downloaded", flush=True)
        return
    began = time.monotonic()
    try:
        folder = fetch(config)
    except Exception as error:
        print(f"model: not downloaded ahead ({str(error).splitlines()[0]})", flush=True)
        return
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    print(f"model: {size / 2**30:.2f} GiB of weights are here after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
