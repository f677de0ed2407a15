"""Secrets in errors and logs: none of many kinds stays, and what is none is left alone."""

from __future__ import annotations

import io
import urllib.error
from email.message import Message

import pytest

from trainer.node.launch.job_watch import JobLog
from trainer.rewards.grading_client import failure_reason
from trainer.storage import storage
from trainer.system import redaction
from trainer.system.redaction import secret_cleaner, secret_in_text, without_secrets

BODY = "Zq7Rw2Xk9Lm4Np8Vt3Yb6Hd1Jc5Fg0SaEiOu"
"""36 characters that stand in every secret."""
PLANTED = {
    "gitlab": f"cloning with glpat-{BODY[:20]}",
    "google": f"key AIza{BODY[:35]} was refused",
    "google-token": f"ya29.{BODY}",
    "jwt": f"sent eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{BODY}",
    "npm": f"npm_{BODY}",
    "pypi": f"pypi-{BODY}{BODY}",
    "slack": f"xoxb-123456789012-{BODY}",
    "slack-webhook": f"https://hooks.slack.com/services/T00000000/B00000000/{BODY[:24]}",
    "azure": f"DefaultEndpointsProtocol=https;AccountKey={BODY}==;EndpointSuffix=x",
    "github": f"ghp_{BODY}",
    "hugging-face": f"hf_{BODY}",
    "aws": "AKIAZQ7RW2XK9LM4NP8V",
    "openai": f"sk-{BODY}",
    "runpod": f"rpa_{BODY.upper()}{BODY.upper()}",
    "login-without-scheme": f"cannot reach user:{BODY[:12]}@store.example.com",
    "login-with-port": f"cannot reach user:{BODY[:12]}@store:9000",
    "login": f"error sending request for url (https://user:{BODY[:12]}@store.example.com/bucket)",
    "query": f"GET http://10.0.0.5:5000/get_reward?token={BODY[:12]}",
    "signature": f"https://store/x?X-Amz-Signature={BODY}&y=1",
    "variable": f"MY_API_KEY={BODY[:12]}",
    "yaml": f"password: {BODY[:12]}",
    "bearer": f"Authorization: Bearer {BODY}",
    "key-block": f"-----BEGIN RSA PRIVATE KEY-----\n{BODY}\n-----END RSA PRIVATE KEY-----",
}
HARMLESS = [
    "step 12: loss 0.5, 3 tokens: 12 at 10:20:30",
    "git@github.com:me/repo.git and image vllm/vllm-openai:v0.32.0@sha256:0123456789abcdef",
    "Traceback: File 'x.py', line 3, in f: KeyError: 'token'",
    "rollout.max_tokens=2048 data.prompt_max_tokens: 4096",
    "http://10.0.0.5:5000/get_reward?api-version=2024-06-01",
    "listening on 127.0.0.1:8000, rank 0 of node-1:29500",
    "https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct/resolve/main/config.json",
    "weights: sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
]


@pytest.mark.parametrize("kind", PLANTED)
def test_no_planted_secret_stays(kind):
    clean = secret_cleaner({})(PLANTED[kind])
    assert "removed]" in clean
    assert BODY[:12] not in clean and BODY[:12].upper() not in clean
    assert secret_in_text(clean.encode(), {}) == ""


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text):
    assert secret_cleaner({})(text) == text


@pytest.fixture
def with_a_key(monkeypatch):
    monkeypatch.setenv("MY_OWN_TOKEN", "a plain word")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/root/key.json")
    redaction._own_cleaner.cache_clear()
    yield
    redaction._own_cleaner.cache_clear()


def test_values_of_this_process_s_variables_are_taken_out(with_a_key):
    assert without_secrets("it said a plain word of /root/key.json") == (
        "it said [MY_OWN_TOKEN removed] of /root/key.json"
    )


def test_the_job_s_log_which_goes_to_the_bucket_has_none(tmp_path, capsys, with_a_key):
    source = tmp_path / "log"
    source.write_text("".join(f"{text}\n" for text in PLANTED.values() if "\n" not in text))
    log = JobLog(source, tmp_path / "run", show=True)
    log.close()
    for text in ((tmp_path / "run" / "launch.log").read_text(), capsys.readouterr().out):
        assert text.count("removed]") >= len(PLANTED) - 1
        assert BODY[:12] not in text and BODY[:12].upper() not in text


def test_errors_of_stores_and_servers_have_none():
    told = storage._first(RuntimeError(PLANTED["login"]))
    assert "password removed]" in told and BODY[:12] not in told
    body = io.BytesIO(f'{{"error": "Bearer {BODY} is not valid"}}'.encode())
    error = urllib.error.HTTPError("http://x", 401, "Unauthorized", Message(), body)
    assert failure_reason(error).startswith("answers 401") and BODY[:12] not in failure_reason(error)
