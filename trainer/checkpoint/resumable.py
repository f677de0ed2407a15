"""Whether a run may go on from its checkpoints. Needs no training stack: a launcher asks before it starts an
attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from trainer.checkpoint import course
from trainer.checkpoint.layout import local_dir, remote_url
from trainer.checkpoint.manifest import code_fingerprint, manifests_here, manifests_there
from trainer.config import ConfigError, RunConfig, difference, of_teacher
from trainer.config.run_store import CHECKPOINTS, RunStore
from trainer.storage import hub
from trainer.storage.seal import KEY_VARIABLE, Seal
from trainer.storage.storage import Storage


def check_resumable(config: RunConfig, data_fingerprint: str) -> None:
    """Raises ConfigError where the run's newest checkpoint, here or in the store, cannot be resumed by
    `config`.

    A start asks this before it replaces an attempt that may be alive: what is refused later would have ended
    that one for nothing. Raises StorageError where the store does not answer.
    """
    counts = course.rewound(config, course.history_of(config))
    manifests = manifests_here(local_dir(config), counts)
    remote = remote_url(config)
    if remote:
        manifests |= manifests_there(Storage(remote), counts, Seal.of(config))[0]
        refuse_unsigned(config, bool(manifests))
    if manifests and config.checkpoint.resume != "never":
        refuse_other(config, data_fingerprint, manifests[max(manifests)], lambda text: None)


def refuse_unsigned(config: RunConfig, some: bool) -> None:
    """Raises ConfigError where the store has checkpoints of a run with a key, and none that it has signed, be
    it that it began without one: to start from scratch would throw them away. some: whether there is one that
    may be resumed. Comes after they were read."""
    refused = [name for name in Seal.of(config).refused if name.startswith(CHECKPOINTS)]
    place = RunStore.of(config)
    if place and refused and not some and config.checkpoint.resume != "never":
        raise ConfigError(
            f"run {config.run_id} has a key ({KEY_VARIABLE}), and {len(refused)} checkpoints in its bucket,"
            f" of which it has signed none, {min(refused)} for one: if they are its own, sign them with"
            f" `python -m trainer.checkpoint.sign {place.root}`; else remove them"
        )


def refuse_other(
    config: RunConfig, data_fingerprint: str, manifest: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Raises ConfigError for a checkpoint of other options, other data or another model."""
    cannot = f"cannot resume run {config.run_id} from step {manifest['step']}"
    why = difference(config, manifest["config"])
    if why:
        raise ConfigError(f"{cannot}: {why}")
    if manifest["data_fingerprint"] != data_fingerprint:
        raise ConfigError(
            f"{cannot}: the data at {config.data.path} is not what the checkpoint was trained on (fingerprint"
            f" {data_fingerprint[:12]!r}, not {manifest['data_fingerprint'][:12]!r}); choose another run.id"
        )
    _refuse_other_model(config, manifest, cannot, say)
    if manifest["code_fingerprint"] != code_fingerprint():
        say(
            "the trainer's code has changed since the checkpoint: the run continues, but perhaps not bit"
            " for bit"
        )


def _refuse_other_model(
    config: RunConfig, manifest: dict[str, Any], cannot: str, say: Callable[[str], None]
) -> None:
    """Folders are compared by what they hold, models of a hub by their name. A teacher's folder is compared
    wherever it lies: another run may have been exported into it since."""
    theirs = manifest.get("teacher_fingerprint", "")
    if config.teaches and theirs and hub.model_fingerprint(of_teacher(config)) != theirs:
        raise ConfigError(
            f"{cannot}: the teacher at {config.algorithm.teacher} is not the one that the checkpoint learned"
            " from: set algorithm.teacher back, or choose another run.id"
        )
    mine, recorded = config.model.path, manifest["config"].get("model.path", "")
    if mine == recorded:
        return
    theirs = manifest.get("model_fingerprint", "")
    if theirs:
        same = hub.model_fingerprint(config) == theirs
    else:  # written before models had fingerprints
        same = Path(mine).is_dir() and PurePath(recorded).is_absolute()
        if same:
            say(f"the checkpoint does not say what its model at {recorded} held: {mine} is taken for it")
    if not same:
        raise ConfigError(
            f"{cannot}: the model at {mine} is not the one at {recorded} that the checkpoint was trained"
            " from: set model.path back, or choose another run.id"
        )
