"""MathV60K (VerMulti): `*_message.jsonl` and the images beside it, from the hub, a mirror folder or
local files.

A line holds `question`, `answer` (`$\\boxed{B}$`) and `message`, a JSON list inside a string, whose
images are paths of the machine that wrote it: absolute, `file://`, relative or bare, with slashes
possibly escaped. Lines are parsed, never rewritten as text; `wanted.py` finds the member of the archive
that a path means.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from data_prep.sources.forms import Form
from data_prep.sources.own_files import RecordSource, hashes, subsource
from trainer.config import ConfigError

FORM = Form("MathV60K", {"chat": "message", "answer": "answer", "solution": "solution"})


def local(jsonl: str | Path, images: str | Path, name: str = "mathv60k", split: str = "") -> RecordSource:
    """The source made of a local jsonl and an archive or folder. ConfigError if one is missing."""
    for path, what in ((jsonl, "jsonl"), (images, "image archive or folder")):
        if not Path(path).exists():
            raise ConfigError(f"no {what} at {path}")
    source = RecordSource(name, [(Path(jsonl), split)], FORM, [Path(images)], subsource=subsource)
    source.record = cache(partial(hashes, source))
    return source
