"""Which models are trained: those that parity tests have shown to be the same in policy and engine, and no others.

A model may load and train and still be computed wrongly; nothing but a comparison finds that out. Adding one here takes
a row of `VERIFIED` and a case of tests/engine/test_parity.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

VERIFIED = {"qwen2_5_vl": "Qwen2.5-VL", "qwen2": "Qwen2 and Qwen2.5 (text)"}
"""By `model_type` of config.json."""
MISSING = {
    "qwen3_vl": "the policy drops its DeepStack features, so every hidden state is wrong",
    "qwen3_vl_moe": "the policy drops its DeepStack features, and experts are not trained",
    "qwen2_vl": "its vision tower has no parity test",
    "qwen2_5_omni": "its audio tower is not fed, and there is no parity test",
    "qwen3": "it has no parity test",
}
"""What is known to be lacking; any other architecture has just not been tested."""


def check(path: str, config: dict[str, Any]) -> None:
    """Raises ConfigError if the architecture in a Hugging Face config.json is not among `VERIFIED`."""
    kind = str(config.get("model_type", ""))
    if kind and kind not in VERIFIED:
        _refuse(path, kind)


def check_path(path: str) -> None:
    """The same for a local folder that has a config.json, or by name for a hub id such as `Qwen/Qwen3-VL-8B`."""
    file = Path(path) / "config.json"
    if file.is_file():
        return check(path, json.loads(file.read_text()))
    name = path.rpartition("/")[2].lower().replace("-", "_").replace(".", "_")
    for kind in sorted(MISSING, key=len, reverse=True):
        if name.startswith(kind + "_"):
            _refuse(path, kind)


def _refuse(path: str, kind: str) -> None:
    why = MISSING.get(kind, "it has no parity test")
    raise ConfigError(f"model.path {path}: {kind} is not supported ({why}); use one of {', '.join(VERIFIED.values())}")
