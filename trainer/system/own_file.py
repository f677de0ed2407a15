"""What a user wrote in a file, `path/to/file.py:name`: loading it, calling it, naming its faults."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.system.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
GIVEN_IN = "SPOTRL_GIVEN_IN"
"""Names the folder in which a person gave the command, where the process has gone elsewhere since."""
FAULT_CHARS = 300
_runner: Any = None
"""The event loop of this process, once something was awaited."""


class OwnFileError(ConfigError):
    """What is wrong with a user's file, or with what it defines, on one line."""

    lacks_module = False
    """Whether the file imports a package that this machine does not have."""


def looked_in(path: str) -> str:
    """Where a path that names nothing was looked for: where the command was given, and the repository."""
    if path.startswith(("/", "~")):
        return ""
    here = os.getcwd()
    given_in = os.environ.get(GIVEN_IN, here) if Path(here) == ROOT else here
    return f" (looked in {' and '.join(dict.fromkeys([given_in, str(ROOT)]))})"


def own_path(spec: str) -> Path:
    """The file of `path/to/file.py:name`, below the current folder or the repository."""
    path = Path(spec.rpartition(":")[0]).expanduser()
    if not path.is_file() and (ROOT / path).is_file():
        path = ROOT / path
    return path.absolute()


def load_named(key: str, spec: str) -> Callable[..., Any]:
    """The function or class of `path/to/file.py:name`, which the option `key` names. The file may import what
    stands beside it. Raises OwnFileError that says what is wrong with it."""
    given, _, name = spec.rpartition(":")
    path = own_path(spec)
    if not given or not path.is_file():
        where = looked_in(given) if given else ""
        raise OwnFileError(f"{key} {spec!r}: write path/to/file.py:function, with a file that exists{where}")
    module_name = "users_" + path.stem
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise OwnFileError(f"{key}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickles look a module up by its name
    _make_importable(path.parent)
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        refused = OwnFileError(fault_of(key, spec, error))
        refused.lacks_module = isinstance(error, ModuleNotFoundError)
        raise refused from error
    loaded = getattr(module, name, None)
    if not callable(loaded):
        raise OwnFileError(f"{key}: {path} has no function {name!r}")
    return loaded


def _make_importable(folder: Path) -> None:
    """Lets a folder's modules be imported, before installed packages and behind Python's own."""
    if str(folder) in sys.path:
        return
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    places = [number for number, path in enumerate(sys.path) if path in installed]
    sys.path.insert(min(places, default=len(sys.path)), str(folder))


def result_of(returned: Any) -> Any:
    """What a user's function returned, awaited where it is asynchronous. One event loop of the process awaits
    all of them, so that a client or a lock that the file keeps stays usable."""
    global _runner
    if not inspect.isawaitable(returned):
        return returned
    if _runner is None:
        import asyncio  # takes its time, and few files are asynchronous

        _runner = asyncio.Runner()
    return _runner.run(_awaited(returned))


async def _awaited(returned: Any) -> Any:
    return await returned


def fault_of(key: str, spec: str, error: BaseException) -> str:
    """What a user's file raised, with its line, on one line."""
    reason = " ".join(str(error).split())[:FAULT_CHARS]
    return f"{key} {spec}: {type(error).__name__}: {reason}{_at_line(error, own_path(spec))}"


def _at_line(error: BaseException, path: Path) -> str:
    """The last line of a file, or one beside it, that an exception passed: " (file.py:3)", or ""."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).parent == path.parent:
        return f" ({Path(error.filename).name}:{error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).parent == path.parent:
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""
