"""What the command lines that talk to a store share."""

from __future__ import annotations

import sys
from collections.abc import Callable

from trainer.config import ConfigError
from trainer.system.errors import StorageError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_OK, EXIT_STORAGE


def exit_code(run: Callable[[], None]) -> int:
    """Runs a command and returns its exit code; what a user can change and what a store said is printed as
    one line."""
    try:
        run()
    except (ConfigError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_STORAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK
