"""What goes through ShardFile is on the disk byte for byte, whatever the sizes and the file system."""

import errno
import hashlib
import os
import random
from pathlib import Path

import pytest

from data_prep.write import shard_file
from data_prep.write.shard_file import BLOCK_BYTES, ShardFile


def write(path: Path, content: bytes, seed: int = 0) -> str:
    """Writes `content` in pieces of random sizes. Returns the hash that the file states."""
    rng = random.Random(seed)
    file, at = ShardFile(path), 0
    while at < len(content):
        size = rng.choice([1, 7, 4096, 70_001, BLOCK_BYTES, 3 * BLOCK_BYTES + 5])
        assert file.write(content[at : at + size]) == len(content[at : at + size])
        at += size
    assert file.tell() == len(content)
    file.close()
    return file.hexdigest()


@pytest.mark.parametrize("size", [0, 1, 4096, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES - 1])
@pytest.mark.parametrize("folder", ["disk", "memory"])
def test_bytes_and_hash(tmp_path, size, folder):
    place = tmp_path if folder == "disk" else Path("/dev/shm")
    path = place / f"shard-file-{os.getpid()}"
    content = random.Random(size).randbytes(size)
    try:
        assert write(path, content, size) == hashlib.sha256(content).hexdigest()
        assert path.read_bytes() == content
    finally:
        path.unlink()


def test_a_write_that_is_cut_short_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """A direct write may end off the disk's blocks; the next is then refused, and what follows is written plainly."""
    real, cut = os.write, []

    def short(descriptor, data):
        if not cut:
            cut.append(real(descriptor, data[: 2 << 20]))
            return cut[0]
        if len(cut) == 1:
            cut.append(0)
            raise OSError(errno.EINVAL, "not aligned")
        return real(descriptor, data)

    monkeypatch.setattr(shard_file.os, "write", short)
    content = random.Random(1).randbytes(2 * BLOCK_BYTES + 99)
    assert write(tmp_path / "f", content) == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "f").read_bytes() == content and len(cut) == 2


def test_a_full_disk_is_an_error():
    file = ShardFile(Path("/dev/full"))
    file.write(bytes(100))
    file.close()
    with pytest.raises(OSError, match="No space left"):
        file.hexdigest()
