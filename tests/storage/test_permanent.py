"""Permanent errors of a store end within seconds, with their fix; transient ones are retried."""

import contextlib
import hashlib
import inspect
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace

import pytest

from tests import servers
from tests.storage.test_storage import MIB, blob
from trainer.config import ConfigError
from trainer.storage import storage
from trainer.storage.__main__ import main
from trainer.storage.storage import Storage, probe_store
from trainer.storage.stores import RetryPolicy, parallel_parts, part_for
from trainer.system.errors import StorageError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_OK, EXIT_STORAGE

PERMANENT_S = 10.0
"""Time that any permanent error may take, with the retries of a node."""
BRIEF = RetryPolicy(attempts=2, first_wait_s=0.05, max_wait_s=0.1, request_retries=0, request_retry_s=0.5)


def xml(code: str, more: str = "") -> str:
    head = '<?xml version="1.0" encoding="UTF-8"?>'
    return f"{head}<Error><Code>{code}</Code><Message>m</Message>{more}</Error>" if code else ""


# Replies as the providers document them (read, not run): S3 error responses, R2 error codes, Cloud Storage
# XML errors.
REPLIES = [
    ("s3", 301, "PermanentRedirect", "<Endpoint>b.s3.eu-west-1.amazonaws.com</Endpoint>", "set AWS_REGION"),
    ("s3", 301, "", "", "set AWS_REGION"),
    ("s3", 400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>", "set AWS_REGION=eu-west-1"),
    ("s3", 403, "RequestTimeTooSkewed", "", "clock is off"),
    ("s3", 403, "AccessDenied", "", "no right"),
    ("s3", 403, "InvalidAccessKeyId", "", "does not know the access key"),
    ("s3", 400, "ExpiredToken", "", "has expired"),
    ("s3", 404, "NoSuchBucket", "", "no such bucket"),
    ("r2", 401, "Unauthorized", "", "refuses the credentials"),
    ("r2", 403, "SignatureDoesNotMatch", "", "R2_SECRET_ACCESS_KEY"),
    ("r2", 404, "NoSuchBucket", "", "no such bucket"),
    ("r2", 400, "InvalidRegionName", "", "does not know the region"),
    ("gs", 403, "AccessDenied", "", "no right"),
    ("gs", 401, "AuthenticationRequired", "", "refuses the credentials"),
    ("gs", 404, "NoSuchBucket", "", "no such bucket"),
    ("gs", 403, "UserProjectMissing", "", "requesters pay"),
]


@contextlib.contextmanager
def replying(status: int, body: str):
    """The port of a server that gives every request the same reply."""
    with servers.answering(lambda _: (status, body.encode(), {"Content-Type": "application/xml"})) as url:
        yield int(url.rpartition(":")[2])


def environment(scheme: str, port: int) -> dict[str, str]:
    url = f"http://127.0.0.1:{port}"
    match scheme:
        case "s3":
            return servers.s3_environment(port)
        case "r2":
            return {"R2_ENDPOINT_URL": url, "R2_ACCESS_KEY_ID": "k", "R2_SECRET_ACCESS_KEY": "s"}
    return {"STORAGE_EMULATOR_HOST": url}


@pytest.mark.parametrize(("scheme", "status", "code", "more", "cure"), REPLIES)
def test_documented_replies_that_no_retry_cures(scheme, status, code, more, cure):
    with replying(status, xml(code, more)) as port:
        store = Storage(f"{scheme}://bucket/p", env=environment(scheme, port))
        for act in (lambda: store.put_bytes("k", b"x"), store.list, lambda: store.get_bytes("k")):
            begun = time.monotonic()
            with pytest.raises(ConfigError, match=cure) as error:
                act()
            assert time.monotonic() - begun < PERMANENT_S
            assert "\n" not in str(error.value) and store.retries == 0


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (403, ConfigError, "no credentials: set GOOGLE_SERVICE_ACCOUNT_KEY"),
        (404, ConfigError, "no credentials: set GOOGLE_SERVICE_ACCOUNT_KEY"),
        (503, StorageError, "failed 2 times at gs://bucket/p"),
    ],
)
def test_google_s_bucket_without_a_key(monkeypatch, status, error, words):
    """The machine's own server of keys has no account for it, or none of Google's is there; or it is away for
    a while."""
    _of_this_machine(monkeypatch)
    with replying(status, "") as port:
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{port}")
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{port}")
        store = Storage("gs://bucket/p", retry=BRIEF)
        for act in (store.list, lambda: store.put_bytes("k", b"x")):
            with pytest.raises(error, match=words):
                act()


def _of_this_machine(monkeypatch):
    """No key is set: Google's client asks the machine's own server."""
    for name in list(os.environ):
        if name.startswith(("GOOGLE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_replies_that_pass_are_tried_again(status):
    with replying(status, xml("SlowDown")) as port:
        store = Storage("s3://bucket/p", env=servers.s3_environment(port), retry=BRIEF)
        with pytest.raises(RuntimeError, match="failed 2 times"):
            store.list()


@pytest.mark.parametrize(
    ("change", "url", "cure"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "s3://bucket/p", "secret key is wrong"),
        ({"AWS_ACCESS_KEY_ID": "AKIANOBODY"}, "s3://bucket/p", "does not know the access key"),
        ({}, "s3://no-such-bucket/p", "no such bucket"),
        ({}, "s3://a-bucket?/p", "no bucket name"),
        ({"AWS_ENDPOINT_URL": "http://a host/"}, "s3://bucket/p", "is no URL"),
    ],
)
def test_a_probe_tells_what_is_wrong(tmp_path, monkeypatch, capsys, change, url, cure):
    with servers.rclone(tmp_path / "disk") as server:
        begun = time.monotonic()
        with pytest.raises(ConfigError, match=cure):
            probe_store(url, env=server.env | change)
        assert time.monotonic() - begun < PERMANENT_S
        for name, value in (server.env | change).items():
            monkeypatch.setenv(name, value)
        assert main(["probe", url]) == EXIT_CONFIG
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1 and cure in said[0]


def test_a_probe_of_a_store_that_takes_a_request_and_never_answers_ends(tmp_path):
    """By its own deadline, not by the ten minutes that a shard of a checkpoint may take."""
    default = inspect.signature(probe_store).parameters["retry"].default
    assert default.request_timeout_s == 60
    once = replace(default, request_timeout_s=1.0, attempts=1, request_retries=0)
    with servers.rclone(tmp_path / "disk") as server, servers.proxy(server.port) as relay:
        probe_store("s3://bucket/there", env=servers.s3_environment(relay.port), retry=once)
        relay.stall()
        begun = time.monotonic()
        with pytest.raises(StorageError):
            probe_store("s3://bucket/there", env=servers.s3_environment(relay.port), retry=once)
        assert 1 <= time.monotonic() - begun < PERMANENT_S


def test_a_probe_leaves_nothing_and_asks_for_no_right_that_is_not_needed(tmp_path, monkeypatch, capsys):
    """A key that may only list and read: enough to read data from the bucket, refused for checkpoints."""
    import boto3

    port = servers.free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        servers.wait_for_port(port, process, 60)
        keys = {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "us-east-1"}
        keys |= {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
        boto3.client("s3", **keys).create_bucket(Bucket="bucket")
        iam, env = boto3.client("iam", **keys), {}
        for name, actions in (("reader", ["s3:ListBucket", "s3:GetObject"]), ("writer", ["s3:*"])):
            iam.create_user(UserName=name)
            rights = [{"Effect": "Allow", "Action": actions, "Resource": "*"}]
            document = json.dumps({"Version": "2012-10-17", "Statement": rights})
            iam.put_user_policy(UserName=name, PolicyName="p", PolicyDocument=document)
            key = iam.create_access_key(UserName=name)["AccessKey"]
            env[name] = servers.s3_environment(port, key["SecretAccessKey"])
            env[name]["AWS_ACCESS_KEY_ID"] = key["AccessKeyId"]
        plain, reset = {"Content-Type": "text/plain"}, f"http://127.0.0.1:{port}/moto-api/reset-auth"
        request = urllib.request.Request(reset, data=b"0", headers=plain, method="POST")
        urllib.request.urlopen(request).read()  # from here on every request is checked
        probe_store("s3://bucket/p", env=env["writer"])
        assert Storage("s3://bucket/p", env=env["writer"]).list() == []
        probe_store("s3://bucket/p", env=env["reader"], write=False)
        with pytest.raises(ConfigError, match=r"upload of probe-.*: the key has no right to do this"):
            probe_store("s3://bucket/p", env=env["reader"])
        with pytest.raises(ConfigError, match="secret key is wrong"):
            probe_store("s3://bucket/p", env=env["writer"] | {"AWS_SECRET_ACCESS_KEY": "wrong"})
        for name, value in env["reader"].items():
            monkeypatch.setenv(name, value)
        assert main(["probe", "s3://bucket/p", "--read-only"]) == EXIT_OK
        assert "can be listed" in capsys.readouterr().out
    finally:
        process.terminate()
        process.wait()


def test_a_store_that_is_away_is_another_code(monkeypatch):
    for name, value in servers.s3_environment(servers.free_port()).items():
        monkeypatch.setenv(name, value)
    assert main(["probe", "s3://bucket/p"]) == EXIT_STORAGE


def test_a_store_that_stands_still_is_told_of_soon(monkeypatch, capfd):
    """It takes the connection and never answers: a listing and a look-up are told of in a minute, in place of
    the ten that an upload may take."""
    assert storage.SMALL_TIMEOUT_S == 60.0
    monkeypatch.setattr(storage, "SMALL_TIMEOUT_S", 1.0)
    with servers.moto() as server, servers.proxy(server.port) as relay:
        store = Storage("s3://bucket/p", env=servers.s3_environment(relay.port), retry=BRIEF)
        store.put_bytes("k", b"x")
        relay.stall()
        for act in (store.list, lambda: store.size("k")):
            began = time.monotonic()
            with pytest.raises(StorageError, match="failed 2 times at s3://bucket/p"):
                act()
            assert time.monotonic() - began < 10
    assert capfd.readouterr().err.count("again in") == 2


# --- slow links ---------------------------------------------------------------------------------------------


def test_a_download_that_stalls_goes_on_from_where_it_stands(tmp_path, capfd):
    """The link hangs twice amid the file: no byte is fetched again from a store that knows ranges."""
    file, sha = blob(tmp_path / "a", 24 * MIB)
    with servers.moto() as server, servers.proxy(server.port) as relay:
        Storage("s3://bucket/p", env=server.env).put(file, "f")
        patient = RetryPolicy(attempts=3, first_wait_s=0.1, max_wait_s=0.2, request_retries=0, stall_s=1.5)
        store = Storage("s3://bucket/p", env=servers.s3_environment(relay.port), retry=patient)
        got = []

        def tick(count: int) -> None:
            before = sum(got)
            got.append(count)
            if before // (8 * MIB) != sum(got) // (8 * MIB) and sum(got) < 20 * MIB:
                relay.stall()
                threading.Timer(2.5, relay.restore).start()

        assert store.get("f", tmp_path / "b", tick, sha256=sha) == 24 * MIB == sum(got)
        assert store.retries >= 1
        assert "no byte for" in capfd.readouterr().err
        assert hashlib.sha256((tmp_path / "b").read_bytes()).hexdigest() == sha


def test_a_slow_link_has_no_deadline(tmp_path):
    """Requests that may take half a second, a file that takes many: the bytes keep coming, so it is no
    error."""
    file, sha = blob(tmp_path / "a", 6 * MIB)
    with servers.moto() as server:
        Storage("s3://bucket/p", env=server.env).put(file, "f")
        with servers.proxy(server.port) as relay:
            patient = replace(BRIEF, stall_s=3.0)
            store = Storage("s3://bucket/p", env=servers.s3_environment(relay.port), retry=patient)
            relay.down_bytes_per_s = 1e6
            begun = time.monotonic()
            store.get("f", tmp_path / "b", sha256=sha)
            assert time.monotonic() - begun > 4 and store.retries == 0


@pytest.mark.parametrize(("gib", "requests"), [(4, 64), (0.25, 32), (0.004, 1)])
def test_parts_grow_with_the_file(gib, requests):
    size = int(gib * 2**30)
    part = part_for(size)
    assert -(-size // part) == requests
    assert parallel_parts(part) * part <= 192 << 20
