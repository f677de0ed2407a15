"""Files of a dataset repository on the Hugging Face hub at one commit, or of a mirror folder with the
same layout.

`huggingface_hub` resolves the revision, downloads, resumes and caches. Every file is hashed once, for
the manifest and to compare it with what the hub states. `HF_ENDPOINT`, `HF_TOKEN` and `HF_HOME` are
honored. A mirror folder holds `REPO_OWNER/REPO/FILE`, as `hf download REPO --repo-type dataset
--local-dir MIRROR/REPO` leaves it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer.config import ConfigError
from trainer.data.dataset import file_sha256
from trainer.system.backoff import Backoff
from trainer.system.errors import OF_THE_DISK, UNWRITABLE, StorageError

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
PATIENT = Backoff(attempts=8, first_wait_s=2.0)
"""How a hub that is away is asked again: for two to four minutes."""


@dataclass(frozen=True)
class Fetched:
    """A local file whose size and hash are those that the hub states."""

    local: Path
    record: dict[str, Any]
    """{"path", "bytes", "sha256"} for the manifest."""


class Repository:
    """One dataset repository at one commit.

    ConfigError where there is no such repository, revision or mirror, StorageError where the hub is away for
    minutes.
    """

    def __init__(
        self, repo: str, revision: str = "", mirror: str | Path = "", cache_dir: str | Path = ""
    ) -> None:
        self.repo = repo
        self.revision = revision
        self._cache = str(cache_dir) or None
        self._folder = Path(mirror) / repo if mirror else None
        self.files: dict[str, tuple[int, str]] = {}
        """Path -> (bytes, sha256). The hub states the sha256 of large files; that of others is empty."""
        if self._folder:
            self._list_mirror(self._folder)
        else:
            self._ask_hub(revision or "main")

    def _list_mirror(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"the mirror has no folder {folder}: put the files of {self.repo} there")
        if self.revision:
            raise ConfigError(
                f"a mirror folder holds one revision, whichever it is: drop --revision {self.revision}"
            )
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if path.is_file() and ".cache" not in inside.parts:
                self.files[inside.as_posix()] = path.stat().st_size, ""

    def _ask_hub(self, revision: str) -> None:
        from huggingface_hub import HfApi

        def ask() -> Any:
            api = HfApi(endpoint=_endpoint())
            return api.dataset_info(self.repo, revision=revision, files_metadata=True)

        info = _patiently(f"{self.repo} at {revision}", ask)
        if not info.sha or (_is_commit(revision) and info.sha != revision):
            raise ConfigError(
                f"{self.repo} at {revision}: {_endpoint() or 'the hub'} gives commit {info.sha} instead"
            )
        self.revision = info.sha
        for file in info.siblings or []:
            self.files[file.rfilename] = file.size or 0, file.lfs.sha256 if file.lfs else ""

    def matching(self, pattern: str) -> list[str]:
        """Paths that match a shell pattern, sorted. ConfigError naming what there is if none does."""
        paths = sorted(path for path in self.files if fnmatch.fnmatchcase(path, pattern))
        if not paths:
            names = ", ".join(list(self.files)[:8])
            raise ConfigError(
                f"{self.repo} at {self.revision or self._folder} has no {pattern}: it has {names}"
            )
        return paths

    def fetch(self, paths: Sequence[str], on_progress: Progress) -> list[Fetched]:
        """Downloads and hashes files, or takes them from the mirror.

        ConfigError if one is missing or damaged.
        """
        return [self._fetch(path, on_progress) for path in paths]

    def _fetch(self, path: str, on_progress: Progress) -> Fetched:
        if path not in self.files:
            raise ConfigError(f"{self.repo} at {self.revision or self._folder} has no {path}")
        size, stated = self.files[path]
        for again in (False, True):
            if self._folder:
                local = self._folder / path
            else:
                local = self._download(path, size, on_progress, force=again)
            sha256 = file_sha256(local)
            if local.stat().st_size == size and stated in ("", sha256):
                return Fetched(local, {"path": path, "bytes": size, "sha256": sha256})
        raise ConfigError(
            f"{self.repo}/{path}: twice {local.stat().st_size} bytes with sha256 {sha256[:12]}… "
            f"instead of {size} with {stated[:12] or 'any'}…; is {_endpoint() or 'the hub'} sound?"
        )

    def _download(self, path: str, size: int, on_progress: Progress, force: bool) -> Path:
        from huggingface_hub import hf_hub_download

        def download() -> Path:
            local = hf_hub_download(
                self.repo,
                path,
                repo_type="dataset",
                revision=self.revision,
                endpoint=_endpoint(),
                cache_dir=self._cache,
                force_download=force,
                tqdm_class=_bar(f"download {path}", size, on_progress),
            )
            return Path(local)

        return _patiently(f"{self.repo} at {self.revision}", download)


def _endpoint() -> str | None:
    # The library reads it only once, when it is imported.
    return os.environ.get("HF_ENDPOINT") or None


def _is_commit(revision: str) -> bool:
    return len(revision) == 40 and set(revision) <= set("0123456789abcdef")


def _patiently(where: str, action: Callable[[], T]) -> T:
    """The action's result, asked for again for minutes while the hub is away. Raises ConfigError for what it
    refuses, StorageError where it stays away."""

    def once() -> T:
        with _one_line(where):
            return action()

    def told(error: Exception, failures: int, wait_s: float) -> None:
        print(f"data_prep: {error}; again in {wait_s:.0f} s", file=sys.stderr, flush=True)

    return PATIENT.call(once, lambda error: isinstance(error, StorageError), told)


@contextlib.contextmanager
def _one_line(where: str) -> Generator[None]:
    """Turns the hub's errors into one line that says what to change: StorageError where it does not answer,
    ConfigError where it refuses."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        message = "access is restricted: accept its terms on the hub and set HF_TOKEN"
    except errors.RevisionNotFoundError:
        message = "no such revision: give --revision a branch, tag or commit of the repository"
    except errors.RepositoryNotFoundError:
        message = f"{_endpoint() or 'the hub'} has no such dataset repository, or HF_TOKEN may not read it"
    except Exception as error:  # httpx's own errors have no base class that huggingface_hub names
        if not isinstance(error, (errors.HfHubHTTPError, OSError)) and "http" not in type(error).__module__:
            raise
        if isinstance(error, OSError) and error.errno in (*OF_THE_DISK, *UNWRITABLE):
            raise  # of the cache here, and not of the hub
        status = getattr(getattr(error, "response", None), "status_code", 0)
        refused = 400 <= status < 500 and status not in (408, 429)
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        message = (
            f"{_endpoint() or 'the hub'} cannot be reached ({first}): "
            "check the network, set HF_ENDPOINT, or use --mirror DIR"
        )
        if not refused:
            raise StorageError(f"{where}: {message}") from None
    else:
        return
    raise ConfigError(f"{where}: {message}") from None


def _bar(stage: str, total: int, on_progress: Progress) -> Any:
    """A progress bar class for huggingface_hub that draws nothing and calls `on_progress`."""
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
