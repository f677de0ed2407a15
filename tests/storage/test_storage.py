"""Storage against real servers: rclone for bytes, authentication, death and interruption; moto for the S3
protocol."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import servers
from trainer.config import ConfigError
from trainer.storage.__main__ import main
from trainer.storage.storage import Storage
from trainer.storage.stores import RetryPolicy, open_store, part_for

QUICK = RetryPolicy(attempts=6, first_wait_s=0.2, max_wait_s=1.0, request_retries=1, request_retry_s=2.0)
MIB = 1 << 20


@pytest.fixture(scope="module")
def rclone(tmp_path_factory):
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="module")
def moto():
    with servers.moto() as server:
        yield server


@pytest.fixture(params=["file", "rclone", "moto"])
def store(request, tmp_path):
    if request.param == "file":
        return Storage(f"file://{tmp_path}/store", retry=QUICK)
    server = request.getfixturevalue(request.param)
    return Storage(f"s3://bucket/{tmp_path.name}", env=server.env, retry=QUICK)


def blob(path: Path, size: int, seed: int = 0) -> tuple[Path, str]:
    data = b"".join(hashlib.sha256(f"{seed}:{i}".encode()).digest() for i in range(-(-size // 32)))[:size]
    path.write_bytes(data)
    return path, hashlib.sha256(data).hexdigest()


def test_round_trip_listing_and_deletion(store, tmp_path):
    file, sha = blob(tmp_path / "a", 20 * MIB + 17)  # more than one part
    assert store.put(file, "step/one.bin")
    store.put_bytes("step/two.json", b"{}")
    store.put_bytes("other.json", b"[]")
    assert store.list("step") == [("step/one.bin", 20 * MIB + 17), ("step/two.json", 2)]
    assert len(store.list()) == 3
    assert store.get_bytes("step/two.json") == b"{}"
    back = []
    count = store.get("step/one.bin", tmp_path / "deep" / "b", back.append, sha256=sha)
    assert count == sum(back) == 20 * MIB + 17
    assert (tmp_path / "deep" / "b").read_bytes() == file.read_bytes()
    store.delete(["step/one.bin", "step/two.json", "never/was"])
    assert store.list() == [("other.json", 2)]
    assert not store.exists("step/one.bin")


def test_missing_keys_are_file_not_found_at_once(store, tmp_path):
    begun = time.monotonic()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        store.get("nowhere", tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        store.get_bytes("nowhere")
    assert store.size("nowhere") is None
    assert time.monotonic() - begun < 3
    assert list(tmp_path.glob(".x*")) == []


def test_a_file_that_is_there_is_not_sent_again(store, tmp_path):
    file, sha = blob(tmp_path / "a", MIB)
    assert store.put(file, "f", sha256=sha)
    assert not store.put(file, "f", sha256=sha)
    other, other_sha = blob(tmp_path / "b", MIB, seed=1)
    assert store.put(other, "f", sha256=other_sha), "same size, other content: must be sent"
    store.delete(["f"])
    assert store.put(other, "f", sha256=other_sha), "only the note was left: must be sent"
    store.put_bytes("f", b"short")
    assert store.put(other, "f", sha256=other_sha), "another size: must be sent"


def test_damage_is_noticed_while_downloading(store, tmp_path):
    _, sha = blob(tmp_path / "a", MIB)
    other, _ = blob(tmp_path / "b", MIB, seed=1)
    store.put(other, "f")
    with pytest.raises(ValueError, match="damaged"):
        store.get("f", tmp_path / "x", sha256=sha)
    assert not (tmp_path / "x").exists()
    assert list(tmp_path.glob(".x*")) == []


def test_server_that_dies_mid_upload_and_comes_back(tmp_path, capfd):
    file, sha = blob(tmp_path / "a", 48 * MIB)
    with servers.rclone(tmp_path / "disk") as server, servers.proxy(server.port) as relay:
        relay.bytes_per_s = 40e6
        store = Storage("s3://bucket/p", env=servers.s3_environment(relay.port), retry=QUICK)

        def murder() -> None:
            while relay.passed < 8 * MIB:
                time.sleep(0.01)
            server.kill()
            time.sleep(1.0)
            relay.bytes_per_s = 0
            server.start()

        thread = threading.Thread(target=murder)
        thread.start()
        assert store.put(file, "f", sha256=sha)
        thread.join()
        assert store.retries >= 1
        assert "again in" in capfd.readouterr().err
        store.get("f", tmp_path / "b", sha256=sha)


def test_network_cut_mid_download(tmp_path):
    file, sha = blob(tmp_path / "a", 24 * MIB)
    with servers.rclone(tmp_path / "disk") as server, servers.proxy(server.port) as relay:
        store = Storage("s3://bucket/p", env=servers.s3_environment(relay.port), retry=QUICK)
        store.put(file, "f")

        counts = []

        def tick(count: int) -> None:
            counts.append(count)
            if len(counts) == 2:
                relay.cut()
                threading.Timer(0.5, relay.restore).start()

        store.get("f", tmp_path / "b", tick, sha256=sha)
        assert store.retries >= 1
        assert (tmp_path / "b").read_bytes() == file.read_bytes()


def test_killed_upload_leaves_no_object(rclone, tmp_path):
    file, sha = blob(tmp_path / "a", 48 * MIB)
    with servers.proxy(rclone.port) as relay:
        relay.bytes_per_s = 20e6
        put = f"Storage('s3://bucket/k').put({str(file)!r}, 'f', sha256={sha!r})"
        code = f"from trainer.storage.storage import Storage; {put}"
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | servers.s3_environment(relay.port)
        )
        while relay.passed < 16 * MIB:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    store = Storage("s3://bucket/k", env=rclone.env, retry=QUICK)
    assert store.list() == []
    assert store.put(file, "f", sha256=sha)


MEMORY = """
import resource, sys
from trainer.storage.storage import Storage
store = Storage('s3://bucket/m')
store.put_bytes('warm', b'x'); store.get_bytes('warm')
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store.put(sys.argv[1], 'big')
store.get('big', sys.argv[2])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, flush=True)
"""


@pytest.mark.slow
def test_memory_is_bounded(rclone, tmp_path):
    file = tmp_path / "a"
    with open(file, "wb") as out:
        out.truncate(768 * MIB)
    command = [sys.executable, "-c", MEMORY, str(file), str(tmp_path / "b")]
    result = subprocess.run(command, env=os.environ | rclone.env, capture_output=True, text=True)
    assert result.stdout, f"{result.returncode}: {result.stderr}"
    assert int(result.stdout) < 320, "MiB above the idle process for a file of 768"


# --- urls, credentials, limits ------------------------------------------------------------------------------


def test_runpod_volumes_have_limits():
    env = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for endpoint, timeout in (("https://s3api-eu-ro-1.runpod.io/", "2h"), ("https://other", "10m")):
        store = open_store("s3://volume/x", env | {"AWS_ENDPOINT_URL": endpoint}, QUICK)
        assert store.client_options["timeout"] == timeout
    for size in (1, 500_000_001, 30 << 30, 4 << 40):
        part = part_for(size)
        assert part <= 500_000_000
        assert -(-size // part) <= 10_000
    assert part_for(500_000_001) < 500_000_001, "above 500 MB it must be multipart"
    with pytest.raises(ConfigError, match="split it"):
        part_for(6 << 40)


def test_r2_takes_endpoint_and_keys_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="R2_ENDPOINT_URL or R2_ACCOUNT_ID"):
        Storage("r2://bucket/p", env={})
    with pytest.raises(ConfigError, match="R2_ACCESS_KEY_ID"):
        Storage("r2://bucket/p", env={"R2_ACCOUNT_ID": "abc"})
    env = {"R2_ACCOUNT_ID": "abc", "R2_ACCESS_KEY_ID": "k", "R2_SECRET_ACCESS_KEY": "s"}
    store = open_store("r2://bucket/p", env, QUICK)
    assert store.config["endpoint"] == "https://abc.r2.cloudflarestorage.com"
    (tmp_path / ".cloudflare").mkdir()
    (tmp_path / ".cloudflare/accountid").write_text("def\n")
    (tmp_path / ".cloudflare/r2.credentials").write_text(
        "[r2]\naws_access_key_id = K\naws_secret_access_key = S\n"
    )
    store = open_store("r2://bucket/p", {}, QUICK)
    assert store.config["endpoint"] == "https://def.r2.cloudflarestorage.com"
    assert (store.config["access_key_id"], store.config["secret_access_key"]) == ("K", "S")


@pytest.mark.parametrize("way", ["r2", "profile"])
def test_keys_of_r2_and_of_a_profile_open_a_real_server(rclone, tmp_path, way):
    (tmp_path / "credentials").write_text(
        f"[mine]\naws_access_key_id = {servers.KEY}\naws_secret_access_key = {servers.SECRET}\n"
    )
    url, keys = rclone.env["AWS_ENDPOINT_URL"], {"R2_ACCESS_KEY_ID": servers.KEY}
    env = keys | {"R2_ENDPOINT_URL": url, "R2_SECRET_ACCESS_KEY": servers.SECRET}
    if way == "profile":
        env = {"AWS_ENDPOINT_URL": url, "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials")}
        env |= {"AWS_PROFILE": "mine"}
    store = Storage(f"{'r2' if way == 'r2' else 's3'}://bucket/{way}", env=env, retry=QUICK)
    store.put_bytes("k", b"x")
    assert store.list() == [("k", 1)]


def test_gs_speaks_to_an_xml_endpoint(moto, tmp_path):
    store = Storage(
        "gs://bucket/gs", env={"STORAGE_EMULATOR_HOST": moto.env["AWS_ENDPOINT_URL"]}, retry=QUICK
    )
    file, sha = blob(tmp_path / "a", 20 * MIB)
    store.put(file, "f", sha256=sha)
    assert ("f", 20 * MIB) in store.list()
    store.get("f", tmp_path / "b", sha256=sha)


@pytest.mark.parametrize("url", ["ftp://bucket/x", "s3:///x", "file://relative"])
def test_urls_that_cannot_work(url):
    with pytest.raises(ConfigError):
        Storage(url, env={})


def test_command_line_copies_folders_and_files_both_ways(rclone, tmp_path, monkeypatch, capsys):
    for key, value in rclone.env.items():
        monkeypatch.setenv(key, value)
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/a").write_text("1")
    (tmp_path / "in/sub/b").write_text("22")
    assert main(["cp", str(tmp_path / "in"), "s3://bucket/cli"]) == 0
    assert main(["ls", "s3://bucket/cli"]) == 0
    assert "sub/b" in capsys.readouterr().out
    assert main(["cp", "s3://bucket/cli", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/sub/b").read_text() == "22"
    assert main(["cp", "s3://bucket/cli/sub/b", str(tmp_path / "one")]) == 0
    assert (tmp_path / "one/b").read_text() == "22"
    assert main(["cp", str(tmp_path / "nothing"), "s3://bucket/cli"]) == 2
    assert main(["cp", "a", "b"]) == 2


def test_a_process_that_ends_right_after_a_download_ends_well(rclone, tmp_path):
    # obstore's asynchronous calls aborted one process in forty here.
    put = Storage("s3://bucket/short", env=rclone.env)
    put.put_bytes("one", b"1")
    ended = []

    def fetch(i: int) -> None:
        command = [sys.executable, "-m", "trainer.storage", "cp", "s3://bucket/short", f"{tmp_path}/{i}"]
        ended.append(subprocess.run(command, env=os.environ | rclone.env, capture_output=True).returncode)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(fetch, range(40)))
    assert ended == [0] * 40
