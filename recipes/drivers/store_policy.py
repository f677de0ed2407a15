"""What rollout workers need of a bucket, and no more: S3's policy, Cloud Storage's conditions.

They read the run and what it was prepared from, and write below two prefixes. All else that decides what is
trained is signed (trainer/storage/seal.py), but who has a worker's credentials has the run's key too.
"""

from __future__ import annotations

import json

from trainer.config.bucket_address import BucketAddress
from trainer.config.run_store import ATTEMPTS, CHECKPOINTS, FLEET

WRITTEN = ("workers", "samples")
"""Folders below the run's `fleet` that workers write (trainer/fleet/objects.py)."""
READ_OF_RUN = (ATTEMPTS, CHECKPOINTS, FLEET)
READ_OF_BUCKET = ("data", "models")
"""Prepared rows and uploaded folders, which machines fetch."""


def policy_lines(bucket: str, run_id: str) -> list[str]:
    """What `up --fleet` prints of workers' rights; nothing for a folder."""
    address = BucketAddress.parse(bucket)
    beginning = f"rights   workers of {run_id} need of {bucket} no more than"
    match address.scheme:
        case "s3":
            return [f"{beginning} this policy: {json.dumps(s3_policy(address, run_id))}"]
        case "gs":
            return [
                f"{beginning} these bindings:",
                *(f"         {one}" for one in gs_bindings(address, run_id)),
            ]
        case "r2":
            writes = " and ".join(_prefixes(address, run_id)[1])
            return [f"{beginning} to read it, and to write {writes}: R2's tokens know no prefixes"]
    return []


def _prefixes(address: BucketAddress, run_id: str) -> tuple[list[str], list[str]]:
    """Prefixes of keys that workers read, and that they write."""
    base = f"{address.path}/" if address.path else ""
    read = [f"{base}{run_id}/{name}/" for name in READ_OF_RUN]
    read += [f"{base}{name}/" for name in READ_OF_BUCKET]
    return read, [f"{base}{run_id}/{FLEET}/{name}/" for name in WRITTEN]


def s3_policy(address: BucketAddress, run_id: str) -> dict[str, object]:
    """A policy of IAM for a worker's user or role."""
    read, written = _prefixes(address, run_id)
    arn = f"arn:aws:s3:::{address.bucket}"

    def allow(actions: list[str], resource: object, **more: object) -> dict[str, object]:
        return {"Effect": "Allow", "Action": actions, "Resource": resource, **more}

    # IfExists: without the right to list, S3 says 403 and not 404 of an object that is not there.
    listed = {"StringLikeIfExists": {"s3:prefix": [f"{prefix}*" for prefix in read]}}
    return {
        "Version": "2012-10-17",
        "Statement": [
            allow(["s3:ListBucket"], arn, Condition=listed),
            allow(["s3:GetObject"], [f"{arn}/{prefix}*" for prefix in read]),
            allow(["s3:PutObject"], [f"{arn}/{prefix}*" for prefix in written]),
        ],
    }


def gs_bindings(address: BucketAddress, run_id: str) -> list[str]:
    """Commands that give a service account these rights. To replace an object needs the right to delete it,
    which only `objectUser` has."""
    read, written = _prefixes(address, run_id)
    bind = (
        f"gcloud storage buckets add-iam-policy-binding gs://{address.bucket} --member=serviceAccount:WORKERS"
    )

    def condition(title: str, prefixes: list[str]) -> str:
        objects = f"projects/_/buckets/{address.bucket}/objects/"
        either = " || ".join(f"resource.name.startsWith('{objects}{prefix}')" for prefix in prefixes)
        return f'--condition="title={title},expression={either}"'

    return [
        f"{bind} --role=roles/storage.legacyBucketReader --condition=None",
        f"{bind} --role=roles/storage.objectViewer {condition('workers-read', read)}",
        f"{bind} --role=roles/storage.objectUser {condition('workers-write', written)}",
    ]
