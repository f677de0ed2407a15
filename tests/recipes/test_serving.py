"""`serve` and `evaluate` of what a run has trained: which weights, where, on how many GPUs, with which
key."""

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.drivers import launching, trained_model
from recipes.plan import sizing
from recipes.presets import resolve
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from tests import servers
from tests.recipes.rendered import render
from trainer import config as c
from trainer.config import ConfigError
from trainer.config.run_store import RunStore
from trainer.sampling import serve
from trainer.storage.storage import Storage
from trainer.system import processes

ROOT = Path(__file__).parents[2]
LORA = "grpo-qwen2.5-vl-72b-lora-mathv60k"


def record(run_id="mine", recipe="grpo-qwen2.5-vl-7b-mathv60k", **more):
    RunRecord(run_id=run_id, recipe=recipe, target="skypilot-runpod", **more).save()


def adapter_of(run_id):
    folder = run_record.RUNS / run_id / run_record.PULLED / "hf"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def config_in(task):
    return yaml.safe_load(re.search(r"<<YAML\n(.*?)^ *YAML$", task, re.S | re.M)[1])


def test_weights_come_from_the_bucket_and_gpus_from_the_memory_plan(capsys, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    record(
        bucket="s3://mine",
        overrides=[
            "storage.bucket=s3://mine",
            "data.path=s3://mine/rows",
            "data.system_prompt=none",
            "run.max_steps=9",
        ],
    )
    for command in (["serve", "mine"], ["evaluate", "mine", "--benchmarks", "mathvista"]):
        code, out, err = run(
            capsys, *command, "--target", "skypilot-runpod", "--dry-run", "--run-id", "other"
        )
        assert code == 0, err
        assert "accelerators: A100-80GB:1\n" in out, "one GPU asks a 7B model; eight train it"
        fetch = r"-m trainer.checkpoint.weights s3://mine/mine/checkpoints/hf .*Qwen/Qwen2.5-VL-7B-Instruct"
        assert re.search(fetch, out) and config_in(out)["model"]["path"] == "${MODELS}/${RUN_ID}"
    assert config_in(out)["data"]["system_prompt"] == "none", "what it was trained to be asked"
    assert "data_prep prepare mathvista" in out and "mine/rows" not in out, (
        "the benchmark's rows, not the run's"
    )
    assert config_in(out)["lora"] == {"rank": 1} and config_in(out)["checkpoint"]["remote"] == "s3://mine"


def test_a_run_with_tools_is_served_and_scored_with_its_turns(capsys):
    turns = ["turns.environment=zoom", "turns.images=2", "turns.tool_seconds=7.5", "turns.limit=5"]
    record(bucket="gs://mine", overrides=["storage.bucket=gs://mine", *turns])
    trained = resolve("grpo-qwen2.5-vl-7b-mathv60k", turns).config.turns
    assert resolve("serve", trained_model.what_to_serve("mine", "", None)).config.turns == trained
    words = ["evaluate", "mine", "--benchmarks", "mathvista", "--target", "skypilot-runpod", "--dry-run"]
    code, out, err = run(capsys, *words, "--run-id", "other")
    assert code == 0, err
    assert config_in(out)["turns"] == {"environment": "zoom", "images": 2, "limit": 5, "tool_seconds": 7.5}


def test_larger_models_take_more_gpus_and_tell_where_none_do():
    large = ["model.path=Qwen/Qwen2.5-VL-72B-Instruct"]
    assert sizing.fewest_gpus(resolve("serve", large))[1:] == [
        "cluster.gpus_per_node=4",
        "rollout.tensor_parallel=4",
    ]
    asked = ["lora.rank=1", "algorithm.kl_coef=0"]
    assert sizing.fewest_gpus(resolve("grpo-qwen2.5-vl-72b-mathv60k", asked)) == [
        "cluster.nodes=1", "cluster.gpus_per_node=8", "rollout.tensor_parallel=8",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="does not fit 8 x L4"):
        sizing.fewest_gpus(resolve("serve", [*large, "cluster.gpu=L4", "cluster.alternatives=[]"]))
    assert sizing.fewest_gpus(resolve("demo", [])) == []


def test_the_plan_of_a_server_tells_its_memory_and_its_hourly_price(capsys):
    code, out, _ = run(capsys, "plan", "serve", "--all")
    assert code == 0 and "engine KV cache" in out and "checkpoint" not in out
    hourly = [float(usd) for usd in re.findall(r"(?:spot|on demand) +([\d.]+)\n", out)]
    assert len(hourly) > 4 and hourly == sorted(hourly)


def test_an_adapter_is_merged_on_the_node_or_here():
    record(recipe=LORA, bucket="gs://mine", overrides=["storage.bucket=gs://mine"])
    recipe = resolve("serve", trained_model.what_to_serve("mine", "", "dstack-gcp"))
    task = next(iter(render(recipe, "dstack-gcp").values()))
    assert 'gs://mine/mine/checkpoints/hf "${MODELS}/${RUN_ID}" Qwen/Qwen2.5-VL-72B-Instruct' in task
    assert "GOOGLE_SERVICE_ACCOUNT_KEY=${{ secrets.google_service_account_key }}" in task
    folder = adapter_of("mine")
    assert f"storage.weights={folder}" in trained_model.what_to_serve("mine", "", "local"), (
        "what `pull --weights` fetched"
    )
    assert "storage.weights=gs://mine/mine/checkpoints/hf" in trained_model.what_to_serve("mine", "", None)


def test_a_model_on_the_hub_that_reads_images_is_known_by_its_shape(tiny_model):
    known = "Qwen/Qwen3.5-9B", "Qwen/Qwen2.5-VL-7B-Instruct", str(tiny_model)
    for name in (*known, "someone/Other-VL-7B", "Qwen/Qwen3.5-122B-A10B"):
        assert serve.has_vision(name)
    assert not serve.has_vision("Qwen/Qwen2.5-7B-Instruct")


def test_experts_are_dealt_as_in_training_where_vllm_heeds_it():
    config = c.override(c.RunConfig(), ["rollout.expert_parallel=true", "rollout.tensor_parallel=2"])
    for device, dealt in (("cuda", True), ("cpu", False)):
        words = serve.server_command(c.override(config, [f"placement.device={device}"]), "127.0.0.1", 8000)
        assert ("--enable-expert-parallel" in words) == dealt


def test_what_cannot_be_served_is_refused_in_a_line(capsys):
    record(recipe=LORA)
    with pytest.raises(ConfigError, match="a run exports them at its end"):
        trained_model.what_to_serve("mine", "", "local")
    folder = adapter_of("mine")
    code, _, err = run(capsys, "serve", "mine", "--target", "skypilot-runpod", "--dry-run")
    assert code == 2 and f"the nodes of skypilot-runpod have no {folder}" in err
    with pytest.raises(ConfigError, match="is an adapter: give the run"):
        trained_model.model_address(str(folder))


def test_nothing_is_rented_for_weights_that_are_not_there(capsys, tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "sky", "")
    record(bucket="s3://bucket")
    with servers.rclone(tmp_path / "disk") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        code, _, err = run(capsys, "serve", "mine", "--target", "skypilot-runpod")
        assert code == 2 and "no exported weights at" in err and not (tmp_path / "calls").exists()
        Storage(RunStore("s3://bucket/mine").exported).put_bytes("config.json", b"{}")
        code, out, err = run(capsys, "serve", "mine", "--target", "skypilot-runpod", "--run-id", "served")
    assert code == 0, err
    key = run_record.RUNS / "served/api.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and len(key.read_text()) >= 32
    calls = (tmp_path / "calls").read_text()
    assert "--secret VLLM_API_KEY" in calls and key.read_text() not in calls + out
    assert "sky status --endpoint 8000 served" in out and '"model": "mine"' in out
    code, _, _ = run(capsys, "status", "served")
    assert "sky status --endpoint 8000 served" in (tmp_path / "calls").read_text()


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2_5_vl", "smollm2"])
def test_the_server_answers_who_has_the_key_and_ends_with_its_hours(family_model, family, tmp_path):
    config = c.RunConfig(
        run=c.Run(name="mine", dir=str(tmp_path)),
        model=c.Model(path=str(family_model(family)), dtype="fp32", min_pixels=784),
        data=c.Data(prompt_max_tokens=192),
        rollout=c.Rollout(max_tokens=64, kv_cache_gib=0.25),
        placement=c.Placement(device="cpu"),
    )
    (tmp_path / "run.yaml").write_text(c.dump(config))
    words = [
        sys.executable,
        "-m",
        "trainer.sampling.serve",
        "--config",
        str(tmp_path / "run.yaml"),
        "--port",
        "18765",
    ]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    env.pop("VLLM_API_KEY", None)
    refused = subprocess.run(words, env=env, capture_output=True, text=True, cwd=ROOT)
    assert refused.returncode == 2 and "VLLM_API_KEY is not set" in refused.stderr
    log = tmp_path / "log"

    def begin(*more):
        file = log.open("w")
        return subprocess.Popen(
            [*words, *more], env=env | {"VLLM_API_KEY": "secret"}, stdout=file, stderr=file, cwd=ROOT
        )

    def ask(key):
        body = {"model": "mine", "max_tokens": 8, "messages": [{"role": "user", "content": "how many"}]}
        request = urllib.request.Request(
            "http://127.0.0.1:18765/v1/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as got:
            return json.load(got)

    server = begin()
    end = time.monotonic() + 180
    while "serving mine on port 18765" not in log.read_text():
        assert server.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.5)
    assert ask("secret")["usage"]["completion_tokens"] > 0
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask("wrong")
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    server = begin("--hours", "0.0003")
    assert server.wait(60) == 0 and "hours are over" in log.read_text()

    server = begin()
    end = time.monotonic() + 180
    while "serving mine on port 18765" not in log.read_text():
        assert server.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.5)
    server.kill()  # nothing of it can end vLLM then
    server.wait()
    end = time.monotonic() + 60
    while serve.server_answers(18765):
        assert time.monotonic() < end, "vLLM answers on, beyond its hours"
        time.sleep(0.5)


STARTS = """
import os, signal, subprocess, sys, time
from functools import partial
from trainer.system.processes import end_with_parent
ending = partial(end_with_parent, os.getpid(), signal.SIGTERM)
server = subprocess.Popen(["sleep", "300"], start_new_session=True, preexec_fn=ending)
print(server.pid, flush=True)
time.sleep(300)
"""


def test_a_server_ends_with_the_process_that_started_it():
    ours = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert ours.stdout is not None
    server = int(ours.stdout.readline())
    assert processes.process_state(server)
    ours.kill()
    ours.communicate()
    end = time.monotonic() + 10
    while not processes.has_ended(server):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_example_of_a_call_is_json_of_a_shell_word():
    record = RunRecord(run_id="mine", recipe="serve", target="local")
    words = shlex.split(launching.how_to_call(record, "it's").partition("curl")[2].replace("\\\n", ""))
    body = json.loads(words[words.index("-d") + 1])
    assert body == {"model": "it's", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
