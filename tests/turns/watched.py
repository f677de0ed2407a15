"""A rank whose episodes have turns, for `scenarios.py`. Not a test itself."""

from __future__ import annotations

import hashlib

import numpy as np

from tests.learning.one_rank import OneRank, lessons
from trainer.algorithm.traces import Prompt, Trace
from trainer.config import override


def episodes(config, rank, port):
    """Episodes of real engines and pictures, how far engine and policy are apart on them, and what becomes of
    them where groups and limits are others."""
    worker = OneRank(config).start(rank, port)
    worker.sampler.load(0)
    prompts = [Prompt(group=row, row=row, seed=1000 + row) for row in range(6)]

    def sampled(asked: list[Prompt], max_tokens: int = config.rollout.max_tokens) -> list[Trace]:
        worker.engine.reset_caches()
        traces = []
        for group in worker.sampler.sample(asked, config.train_split, 4, 1.0, 1.0, max_tokens, False, []):
            traces += group
        return sorted(traces, key=lambda t: (t.group, t.index))

    traces = sampled(prompts)
    apart = []
    for trace in traces:
        apart += worker.logprobs([[trace]])["old"]
    other_order = sampled(prompts[3:]) + sampled(prompts[:3])
    other_order.sort(key=lambda t: (t.group, t.index))
    short = sampled(prompts, 130)
    dialogs = worker.sampler.dialogs
    assert dialogs is not None
    dialogs.config = override(config, ["turns.images=1"])
    few = sampled(prompts)
    batch = lessons(traces, [1.0 if trace.index % 2 else -1.0 for trace in traces])
    about = {
        "apart": largest_gap(traces, np.concatenate(apart)),
        "packed": largest_gap(traces, worker.logprobs([traces])["old"][0]),
        "traces": told(worker, traces),
        "again": told(worker, other_order),
        "short": told(worker, short),
        "few": told(worker, few),
    }
    norm = worker.step(batch, config.algorithm.micro_batch_tokens)["grad/norm"]
    learned = worker.logprobs([[trace] for trace in traces])["old"]
    return about | {"norm": norm, "learned": [float(values.sum()) for values in learned]}


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
