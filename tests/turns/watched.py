"""A rank whose episodes have turns, for `scenarios.py`. Not a test itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tests.learning.one_rank import OneRank, trainable
from trainer.algorithm.traces import Prompt, Trace
from trainer.config import override

GROUPS = 6


class Watched:
    """A rank that samples episodes of the first rows."""

    def __init__(self, config, rank, port) -> None:
        self.config = config
        self.worker = OneRank(config).start(rank, port)
        self.worker.sampler.load(0)
        self.prompts = [Prompt(group=row, row=row, seed=1000 + row) for row in range(GROUPS)]

    def sampled(
        self, asked: list[Prompt], max_tokens: int = 0, temperature: float = 1.0, begun: Sequence[Trace] = ()
    ) -> list[Trace]:
        """Four episodes of each prompt, or those that go on."""
        self.worker.engine.reset_caches()
        traces = []
        how = 4, temperature, 1.0, max_tokens or self.config.rollout.max_tokens, [], begun
        for group in self.worker.sampler.sample(asked, self.config.train_split, *how):
            traces += group
        if self.config.rollout.tensor_parallel > 1:  # the engine's first rank alone has them
            shared = [traces]
            torch.distributed.broadcast_object_list(shared, src=0)
            (traces,) = shared
        return sorted(traces, key=lambda t: (t.group, t.index))

    def in_pieces(self, cut: int) -> tuple[list[Trace], int]:
        """Episodes that grow by at most `cut` sampled tokens in a phase, and the number of phases."""
        asked = [replace(prompt, cut=cut) for prompt in self.prompts]
        over: list[Trace] = []
        begun: list[Trace] = []
        phases = 0
        while asked:
            self.worker.sampler.load(phases)
            before = {(trace.group, trace.index): len(trace.learned) for trace in begun}
            traces = self.sampled(asked, temperature=0.0, begun=begun)
            for trace in traces:
                assert len(trace.learned) - before.get((trace.group, trace.index), 0) <= cut
            phases += 1
            over += [trace for trace in traces if trace.end != "cut"]
            begun = [trace for trace in traces if trace.end == "cut"]
            asked = [prompt for prompt in asked if prompt.group in {trace.group for trace in begun}]
        return sorted(over, key=lambda t: (t.group, t.index)), phases


def episodes(config, rank, port):
    """Episodes of real engines and pictures, how far engine and policy are apart on them, the same in another
    order, and an update."""
    watched = Watched(config, rank, port)
    worker, prompts = watched.worker, watched.prompts
    traces = watched.sampled(prompts)
    apart = []
    for trace in traces:
        apart += worker.logprobs([[trace]])["old"]
    other_order = watched.sampled(prompts[3:]) + watched.sampled(prompts[:3])
    other_order.sort(key=lambda t: (t.group, t.index))
    about = {
        "apart": largest_gap(traces, np.concatenate(apart)),
        "packed": largest_gap(traces, worker.logprobs([traces])["old"][0]),
        "traces": told(worker, traces),
        "again": told(worker, other_order),
    }
    batch = trainable(traces, [1.0 if trace.index % 2 else -1.0 for trace in traces])
    norm = worker.step(batch, config.algorithm.micro_batch_tokens)["grad/norm"]
    learned = worker.logprobs([[trace] for trace in traces])["old"]
    return about | {"norm": norm, "learned": [float(values.sum()) for values in learned]}


def limited_episodes(config, rank, port):
    """What becomes of episodes with less room and fewer images, and of those that are carried over."""
    watched = Watched(config, rank, port)
    worker, prompts = watched.worker, watched.prompts
    short = watched.sampled(prompts, 130)
    greedy = watched.sampled(prompts, temperature=0.0)
    pieces, phases = watched.in_pieces(9)
    apart = worker.logprobs([pieces])["old"][0]
    dialogs = worker.sampler.dialogs
    assert dialogs is not None
    dialogs.config = override(config, ["turns.images=1"])
    return {
        "short": told(worker, short),
        "greedy": told(worker, greedy),
        "pieces": told(worker, pieces),
        "phases": phases,
        "apart": largest_gap(pieces, apart),
        "few": told(worker, watched.sampled(prompts)),
    }


def largest_gap(traces: list[Trace], policy: np.ndarray) -> float:
    engine = np.concatenate([trace.logprobs for trace in traces])
    return float(np.abs(engine - policy).max())


def told(worker: OneRank, traces: list[Trace]) -> list[dict]:
    """What a test looks at of each trace."""
    image = worker.prompter.image_token_id
    out = []
    for trace in traces:
        observed = np.setdiff1d(np.arange(trace.shared, len(trace.tokens)), trace.learned)
        about = {
            "end": trace.end,
            "dialog": list(trace.dialog),
            "text": trace.text,
            "replies": [worker.prompter.reply_text(reply.tolist()) for reply in trace.replies],
            "observed": worker.prompter.tokenizer.decode(trace.tokens[observed]),
            "image_runs": int(np.count_nonzero(np.diff((trace.tokens == image).astype(int)) == 1)),
            "tokens": hashlib.sha256(trace.tokens.tobytes()).hexdigest(),
            "lengths": [trace.shared, len(trace.completion), len(trace.learned), len(trace.logprobs)],
            "segments": len(trace.segments),
        }
        out.append(about)
    return out
