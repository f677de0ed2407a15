"""Finding the checkpoint to resume from: newest first, whole, and of this very run; and saying what was
passed over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.course import CheckpointHistory, refuse_other, refuse_unsigned, rewound
from trainer.checkpoint.layout import CheckpointKey, local_dir, remote_folder, remote_url, step_name
from trainer.checkpoint.manifest import every_manifest, manifests_here, newest_of_each
from trainer.checkpoint.shard_reader import (
    CorruptCheckpoint,
    FoundCheckpoint,
    damaged_files,
    read_state,
    verified_files,
)
from trainer.config import ConfigError, RunConfig
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage
from trainer.system.errors import StorageError


def find_checkpoint(
    config: RunConfig,
    data_fingerprint: str,
    storage: Storage | None,
    before: int | None,
    say: Callable[[str], None],
    past: CheckpointHistory,
) -> tuple[FoundCheckpoint | None, list[int]]:
    """The newest usable checkpoint below step `before` (None: of all), and the newer ones that are passed
    over. past: the run's history, as the attempt that asks sees it.

    Raises ConfigError for a checkpoint of another configuration or dataset, where there are checkpoints and
    none is whole, for `resume: must` without one and `resume: never` with one; StorageError if the store is
    away and there is nothing local.
    """
    folder, url = local_dir(config), remote_url(config)
    here = manifests_here(folder)
    stored, sizes = _there(storage, bool(here), say, Seal.of(config))
    refuse_unsigned(config, bool(here or stored))
    counts = rewound(config, past)
    every_step = here.keys() | {step for step, _ in stored}
    here = {step: one for step, one in here.items() if counts(step, one.get("attempt", ""))}
    there = newest_of_each({key: one for key, one in stored.items() if counts(*key)})
    newest_first = sorted(every_step, reverse=True)
    before_step = config.checkpoint.before
    mode = config.checkpoint.resume
    if mode == "never" and newest_first:
        raise ConfigError(
            f"checkpoint.resume is never, but run {config.run_id} has checkpoints up to step"
            f" {newest_first[0]}: choose another run.id, or remove them"
        )
    passed = [step for step in newest_first if before is not None and step >= before]
    for step in newest_first[len(passed) :]:
        # A checkpoint may lie here, there, or both; the two may differ after a fall-back, so each is tried by
        # itself.
        options = [manifest for manifest in (here.get(step), there.get(step)) if manifest is not None]
        if not options:
            why = "the run went on without it, as the record of its attempts says"
            if before_step and step >= before_step:
                why = f"the run goes back to before step {before_step} (checkpoint.before)"
            say(f"step {step} is left out: {why}")
            passed.append(step)
            continue
        reason = ""
        for manifest in options if len(options) == 2 and options[0] != options[1] else options[:1]:
            inside = remote_folder(step, manifest.get("attempt", ""))
            remote = f"{url}/{inside}" if there.get(step) == manifest else ""
            found = FoundCheckpoint(step, str(folder / step_name(step)), remote, manifest)
            reason = _wrong(found, storage, inside, sizes)
            if reason:
                continue
            refuse_other(config, data_fingerprint, manifest, say)
            try:
                return replace(
                    found, state=read_state(found), verified=verified_files(found.directory)
                ), passed
            except CorruptCheckpoint as error:
                reason = str(error)
        say(f"step {step} cannot be used ({reason}); falling back to the one before")
        passed.append(step)
    if before_step and newest_first and newest_first[-1] >= before_step:
        raise ConfigError(
            f"run {config.run_id} has no checkpoint from before step {before_step}: the oldest is of step"
            f" {newest_first[-1]}; raise checkpoint.before, or set it to 0"
        )
    if newest_first:  # starting from scratch over them would throw the run away
        steps = ", ".join(map(str, sorted(newest_first)))
        raise ConfigError(
            f"run {config.run_id} has checkpoints of steps {steps} in {folder} {url} and none is whole: bring"
            " back what is missing (every node's files, or the store), or remove them to start from scratch"
        )
    if mode == "must":
        raise ConfigError(f"checkpoint.resume is must, but there is no checkpoint in {folder} {url}".rstrip())
    return None, passed


def _there(
    storage: Storage | None, have_local: bool, say: Callable[[str], None], seal: Seal
) -> tuple[dict[CheckpointKey, dict[str, Any]], dict[str, int]]:
    if storage is None:
        return {}, {}
    try:
        return every_manifest(storage, seal)
    except StorageError as error:
        if not have_local:
            raise  # starting from scratch because the store is away would throw the run away
        say(f"{error}: looking at local checkpoints only")
        return {}, {}


def _wrong(found: FoundCheckpoint, storage: Storage | None, inside: str, sizes: dict[str, int]) -> str:
    """Why a checkpoint cannot be used, or an empty string."""
    for entry in damaged_files(found):
        if not found.url:
            there = (Path(found.directory) / entry["name"]).exists()
            return f"{entry['name']} is {'damaged' if there else 'missing'}"
        key = f"{inside}/{entry['name']}"
        if sizes.get(key) != entry["bytes"] and storage is not None and storage.size(key) != entry["bytes"]:
            return f"{entry['name']} is damaged or missing, in the store too"
    return ""
