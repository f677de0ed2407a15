"""Files of a model of the hub: what another start may bring is told apart from what it cannot."""

from __future__ import annotations

import errno
import threading
import time
from types import SimpleNamespace

import httpx2
import pytest
from huggingface_hub.errors import XetDownloadError

from tests.data_prep import hub_server
from trainer import config as c
from trainer.config import ConfigError
from trainer.data.processor import Prompter
from trainer.storage import hub as hub_files
from trainer.system import server_waits
from trainer.system.backoff import Backoff
from trainer.system.errors import StorageError

CONFIG = c.RunConfig(model=c.Model(path="owner/model"))
INDEX, WHOLE = hub_files.INDEX, hub_files.WHOLE


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """The library tries again for 23 s, and we for 20 minutes."""
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(hub_files, "TRIES", Backoff(attempts=1))


@pytest.fixture
def hub(monkeypatch):
    with hub_server.serve() as served:
        served.add("owner/model", {WHOLE: b"w" * 2000})
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        # transformers' calls take these
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield served


@pytest.mark.parametrize("name", [INDEX, WHOLE])
@pytest.mark.parametrize("status", [500, 503, 429, 0, 400, 401, 403, 404])
def test_an_outage_is_not_a_refusal(hub, tmp_path, name, status):
    """Status 0: the connection is closed without an answer."""
    hub.fails = {name: status}
    with pytest.raises(ConfigError if 400 <= status < 429 else StorageError) as raised:
        hub_files.fetch_files(CONFIG, hub_files.weight_files(CONFIG, tmp_path), tmp_path)
    assert f"{name} of owner/model" in str(raised.value) and "\n" not in str(raised.value)
    hub.fails = {}
    (path,) = hub_files.fetch_files(CONFIG, hub_files.weight_files(CONFIG, tmp_path), tmp_path)
    assert path.read_bytes() == b"w" * 2000


def test_a_hub_that_is_away_is_an_outage(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="ConnectError"):
        hub_files.weight_files(CONFIG, tmp_path)


@pytest.mark.parametrize(
    "error", [httpx2.ReadError(""), httpx2.ReadTimeout("late"), XetDownloadError("x"), OSError(5)]
)
def test_a_download_that_breaks_off_is_an_outage(monkeypatch, tmp_path, error):
    def download(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(StorageError, match=type(error).__name__):
        hub_files.model_file(CONFIG, WHOLE, tmp_path)


def test_what_is_not_there_and_what_cannot_be_a_name(hub, monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"owner/model has no {INDEX}"):
        hub_files.model_file(CONFIG, INDEX, tmp_path)
    with pytest.raises(ConfigError, match="HFValidationError"):
        hub_files.model_file(c.RunConfig(model=c.Model(path="owner/--model")), WHOLE, tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub_files.weight_files(CONFIG, tmp_path) == [WHOLE]
    with pytest.raises(FileNotFoundError, match="the hub is switched off"):
        hub_files.model_file(CONFIG, WHOLE, tmp_path)


@pytest.mark.parametrize(("status", "kind"), [(503, StorageError), (0, StorageError), (401, ConfigError)])
def test_the_first_file_that_a_start_reads_is_no_exception(hub, monkeypatch, tmp_path, status, kind):
    """transformers raises OSError for all of these."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub.fails = {"config.json": status}
    with pytest.raises(kind, match="config.json of owner/model"):
        Prompter(CONFIG.model)


def test_an_outage_after_the_first_file_is_one_too(hub, tiny_model, monkeypatch, tmp_path):
    """config.json has come; what else the processor and the tokenizer read has not."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir() if path.suffix != ".safetensors"}
    hub.add("owner/small", files)
    hub.fails = {name: 503 for name in files if name != "config.json"}
    hub.fails |= dict.fromkeys(
        ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json"), 503
    )
    with pytest.raises(StorageError, match="owner/small"):
        Prompter(c.Model(path="owner/small"))
    hub.fails = {}
    assert Prompter(c.Model(path="owner/small")).has_vision


def test_a_hub_that_comes_back_is_waited_for_by_name(hub, monkeypatch, tmp_path):
    """As a launcher sees it."""
    monkeypatch.setenv(server_waits.FOLDER_VARIABLE, str(tmp_path / "beacons"))
    (tmp_path / "beacons").mkdir()
    monkeypatch.setattr(hub_files, "TRIES", Backoff(attempts=1, first_wait_s=0.05, patience_s=60))
    hub.fails = {WHOLE: 503}
    got = []
    thread = threading.Thread(target=lambda: got.append(hub_files.model_file(CONFIG, WHOLE, tmp_path)))
    thread.start()
    deadline = time.monotonic() + 30
    while not (waits := server_waits.read_waits(tmp_path / "beacons")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (wait,) = waits
    assert wait.kind == "storing" and wait.notable and wait.limit_s == hub_files.LONGEST_S
    assert str(wait).startswith(f"waiting for the hub at {hub.url} since ") and "503" in str(wait)
    hub.fails = {}
    thread.join(30)
    assert got[0].read_bytes() == b"w" * 2000 and server_waits.read_waits(tmp_path / "beacons") == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), None])
def test_what_waiting_does_not_cure_is_told_at_once(hub, monkeypatch, tmp_path, capsys, error):
    """A full disk, and a refusal."""
    monkeypatch.setattr(hub_files, "TRIES", Backoff(attempts=9, first_wait_s=60, patience_s=60))
    hub.fails = {WHOLE: 401}
    if error:

        def download(*_, **__):
            raise error

        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(StorageError if error else ConfigError):
        hub_files.model_file(CONFIG, WHOLE, tmp_path)
    assert "waiting for" not in capsys.readouterr().err
