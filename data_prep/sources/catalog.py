"""The datasets by name (catalog.yaml): repository, license, and the role of each column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.ingest.archive import TAR_ENDINGS
from data_prep.ingest.hub_files import Progress, Repository
from data_prep.sources.file_records import ENDINGS, first_object, read
from data_prep.sources.forms import Form
from data_prep.sources.own_files import Given, RecordSource, by_form
from trainer.config import ConfigError
from trainer.config.overrides import read_yaml

CHECKED = {
    "loopback": "columns as published, from a loopback hub (tests)",
    "documented": "columns as its documentation or others' code states them, from a loopback hub (tests);"
    " never downloaded here",
}
"""What of an entry was tried, and how, by its word for it."""


@dataclass(frozen=True)
class Entry:
    """One dataset of the hub."""

    repo: str
    about: str
    files: dict[str, list[str]]
    """Split -> shell patterns of its data files. The rows of split "" are split here."""
    columns: dict[str, str]
    """Role -> column."""
    images: list[str] = field(default_factory=list)
    """Archives with the images, if the rows do not hold them."""
    rows: int = 0
    """Published number of rows over all splits; 0: not stated. The summary names a difference."""
    license: str = ""
    """License that its repository states; empty: it was not read, so look before you use it."""
    revision: str = ""
    """Commit that is taken; empty: `main`, and the manifest says which commit that was."""
    marked: bool = False
    """Whether answers come after `####` or in a box; a row without one is left out."""
    evaluation: bool = False
    """Whether all rows are kept as published, with their own fields."""
    sft: bool = False
    """Whether it is for supervised training, which learns replies as they are."""
    only: tuple[str, Sequence[str]] = ("", ())
    """A column, and the values of it for which a row is taken."""
    checked: str = ""
    """What of this entry was tried, and how."""


def _catalog() -> dict[str, Entry]:
    rows = read_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: Entry(**row | {"checked": CHECKED[row["checked"]]}) for name, row in rows.items()}


CATALOG = _catalog()


def sources(name: str, repository: Repository, on_progress: Progress) -> Sequence[RecordSource]:
    """Downloads a dataset of the catalog.

    Raises ConfigError if it lacks the columns that the entry names.
    """
    entry = CATALOG[name]
    tables: list[tuple[Path, str]] = []
    records = []
    for split, patterns in entry.files.items():
        for pattern in patterns:
            for fetched in repository.fetch(repository.matching(pattern), on_progress):
                tables.append((fetched.local, split))
                records.append(fetched.record)
    archive_paths = []
    for pattern in entry.images:
        archive_paths += repository.matching(pattern)
    archives = repository.fetch(archive_paths, on_progress)
    form = Form(
        name, entry.columns, keep=entry.evaluation, marked=entry.marked, sft=entry.sft, only=entry.only
    )
    _check_columns(name, tables[0][0], form)
    roots = [archive.local for archive in archives]
    records += [archive.record for archive in archives]
    return [RecordSource(name, tables, form, roots, revision=repository.revision, fetched=records)]


def _check_columns(name: str, path: Path, form: Form) -> None:
    first = first_object(read(path))
    wanted = set()
    for role, columns in form.columns.items():
        if role in ("question", "answer", "chat", "images"):
            wanted |= {column.partition(".")[0] for column in columns.split(",")}
    missing = sorted(wanted - first.keys())
    if missing:
        raise ConfigError(
            f"{name}: {path.name} has no column {', '.join(missing)} (it has {', '.join(first)}): "
            "its repository changed; give --revision a commit from before, or its hub id and --map"
        )


def any_repository(repository: Repository, given: Given, on_progress: Progress) -> list[RecordSource]:
    """Any dataset repository: its Parquet files, or else its other data files, and its archives."""
    data = _ending_in(repository.files, ".parquet") or _ending_in(repository.files, ENDINGS)
    if not data:
        raise ConfigError(f"{repository.repo} has no data file ({', '.join(ENDINGS)})")
    archives = _ending_in(repository.files, (".zip", *TAR_ENDINGS))
    fetched = repository.fetch([*data, *archives], on_progress)
    local = [file.local for file in fetched]
    name = repository.repo.partition("/")[2].lower()
    sources = by_form(local[: len(data)], data, name, local[len(data) :], None, given)
    for source in sources:
        source.revision = repository.revision
        source.fetched = [file.record for file in fetched]
    return sources


def _ending_in(paths: Iterable[str], endings: str | tuple[str, ...]) -> list[str]:
    return [path for path in paths if path.endswith(endings)]
