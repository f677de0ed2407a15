"""Errors that more than one package raises or reads."""

import errno

OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""What the system says of a disk that is full, over its quota, read-only or failing. Another start may find
it well, or find another machine."""


def describe_disk_error(error: OSError) -> str:
    """What is wrong with a disk, where, and what to do."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            state = "is full"
            cure = "free some of it, keep fewer checkpoints (checkpoint.keep_last), or move run.dir"
        case errno.EROFS:
            state, cure = "is read-only", "mount it writable, or move run.dir"
        case _:
            state, cure = "fails", "take another disk or machine"
    where = f" at {error.filename}" if error.filename else ""
    return f"the disk {state}{where} ({error.strerror or error}): {cure}"


UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG)
"""What the system says of a place where this user can write nothing: another place is to be named."""


class ConfigError(ValueError):
    """A configuration, data set or machine that cannot run. The message says what to change."""


class StoreRefused(ConfigError):
    """A store says that the credentials or their rights do not do. After it has served them, that may pass:
    rights are changed and clouds err."""


class ObjectTooLarge(ValueError):
    """An object that is larger than anything of its kind may be; nothing of it was read."""


class RayError(RuntimeError):
    """Ray did not start, or placed nothing on a cluster that is large enough: worth another start."""


class StorageError(RuntimeError):
    """A store or the hub failed for longer than the retries last: another start may find it well."""
