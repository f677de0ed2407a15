"""Ranks that train and publish, and a mirror that must hold what they gather: a scenario for `run_ranks`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config.run_store import RunStore
from trainer.fleet.fleet_records import Anchor, WeightVersion
from trainer.fleet.objects import Objects, first_lineage, next_lineage, version_key
from trainer.fleet.weight_mirror import WeightMirror, load_pretrained
from trainer.fleet.weight_publisher import PublisherPart
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage

ATTEMPT = "1-000000"
VERSIONS = 3


def gathered(worker: Any) -> dict[str, Tensor]:
    """The policy's full weights. Collective."""
    found = {}
    for group in worker.policy.weights.groups(1 << 20):
        found |= {name: tensor.detach().clone() for name, tensor in group}
    return found


def from_all(value: Any) -> list[Any]:
    """Every rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def published(config, rank, port):
    """Real updates; after each the mirror against the gathered weights."""
    from tests.learning.one_rank import OneRank
    from tests.learning.scenarios import fixed_items, update

    # Before the policy: while that is there, transformers shards every model that it loads.
    model = load_pretrained(config)
    worker = OneRank(config)
    worker.process.set_rank(rank, rank, "127.0.0.1", port)
    worker.learner.start(10)
    store = RunStore.of(config)
    assert store is not None
    objects = Objects(Storage(store.fleet), Seal(config.run_id, b"0123456789abcdef"))
    publisher = worker.process.part(PublisherPart)
    opened = from_all(publisher.open())
    lineage = first_lineage("model", 0, [one.digest for one in opened])
    anchor = Anchor("model", 0, lineage)
    out: dict[str, Any] = {"equal": [], "bytes": [], "trained": sum(one.nbytes for one in opened)}

    mirror = None
    if rank == 0:
        layout = [one.layout for one in opened]
        mirror = WeightMirror(objects, layout, model.tensors, lambda *_: None, 1 << 20, model.merged)
        mirror.to(0, lineage, [anchor])
        out["same start"] = mirror.digests() == [one.digest for one in opened]
    for number in range(1, VERSIONS + 1):
        update(worker, fixed_items(worker), config.algorithm.micro_batch_tokens)
        shards = from_all(publisher.publish(number, ATTEMPT, True))
        publisher.settle()
        dist.barrier()
        weights = gathered(worker)
        if mirror is None:
            continue
        after = next_lineage(lineage, [shard.patch.sha256 for shard in shards])
        digests = tuple(shard.digest for shard in shards)
        patches = tuple(shard.patch for shard in shards)
        version = WeightVersion(number, after, number - 1, lineage, patches, digests)
        objects.put_record(version_key(number, after), version)
        mirror.to(number, after, [anchor])
        held = dict(tensor for group in mirror.groups() for tensor in group)
        assert held.keys() == weights.keys()
        out["whole"] = sum(tensor.nbytes for tensor in held.values())
        out["equal"].append(all(torch.equal(held[name], weights[name]) for name in weights))
        out["bytes"].append(sum(patch.bytes for patch in patches))
        lineage = after
    dist.barrier()
    return out
