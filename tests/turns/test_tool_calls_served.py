"""A model that learned to call `zoom`, served by vLLM with its own tool calling."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.servers import free_port
from tests.turns.talking import QUESTION, teach
from trainer import config as c
from trainer.data.dataset import Dataset
from trainer.data.processor import Prompter
from trainer.turns.environments import tools_of

ROOT = Path(__file__).parents[2]
TURNS = c.Turns(environment="zoom", image_pixels=3136)


def ask(port: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "mine", "messages": messages, "tools": tools_of(TURNS), "max_tokens": 120}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body | {"temperature": 0.0, "return_token_ids": True}).encode(),
        {"Authorization": "Bearer secret", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as got:
        return json.load(got)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_call_comes_back_as_a_call_and_prompts_have_the_tokens_of_training(
    tiny_model, picture_dataset, tmp_path
):
    config = c.RunConfig(
        run=c.Run(name="mine", dir=str(tmp_path)),
        model=c.Model(path=str(teach(tiny_model, tmp_path / "talking")), dtype="fp32", min_pixels=784),
        data=c.Data(prompt_max_tokens=1400),
        rollout=c.Rollout(max_tokens=600, kv_cache_gib=0.25),
        turns=TURNS,
        placement=c.Placement(device="cpu"),
    )
    (tmp_path / "run.yaml").write_text(c.dump(config))
    port = free_port()
    words = [sys.executable, "-m", "trainer.sampling.serve", "--config", str(tmp_path / "run.yaml")]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_API_KEY": "secret"}
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen([*words, "--port", str(port)], env=env, stdout=file, stderr=file, cwd=ROOT)
    try:
        end = time.monotonic() + 1500
        while f"serving mine on port {port}" not in log.read_text():
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        row = Dataset(str(picture_dataset), "train")[0]
        url = f"data:image/png;base64,{base64.b64encode(row.images[0]).decode()}"
        picture = {"type": "image_url", "image_url": {"url": url}}
        question = {"role": "user", "content": [QUESTION[0], picture]}
        reply = ask(port, [question])
        prompter = Prompter(config.model, tools_of(TURNS))
        said = reply["choices"][0]["message"]
        (call,) = said["tool_calls"]
        assert call["function"]["name"] == "zoom"
        assert len(json.loads(call["function"]["arguments"])["box"]) == 4
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        (trained,) = prompter.texts([[{"role": "user", "content": QUESTION}]])
        assert squeezed(prompter, reply["prompt_token_ids"]) == trained

        content = [{"type": "text", "text": "Picture 1:"}, picture]
        shown = {"role": "tool", "tool_call_id": call["id"], "content": content}
        reply = ask(port, [question, {k: said[k] for k in ("role", "content", "tool_calls")}, shown])
        assert squeezed(prompter, reply["prompt_token_ids"]).count("<|image_pad|>") == 2
        assert "<tool_response>\nPicture 1:<|vision_start|>" in squeezed(prompter, reply["prompt_token_ids"])
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def squeezed(prompter: Prompter, token_ids: list[int]) -> str:
    """The prompt as text, with one placeholder an image."""
    image = prompter.image_token_id
    once = [t for i, t in enumerate(token_ids) if t != image or token_ids[i - 1] != image]
    return prompter.tokenizer.decode(once)
