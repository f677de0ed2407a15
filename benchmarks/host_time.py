"""Host seconds and kernel launches of a recipe's passes on a device that computes nothing:
`python -m benchmarks.host_time RECIPE...`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

ROUNDS = 3


def play(recipe_name: str, ranks: int, sets: list[str]) -> dict[str, Any]:
    from recipes.plan import hub_config
    from recipes.presets import get
    from recipes.spec import override
    from tests.rehearsal.fake_pass import to_learn
    from tests.rehearsal.models import VOCABULARY, model_config
    from tests.rehearsal.rows import usual
    from trainer.config.budget import logprob_tokens, micro_batch_tokens

    recipe = override(get(recipe_name), sets)
    shape = hub_config.shape(recipe.config.model)
    torch.backends.cudnn.enabled = False
    device = torch.device("cuda", 0)
    without_checks(shape)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=ranks)
    folder = tempfile.mkdtemp()
    model_config(shape).save_pretrained(folder)
    from trainer.learning.policy import Policy, init_distributed

    init_distributed("cuda")
    config = recipe.config
    config = replace(
        config,
        model=replace(config.model, path=folder),
        algorithm=replace(config.algorithm, kl_coef=0.0),
        placement=replace(config.placement, nodes=1, workers_per_node=ranks),
    )
    train = micro_batch_tokens(config, shape)
    score = logprob_tokens(config, shape)
    began = time.time()
    policy = Policy(config, shape, list(range(VOCABULARY, shape.vocabulary)), device, 100, empty=True)
    print("policy", round(time.time() - began, 1), file=sys.stderr)
    rows = {kind: usual(recipe, shape, tokens) for kind, tokens in (("score", score), ("learn", train))}
    batches = {kind: row.micro_batch() for kind, row in rows.items()}
    item = to_learn(config, batches["learn"], rows["learn"].completions)
    out: dict[str, Any] = {"tokens": {k: b.input_ids.numel() for k, b in batches.items()}}

    def learn(count: int) -> None:
        policy.update([item] * count, count, 0.0)

    policy.update([item], 1, 0.0)
    policy.update([item], 1, 0.0)
    out["score"] = least(lambda: policy.logprobs([batches["score"]]))
    one, three = least(lambda: learn(1)), least(lambda: learn(3))
    out["learn"] = (three - one) / 2
    out["step"] = one - out["learn"]
    if os.environ.get("PROFILE"):
        import cProfile
        import pstats

        profile = cProfile.Profile()
        profile.runcall(learn, 3)
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    out |= plain(shape, batches, device)
    return out


def without_checks(shape: Any) -> None:
    """Takes out transformers' comparison of image tokens with features: this device's values mean nothing."""
    from tests.rehearsal.models import model_class

    modeling: Any = sys.modules[model_class(shape).__module__]
    if hasattr(modeling, "torch_compilable_check"):
        modeling.torch_compilable_check = lambda *_, **__: None


def least(work: Callable[[], Any]) -> float:
    """The least CPU seconds of a few runs."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def plain(shape: Any, batches: dict[str, Any], device: Any) -> dict[str, Any]:
    """The same rows through transformers' model alone, with its own checkpoints: no ZeRO, no loss."""
    from tests.rehearsal.models import model_class, model_config
    from trainer.algorithm.batching import moved
    from trainer.learning.logprobs import LogprobModel

    unset_hf_deepspeed_config()  # else the model would be built in shards
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        hf = model_class(shape)(model_config(shape))
    torch.set_default_dtype(torch.float32)
    hf.gradient_checkpointing_enable({"use_reentrant": False})
    model = LogprobModel(hf, [], 1.0, False).to(device).train()
    out = {}
    learn = moved(batches["learn"], device)
    score = moved(batches["score"], device)

    def learned() -> None:
        model._hidden(learn).sum().backward()
        model.zero_grad()

    def scored() -> None:
        with torch.no_grad():
            model._hidden(score)

    for name, work in (("plain_learn", learned), ("plain_score", scored)):
        work()
        out[name] = least(work)
    return out


if __name__ == "__main__":
    print(json.dumps(play(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
