"""Tokens against a server that answers as the hub and W&B do: accepted, refused, nobody's, no answer; never
printed."""

import json

import pytest

from tests.servers import Reply, Request, answering
from trainer.config import RunConfig, override
from trainer.node.preflight import service_tokens

GOOD = {"Bearer hf_good": {"name": "me"}, "Basic YXBpOmdvb2Q=": {"data": {"viewer": {"id": "me"}}}}
"""Authorization -> answer; the second is api:good."""
NOBODY = {"Basic YXBpOm5vYm9keQ==": {"data": {"viewer": None}}}


def answer(request: Request) -> Reply:
    known = (GOOD | NOBODY).get(request.headers["Authorization"])
    return 200 if known else 401, json.dumps(known or {"error": "invalid"}).encode(), {}


@pytest.fixture
def service():
    with answering(answer) as url:
        yield url


def look(url, hub="", wandb="", *overrides):
    config = override(
        RunConfig(), ["model.path=Qwen/Qwen2.5-VL-3B-Instruct", "logging.wandb=online", *overrides]
    )
    env = {"HF_ENDPOINT": url, "WANDB_BASE_URL": url, "HF_TOKEN": hub, "WANDB_API_KEY": wandb}
    return [(f.level, f.figure) for f in service_tokens.check_service_tokens(config, 0, env)]


def test_good_tokens_pass_and_bad_ones_fail_without_being_shown(service):
    assert look(service, "hf_good", "good") == [
        ("pass", "HF_TOKEN is accepted"),
        ("pass", "WANDB_API_KEY is accepted"),
    ]
    (hub, wandb) = look(service, "hf_secret", "secret")
    assert hub[0] == wandb[0] == "fail" and "HF_TOKEN is refused: 401" in hub[1]
    assert "secret" not in hub[1] + wandb[1]
    assert look(service, "", "nobody") == [
        ("fail", f"WANDB_API_KEY is refused: it belongs to nobody at {service}/graphql")
    ]


def test_what_is_not_set_or_not_used_is_not_asked(service, tmp_path):
    assert look(service) == []
    assert look(service, "hf_bad", "bad", f"model.path={tmp_path}", "logging.wandb=offline") == []


def test_a_service_that_does_not_answer_warns(service):
    (found,) = look("http://127.0.0.1:9", "hf_good")
    assert found == ("warn", "HF_TOKEN could not be tried: no answer")
