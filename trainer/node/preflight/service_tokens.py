"""Whether the tokens that a run will use are accepted, asked of their services. Values are never printed.

Hugging Face: `whoami-v2` of the hub's API. Weights & Biases: `viewer` of its GraphQL API (*read*, not run).
"""

from __future__ import annotations

import base64
import json
import os
import urllib.error
from collections.abc import Mapping

from trainer.config import RunConfig, by_model
from trainer.node.preflight.findings import Finding, judged
from trainer.system.web_request import send_request

TIMEOUT_S = 10.0


def check_service_tokens(config: RunConfig, rank: int, env: Mapping[str, str] = os.environ) -> list[Finding]:
    """One finding for each token that will be used; a service that does not answer is a warning."""
    refusals: dict[str, str | None] = {}
    if (token := env.get("HF_TOKEN")) and env.get("HF_HUB_OFFLINE") != "1" and _from_hub(config):
        url = env.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/") + "/api/whoami-v2"
        refusals["HF_TOKEN"] = _refusal(url, f"Bearer {token}")
    if (key := env.get("WANDB_API_KEY")) and config.logging.wandb == "online":
        url = env.get("WANDB_BASE_URL", "https://api.wandb.ai").rstrip("/") + "/graphql"
        login = base64.b64encode(f"api:{key}".encode()).decode()
        refusals["WANDB_API_KEY"] = _refusal(url, f"Basic {login}", {"query": "{viewer{id}}"})

    findings = []
    for name, why in refusals.items():
        if why is None:
            unheard = f"{name} could not be tried: no answer"
            remedy = "look whether this machine reaches the service"
            findings.append(judged("tokens", (rank,), unheard, remedy=remedy, level="warn"))
            continue
        wrong = f"{name} is refused: {why}" if why else ""
        findings.append(judged("tokens", (rank,), wrong, f"{name} is accepted"))
    return findings


def _from_hub(config: RunConfig) -> bool:
    return not all(os.path.exists(own.model.path) for own in by_model(config))


def _refusal(url: str, authorization: str, body: dict[str, str] | None = None) -> str | None:
    """Why the service refuses the token; "" if it accepts it, None if it does not answer."""
    data = json.dumps(body).encode() if body else None
    headers = {"Authorization": authorization, "Content-Type": "application/json"}
    try:
        method = "POST" if data else "GET"
        reply = send_request(url, method=method, body=data, headers=headers, timeout_s=TIMEOUT_S)
        answer = json.loads(reply)
    except urllib.error.HTTPError as error:
        return f"{error.code} from {url}" if error.code in (401, 403) else None
    except (OSError, ValueError):
        return None
    nobody = body is not None and not (answer.get("data") or {}).get("viewer")
    return f"it belongs to nobody at {url}" if nobody else ""
