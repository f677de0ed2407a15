"""What a run has exported, as a model's folder: python -m trainer.checkpoint.weights SOURCE FOLDER BASE
[REVISION]

SOURCE is `hf` of a run, in a store or on this machine. An adapter is merged into BASE, a folder or a hub id.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainer.checkpoint.hf_export import QUANTIZATION, export_hf
from trainer.config import ConfigError, LoRA
from trainer.config.lora import ADAPTER
from trainer.data.prompt_form import FILE
from trainer.storage.storage import Storage
from trainer.storage.transfer import fetch_whole_folder
from trainer.system.exit_codes import exit_code

PREFIX = "base_model.model."


class AdapterFolder:
    """peft's folder of a run's adapter, read as `export_hf` reads a checkpoint."""

    def __init__(self, folder: Path):
        about = json.loads((folder / "adapter_config.json").read_text())
        quantized = (folder / QUANTIZATION).is_file()
        self.lora = LoRA(
            rank=about["r"], alpha=about["lora_alpha"], rslora=about["use_rslora"], qlora=quantized
        )
        self._file: Any = safe_open(folder / "adapter_model.safetensors", framework="pt")
        # Its keys leave out the adapter's name, which the module's parameters have.
        self._keys = {
            f"{key.removeprefix(PREFIX).removesuffix('.weight')}.{ADAPTER}.weight": key
            for key in self._file.keys()  # noqa: SIM118
        }

    def names(self) -> list[str]:
        return sorted(self._keys)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(self._keys[name]).get_shape())

    def read(self, kind: str, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of a factor in fp32, flattened."""
        assert kind == "master"
        return self._file.get_tensor(self._keys[name]).float().flatten()[start:stop]

    @property
    def dtype(self) -> str:
        """Name of the type that the run computed in: "bf16" or "fp32"."""
        first = self._file.get_slice(next(iter(self._keys.values())))
        return "fp32" if first.get_dtype() == "F32" else "bf16"


def make_model_folder(source: str, folder: Path, base: str, revision: str = "") -> Path:
    """The folder, whole or not at all. Raises ConfigError."""
    here, fetched = Path(source), folder.with_name(f".{folder.name}.fetched")
    if "://" in source:
        if not Storage(source).list():
            raise ConfigError(
                f"no exported weights at {source}: a run writes them at its end (checkpoint.export_hf)"
            )
        shutil.rmtree(fetched, ignore_errors=True)
        fetch_whole_folder(source, here := fetched)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if (here / "adapter_config.json").is_file():
        adapter = AdapterFolder(here)
        export_hf(adapter, folder, base_folder(base, revision), adapter.dtype)
        if (here / FILE).is_file():
            shutil.copy(here / FILE, folder / FILE)
        shutil.rmtree(fetched, ignore_errors=True)
    elif not (here / "config.json").is_file():
        raise ConfigError(
            f"{source} has no config.json and no adapter_config.json: give `hf` of a run that has ended"
        )
    elif here == fetched:
        fetched.rename(folder)
    else:
        folder.symlink_to(here.absolute())
    return folder


def base_folder(base: str, revision: str) -> Path:
    """The folder of the model that an adapter changes; downloaded if it is the hub's."""
    if Path(base).is_dir():
        return Path(base)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(base, revision=revision or None))


def run(arguments: list[str]) -> None:
    if len(arguments) not in (3, 4):
        raise ConfigError("usage: " + (__doc__ or "").splitlines()[0].partition(": ")[2])
    source, folder, base, *revision = arguments
    print(f"weights: {make_model_folder(source, Path(folder), base, *revision)}")


if __name__ == "__main__":
    sys.exit(exit_code(lambda: run(sys.argv[1:])))
