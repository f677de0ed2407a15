"""When the run's state is saved, and what a notice means for the current step."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.checkpoint.format import CheckpointError
from trainer.checkpoint.hf_export import export_adapter, export_hf
from trainer.checkpoint.manager import Checkpoints
from trainer.config import RunConfig
from trainer.config.run_folder import METRICS, SAMPLES
from trainer.config.run_store import EXPORTED
from trainer.data.dataset import Dataset
from trainer.data.prompt_form import LOOKED_AT, PromptForm
from trainer.learning.distributed import DistributedLearner
from trainer.node.watch.preemption import PreemptionNotice
from trainer.rewards.grading import RULES
from trainer.storage import hub
from trainer.system.errors import StorageError

ATTACHED = (METRICS, SAMPLES)
"""Append-only files of the run that travel with a checkpoint, so that a new node has the curves."""

CHANGES_STATE = "update"
"""The phase after which the weights are no longer those of the step before."""

STEP_MEMORY = 8
"""After a notice, a step is expected to take as long as the slowest of this many last steps."""


@dataclass(frozen=True)
class RunPosition:
    """The run's state between two steps: what a checkpoint holds besides the ranks' shards."""

    step: int
    loop_state: dict[str, float]
    """What the loop needs for its next step besides the weights."""
    updates: int
    """Optimizer steps so far."""
    skipped: int
    """Updates whose gradient was not finite."""
    score: float | None = None
    """The step's score; None if it was not evaluated."""
    ahead: Sequence[int] = ()
    """Steps whose rollout logs it needs (`session.needed_logs`)."""


class Preempted(Exception):
    """A preemption notice, or Ctrl-C; raised between phases."""


class Saving:
    """Drives the checkpoints of one run from the boundaries between its phases and steps."""

    def __init__(
        self,
        run_dir: str,
        checkpoints: Checkpoints,
        learner: DistributedLearner | None,
        notice: PreemptionNotice,
    ) -> None:
        """learner: None where nothing is trained, so that nothing is saved."""
        self.run_dir = Path(run_dir)
        self.checkpoints = checkpoints
        self._learner = learner
        self.notice = notice
        self._step_times: deque[float] = deque(maxlen=STEP_MEMORY)
        self._stepped_at = time.monotonic()
        self._position: RunPosition | None = None
        self._announced = False

    @property
    def learner(self) -> DistributedLearner:
        """Whose state is saved."""
        assert self._learner is not None, "nothing is saved of a run that trains nothing"
        return self._learner

    def stepped(self, step_s: float) -> None:
        """Records the duration of a finished step."""
        self._step_times.append(step_s)
        self._stepped_at = time.monotonic()

    def maybe_save(self, position: RunPosition, *, last: bool) -> None:
        """Called between two steps: advances the save under way, and starts one if it is due. last: whether
        it was the last step of the run."""
        self._position = replace(position, loop_state=dict(position.loop_state))
        self._advance()
        step_s = self._step_times[-1] if self._step_times else 0.0
        if self.checkpoints.due(position.step, step_s, last=last):
            self._save(self._position)
        elif (late := self.checkpoints.to_send()) is not None:
            self.learner.send(late)

    def _save(self, at: RunPosition) -> None:
        checkpoints = self.checkpoints
        attach = [self.run_dir / name for name in ATTACHED]
        state = {"updates": at.updates, "skipped": at.skipped, "reward_norm": at.loop_state}
        state["grading"] = RULES
        checkpoints.begin(at.step, state, score=at.score, attach=attach, ahead=at.ahead)
        try:
            keep, to = checkpoints.retention.local_steps(), checkpoints.attempt
            checkpoints.schedule.stall_s = self.learner.save(at.step, keep, checkpoints.sends, to)
        except CheckpointError as error:
            checkpoints.failed(error)

    def _advance(self) -> None:
        if self.checkpoints.busy:
            try:
                self.checkpoints.advance(self.learner.save_status())
            except CheckpointError as error:
                self.checkpoints.failed(error)

    def finish(self, position: RunPosition) -> None:
        """Waits until the checkpoint of the last step is committed."""
        while self.checkpoints.progress.safe != position.step:
            self.maybe_save(position, last=True)
            while self.checkpoints.busy:
                self._advance()
                time.sleep(0.05)

    def on_boundary(self, phase: str) -> None:
        """After every phase: commits written checkpoints, and after a notice decides whether to finish the
        step."""
        if phase == CHANGES_STATE:
            self._position = None
        self._advance()
        if (reason := self.notice.poll()) is not None and not self._goes_on(phase):
            raise Preempted(reason)

    def _goes_on(self, phase: str) -> bool:
        """After a notice: whether the current step can be finished and saved in the time left. One decision
        for all ranks: a notice on any node reaches this process, which drives all ranks."""
        if phase == "checkpoint" or self.notice.reason == "interrupted" or not self._step_times:
            return False
        rest_s = max(0.0, max(self._step_times) - (time.monotonic() - self._stepped_at))
        left_s = self.notice.left_s()
        if not self.checkpoints.fits(left_s - rest_s):
            return False
        if not self._announced:
            self._announced = True
            write_s = self.checkpoints.schedule.write_s
            plan = f"finishing the step (about {rest_s:.1f} s) and saving it ({write_s:.1f} s)"
            print(f"notice: {self.notice.reason}, {left_s:.0f} s left: {plan}", flush=True)
        return True

    def flush(self) -> None:
        """After a notice: saves the run's state if the time suffices, and waits for uploads as long as it
        can."""
        checkpoints, at = self.checkpoints, self._position
        try:
            while (left_s := self.notice.left_s()) > 0:
                self._advance()
                unsaved = at is not None and at.step != checkpoints.schedule.last_begun
                idle = checkpoints.progress.writing is None
                if at is not None and unsaved and idle and checkpoints.fits(left_s):
                    self._save(at)
                elif checkpoints.busy:
                    time.sleep(0.05)
                elif (late := checkpoints.to_send()) is not None:
                    self.learner.send(late)
                elif not checkpoints.busy:
                    break
        except StorageError as error:
            print(error, file=sys.stderr, flush=True)


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
