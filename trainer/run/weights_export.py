"""Writes what a run has learned in the form that others read."""

from __future__ import annotations

from pathlib import Path

from trainer.checkpoint.hf_export import export_adapter, export_hf
from trainer.checkpoint.manager import Checkpoints
from trainer.config import RunConfig
from trainer.config.run_store import EXPORTED
from trainer.data.dataset import Dataset
from trainer.data.prompt_form import LOOKED_AT, PromptForm
from trainer.storage import hub


def export_weights(config: RunConfig, checkpoints: Checkpoints, train_set: Dataset) -> Path:
    """Writes the newest checkpoint as a Hugging Face model folder, or its adapter as peft's, and pushes it
    beside the checkpoints."""
    checkpoint = checkpoints.find()
    out = Path(config.run.dir) / EXPORTED
    assert checkpoint is not None
    if config.lora.rank:
        export_adapter(checkpoint, out, config)
    else:
        # its weights are the base model's, of which this node may have a share
        if config.model.freeze_vision:
            hub.fetch_files(config, hub.weight_files(config))
        export_hf(checkpoint, out, hub.model_folder(config), config.model.dtype)
    rows = range(min(LOOKED_AT, len(train_set)))
    form = PromptForm.of(train_set[row].messages for row in rows)
    if form:
        form.write(out)
    if checkpoints.storage:
        for path in sorted(out.iterdir()):
            checkpoints.storage.put(path, f"{EXPORTED}/{path.name}")
    print(f"weights: {out}", flush=True)
    return out
