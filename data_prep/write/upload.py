"""Moving a prepared dataset to an object store: shards first, the manifest last."""

from __future__ import annotations

from pathlib import Path

from data_prep.ingest.hub_files import Progress
from trainer.data.dataset import MANIFEST, read_manifest
from trainer.data.schema import Manifest

EXTRAS = ("quarantine.jsonl", "preview.html")


def upload(local: str | Path, url: str, on_progress: Progress) -> Manifest:
    """Uploads the dataset in `local` to `url`, replacing another one there.

    Files already there are not sent again.

    A reader never sees a manifest whose shards are not complete: a former manifest goes first, ours
    comes last.
    """
    from trainer.storage.storage import Storage

    out, store = Path(local), Storage(url)
    manifest = read_manifest(out)
    former = remote_manifest(url)
    if former and former.fingerprint == manifest.fingerprint:
        return manifest
    if former:
        store.delete([MANIFEST])
        outdated = []
        for file in former.files:
            outdated += [file["path"], f"{file['path']}.sha256"]
        store.delete(outdated)
    done = 0
    for file in manifest.files:
        store.put(out / file["path"], file["path"], sha256=file["sha256"])
        done += file["bytes"]
        on_progress("upload", done, manifest.size_bytes)
    for name in EXTRAS:
        if (out / name).exists():
            store.put(out / name, name)
    store.put(out / MANIFEST, MANIFEST)
    return manifest


def remote_manifest(url: str) -> Manifest | None:
    """Manifest of the dataset at a URL; None if there is none."""
    from trainer.storage.storage import Storage

    return read_manifest(url) if Storage(url).exists(MANIFEST) else None
