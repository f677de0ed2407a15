"""Files of a dataset repository on the Hugging Face hub, or of a mirror folder laid out like it.

Revision, sizes and hashes come from the hub; `huggingface_hub` downloads and resumes (into its own cache); every file
is then hashed and compared. `HF_ENDPOINT` and `HF_TOKEN` are honoured. A mirror folder holds `REPO_OWNER/REPO/FILE`, as
`hf download REPO --repo-type dataset --local-dir MIRROR/REPO` leaves it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.data.dataset import sha256_of

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class HubFile:
    """One file of a repository at one commit."""

    path: str
    bytes: int
    sha256: str = ""
    """Known for large files (LFS)."""
    git_sha1: str = ""
    """git's blob id: known for the others."""


@dataclass(frozen=True)
class Fetched:
    """A file that is here and is what the hub says."""

    local: Path
    record: dict[str, Any]
    """{"path", "bytes", "sha256"} for the manifest."""


class Repository:
    """One dataset repository at one commit. ConfigError where it, the revision or the mirror cannot be reached."""

    def __init__(self, repo: str, revision: str = "", mirror: str | Path = "", cache_dir: str | Path = "") -> None:
        self.repo = repo
        self._cache = str(cache_dir) or None
        self._folder = Path(mirror) / repo if mirror else None
        if self._folder:
            if not self._folder.is_dir():
                raise ConfigError(f"the mirror has no folder {self._folder}: put the files of {repo} there")
            self.files = [
                HubFile(path.relative_to(self._folder).as_posix(), path.stat().st_size)
                for path in sorted(self._folder.rglob("*"))
                if path.is_file() and ".cache" not in path.relative_to(self._folder).parts
            ]
            self.revision = self._mirror_revision(revision)
        else:
            self.revision, self.files = self._ask_hub(revision or "main")

    def _endpoint(self) -> str | None:
        return os.environ.get("HF_ENDPOINT") or None  # read now: the library reads it once, when it is imported

    def _ask_hub(self, revision: str) -> tuple[str, list[HubFile]]:
        from huggingface_hub import HfApi

        with _one_line(self.repo, revision):
            info = HfApi(endpoint=self._endpoint()).dataset_info(self.repo, revision=revision, files_metadata=True)
        files = []
        for sibling in info.siblings or []:
            lfs = sibling.lfs
            files.append(
                HubFile(
                    sibling.rfilename,
                    sibling.size or 0,
                    lfs.sha256 if lfs else "",
                    "" if lfs else sibling.blob_id or "",
                )
            )
        if not info.sha:
            raise ConfigError(f"the hub names no commit for {self.repo} at {revision}: give --revision a commit hash")
        if _is_commit(revision) and info.sha != revision:
            where = self._endpoint() or "the hub"
            raise ConfigError(
                f"{where} answers {self.repo} at {revision} with commit {info.sha}: use another HF_ENDPOINT"
            )
        return info.sha, files

    def _mirror_revision(self, wanted: str) -> str:
        """The commit that `hf download` noted beside the files, if one and the same; the wanted one must be it."""
        commits = {self._note(file.path)[0] for file in self.files} - {""}
        commit = commits.pop() if len(commits) == 1 else ""
        if wanted and not commit:
            raise ConfigError(
                f"{self._folder} does not say of which one revision it is: fetch it by `hf download --local-dir`, "
                "or drop --revision"
            )
        if _is_commit(wanted) and wanted != commit:
            raise ConfigError(
                f"{self._folder} is at revision {commit}, not {wanted}: download that one, or drop --revision"
            )
        return commit

    def _note(self, path: str) -> tuple[str, str]:
        """Commit and ETag (sha256 of a large file) that `hf download --local-dir` wrote down, or empty texts."""
        note = self._folder / ".cache" / "huggingface" / "download" / f"{path}.metadata" if self._folder else None
        lines = note.read_text().splitlines() if note and note.is_file() else []
        return (lines[0].strip(), lines[1].strip()) if len(lines) >= 2 else ("", "")

    def matching(self, pattern: str) -> list[str]:
        """Paths that match a shell pattern, sorted. ConfigError if there are none."""
        found = sorted(file.path for file in self.files if fnmatch.fnmatchcase(file.path, pattern))
        if not found:
            names = ", ".join(file.path for file in self.files[:8])
            raise ConfigError(f"{self.repo} at {self.revision or self._folder} has no {pattern}: it has {names}")
        return found

    def fetch(self, paths: Sequence[str], on_progress: Progress) -> list[Fetched]:
        """Downloads (or finds in the mirror) and verifies files. ConfigError if one is missing or damaged."""
        return [self._fetch(path, on_progress) for path in paths]

    def _fetch(self, path: str, on_progress: Progress) -> Fetched:
        file = next((file for file in self.files if file.path == path), None)
        if file is None:
            raise ConfigError(f"{self.repo} at {self.revision or self._folder} has no {path}")
        if self._folder:
            local = self._folder / path
            etag = self._note(path)[1]
            sha256 = sha256_of(local)
            if len(etag) == 64 and etag != sha256:
                raise ConfigError(f"{local} is damaged (sha256 differs from the one noted at download): fetch it again")
            return Fetched(local, {"path": path, "bytes": file.bytes, "sha256": sha256})
        local, sha256 = self._download(file, on_progress, force=False), ""
        for attempt in range(2):
            sha256 = sha256_of(local)
            problem = mismatch(local, file, sha256)
            if not problem:
                break
            if attempt:
                raise ConfigError(f"{self.repo}/{path}: {problem}, twice; is {self._endpoint() or 'the hub'} sound?")
            local = self._download(file, on_progress, force=True)
        return Fetched(local, {"path": path, "bytes": file.bytes, "sha256": sha256})

    def _download(self, file: HubFile, on_progress: Progress, force: bool) -> Path:
        from huggingface_hub import hf_hub_download

        with _one_line(self.repo, self.revision):
            path = hf_hub_download(
                self.repo,
                file.path,
                repo_type="dataset",
                revision=self.revision,
                endpoint=self._endpoint(),
                cache_dir=self._cache,
                force_download=force,
                tqdm_class=_bar(f"download {file.path}", file.bytes, on_progress),
            )
        return Path(path)


def _is_commit(revision: str) -> bool:
    return len(revision) == 40 and set(revision) <= set("0123456789abcdef")


def mismatch(local: Path, file: HubFile, sha256: str) -> str:
    """How a local file differs from what the hub says; empty if it does not."""
    size = local.stat().st_size
    if size != file.bytes:
        return f"{size} bytes instead of {file.bytes}"
    if file.sha256 and file.sha256 != sha256:
        return f"sha256 {sha256[:12]}… instead of {file.sha256[:12]}…"
    if file.git_sha1:
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        with open(local, "rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
        if digest.hexdigest() != file.git_sha1:
            return f"git hash {digest.hexdigest()[:12]}… instead of {file.git_sha1[:12]}…"
    return ""


class _one_line:
    """Turns the hub's errors into one line that says what to change."""

    def __init__(self, repo: str, revision: str) -> None:
        self._where = f"{repo} at {revision}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, (KeyboardInterrupt, SystemExit, ConfigError)):
            return
        from huggingface_hub import errors

        endpoint = os.environ.get("HF_ENDPOINT") or "the hub"
        if isinstance(error, errors.GatedRepoError):
            message = "access is restricted: accept its terms on the hub and set HF_TOKEN"
        elif isinstance(error, errors.RevisionNotFoundError):
            message = "no such revision: give --revision a branch, tag or commit of the repository"
        elif isinstance(error, errors.RepositoryNotFoundError):
            message = f"{endpoint} has no such dataset repository, or HF_TOKEN may not read it"
        elif isinstance(error, (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError)) or "http" in str(kind):
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            message = f"{endpoint} cannot be reached ({first}): check the network, set HF_ENDPOINT, or use --mirror DIR"
        else:
            return
        raise ConfigError(f"{self._where}: {message}") from None


def _bar(stage: str, total: int, on_progress: Progress) -> Any:
    """A progress bar class for huggingface_hub that draws nothing and tells `on_progress`."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._done = int(options.get("initial") or 0)
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            on_progress(stage, min(self._done, total), total)
            return None

    return Bar
