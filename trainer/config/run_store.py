"""Where a run's things lie: in its bucket, under BUCKET/RUN, and by the same names in its folder.

Standard library only, so that a desk without the training stack knows where to look.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.system.errors import ConfigError

CHECKPOINTS = "checkpoints"
"""Folders of steps, written by the ranks."""
ROLLOUTS = "rollouts"
"""What was sampled and graded, step by step."""
ATTEMPTS = "attempts"
"""Who may write, and how each attempt ended."""
FLEET = "fleet"
"""Between the trainer and its rollout workers: weights out, samples in."""
STREAM = "stream"
"""What the run writes about itself, in pieces, for the desk."""
PROFILES = "profile"
"""Profiles of single steps."""
EXPORTED = "hf"
"""The weights as a Hugging Face model folder; in the bucket below the checkpoints."""


RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""An id of a run as a folder of a bucket, of any version."""


@dataclass(frozen=True)
class RunStore:
    """One run's place. `root` is BUCKET/RUN, or the run's folder on a disk."""

    root: str

    @classmethod
    def in_bucket(cls, bucket: str, run_id: str) -> RunStore:
        """The place of a run in a bucket. Raises ConfigError for an id that leads elsewhere."""
        if not RUN_ID.fullmatch(run_id):
            raise ConfigError(
                f"run id {run_id!r} names no folder of a bucket: use letters, digits, dots, dashes and"
                " underscores, a letter or digit first"
            )
        return cls(f"{bucket.rstrip('/')}/{run_id}")

    @classmethod
    def of(cls, config: RunConfig) -> RunStore | None:
        """The place of a run in the bucket of its configuration; None without one."""
        remote = config.checkpoint.remote
        return cls.in_bucket(remote, config.run_id) if remote else None

    @classmethod
    def at_run_folder(cls, config: RunConfig) -> RunStore:
        """The run's folder on this machine."""
        return cls(config.run.dir)

    @property
    def bucket(self) -> str:
        """The bucket that holds the run."""
        return self.root.rpartition("/")[0]

    @property
    def checkpoints(self) -> str:
        return f"{self.root}/{CHECKPOINTS}"

    @property
    def rollouts(self) -> str:
        return f"{self.root}/{ROLLOUTS}"

    @property
    def attempts(self) -> str:
        return f"{self.root}/{ATTEMPTS}"

    @property
    def fleet(self) -> str:
        return f"{self.root}/{FLEET}"

    @property
    def profiles(self) -> str:
        return f"{self.root}/{PROFILES}"

    @property
    def exported(self) -> str:
        """The exported weights in a bucket. In the run's folder they lie in `EXPORTED` itself."""
        return f"{self.checkpoints}/{EXPORTED}"


EXPORTS = (EXPORTED, CHECKPOINTS, "pulled")
"""Folders of a run that hold its exported weights: the run's own name says more."""


def model_name(path: str) -> str:
    """The last part of a hub id or folder; of a run's export, which is `RUN/hf`, the run."""
    parts = [part for part in Path(path).parts if part not in EXPORTS]
    return parts[-1] if parts else path


def is_hub_name(path: str) -> bool:
    """Whether the hub could have a model of that name, OWNER/NAME."""
    return bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", path))
