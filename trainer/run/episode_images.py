"""What the observations of an episode showed, for the samples of the report."""

from __future__ import annotations

import io
from functools import cached_property

from trainer.algorithm.traces import Trace
from trainer.config import RunConfig
from trainer.data.dialog import Dialogs, dialogs_of
from trainer.data.reader import RowReader


class EpisodeImages:
    """Makes the images of later turns again, in the driver."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @cached_property
    def _dialogs(self) -> Dialogs | None:
        """It reads the model's processor, so it waits for the first sample that showed anything."""
        return dialogs_of(self.config, RowReader(self.config))

    def of(self, trace: Trace) -> list[list[bytes]]:
        """The images of each observation, as PNG files."""
        dialogs = self._dialogs if trace.dialog else None
        if dialogs is None or not dialogs.environment.shows_images:
            return [[] for _ in trace.dialog[1::2]]
        situation = dialogs.situation(self.config.train_split, trace.row)
        shown = []
        for turn in range(0, len(trace.dialog), 2):
            observation = dialogs.environment.answer(situation, trace.dialog[: turn + 1 : 2])
            files = []
            for image in observation.images if observation else ():
                buffer = io.BytesIO()
                image.save(buffer, "PNG")
                files.append(buffer.getvalue())
            shown.append(files)
        return shown
