"""What the clients of a reward server and of a judge have in common: which failures pass, and how to say
them."""

from __future__ import annotations

import ssl
import urllib.error

from trainer.rewards.grade import one_line

PASSING_CODES = (408, 425, 429)
"""Codes below 500 after which the same request may succeed."""


def is_away(error: BaseException) -> bool:
    """Whether a server may be busy, stopped or gone for a while, so that it is asked again."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 and error.code != 501 or error.code in PASSING_CODES
    if isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError):
        return False
    return isinstance(error, OSError)


def failure_reason(error: BaseException) -> str:
    """What a server answered, or why it did not, on one line."""
    if isinstance(error, urllib.error.HTTPError):
        try:
            detail = error.read(500).decode(errors="replace")
        except ValueError:  # closed
            detail = ""
        return f"answers {error.code}: {one_line(detail or str(error.reason))}"
    cause = getattr(error, "reason", error)
    return f"cannot be reached: {one_line(str(cause)) or type(cause).__name__}"
