"""The rights of rollout workers, by the keys that trainer and workers use."""

import pytest
from desk import bucket as bucket
from desk import elsewhere as elsewhere
from desk import run

from recipes.drivers import fleet_launch
from trainer.fleet import objects

WRITTEN = [objects.worker_key("w0"), objects.samples_key("1-aaaaaa", "000001", 1, "w0")]
READ = [
    *WRITTEN,
    objects.about_key("1-aaaaaa"),
    objects.head_key("1-aaaaaa"),
    objects.mail_key("1-aaaaaa", "w0"),
    objects.version_key(3, "ab" * 32),
    objects.patch_key("1-aaaaaa", 3, 0),
]


@pytest.mark.parametrize("address", ["s3://mine", "gs://mine/x", "r2://mine"])
def test_workers_write_two_prefixes_and_read_what_they_need(capsys, monkeypatch, address):
    monkeypatch.setenv("R2_ACCOUNT_ID", "f" * 32)
    up = ["up", "grpo-qwen2.5-vl-7b-mathv60k", "--bucket", address, "--run-id", "a-run", "--dry-run"]
    code, out, err = run(capsys, *up, "--target", "skypilot-runpod", "--fleet", "4xL40S:spot")
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("rights ")]
    assert f"need of {address} no more than" in line
    read, _, written = line.partition("to read ")[2].partition(" and to write ")
    for prefixes, keys in ((read, READ), (written, WRITTEN)):
        assert all(f"a-run/fleet/{key}".startswith(tuple(prefixes.split(", "))) for key in keys)
    assert not any(f"a-run/fleet/{key}".startswith(tuple(written.split(", "))) for key in READ[2:])
    assert "a-run/checkpoints/" in read and "rollouts" not in read and "stream" not in line
    assert fleet_launch._rights("file:///tmp/x", "a-run") == []
