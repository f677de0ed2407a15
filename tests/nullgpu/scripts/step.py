"""Two steps of a run's ranks without Ray: load, engine, sync, sample, sleep, score, update, offload, reload.

step.py RUN.YAML PORT      # one process per rank; each prints a line of JSON
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import torch
import torch.multiprocessing as mp

from tests.nullgpu import counts
from trainer.algorithm.batching import TrainBatch
from trainer.algorithm.traces import Prompt
from trainer.config import validate
from trainer.config.files import load
from trainer.ranks.environment import rank_environment

GIB = 2**30


def rank(number: int, path: str, port: int) -> None:
    from trainer.learning.learner_part import LearnerPart
    from trainer.ranks.process import RankProcess
    from trainer.sampling.sampler_part import SamplerPart

    config = load(path)
    validate(config)
    begun = time.time()
    said: dict = {"rank": number, "phases": {}}

    def done(name: str) -> None:
        device = counts.library()
        said["phases"][name] = {
            "seconds": round(time.time() - begun, 1),
            "used_gib": round(device.nullgpu_used_bytes(number) / GIB, 3),
        }
        print(f"rank {number}: {name} {said['phases'][name]}", file=sys.stderr, flush=True)

    process = RankProcess(config)
    process.set_rank(number, number, "127.0.0.1", port)
    learner = process.part(LearnerPart)
    sampler = process.part(SamplerPart)
    with counts.phase("load policy"):
        learner.start(4, None)
    done("load policy")
    with counts.phase("build engine"):
        sampler.start()
    done("build engine")
    said["sleeps"] = bool(sampler.engine.sleeps)
    for version in range(2):
        with counts.phase("sync"):
            sampler.load(version)
        done(f"sync {version}")
        with counts.phase("sample"):
            prompts = [Prompt(group=g, row=g, seed=100 * version + g) for g in range(4)]
            groups = list(sampler.sample(prompts, config.train_split, 2, 1.0, 1.0, 16, []))
        done(f"sample {version}")
        traces = [trace for group in groups for trace in group]
        said["sampled"] = len(traces)
        with counts.phase("rest"):
            sampler.rest()
        done(f"rest {version}")
        shared = [traces]
        if config.placement.world_size > 1:
            # On the host: unpickling reads sizes that a device would have computed.
            torch.distributed.broadcast_object_list(shared, 0, torch.distributed.new_group(backend="gloo"))
        (traces,) = shared
        with counts.phase("logprobs"):
            learner.logprobs([traces], config.train_split, True, bool(config.algorithm.kl_coef))
        with counts.phase("update"):
            ones = [np.ones(len(trace.learned), np.float32) for trace in traces]
            reference = [np.zeros(len(one), np.float32) for one in ones]
            batch = TrainBatch(traces, ones, None, reference)
            stats = learner.update([batch], batch.tokens, len(batch), config.algorithm.kl_coef)
        done(f"update {version}")
        said["update"] = sorted(stats)[:3]
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asked = load(sys.argv[1])
    os.environ |= rank_environment(asked)  # read when torch, DeepSpeed and vLLM are imported
    mp.spawn(rank, (sys.argv[1], int(sys.argv[2])), asked.placement.world_size)
