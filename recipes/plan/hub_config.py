"""config.json of a model on the hub: a few kB are all that a plan needs of it. Fetched once, kept in
.cache/hub."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
from pathlib import Path

from trainer.config import ConfigError, Model, RunConfig, of_teacher
from trainer.config.run_folder import write_whole
from trainer.hardware import architectures, model_shapes
from trainer.hardware.model_shapes import Shape
from trainer.system.web_request import send_request

CACHE = Path(".cache/hub")
TIMEOUT_S = 10.0


def shape(model: Model) -> Shape | None:
    """The shape of a recipe's model, its config.json fetched where neither table, folder nor the hub's cache
    has it.

    None for a folder that is not there yet. Raises ConfigError, in one line, without a network.
    """
    path = model.path
    if not model_shapes.is_hub_id(path) or model_shapes.has_known_shape(path, model.revision):
        return model_shapes.shape_of(path, model.revision)
    architectures.check_path(path)  # what its name tells needs no network
    kept = CACHE / path / (model.revision or "main") / "config.json"
    if not kept.exists():
        text = fetch_config(path, model.revision or "main", os.environ.get("HF_TOKEN", ""))
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, text)
    return model_shapes.from_config_of(path, json.loads(kept.read_text()))


def teacher_shape(config: RunConfig) -> Shape | None:
    """The shape of a run's teacher; None where it has none, or a folder that is not there yet."""
    return shape(of_teacher(config).model) if config.teaches else None


def fetch_config(path: str, revision: str, token: str) -> bytes:
    """config.json of a model, from HF_ENDPOINT. Raises ConfigError."""
    advice = f"download config.json of {path} into a folder and set model.path to it"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise ConfigError(f"the shape of {path} is not known and HF_HUB_OFFLINE is set: {advice}")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    url = f"{endpoint}/{path}/resolve/{urllib.parse.quote(revision, safe='')}/config.json"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        text = send_request(url, headers=headers, timeout_s=TIMEOUT_S, redirects=5)
        json.loads(text)
        return text
    except urllib.error.HTTPError as error:
        hint = (
            "export HF_TOKEN, or accept its terms"
            if error.code in (401, 403)
            else "look at its name and revision"
        )
        raise ConfigError(f"{url} said {error.code}: {hint}, or {advice}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise ConfigError(
            f"the shape of {path} is not known and {endpoint} cannot be asked ({why}): {advice}"
        ) from None
