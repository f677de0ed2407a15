"""Which models are trained. Any other is refused by name: it may load and train and still be computed
wrongly.

A row of `SUPPORTED` takes a case in tests/weights/test_parity.py (policy and engine are the same model) and
one in tests/learning/test_packing.py (packed gradients are those of the padded computation).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

SUPPORTED = {
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen2": "Qwen2 and Qwen2.5 (text)",
    "qwen3": "Qwen3 (text)",
    "llama": "Llama (text)",
}
"""By `model_type` of config.json."""
_GATED_DELTA = (
    "its gated delta-net layers carry their state from one packed sample into the next, and parity with the"
    " engine is not shown"
)
MISSING = {
    "qwen3_5": _GATED_DELTA,
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5_moe": f"{_GATED_DELTA}, and experts have no parity test",
    "qwen3_next": f"{_GATED_DELTA}, and experts have no parity test",
    "qwen3_vl_moe": "its experts have no parity test",
    "qwen3_moe": "its experts have no parity test",
    "qwen2_vl": "its vision tower has no parity test",
    "qwen2_5_omni": "its audio tower is not fed, and there is no parity test",
}
"""What is known to be lacking; any other architecture has just not been tested."""
CONVERT = (
    "make a model folder of it with `python -m examples.pretrained.smollm2 --gguf FILE.gguf --out FOLDER`,"
    " and set model.path to the folder"
)
"""How a GGUF file becomes a model that is trained."""


def check(path: str, config: dict[str, Any]) -> None:
    """Raises ConfigError if the architecture in a Hugging Face config.json is not among `SUPPORTED`."""
    kind = str(config.get("model_type", ""))
    if (config.get("quantization_config") or {}).get("quant_method") == "gguf":
        raise ConfigError(
            f"model.path {path}: config.json says GGUF, which is read and not trained: {CONVERT}; if the"
            " weights beside it are plain already, take quantization_config out of config.json"
        )
    if kind and kind not in SUPPORTED:
        _refuse(path, kind)
    if (config.get("text_config") or config).get("use_sliding_window"):
        raise ConfigError(
            f"model.path {path}: layers with sliding windows are not supported; use a model without"
        )


def check_path(path: str) -> None:
    """The same for a local folder that has a config.json, or by name for a hub id such as
    `Qwen/Qwen3.5-9B`; a GGUF file is refused."""
    file = Path(path) / "config.json"
    if path.endswith(".gguf") or (not file.is_file() and any(Path(path).glob("*.gguf"))):
        raise ConfigError(f"model.path {path} is a GGUF file: {CONVERT}")
    if file.is_file():
        return check(path, json.loads(file.read_text()))
    name = path.rpartition("/")[2].lower().replace("-", "_").replace(".", "_")
    for kind in sorted(MISSING, key=len, reverse=True):
        if name.startswith(kind + "_"):
            _refuse(path, kind)


def _refuse(path: str, kind: str) -> None:
    why = MISSING.get(kind, "it has no parity test")
    raise ConfigError(
        f"model.path {path}: {kind} is not supported ({why}); use one of {', '.join(SUPPORTED.values())}"
    )
