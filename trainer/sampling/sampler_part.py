"""One rank's share of a colocated engine: vLLM in the process that also holds the policy's shard."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial

from trainer.algorithm.traces import Prompt, Trace
from trainer.config import Split
from trainer.data.dialog import dialogs_of
from trainer.learning.learner_part import LearnerPart
from trainer.observe import beacon
from trainer.ranks.process import RankProcess
from trainer.rewards.verdict_at_once import quick_verdict
from trainer.sampling.episodes import Episodes


class SamplerPart:
    """A part of a `RankProcess`, beside its `LearnerPart`. All methods are collective. Policy and engine take
    turns on the GPU: one of them sleeps. `load` ends with the engine awake, `rest` with the policy's states
    back."""

    def __init__(self, process: RankProcess) -> None:
        self.process = process
        self.config = process.config
        self.reader = process.reader
        self.learner = process.part(LearnerPart)

    def start(self) -> None:
        """Builds the engine, without weights, and puts it to sleep."""
        # Here, so that the driver, which only names this class, loads no vLLM.
        from trainer.sampling.vllm_engine import Engine

        self.learner.policy.states.offload()
        # As it starts, vLLM collects garbage a dozen times, each time among all that is there for good; its
        # first CUDA graph ends what is frozen here.
        gc.collect()
        gc.freeze()
        before = self.process.allocated_bytes()
        self.engine = Engine(self.config, self.reader.prompter, self.reader.images_per_prompt())
        if self.engine.sleeps:
            self.learner.asleep_bytes = self.process.allocated_bytes() - before
        self.engine.sleep()
        verdict = partial(quick_verdict, self.config.rewards)
        self.dialogs = dialogs_of(self.config, self.reader, verdict)

    def load(self, version: int) -> None:
        """Brings the policy's weights into the engine. Before: the engine sleeps. After: it is awake."""
        from trainer.weights import in_process

        with self.process.recording("load"):
            self.learner.policy.states.offload()
            self.engine.wake_weights()
            in_process.push_weights(self.learner.weights(version), self.engine)
            self.engine.wake_cache()
            self.learner.policy.states.lock_behind()

    def rest(self) -> None:
        """Puts the engine to sleep and takes the policy's states back."""
        self.engine.sleep()
        self.learner.forget_peak()
        self.learner.policy.states.reload()

    def sample(
        self,
        prompts: Sequence[Prompt],
        split: Split,
        samples_per_prompt: int,
        temperature: float,
        top_p: float,
        max_tokens: int,
        upcoming: Sequence[int],
        begun: Sequence[Trace] = (),
    ) -> Iterator[list[Trace]]:
        """Completes this engine's prompts. All its ranks compute; only the first yields the groups, as they
        finish. upcoming: training rows that are asked next; their images are decoded while the engine
        samples. begun: completions of these prompts that go on."""
        self.reader.look_ahead(self.config.train_split, upcoming)
        first_of_engine = self.process.rank % self.config.rollout.tensor_parallel == 0
        episodes = None
        if self.dialogs:
            episodes = Episodes(self.dialogs, split, max_tokens, beacon.count_piece)
        with self.process.recording("sample"), closing(episodes) if episodes else nullcontext():
            groups = self.engine.generate(
                prompts,
                lambda prompt: self.reader.request(split, prompt.row),
                samples_per_prompt=samples_per_prompt,
                temperature=temperature,
                top_p=top_p,
                max_tokens=max_tokens,
                begun=begun,
                episodes=episodes,
            )
            for group in groups:
                if first_of_engine:
                    yield group
        if episodes:
            self.learner.tool_s += episodes.tool_s
            self.learner.tool_wait_s += episodes.waited_s
