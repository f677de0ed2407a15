"""What the record of a run's attempts says, as JSON: `python -m trainer.checkpoint s3://bucket/prefix/RUN_ID`.

{"attempt": "7-3f2c1a", "host": ..., "seen_unix_s": ..., "alive": true, "code": null, "final": null}; "final" is [exit
code, why] of a run that is over for good. "attempt" is null before the first. For the desk, before a second launch.
"""

from __future__ import annotations

import json
import sys

from trainer.checkpoint.attempt import Attempts
from trainer.config import ConfigError
from trainer.exit_codes import EXIT_CONFIG, EXIT_STORAGE
from trainer.storage.probe import QUICK
from trainer.storage.storage import Storage, StorageError

SHOWN = {"attempt": "name", "host": "host", "code": "code"}


def main(arguments: list[str]) -> int:
    """The command line. Returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m trainer.checkpoint URL", file=sys.stderr)
        return EXIT_CONFIG
    try:
        record = Attempts(Storage(f"{arguments[0].rstrip('/')}/attempts", retry=QUICK))
        past, alive = record.past(), record.alive()
        newest = past[-1] if past else None
        shown = {name: newest and getattr(newest, key) for name, key in SHOWN.items()}
        shown["seen_unix_s"] = newest and record.seen(newest)
        print(json.dumps(shown | {"alive": alive is not None, "final": record.final()}))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_STORAGE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
