"""The files of a pretrained model's weights: in a folder, or in the hub's cache, into which they are
downloaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.config import ConfigError, RunConfig
from trainer.system.backoff import Backoff
from trainer.system.errors import OF_THE_DISK, StorageError
from trainer.system.server_waits import Waiter, waiting_for

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
READ_FIRST = ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""Files of a tokenizer or processor, of which a model may lack some."""
PARALLEL_FILES = 4
TRIES = Backoff(attempts=3, first_wait_s=2.0, patience_s=1200.0)
"""Tries of a download, on top of huggingface_hub's own for 23 s: the hub may be away for 20 minutes. Ranks
wait longer for one that downloads for them (`policy.LOAD_S`)."""
MOST_HEADER_BYTES = 100 << 20
"""As safetensors itself limits it."""
SAMPLE_BYTES = 1 << 16
"""Read at each of three places of a weight file, to tell it from others."""
LONGEST_S = TRIES.patience_s + 300.0
"""Longest wait that is progress to the watchdog: the last try may take its time."""
NODE_VARIABLE = "SPOTRL_WEIGHTS_NODE"
"""A node's place among those that share the download of a model's files, as its launcher counts them."""


def from_hub(config: RunConfig) -> bool:
    """Whether the model is one of the hub, which may be asked."""
    return not Path(config.model.path).is_dir() and os.environ.get("HF_HUB_OFFLINE") != "1"


def model_file(config: RunConfig, name: str, cache_dir: str | Path | None = None) -> Path:
    """Path of one file of the model; of the hub's, downloaded where it is not in the cache, after another
    process that downloads it. A hub that is away is waited for by name. Raises FileNotFoundError where the
    model has no such file, ConfigError where the hub refuses it, StorageError where it does not answer, or
    the download breaks off, for as long as TRIES lasts."""
    folder = Path(config.model.path)
    if folder.is_dir():
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}")
        return folder / name
    from huggingface_hub import hf_hub_download

    revision, endpoint = config.model.revision or None, os.environ.get("HF_ENDPOINT") or None
    waiters: list[Waiter] = []

    def download() -> Path:
        try:
            got = hf_hub_download(
                config.model.path, name, revision=revision, endpoint=endpoint, cache_dir=cache_dir
            )
        except Exception as error:  # those of its HTTP client, of Xet and its own have no base in common
            raise _failure(config.model.path, name, error) from error
        return Path(str(got))

    with contextlib.ExitStack() as waits:

        def tell(error: Exception, _: int, __: float) -> None:
            if not waiters:  # a download that gets on is no wait
                where = f"the hub at {endpoint or 'huggingface.co'}"
                waiters.append(waits.enter_context(waiting_for("storing", where, LONGEST_S)))
            waiters[0].failed(str(error))

        # A full disk is no matter of the hub's.
        def may_pass(error: Exception) -> bool:
            errno = getattr(error.__cause__, "errno", None)
            return isinstance(error, StorageError) and errno not in OF_THE_DISK

        return TRIES.call(download, may_pass, tell)


def _failure(model: str, name: str, error: BaseException) -> Exception:
    """What `file` raises for an error of huggingface_hub."""
    from huggingface_hub import errors

    if isinstance(error, errors.RemoteEntryNotFoundError):
        return FileNotFoundError(f"{model} has no {name}")
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:  # the cause says why
        error = error.__cause__
    if isinstance(error, errors.OfflineModeIsEnabled):
        return FileNotFoundError(f"{model} has no {name} in the hub's cache, and the hub is switched off")
    message = f"{name} of {model}: {type(error).__name__}: {' '.join(str(error).split())}"
    status = getattr(getattr(error, "response", None), "status_code", 0)
    refused = 400 <= status < 500 and status not in (408, 429)  # a timeout, and too many requests
    if refused or isinstance(error, errors.HFValidationError | PermissionError):
        return ConfigError(message)
    return StorageError(message)


def model_folder(config: RunConfig) -> Path:
    """The local folder of the pretrained model; of a hub id what the hub's cache has, which may lack the
    weights."""
    if Path(config.model.path).is_dir():
        return Path(config.model.path)
    from huggingface_hub import hf_hub_download

    revision = config.model.revision or None
    return Path(
        str(hf_hub_download(config.model.path, "config.json", revision=revision, local_files_only=True))
    ).parent


def model_fingerprint(config: RunConfig) -> str:
    """What tells the model from another one: of a folder a hash of what it holds, of a hub's model its name.
    Of every weight file some bytes at its start, middle and end are read: that takes no time, and other
    weights of the same shapes differ there."""
    model = Path(config.model.path)
    if not model.is_dir():
        return f"hub:{config.model.path}@{config.model.revision}"
    digest = hashlib.sha256()
    described = json.loads((model / "config.json").read_text())
    for volatile in ("transformers_version", "_name_or_path"):
        described.pop(volatile, None)
    digest.update(json.dumps(described, sort_keys=True).encode())
    for path in sorted(model.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as weights:
            digest.update(f"{path.name} {size}\n".encode())
            for offset in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                weights.seek(offset)
                digest.update(weights.read(SAMPLE_BYTES))
    return f"files:{digest.hexdigest()}"


def parameters_in(path: Path) -> int:
    """Number of values in a safetensors file, from its header. Raises ConfigError for a file that is none."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MOST_HEADER_BYTES:
                raise ValueError("no header")
            header = json.loads(file.read(length))
        return sum(math.prod(about["shape"]) for name, about in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no safetensors file ({error!r}): download the model again") from error


def weight_files(config: RunConfig, cache_dir: str | Path | None = None) -> list[str]:
    """Names of the files that hold the model's weights. Raises as `file` does, and ConfigError for a broken
    index."""
    try:
        index = model_file(config, INDEX, cache_dir)
    except FileNotFoundError:
        return [WHOLE]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of weights ({error!r}): download the model again") from error


def fetch_files(config: RunConfig, names: Sequence[str], cache_dir: str | Path | None = None) -> list[Path]:
    """Paths of several files, some downloaded at a time. Raises as `file` does."""
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        return list(pool.map(lambda name: model_file(config, name, cache_dir), names))


def check_hub_answers(config: RunConfig) -> None:
    """After a failure that may be the hub's, or its answer: raises StorageError if it does not answer."""
    for name in READ_FIRST if from_hub(config) else ():
        with contextlib.suppress(FileNotFoundError, ConfigError):
            model_file(config, name)


def key_aliases(key: str) -> set[str]:
    """What a module may call a tensor of a file: older files of vision models leave out where the decoder
    lies."""
    return {key, f"model.{key}", key.replace("model.", "model.language_model.", 1)}
