"""Models and datasets of this machine that a rented node must have: put into the bucket before anything is
rented."""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from recipes.drivers import bucket_access
from recipes.platforms.targets import target_named
from recipes.recipe.recipe_files import STORED_NOTE
from recipes.recipe.spec import MARKS, Recipe, Upload
from recipes.records import manifest
from trainer.config import ConfigError

FIELDS = {
    "model.path": "models",
    "algorithm.teacher": "models",
    "data.path": "data",
    "evaluation.path": "data",
}
"""Fields that may name a folder, and where that goes below the bucket."""


def with_uploads(recipe: Recipe, target: str, earlier: dict[str, str]) -> Recipe:
    """The recipe with what has to be uploaded for the target. Raises ConfigError where a folder is not here.

    earlier: field -> key of an earlier launch of the run, which stays with what it began with.
    """
    if not target_named(target).disposable:
        return recipe
    uploads = []
    for field, kind in FIELDS.items():
        if field == "algorithm.teacher" and recipe.kind == "sample":
            continue  # the trainer alone asks it
        section, _, name = field.partition(".")
        path = getattr(getattr(recipe.config, section), name)
        if not path.startswith(("/", "~")):
            continue
        local = str(Path(path).expanduser())
        key = earlier.get(field, "")
        note = Path(local) / STORED_NOTE
        if note.is_file():
            key = note.read_text().strip()
            if not key:  # storage.weights has all that the nodes need
                continue
        mark = MARKS[kind]
        if not key and not (Path(local) / mark).is_file():
            raise ConfigError(
                f"{field} {path} has no {mark} on this machine, and the nodes of {target} have no {path}"
            )
        key = key or f"{kind}/{Path(local).name.lower()}-{content_digest(local)}"
        uploads.append(Upload(field=field, local=local, key=key))
    if recipe.storage.weights.startswith("/"):
        raise ConfigError(
            f"the nodes of {target} have no {recipe.storage.weights}: give the run's bucket, or --target"
            " local"
        )
    _check_own_code(recipe, target)
    return replace(recipe, uploads=tuple(uploads))


def _check_own_code(recipe: Recipe, target: str) -> None:
    """Raises ConfigError where code of the run's own is not copied to the nodes with the repository."""
    for key, path in manifest.own_code(recipe.config):
        file = path.rpartition(":")[0]
        outside = Path(file).is_absolute() or ".." in Path(file).parts
        if outside or file.startswith("~"):
            raise ConfigError(
                f"{key} {file} is not on the nodes of {target}: put it into the repository, which"
                " is copied there, and name it from its root"
            )
        if Path(file).is_file() and manifest.is_ignored(file):
            raise ConfigError(f"{key} {file} is not copied to the nodes of {target}, since git ignores it")


def check_model_folder(recipe: Recipe) -> None:
    """Raises ConfigError where model.path or algorithm.teacher is to be a folder of this machine, and that
    holds no model."""
    config = recipe.config
    for field, path in (("model.path", config.model.path), ("algorithm.teacher", config.algorithm.teacher)):
        if path.startswith(("/", "~")) and not (Path(path).expanduser() / "config.json").is_file():
            raise ConfigError(
                f"{field} {path} has no config.json on this machine: give the folder of a model"
            )


def content_digest(folder: str) -> str:
    """Eight hex digits of a folder's names, sizes and times: two states of one folder never share a key."""
    lines = []
    for path in sorted(Path(folder).rglob("*"), key=str):
        if path.is_file():
            status = path.stat()
            lines.append(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def upload_lines(recipe: Recipe) -> list[str]:
    """What is uploaded, with its size, for a person."""
    lines = []
    for upload in _here(recipe):
        size = sum(path.stat().st_size for path in Path(upload.local).rglob("*") if path.is_file())
        where = f"{recipe.storage.bucket or 'BUCKET'}/{upload.key}"
        lines.append(f"{upload.local} ({size / 2**30:.2f} GiB) to {where}")
    return lines


def send_uploads(recipe: Recipe, env: dict[str, str]) -> None:
    """Uploads what is not there yet, with its size, speed and time on the screen. Raises ConfigError."""
    for upload, line in zip(_here(recipe), upload_lines(recipe), strict=True):
        print(f"uploading {line}", flush=True)
        url = f"{recipe.storage.bucket}/{upload.key}"
        command = [bucket_access.find_python(), "-m", "trainer.storage", "send", upload.local, url]
        if subprocess.run(command, env=os.environ | env).returncode:
            raise ConfigError(f"{upload.field} {upload.local} could not be uploaded, so nothing was rented")


def _here(recipe: Recipe) -> list[Upload]:
    """Uploads whose folder is here with all of it, and not only the shape of what lies in the bucket."""
    folders = {upload: Path(upload.local) for upload in recipe.uploads}
    return [up for up, folder in folders.items() if folder.is_dir() and not (folder / STORED_NOTE).is_file()]
