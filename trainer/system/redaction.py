"""Secrets taken out of texts: of errors and of logs that go to the bucket; and found in files
before they are sent. The patterns are data."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cache

LEAST_SECRET = 16
"""Characters from which on a token's value is looked for in a file."""
LEAST_REMOVED = 6
"""The same where it is taken out of a text."""
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
"""What the name of a variable has whose value is a secret."""
SIGNS = {
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "a service account's key": r'"private_key"\s*:\s*"[^"]{20}',
    "the key of a cluster's client": r"client-key-data:\s*\S{20}",
    "an AWS key": r"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
    "an AWS secret": r"(?i)aws_secret_access_key\W{1,6}[A-Za-z0-9/+]{40}\b",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}\b",
    "a GitHub token": r"\b(gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{40,})\b",
    "a GitLab token": r"\bgl(pat|dt|rt|cbt|ptt|agent|oas)-[A-Za-z0-9_.-]{20,}",
    "a Google API key": r"\bAIza[0-9A-Za-z_-]{35}(?![0-9A-Za-z_-])",
    "a Google token": r"\bya29\.[0-9A-Za-z_-]{20,}",
    "an npm token": r"\bnpm_[A-Za-z0-9]{36}\b",
    "a PyPI token": r"\bpypi-[A-Za-z0-9_-]{40,}",
    "a Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "a Slack webhook": r"https://hooks\.slack\.com/services/[A-Za-z0-9/]{20,}",
    "an Azure key": r"(?i)\b(AccountKey|SharedAccessKey|SharedAccessSignature)=[A-Za-z0-9+/=%&?_.-]{20,}",
    "a signed token": r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+",
    "a RunPod key": r"\brpa_[A-Z0-9]{40,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{32,}",
    "a login of .netrc": r"\bmachine\s+\S+\s+(login\s+\S+\s+)?password\s+\S{8,}",
    "an address with a password": r"\b[a-z]{3,}://[^\s/@:'\"{}$]+:[^\s/@:'\"{}$]{8,}@",
}
"""What a secret looks like, by what it is called."""
ASSIGNED = (
    r"\b(?P<name>[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS)[A-Z0-9_]*"
    r"[\"']?\s*[=:]\s*)"
    r"(?P<value>\"[^\"\n]+\"|'[^'\n]+'|[^\s\"',}]+)",
    r"(?P<name>(?i:\b(?:api_?key|access_?key|secret_?key|private_?key|password|passwd|auth_?token|access_?token)"
    r"\b[\"']?\s*[=:]\s*))"
    r"(?P<value>\"[^\"\n]+\"|'[^'\n]+'|[^\s\"',}]+)",
    r"(?P<name>(?i:\b(?:bearer|basic)\s+))(?P<value>[A-Za-z0-9._~+/=-]{8,})",
    r"(?P<name>[?&](?i:[a-z0-9_-]*(?:token|key|secret|sig|signature|credential|password))=)"
    r"(?P<value>[^&\s\"']+)",
    r"(?P<name>\b[a-z][a-z0-9+.-]*://)(?P<value>[^\s/@\"']+)(?=@)",
    # A login without a scheme, before a host that has a dot or a port.
    r"(?P<name>(?<![\w/@.:-]))(?P<value>[\w.+-]+:[^\s/@:\"']{4,})(?=@[\w-]+(?:\.[\w-]+|:\d))",
)
"""A secret after the name that it is given to."""
BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)")


def without_secrets(text: str) -> str:
    """A text of a server or a library, for an error or a log, without the values of this process's variables
    that are secrets and without what looks like one."""
    return _own_cleaner()(text)


@cache
def _own_cleaner() -> Callable[[str], str]:
    secrets = {}
    for name, value in os.environ.items():
        path = value.startswith(("/", "~"))
        if SECRET_NAME.search(name) and len(value) >= LEAST_REMOVED and not path:
            secrets[name] = value
    return secret_cleaner(secrets)


def secret_cleaner(secrets: Mapping[str, str]) -> Callable[[str], str]:
    """A function that takes a text to one without secrets. secrets: values that are known, by name."""
    values = sorted(secrets.items(), key=lambda item: -len(item[1]))

    def clean(text: str) -> str:
        for name, value in values:
            for form in {value, json.dumps(value)[1:-1]}:
                text = text.replace(form, f"[{name} removed]")
        text = BLOCK.sub("[a private key removed]", text)
        for kind, pattern in SIGNS.items():
            text = re.sub(pattern, f"[{kind} removed]", text)
        for pattern in ASSIGNED:
            text = re.sub(pattern, _without_value, text)
        return text

    return clean


def _without_value(match: re.Match[str]) -> str:
    value = match["value"]
    kept = "removed]" in value or value.startswith("$") or value in ("null", "true", "false", '""', "''")
    return match[0] if kept else f"{match['name']}[removed]"


def secret_in_text(text: bytes, secrets: Mapping[str, str]) -> str:
    """What secret a text holds; "" if none is seen. secrets: values that are looked for too, by name."""
    for name, value in secrets.items():
        if len(value) >= LEAST_SECRET and value.strip().encode() in text:
            return f"the value of {name}"
    return next((kind for kind, pattern in SIGNS.items() if re.search(pattern.encode(), text)), "")
