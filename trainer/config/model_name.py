"""What a person calls the model that `model.path` names, and what the hub takes for a name. Standard library
only."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.config.run_store import CHECKPOINTS, EXPORTED

EXPORTS = (EXPORTED, CHECKPOINTS, "pulled")
"""Folders of a run that hold its exported weights: the run's own name says more."""


def model_name(path: str) -> str:
    """The last part of a hub id or folder; of a run's export, which is `RUN/hf`, the run."""
    parts = [part for part in Path(path).parts if part not in EXPORTS]
    return parts[-1] if parts else path


def is_hub_name(path: str) -> bool:
    """Whether the hub could have a model of that name, OWNER/NAME."""
    return bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", path))
