"""Tokens against a server that answers as the hub and W&B do: accepted, refused, nobody's, no answer; never
printed."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trainer.config import RunConfig, override
from trainer.node.preflight import service_tokens

GOOD = {"Bearer hf_good": {"name": "me"}, "Basic YXBpOmdvb2Q=": {"data": {"viewer": {"id": "me"}}}}
"""Authorization -> answer; the second is api:good."""
NOBODY = {"Basic YXBpOm5vYm9keQ==": {"data": {"viewer": None}}}


class Service(BaseHTTPRequestHandler):
    def _answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        known = (GOOD | NOBODY).get(self.headers["Authorization"])
        body = json.dumps(known or {"error": "invalid"}).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _answer

    def log_message(self, *arguments):
        pass


@pytest.fixture
def service():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


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
