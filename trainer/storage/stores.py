"""Opening a store from its URL: endpoints, credentials and limits, from the environment as boto and SkyPilot
set it."""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from obstore.exceptions import BaseError
from obstore.store import GCSStore, LocalStore, S3Store

from trainer.config import ConfigError
from trainer.config.bucket_address import BucketAddress, is_address
from trainer.system.backoff import Backoff

PART_BYTES = 8 << 20
"""Smallest part of a multipart upload; equal parts (R2 asks for that). A smaller file goes in one request."""
USUAL_PART_BYTES = 64 << 20
"""Parts grow with the file up to this: each part is a request that is paid for."""
USUAL_PARTS = 64
"""Parts of a file that is large, until its parts have reached USUAL_PART_BYTES."""
MAX_PART_BYTES = 500_000_000
"""Largest part. RunPod's volumes take at most 500 MB, and want multipart above it."""
MAX_PARTS = 10_000
"""Most parts of one upload."""
IN_FLIGHT_BYTES = 192 << 20
"""Parts in flight, at least 3 of them and at most 12: this bounds the memory of an upload."""
UPLOAD_TIMEOUT_S = 600.0
"""Deadline of one request of an upload."""
RUNPOD = r"//s3api-[^/]*\.runpod\.io"
"""Endpoint of RunPod's S3-compatible network volumes: bucket = volume id."""
RUNPOD_TIMEOUT_S = 7200.0
"""RunPod joins the parts of a 10 GB file for up to two hours."""


def part_for(size: int) -> int:
    """Part size for a file of `size` bytes. Raises ConfigError if it is larger than a store can take."""
    part = max(PART_BYTES, min(USUAL_PART_BYTES, -(-size // USUAL_PARTS)), -(-size // MAX_PARTS))
    if part > MAX_PART_BYTES:
        raise ConfigError(
            f"a file of {size} bytes is more than {MAX_PARTS} parts of {MAX_PART_BYTES}: split it"
        )
    return part


def parallel_parts(part: int) -> int:
    """Parts of `part` bytes to have in flight."""
    return max(3, min(12, IN_FLIGHT_BYTES // part))


@dataclass(frozen=True)
class RetryPolicy(Backoff):
    """Whole-file retries, on top of obstore's per request."""

    attempts: int = 6
    request_retries: int = 4
    request_retry_s: float = 60.0
    stall_s: float = 45.0
    """A download that gets no byte for this long is asked for again from where it stands."""
    request_timeout_s: float = 0.0
    """Deadline of one request; 0: the store's own."""


PATIENT = RetryPolicy(request_timeout_s=60.0)
"""A probe's on a node: waits through a passing outage."""
QUICK = RetryPolicy(
    attempts=2, first_wait_s=0.5, request_retries=1, request_retry_s=5.0, stall_s=8.0, request_timeout_s=15.0
)
"""On a user's machine: gives up early."""
DOWNLOAD_TIMEOUT_S = 24 * 3600.0
"""Deadline of a whole download, which `Retry.stall_s` watches."""


def open_store(url: str, env: Mapping[str, str], retry: RetryPolicy, request_timeout_s: float = 0.0) -> Any:
    """The obstore store of `url`. Raises ConfigError for a URL or credentials that cannot work.
    request_timeout_s: in place of the store's own."""
    local = {"mkdir": True, "automatic_cleanup": True}
    if not is_address(url):
        return LocalStore(os.path.abspath(os.path.expanduser(url)), **local)
    address = BucketAddress.parse(url, "address")
    if not address.is_store:
        return LocalStore(address.path, **local)
    scheme = address.scheme
    bucket = address.bucket
    prefix = address.path
    endpoint, keys = "", {}
    match scheme:
        case "s3":
            endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or ""
            keys = _s3_keys(env)
        case "r2":
            endpoint, keys = _r2(env, url)
        case "gs":
            endpoint = env.get("STORAGE_EMULATOR_HOST") or ""
    if endpoint and not re.fullmatch(r"https?://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+)(:\d+)?(/\S*)?", endpoint):
        raise ConfigError(
            f"{url}: the endpoint {endpoint!r} is no URL: write https://host, as it was given to you"
        )
    of_runpod = re.search(RUNPOD, endpoint) is not None
    own_timeout_s = RUNPOD_TIMEOUT_S if of_runpod else UPLOAD_TIMEOUT_S
    options: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(seconds=request_timeout_s or own_timeout_s),
            "connect_timeout": timedelta(seconds=10),
            "allow_http": endpoint.startswith("http://"),
        },
        "retry_config": {
            "max_retries": retry.request_retries,
            "retry_timeout": timedelta(seconds=retry.request_retry_s),
            "backoff": BACKOFF,
        },
        "prefix": prefix or None,
    }
    if scheme == "gs":
        keys = {name: env[variable] for name, variable in _GCS_VARIABLES.items() if env.get(variable)}
        if endpoint:
            keys |= {"base_url": endpoint, "bearer_token": "emulator"}
        try:
            return GCSStore(bucket, **keys, **options)
        except BaseError:  # which may show the key
            raise ConfigError(
                f"{url}: the Google key cannot be read: GOOGLE_SERVICE_ACCOUNT_KEY takes the key's JSON,"
                " GOOGLE_APPLICATION_CREDENTIALS the path of its file"
            ) from None
    if endpoint:
        keys["endpoint"] = endpoint
    usual = "SHA256" if not endpoint or ".amazonaws.com" in endpoint else ""
    # Amazon compares it with what arrived; others may refuse the header.
    if checksum := env.get("AWS_CHECKSUM_ALGORITHM", usual):
        keys["checksum_algorithm"] = checksum
    if of_runpod:
        keys["virtual_hosted_style_request"] = False
    return S3Store(bucket, **keys, **options)


BACKOFF = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=15), "base": 2}
_GCS_VARIABLES = {
    "service_account": "GOOGLE_SERVICE_ACCOUNT",
    "service_account_key": "GOOGLE_SERVICE_ACCOUNT_KEY",
    "application_credentials": "GOOGLE_APPLICATION_CREDENTIALS",
}


def _s3_keys(env: Mapping[str, str]) -> dict[str, Any]:
    """Credentials as boto finds them: variables, then the profile of the shared file, else the instance's
    role."""
    keys: dict[str, Any] = {"region": env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1"}
    if own := _own_keys(env, "AWS"):
        token = env.get("AWS_SESSION_TOKEN")
        return keys | own | ({"session_token": token} if token else {})
    path = Path(env.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws/credentials").expanduser()
    return keys | _profile(path, env.get("AWS_PROFILE") or "default")


def _r2(env: Mapping[str, str], url: str) -> tuple[str, dict[str, Any]]:
    """Cloudflare R2: R2_* variables, else the files that SkyPilot keeps under ~/.cloudflare."""
    home = Path.home() / ".cloudflare"
    account_file = home / "accountid"
    account = env.get("R2_ACCOUNT_ID") or (account_file.read_text().strip() if account_file.is_file() else "")
    usual = f"https://{account}.r2.cloudflarestorage.com" if account else ""
    endpoint = env.get("R2_ENDPOINT_URL") or usual
    if not endpoint:
        raise ConfigError(f"{url}: set R2_ENDPOINT_URL or R2_ACCOUNT_ID, or write ~/.cloudflare/accountid")
    keys = _own_keys(env, "R2") or _profile(home / "r2.credentials", "r2")
    if not keys:
        raise ConfigError(
            f"{url}: set R2_ACCESS_KEY_ID and R2_SECRET_ACCESS_KEY, or write {home}/r2.credentials"
        )
    return endpoint, keys | {"region": "auto"}


def _own_keys(env: Mapping[str, str], prefix: str) -> dict[str, Any]:
    key, secret = env.get(f"{prefix}_ACCESS_KEY_ID"), env.get(f"{prefix}_SECRET_ACCESS_KEY", "")
    return {"access_key_id": key, "secret_access_key": secret} if key else {}


def _profile(path: Path, name: str) -> dict[str, Any]:
    parser = configparser.ConfigParser()
    parser.read(path)
    section = parser[name] if parser.has_section(name) else {}
    pairs = (
        (key, section.get(f"aws_{key}")) for key in ("access_key_id", "secret_access_key", "session_token")
    )
    return {key: value for key, value in pairs if value}
