"""A stand-in policy for checkpoint tests: parameters with Adam's states, cut among ranks as ZeRO-3 cuts
them."""

from __future__ import annotations

import json
import math
import struct
import time
import zipfile

import numpy as np
import torch

from trainer.checkpoint.attempt import Attempts
from trainer.checkpoint.format import Shard
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.rollout_archive import graded_of
from trainer.checkpoint.shard_reader import ShardReader
from trainer.checkpoint.writer import ShardWriter
from trainer.config import RunConfig, override

SHAPES = {
    "model.embed.weight": (67, 11),
    "model.layer.weight": (13, 11),
    "model.norm.weight": (11,),
    "scale": (1,),
}
KINDS = ("master", "exp_avg", "exp_avg_sq")


def piece(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """[start, stop) of a flat parameter under ZeRO-3: equal pieces, the padded tail left out."""
    length = -(-numel // world_size)
    return min(numel, rank * length), min(numel, (rank + 1) * length)


def whole(seed: int, shapes=None) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: {kind: torch.randn(torch.Size(shape).numel(), generator=generator) for kind in KINDS}
        for name, shape in (shapes or SHAPES).items()
    }


def cut(full, rank: int, world_size: int, shapes=None) -> dict[str, Shard]:
    shards = {}
    for name, shape in (shapes or SHAPES).items():
        start, stop = piece(torch.Size(shape).numel(), rank, world_size)
        shards[name] = Shard(
            shape, start, stop, {kind: t[start:stop].clone() for kind, t in full[name].items()}
        )
    return shards


def cut_whole(full, rank: int, world_size: int) -> dict[str, Shard]:
    """As ZeRO-1 and 2 cut: parameters end to end, and the whole in equal pieces; most ranks have nothing of
    most."""
    total = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    first, last = piece(total, rank, world_size)
    shards, at = {}, 0
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        start, stop = (min(max(end - at, 0), size) for end in (first, last))
        start, stop = (start, stop) if start < stop else (0, 0)
        shards[name] = Shard(
            shape, start, stop, {kind: t[start:stop].clone() for kind, t in full[name].items()}
        )
        at += size
    return shards


def configure(folder, *assignments: str) -> RunConfig:
    base = [
        f"run.dir={folder}/run",
        "run.name=test",
        f"checkpoint.remote=file://{folder}/remote",
        "data.path=rows",
    ]
    return override(RunConfig(), [*base, "checkpoint.every_steps=2", *assignments])


def writers(config: RunConfig, world_size: int, **options) -> list[ShardWriter]:
    return [ShardWriter(config, rank, world_size, **options) for rank in range(world_size)]


def save(
    checkpoints: Checkpoints, ranks: list[ShardWriter], step: int, seed: int | None = None, cut=cut, **options
) -> None:
    """One whole checkpoint of `whole(seed or step)`, committed here and in the store, or known to have failed
    there."""
    full = whole(step if seed is None else seed)
    checkpoints.begin(step, {"step": step, "offset": 8 * step}, **options)
    for writer in ranks:
        shards = cut(full, writer.rank, writer.world_size)
        extra = {"rng": torch.tensor([step, writer.rank])}
        writer.start(
            step, shards, extra, checkpoints.retention.local_steps(), checkpoints.sends, checkpoints.attempt
        )
    finish(checkpoints, ranks)


def finish(checkpoints: Checkpoints, ranks: list[ShardWriter]) -> None:
    """Waits for what is under way, and lets the ranks upload what the store still lacks."""
    while checkpoints.busy:
        checkpoints.advance([writer.status() for writer in ranks])
        time.sleep(0.05)


def resend(checkpoints: Checkpoints, ranks: list[ShardWriter]) -> int | None:
    """What the session does after every step: uploads again what the store lacks. Returns the step."""
    step = checkpoints.to_send()
    if step is not None:
        for writer in ranks:
            writer.send(step)
    finish(checkpoints, ranks)
    return step


def holds(source, step: int, world_size: int = 1) -> bool:
    """Whether a checkpoint read by `world_size` ranks has, bit for bit, the values of `whole(step)`."""
    reader, full = ShardReader(source), whole(step)
    for name in SHAPES:
        for kind in KINDS:
            for rank in range(world_size):
                start, stop = piece(full[name][kind].numel(), rank, world_size)
                if not torch.equal(reader.read(kind, name, start, stop), full[name][kind][start:stop]):
                    return False
    return reader.names() == list(SHAPES) and all(
        reader.shape(name) == shape for name, shape in SHAPES.items()
    )


def attempt(config: RunConfig, told: list[str], **options) -> Checkpoints:
    """The checkpoints of a new attempt of the run, which replaces the one before."""
    return Checkpoints(config, "data", attempt=Attempts.of(config).take(0), say=told.append, **options)


def place(folder, step: int):
    """Where the newest attempt's files of a step lie, in a folder of checkpoints here or in the store."""
    return inner(folder / f"step-{step:08d}")


def inner(step_folder):
    """The newest attempt's folder of a step's, or the step's where it has none (on the disk)."""
    attempts = sorted(p for p in step_folder.iterdir() if p.is_dir())
    return attempts[-1] if attempts else step_folder


def again(config: RunConfig, told: list[str], data: str = "data") -> Checkpoints:
    """The checkpoints as the next process sees them."""
    return Checkpoints(config, data, say=told.append)


def spoil(folder, damage: str) -> None:
    """Damages one file of a checkpoint."""
    path = inner(folder) / ("manifest.json" if damage == "manifest" else "rank-00001-of-00002.safetensors")
    if damage == "remove":
        path.unlink()
    else:
        spoil_file(path, damage, -5)


def spoil_file(path, damage: str, at: int) -> None:
    """Cuts a file in half ("cut"), or flips a bit of its byte `at`."""
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    else:
        data[at] ^= 1
    path.write_bytes(data)


ARCHIVE_DAMAGE = ("cut", "data", "array header", "member name")


def spoil_archive(path, damage: str, name: str) -> None:
    """Cuts a NumPy archive in half ("cut"), or flips a bit of one of its arrays: in the middle of its "data",
    in its "array header" (type and shape), or in its "member name" in the zip file."""
    if damage == "cut":
        spoil_file(path, "cut", 0)
        return
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(f"{name}.npy")
        assert member.compress_type == zipfile.ZIP_STORED, "else no byte of the file is one of the array"
        with archive.open(member) as file:
            np.lib.format.read_magic(file)
            shape, _, kind = np.lib.format.read_array_header_1_0(file)
            header_bytes = file.tell()
    data_bytes = math.prod(shape) * kind.itemsize
    assert data_bytes > 0 and header_bytes + data_bytes == member.file_size

    # A zip file's local header: 26 bytes, the lengths of name and extra field in 2 bytes each, then both.
    local = path.read_bytes()[member.header_offset :]
    name_bytes, extra_bytes = struct.unpack_from("<HH", local, 26)
    assert local[30 : 30 + name_bytes] == member.filename.encode()
    array = 30 + name_bytes + extra_bytes
    starts = {
        "member name": 30,
        "array header": array + local[array:].index(b"descr"),
        "data": array + header_bytes + data_bytes // 2,
    }
    spoil_file(path, "flip", member.header_offset + starts[damage])


def steps_in(folder) -> list[int]:
    """Steps that are committed in a folder."""
    return sorted({int(p.relative_to(folder).parts[0][5:]) for p in folder.glob("step-*/**/manifest.json")})


def logged_steps(folder):
    """(step, what was sampled and graded) of every rollout log on a disk."""
    for path in sorted(folder.glob("step-*.npz")):
        with np.load(path, allow_pickle=False) as archive:
            arrays = dict(archive)
        yield int(path.stem[5:]), graded_of(json.loads(arrays["about"].tobytes()), arrays)
