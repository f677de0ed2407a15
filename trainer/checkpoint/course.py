"""Which checkpoints count: the one definition that finder, retention, budget and every reader share; and
whether a run may go on from them.

It stands in the record of attempts. When an attempt starts, its record names the checkpoints that are there
and count; before its first own one it notes the step that it goes on from. From then on count: its own, and
of the named those up to that step. So what a run was taken back from, what was passed over as damaged, and
what an older attempt commits after it was replaced counts no more, whether or not it could be deleted. Needs
no training stack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from trainer.checkpoint.layout import CheckpointKey, Counts, attempts_url, local_dir, remote_url
from trainer.checkpoint.manifest import code_fingerprint, manifests_here, manifests_there
from trainer.config import ConfigError, RunConfig, difference, of_teacher
from trainer.config.run_store import CHECKPOINTS
from trainer.storage import hub
from trainer.storage.attempt_record import AttemptRecord, OriginRecord, attempt_number
from trainer.storage.seal import KEY_VARIABLE, Seal
from trainer.storage.storage import Storage
from trainer.storage.stores import RetryPolicy


@dataclass(frozen=True)
class CheckpointHistory:
    """What the newest attempt that says so tells of its run's checkpoints."""

    attempt: str = ""
    """Its name; "": none says anything, and every checkpoint counts."""
    counted: frozenset[CheckpointKey] = frozenset()
    goes_on_from: int | None = None
    """The step from which its own checkpoints go on; None before the first."""
    before: int = 0

    def counts(self, step: int, attempt: str) -> bool:
        if (
            not self.attempt
            or attempt == self.attempt
            or attempt_number(attempt) > attempt_number(self.attempt)
        ):
            return True
        left_behind = self.goes_on_from is not None and step > self.goes_on_from
        return (step, attempt) in self.counted and not left_behind


def history_from_record(record: AttemptRecord, epoch: int | None = None) -> CheckpointHistory:
    """The history as attempt `epoch` sees it; None: the newest one."""
    if epoch is None:
        newest = record.newest()
        epoch = newest.attempt.epoch if newest else 0
    for begun in record.starts(epoch):
        if begun.counted is not None:
            origin = record.get(f"{begun.epoch:08d}.from", OriginRecord)
            return CheckpointHistory(
                attempt=begun.name,
                counted=frozenset(begun.counted),
                goes_on_from=origin.step if origin and origin.name == begun.name else None,
                before=begun.before,
            )
    return CheckpointHistory()


def history_of(config: RunConfig, retry: RetryPolicy | None = None) -> CheckpointHistory:
    """The history of a run. Raises StorageError where its store is away."""
    return history_from_record(AttemptRecord(Storage(attempts_url(config), retry=retry), Seal.of(config)))


def rewound(config: RunConfig, past: CheckpointHistory) -> Counts:
    """What counts of a run that goes back to before `checkpoint.before`: nothing from that step on, but what
    was made since it went back there."""
    before = config.checkpoint.before
    if not before or past.before == before:
        return past.counts
    return lambda step, attempt: step < before and past.counts(step, attempt)


def check_resumable(config: RunConfig, data_fingerprint: str) -> None:
    """Raises ConfigError where the run's newest checkpoint, here or in the store, cannot be resumed by
    `config`. A start asks this before it replaces an attempt that may be alive: what is refused later would
    have ended that one for nothing. Raises StorageError where the store does not answer."""
    counts = rewound(config, history_of(config))
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
    if refused and not some and config.checkpoint.resume != "never":
        raise ConfigError(
            f"run {config.run_id} has a key ({KEY_VARIABLE}), and {len(refused)} checkpoints in its bucket,"
            f" of which it has signed none, {min(refused)} for one: go on without workers"
            " (fleet.workers=off), choose another run.id, or remove them"
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
    model, recorded = config.model.path, manifest["config"].get("model.path", "")
    if model == recorded:
        return
    theirs = manifest.get("model_fingerprint", "")
    if theirs:
        same = hub.model_fingerprint(config) == theirs
    else:  # written before models had fingerprints
        same = Path(model).is_dir() and PurePath(recorded).is_absolute()
        if same:
            say(f"the checkpoint does not say what its model at {recorded} held: {model} is taken for it")
    if not same:
        raise ConfigError(
            f"{cannot}: the model at {model} is not the one at {recorded} that the checkpoint was trained"
            " from: set model.path back, or choose another run.id"
        )
