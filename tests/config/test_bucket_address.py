"""One reading of a bucket's address, at the desk, on a node and in the shell of every rendered file."""

import subprocess
from pathlib import Path

import pytest

from trainer.config import ConfigError
from trainer.config.bucket_address import BucketAddress, is_address
from trainer.storage.storage import Storage

ROOT = Path(__file__).parents[2]

RIGHT = {
    "s3://mine": "s3://mine",
    "s3://mine/": "s3://mine",
    "s3://mine/runs/2026": "s3://mine/runs/2026",
    "s3://mine/runs/": "s3://mine/runs",
    "s3://my.bucket-1/a_b=c@d+e:f,g~h.i": "s3://my.bucket-1/a_b=c@d+e:f,g~h.i",
    "gs://mine/runs": "gs://mine/runs",
    "gs://my_bucket": "gs://my_bucket",
    "r2://mine/runs": "r2://mine/runs",
    "file:///data/checkpoints": "file:///data/checkpoints",
    "file:///data/checkpoints/": "file:///data/checkpoints",
    "file:///home/jürgen/läufe": "file:///home/jürgen/läufe",
}
WRONG = {
    "": "that variable is not set",
    " ": "that variable is not set",
    "s3://": "names no bucket: write s3://NAME/PREFIX",
    "gs://": "names no bucket: write gs://NAME/PREFIX",
    "r2://": "names no bucket",
    "s3:///runs": "names no bucket",
    "s3:": "unknown form",
    "s3:/run": "unknown form",
    "s3:/mine/run": "unknown form",
    "s3://$MINE": "not filled in",
    "s3://${MINE}/runs": "not filled in",
    "s3://mine/$USER": "not filled in",
    " s3://mine": "white space",
    "s3://mine ": "white space",
    "s3://mine\n": "white space",
    "s3://my bucket": "white space",
    "s3://...": "'...' is no bucket name",
    "s3://mi": "'mi' is no bucket name",
    "s3://-mine": "'-mine' is no bucket name",
    "s3://mine-": "'mine-' is no bucket name",
    "s3://my:bucket": "is no bucket name",
    "s3://<bucket>": "is no bucket name",
    "s3://müller": "is no bucket name",
    "s3://" + "a" * 223: "is no bucket name",
    "s3://mine//": "nothing between two slashes",
    "s3://mine//runs": "nothing between two slashes",
    "s3://mine/runs//": "nothing between two slashes",
    "s3://mine/../theirs": "write the path without it",
    "s3://mine/./runs": "write the path without it",
    "s3://mine/a*b": "characters",
    's3://mine/"a"': "characters",
    "s3://mine/a\\b": "characters",
    "S3://mine": "unknown form",
    "gcs://mine": "unknown form",
    "ftp://mine": "unknown form",
    "https://mine.s3.amazonaws.com": "unknown form",
    "mine": "unknown form",
    "/data/runs": "unknown form",
    "file://": "write an absolute path",
    "file://data": "write an absolute path",
    "file://~/data": "write an absolute path",
    "file:///": "names no folder",
    "file:////": "nothing between two slashes",
    "file:///data//runs": "nothing between two slashes",
    "file:///data/../runs": "write the path without it",
    "file:///data/{runs}": "characters",
    "file:///data/[runs]": "characters",
    "file:///data/'runs'": "characters",
}


@pytest.mark.parametrize(("text", "url"), RIGHT.items())
def test_an_address_is_read_and_written_without_its_last_slash(text, url):
    address = BucketAddress.parse(text)
    assert address.url == url and address.under("run") == f"{url}/run"
    assert address.is_store == (not text.startswith("file:"))


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_what_is_no_address_is_refused_with_the_change_to_make(text, message):
    with pytest.raises(ConfigError) as refused:
        BucketAddress.parse(text, "--bucket")
    assert str(refused.value).startswith(f"--bucket {text!r}") and message in str(refused.value)


def shell(address, kept):
    done = subprocess.run(
        ["bash", "trainer/shell/bucket.sh", address, kept], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode in (0, 2) and bool(done.stderr) == bool(done.returncode), done.stderr
    return done.returncode == 0


@pytest.mark.parametrize("text", [*RIGHT, *WRONG])
def test_the_shell_of_rendered_files_accepts_the_same(text):
    assert shell(text, "/") == (text in RIGHT)


@pytest.mark.parametrize(
    "code", [*range(1, 33), 33, 34, 39, 42, 47, 63, 64, 91, 92, 93, 96, 124, 127, 160, 233, 8364]
)
@pytest.mark.parametrize("form", ["s3://my{}bucket", "s3://bucket/a{}b", "file:///data/a{}b"])
def test_the_shell_takes_the_same_characters(code, form):
    text = form.format(chr(code))
    try:
        BucketAddress.parse(text)
        accepted = True
    except ConfigError:
        accepted = False
    assert shell(text, "/") == accepted


def test_a_folder_that_goes_away_with_the_machine_is_refused():
    assert shell("file:///data", "/") and shell("file:///workspace/runs", "/workspace")
    assert not shell("file:///data", "") and not shell("file:///workspaces/runs", "/workspace")
    assert not shell("file:///workspace/../data", "/workspace")
    assert shell("s3://mine", "") and shell("s3://mine", "/workspace")


@pytest.mark.parametrize(
    "text", ["s3://", "s3:", "s3:/run", "gs://", "r2:///x", "s3://$MINE", "file:///", "nothing://x"]
)
def test_a_node_makes_no_folder_of_a_wrong_address(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        Storage(text, env={})
    assert not list(tmp_path.iterdir())


def test_a_path_is_no_address():
    assert (
        not is_address("/data/runs")
        and not is_address("runs")
        and not is_address("./s3:")
        and is_address("s3:")
    )
