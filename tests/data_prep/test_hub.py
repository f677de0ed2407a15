"""Downloads through huggingface_hub from a server in the hub's layout: pinned, resumed, verified; mirror
folders."""

from __future__ import annotations

import hashlib
import random

import pytest

from data_prep.ingest.hub_files import Repository
from tests.data_prep import hub_server
from trainer.config import ConfigError
from trainer.system.errors import StorageError

REPO = "owner/set"
BIG = random.Random(0).randbytes(3_000_000)


def quiet(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server.serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        running.add(REPO, {"big.bin": BIG, "README.md": b"small", "data/a-0.parquet": b"x" * 2000})
        yield running


def test_a_branch_is_resolved_to_its_commit_and_files_are_verified(hub, tmp_path):
    first = hub.heads[REPO]
    seen = []
    repository = Repository(REPO, cache_dir=tmp_path)
    hub.add(REPO, {"big.bin": b"another commit" * 100})  # main moves on while we download
    fetched = repository.fetch(["big.bin", "README.md"], lambda *report: seen.append(report))
    assert repository.revision == first
    assert [one.local.read_bytes() for one in fetched] == [BIG, b"small"]
    assert fetched[0].record == {
        "path": "big.bin",
        "bytes": len(BIG),
        "sha256": hashlib.sha256(BIG).hexdigest(),
    }
    assert ("download big.bin", len(BIG), len(BIG)) in seen


def test_an_old_commit_can_be_asked_for(hub, tmp_path):
    first = hub.heads[REPO]
    hub.add(REPO, {"big.bin": b"new"})
    assert Repository(REPO, first, cache_dir=tmp_path).fetch(["big.bin"], quiet)[0].local.read_bytes() == BIG


def test_a_cut_download_goes_on_where_it_stopped(hub, tmp_path):
    huge = 9 * BIG  # the library keeps what it has in steps of 10 MiB
    hub.add(REPO, {"huge.bin": huge})
    hub.cut_after["huge.bin"] = [len(huge) - 1_000_000]
    fetched = Repository(REPO, cache_dir=tmp_path).fetch(["huge.bin"], quiet)
    assert fetched[0].local.read_bytes() == huge
    ranges = [
        given for method, path, given in hub.requests if method == "GET" and path.startswith("/cdn") and given
    ]
    assert [int(given.removeprefix("bytes=").partition("-")[0]) for given in ranges] == [20 << 20]


def test_a_second_fetch_downloads_nothing(hub, tmp_path):
    Repository(REPO, cache_dir=tmp_path).fetch(["big.bin"], quiet)
    before = sum(method == "GET" and "/cdn/" in path for method, path, _ in hub.requests)
    Repository(REPO, cache_dir=tmp_path).fetch(["big.bin"], quiet)
    assert sum(method == "GET" and "/cdn/" in path for method, path, _ in hub.requests) == before == 1


def test_a_corrupt_download_is_repeated_once(hub, tmp_path):
    hub.corrupt["big.bin"] = 1
    assert Repository(REPO, cache_dir=tmp_path).fetch(["big.bin"], quiet)[0].local.read_bytes() == BIG
    hub.corrupt["big.bin"] = 2
    twice = r"big.bin: twice 3000000 bytes with sha256 .* instead of .*; is .* sound\?"
    with pytest.raises(ConfigError, match=twice):
        Repository(REPO, cache_dir=tmp_path / "again").fetch(["big.bin"], quiet)


@pytest.mark.parametrize(
    ("repo", "revision", "says"),
    [("owner/none", "", "no such dataset repository"), (REPO, "v9", "no such revision: give --revision")],
)
def test_what_is_not_there_is_named_in_one_line(hub, tmp_path, repo, revision, says):
    with pytest.raises(ConfigError, match=says) as caught:
        Repository(repo, revision, cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_an_unreachable_hub_names_the_ways_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="cannot be reached .* HF_ENDPOINT, or use --mirror DIR") as caught:
        Repository(REPO, cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_patterns_name_what_is_there(hub, tmp_path):
    repository = Repository(REPO, cache_dir=tmp_path)
    assert repository.matching("data/*.parquet") == ["data/a-0.parquet"]
    with pytest.raises(ConfigError, match="no test-.*: it has README.md, big.bin"):
        repository.matching("test-*")


def mirror(folder, sha256: str, commit: str = "a" * 40):
    """What `hf download REPO --local-dir` leaves."""
    here = folder / REPO
    notes = here / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    (here / "big.bin").write_bytes(BIG)
    (notes / "big.bin.metadata").write_text(f"{commit}\n{sha256}\n1700000000.0\n")


def test_a_mirror_folder_needs_no_server(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    mirror(tmp_path, hashlib.sha256(BIG).hexdigest())
    repository = Repository(REPO, mirror=tmp_path)
    assert repository.revision == ""
    assert repository.matching("*") == ["big.bin"]
    assert repository.fetch(["big.bin"], quiet)[0].local == tmp_path / REPO / "big.bin"
    with pytest.raises(ConfigError, match="holds one revision, whichever it is: drop --revision v2"):
        Repository(REPO, "v2", mirror=tmp_path)


def test_a_hub_that_answers_with_another_commit_is_refused(hub, tmp_path):
    asked, other = hub.heads[REPO], hub.add(REPO, {"big.bin": b"other"})
    hub.answers_with[asked] = other
    with pytest.raises(ConfigError, match=f"at {asked}: .* gives commit {other} instead"):
        Repository(REPO, asked, cache_dir=tmp_path)


def test_a_missing_mirror_says_what_belongs_there(tmp_path):
    with pytest.raises(ConfigError, match="put the files of owner/set there"):
        Repository(REPO, mirror=tmp_path)
