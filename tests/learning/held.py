"""How much memory the tensors of a process hold."""

from __future__ import annotations

import gc

import torch


def held_bytes() -> int:
    """Bytes of all CPU tensors that Python knows; each storage once. Tensors without a storage of their own,
    such as the FakeTensors that torch.compile leaves, hold nothing and refuse to name one."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if not issubclass(type(found), torch.Tensor) or found.device.type != "cpu":
            continue
        storage = found.untyped_storage()
        try:
            storages[storage.data_ptr()] = storage.nbytes()
        except RuntimeError:
            continue
    return sum(storages.values())
