"""A checkpoint's weights for elsewhere: a Hugging Face model folder or a peft adapter, streamed in small
pieces."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainer.checkpoint.format import raw_bytes, safetensors_header, write_file
from trainer.checkpoint.shard_reader import FoundCheckpoint, ShardReader
from trainer.config import ConfigError, LoRA, RunConfig
from trainer.config.lora import ADAPTER, TEXT
from trainer.hardware import architectures
from trainer.storage import expert_files, hub

READ_ELEMENTS = 16 << 20
"""Elements of a parameter that an export holds at a time: 64 MiB of fp32."""
EXPORT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Sources = dict[str, tuple[tuple[int, ...], Callable[[int, int], torch.Tensor]]]
"""name -> (shape, read(start, stop) of the flattened tensor)."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json", ".*")
"""What an export does not take over from the model's own folder."""
QUANTIZATION = "quantization.json"
"""In an adapter's folder: arguments of transformers' BitsAndBytesConfig for the base that it was trained
on."""


def export_hf(
    source: Any, out_dir: str | Path, model_dir: str | Path, dtype: str = "bf16", *, file_bytes: int = 5 << 30
) -> Path:
    """Writes the master weights as a Hugging Face model folder, streamed: no rank ever holds the model.

    source: a checkpoint, its folder, or a run's adapter (`AdapterFolder`). model_dir gives config, tokenizer,
    processor, chat template, and the weights that were frozen; adapters are merged into these in fp32 and
    rounded once, those of a base in 4 bits into what these stood for in training. dtype: what is written,
    "bf16" or "fp32". The folder appears whole or not at all. Raises ConfigError if model_dir is no model's
    folder, CorruptCheckpoint for a damaged checkpoint.
    """
    reader: Any = ShardReader(source) if isinstance(source, FoundCheckpoint | str | Path) else source
    out = Path(out_dir)
    model = Path(model_dir)
    if not (model / "config.json").is_file():
        raise ConfigError(f"{model} has no config.json: give the folder of the model that was trained")
    kind = EXPORT_DTYPES[dtype]
    layout = _experts(model)

    sources: Sources = {}
    for name in reader.names():
        if ".lora_" not in name:
            read = partial(reader.read, "master", name)
            for key, shape, part in expert_files.written_tensors(name, reader.shape(name), read, layout):
                sources[key] = (shape, part)
    sources |= _frozen(model, reader, layout)

    files: list[Sources] = [{}]
    filled = 0
    total = 0
    for name, (shape, read) in sources.items():
        size = torch.Size(shape).numel() * kind.itemsize
        if filled and filled + size > file_bytes:
            files.append({})
            filled = 0
        filled += size
        total += size
        files[-1][name] = (shape, read)

    with _whole(out) as scratch:
        _copy_rest(model, scratch)
        if len(files) == 1:
            write_file(scratch / "model.safetensors", _weights(files[0], kind))
            return out

        weight_map = {}
        for number, tensors in enumerate(files, 1):
            file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            write_file(scratch / file_name, _weights(tensors, kind))
            weight_map |= dict.fromkeys(tensors, file_name)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (scratch / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return out


def export_adapter(source: FoundCheckpoint | str | Path, out_dir: str | Path, config: RunConfig) -> Path:
    """Writes the adapter of a LoRA run as peft's folder, which `PeftModel.from_pretrained` and vLLM load, and
    transformers' `from_pretrained` too where the base model is found under config.model.path. The folder
    appears whole or not at all. Raises ConfigError if the checkpoint has no adapter."""
    reader = ShardReader(source)
    out = Path(out_dir)
    sources: Sources = {}
    for name in reader.names():
        if ".lora_" in name:
            key = f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"
            sources[key] = (reader.shape(name), partial(reader.read, "master", name))
    if not sources:
        raise ConfigError(
            f"the checkpoint of step {reader.source.step} has no adapter: all weights were trained"
        )

    about = {
        "peft_type": "LORA",
        "inference_mode": True,
        "base_model_name_or_path": config.model.path,
        "revision": config.model.revision or None,
    }
    about |= config.lora.peft()
    dtype = config.model.dtype
    with _whole(out) as scratch:
        scratch.mkdir(parents=True)
        write_file(scratch / "adapter_model.safetensors", _weights(sources, EXPORT_DTYPES[dtype]))
        (scratch / "adapter_config.json").write_text(json.dumps(about, indent=2))
        if config.lora.qlora:
            quantization = json.dumps(config.lora.quantization(dtype), indent=2)
            (scratch / QUANTIZATION).write_text(quantization)
    return out


@contextlib.contextmanager
def _whole(out: Path) -> Generator[Path]:
    """The name of a folder to make, which then takes the place of `out`; after an error `out` is as it
    was."""
    scratch = out.with_name(f".{out.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        yield scratch
        shutil.rmtree(out, ignore_errors=True)
        scratch.replace(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # what is half written would keep a full disk full


def _copy_rest(model: Path, out: Path) -> None:
    """Copies everything but the weights of a model's folder. Raises the first OSError as it is, which
    shutil.copytree does not."""
    out.mkdir(parents=True)
    ignored = shutil.ignore_patterns(*WEIGHTS)
    for folder, folders, names in os.walk(model, followlinks=True):
        left_out = ignored(folder, [*folders, *names])
        folders[:] = [name for name in folders if name not in left_out]
        copy = out / Path(folder).relative_to(model)
        for name in folders:
            (copy / name).mkdir()
        for name in names:
            if name not in left_out:
                shutil.copy2(Path(folder) / name, copy / name)


def _experts(model: Path) -> expert_files.Layout:
    """How the files of a model hold its experts."""
    kind = json.loads((model / "config.json").read_text()).get("model_type")
    family = architectures.FAMILIES.get(kind)
    return family.experts if family else ""


def _frozen(model: Path, reader: Any, layout: expert_files.Layout) -> Sources:
    """The base model's tensors that were not trained, with their adapters. Older files name a parameter
    otherwise than the module does."""
    sources: Sources = {}
    trained = set(reader.names())
    adapted = {}
    """Name of a weight that has an adapter -> what the names of its factors begin with."""
    for name in trained:
        if ".lora_A." in name:
            stem = name.partition("lora_A.")[0]
            adapted[f"{stem}weight"] = stem
    lora, dtype, freezes = _origin(reader)
    tied = json.loads((model / "config.json").read_text()).get("tie_word_embeddings", False)

    def known(name: str) -> bool:
        parameter = expert_files.tensor_place(name, layout).name
        return bool(hub.key_aliases(parameter) & trained) or (tied and name == "lm_head.weight")

    # Where every weight was trained, a name that is not known belongs to no module.
    if lora.rank or freezes:
        index = model / hub.INDEX
        weight_map = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        for name, file_name in weight_map.items():
            if not known(name) and not (model / file_name).is_file():
                raise ConfigError(f"{model} has no {file_name}, which holds {name}: download the whole model")
    for path in sorted(model.glob("*.safetensors")):
        file = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118
            if known(name):
                continue
            shape = tuple(file.get_slice(name).get_shape())
            read = partial(_read_tensor, file, name)
            aliases = hub.key_aliases(name) & adapted.keys()
            if not aliases:
                sources[name] = (shape, read)
                continue

            stem = adapted.pop(aliases.pop())
            if lora.qlora and re.fullmatch(TEXT, stem.removesuffix(".")):
                read = partial(_read_nf4, read, shape, EXPORT_DTYPES[dtype])
            sources[name] = (shape, partial(_read_merged, read, reader, lora, stem, shape[-1]))
    if adapted:
        raise ConfigError(
            f"{model} has no {min(adapted)}, which the adapter changes: give the model it was trained on"
        )
    return sources


def _origin(reader: Any) -> tuple[LoRA, str, bool]:
    """What wrote a checkpoint or an adapter: its adapter, what it computed in ("bf16" or "fp32"), and whether
    it froze the vision tower whole."""
    if not isinstance(reader, ShardReader):
        return reader.lora, reader.dtype, False
    settings = reader.source.manifest["config"]
    lora = {key[5:]: value for key, value in settings.items() if key.startswith("lora.")}
    return LoRA(**lora), settings["model.dtype"], bool(settings.get("model.freeze_vision"))


def _read_merged(
    read: Callable[[int, int], torch.Tensor],
    reader: Any,
    lora: LoRA,
    stem: str,
    inputs: int,
    start: int,
    stop: int,
) -> torch.Tensor:
    """Elements [start, stop) of W + scale B A, flattened; of B only the rows that they lie in."""
    first = start // inputs
    last = -(-stop // inputs)
    a = reader.read("master", f"{stem}lora_A.{ADAPTER}.weight").view(lora.rank, inputs)
    rows = reader.read("master", f"{stem}lora_B.{ADAPTER}.weight", first * lora.rank, last * lora.rank)
    b = rows.view(-1, lora.rank)
    delta = (b @ a).reshape(-1)[start - first * inputs : stop - first * inputs]
    return read(start, stop).float().add(delta, alpha=lora.scale)


def _read_nf4(
    read: Callable[[int, int], torch.Tensor], shape: Any, dtype: torch.dtype, start: int, stop: int
) -> Any:
    """Elements [start, stop) of what a weight's 4 bits stand for in a run that computes in dtype,
    flattened."""
    return _nf4(read, shape, dtype).flatten()[start:stop]


@functools.lru_cache(maxsize=1)  # a matrix is read in pieces, and its scales are of the whole
def _nf4(
    read: Callable[[int, int], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = read(0, math.prod(shape)).to(dtype).view(shape)
    return dequantize_4bit(*quantize_4bit(weight, compress_statistics=True, quant_type="nf4"))


def _read_tensor(file: Any, name: str, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a tensor, flattened; only the rows that they lie in are read."""
    rows = file.get_slice(name)
    shape = rows.get_shape()
    if not shape:  # a single number
        return file.get_tensor(name).reshape(1)[start:stop]
    row = math.prod(shape[1:])
    first = start // row
    return rows[first : -(-stop // row)].reshape(-1)[start - first * row : stop - first * row]


def _weights(sources: Sources, dtype: torch.dtype) -> Iterator[Any]:
    entries = {name: (dtype, shape) for name, (shape, _) in sources.items()}
    yield safetensors_header(entries, {"format": "pt"})
    for shape, read in sources.values():
        total = torch.Size(shape).numel()
        for start in range(0, total, READ_ELEMENTS):
            yield raw_bytes(read(start, min(total, start + READ_ELEMENTS)).to(dtype))
