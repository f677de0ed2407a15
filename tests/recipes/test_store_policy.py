"""The rights of rollout workers, by the keys that trainer and workers use."""

from fnmatch import fnmatchcase

import pytest
from desk import bucket as bucket
from desk import elsewhere as elsewhere
from desk import run

from recipes.drivers import store_policy
from trainer.config.bucket_address import BucketAddress
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
OTHERS = ["rollouts/step-00000003/1-aaaaaa.npz", "stream/00000001.json"]
RECORDS = [
    "attempts/final.json",
    "attempts/00000001.json",
    "checkpoints/step-00000004/1-aaaaaa/manifest.json",
]


@pytest.mark.parametrize("base", ["", "team/runs"])
def test_workers_write_two_prefixes_and_read_what_they_need(base):
    address = BucketAddress.parse(f"s3://mine/{base}".rstrip("/"))
    _, read, write = store_policy.s3_policy(address, "a-run")["Statement"]

    def may(statement, key: str) -> bool:
        return any(fnmatchcase(f"arn:aws:s3:::mine/{key}", resource) for resource in statement["Resource"])

    root = f"{base}/a-run".lstrip("/")
    assert write["Action"] == ["s3:PutObject"]
    assert all(may(write, f"{root}/fleet/{key}") for key in WRITTEN)
    assert not any(may(write, f"{root}/fleet/{key}") for key in READ if key not in WRITTEN)
    assert all(may(read, f"{root}/fleet/{key}") for key in READ)
    assert all(may(read, f"{root}/{key}") and not may(write, f"{root}/{key}") for key in RECORDS)
    assert not any(may(read, f"{root}/{key}") or may(write, f"{root}/{key}") for key in OTHERS)
    assert not may(read, f"{root}-2/fleet/{READ[0]}"), "another run's, whose name begins with this one's"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://mine", '"Action": ["s3:PutObject"], "Resource": ["arn:aws:s3:::mine/a-run/fleet/workers/*"'),
        ("gs://mine/x", "startsWith('projects/_/buckets/mine/objects/x/a-run/fleet/samples/')"),
        ("r2://mine", "to write a-run/fleet/workers/ and a-run/fleet/samples/"),
    ],
)
def test_up_prints_them(capsys, monkeypatch, address, said):
    monkeypatch.setenv("R2_ACCOUNT_ID", "f" * 32)
    asked = ["up", "grpo-qwen2.5-vl-7b-mathv60k", "--bucket", address, "--run-id", "a-run", "--dry-run"]
    code, out, err = run(capsys, *asked, "--target", "skypilot-runpod", "--fleet", "4xL40S:spot")
    assert code == 0, err
    assert said in out
    assert store_policy.policy_lines("file:///tmp/x", "a-run") == []
