"""A file of lines that another process appends to, read piece by piece."""

from __future__ import annotations

from pathlib import Path


class GrowingFile:
    """Gives every complete line once, and all of them again where the file was written anew."""

    def __init__(self, path: Path, start: int = 0) -> None:
        """start: bytes at the file's beginning that are passed over."""
        self.path = path
        self.begun_anew = False
        """Whether the last `read` found another file than the one before it, or a shorter one."""
        self._inode = 0
        self._offset = start

    def read(self) -> bytes:
        """The complete lines that are new; empty where there is no file yet."""
        self.begun_anew = False
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return b""
        replaced = self._inode and stat.st_ino != self._inode
        if replaced or stat.st_size < self._offset:
            self.begun_anew = True
            self._offset = 0
        self._inode = stat.st_ino
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        lines = new[: new.rfind(b"\n") + 1]
        self._offset += len(lines)
        return lines

    def rest(self) -> bytes:
        """What follows the last complete line; no later `read` gives it again."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                rest = file.read()
        except FileNotFoundError:
            return b""
        self._offset += len(rest)
        return rest
