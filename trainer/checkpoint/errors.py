"""What can be wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The message says what to change, where something can be changed."""


class CorruptCheckpoint(CheckpointError):
    """A file of a committed checkpoint is missing or has another sha256: fall back to the checkpoint before
    it."""
