"""What a user wrote in a file, `path/to/file.py:name`: loading it, and saying its faults in a line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class OwnFileError(Exception):
    """What is wrong with a user's file, or with what it defines, on one line."""


def load_named(key: str, spec: str) -> Callable[..., Any]:
    """The function or class of `path/to/file.py:name`, which the option `key` names. Raises OwnFileError that
    says what is wrong with it."""
    path, _, name = spec.rpartition(":")
    if not path or not Path(path).is_file():
        raise OwnFileError(f"{key} {spec!r}: write path/to/file.py:function, with a file that exists")
    module_name = "users_" + Path(path).stem
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise OwnFileError(f"{key}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickles look a module up by its name
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}"
        raise OwnFileError(f"{key} {spec}: {said}{at_fault(error, path)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise OwnFileError(f"{key}: {path} has no function {name!r}")
    return found


def at_fault(error: BaseException, path: str) -> str:
    """The last line of a file that an exception passed, as " (file.py:3)"; empty where it passed none."""
    own = Path(path).resolve()
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).resolve() == own:
        return f" ({own.name}:{error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).resolve() == own:
            return f" ({own.name}:{frame.lineno})"
    return ""
