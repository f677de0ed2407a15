"""Telling permanent errors of a store from transient ones, from the replies that the providers document.
obstore gives the reply's status and body as text only, and reports refusals of a listing as a generic error:
the S3, R2 and RunPod replies are XML with a `<Code>`, those of Google's JSON interface have a `"reason"`."""

from __future__ import annotations

import re

OTHER_REGION = "the bucket is in another region: set AWS_REGION{region}"
BAD_CERTIFICATE = "the endpoint's certificate is not valid: check the endpoint and this machine's clock"
CURES = {
    "SignatureDoesNotMatch": "the secret key is wrong: check AWS_SECRET_ACCESS_KEY or R2_SECRET_ACCESS_KEY",
    "InvalidAccessKeyId": "the store does not know the access key: check AWS_ACCESS_KEY_ID (or R2's)",
    "InvalidToken": (
        "the session token is wrong: set AWS_SESSION_TOKEN again, or unset it; where none is set, the store"
        " does not know its own listing's next page, and cannot hold a run"
    ),
    "ExpiredToken": "the session token has expired: set AWS_SESSION_TOKEN again",
    "RequestTimeTooSkewed": "this machine's clock is off: set it (chronyc makestep, or ntpdate)",
    "RequestExpired": "this machine's clock is off: set it (chronyc makestep, or ntpdate)",
    "NoSuchBucket": "there is no such bucket: create it, or correct its name",
    "InvalidBucketName": "that is no bucket name: correct it",
    "AuthorizationHeaderMalformed": OTHER_REGION,
    "PermanentRedirect": OTHER_REGION,
    "IllegalLocationConstraintException": OTHER_REGION,
    "InvalidRegionName": "the store does not know the region: set AWS_REGION (R2: auto)",
    "AccessDenied": "the key has no right to do this: give it get, put, list and delete on the bucket",
    "AllAccessDisabled": "the bucket is disabled: ask the provider",
    "UserProjectMissing": "the bucket makes requesters pay: use one that does not",
    "accountDisabled": "the project's billing is off: turn it on",
}
"""Error code of the reply -> what is wrong and what to change."""

STATUS = {
    301: CURES["PermanentRedirect"],
    307: CURES["PermanentRedirect"],
    401: "the store refuses the credentials: check the key, the secret and the token",
    403: CURES["AccessDenied"],
}
"""The same for replies without a body (HEAD) or with an unknown code."""

PASSING = ("rateLimitExceeded", "userRateLimitExceeded", "quotaExceeded", "SlowDown", "RequestLimitExceeded")
"""Codes that some stores send with 403, and that are over after a while."""

NO_GOOGLE_KEY = (
    "there are no credentials: set GOOGLE_SERVICE_ACCOUNT_KEY to the key's JSON, or"
    " GOOGLE_APPLICATION_CREDENTIALS to its file"
)
TEXTS = {
    "computeMetadata": NO_GOOGLE_KEY,
    "169.254.169.254": "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "redirect without LOCATION": CURES["PermanentRedirect"],
    "invalid peer certificate": BAD_CERTIFICATE,
    "CertificateRequired": BAD_CERTIFICATE,
    "invalid_grant": "Google refuses the service account's key: check it, and this machine's clock",
}
"""Where there was no reply from the store itself, the first that fits."""


def status_of(error: BaseException) -> int:
    """HTTP status of the reply in an obstore error; 0 if there was none."""
    match = re.search(r"status code: (\d{3})", str(error))
    return int(match[1]) if match else 0


def code_of(error: BaseException) -> str:
    """Error code in the body of that reply, or an empty string."""
    text = str(error)
    match = re.search(r"<Code>\s*(\w+)\s*</Code>", text) or re.search(r'"reason":\s*"(\w+)"', text)
    return match[1] if match else ""


def permanent_cause(error: BaseException, *, bucket_missing_is_404: bool) -> str:
    """What is wrong and what to change, if trying again cannot help; else an empty string.
    bucket_missing_is_404: the request was a listing or a put, whose 404 can only mean the bucket."""
    status = status_of(error)
    code = code_of(error)
    text = str(error)
    if code in PASSING:
        return ""
    if code in CURES:
        region = re.search(r"<Region>([^<]+)</Region>", text) or re.search(r"expecting '([a-z0-9-]+)'", text)
        return CURES[code].format(region=f"={region[1]}" if region else "")
    if status >= 500:  # also of a cloud's own server of keys, which answers for an account that is there
        return ""
    for words, cure in TEXTS.items():
        if words in text:
            return cure.format(region="")
    if status == 404 and bucket_missing_is_404 and code in ("", "notFound", "NotFound"):
        return CURES["NoSuchBucket"]
    return STATUS.get(status, "").format(region="")
