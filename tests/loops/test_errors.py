"""What cannot run is refused in one line with exit code 2, before anything is started or written."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import ray.exceptions
import torch
from safetensors.torch import save_file

from tests.loops.jobs import Job
from trainer import config as c
from trainer.checkpoint.layout import local_dir
from trainer.config import budget
from trainer.config.run_folder import read_progress
from trainer.data.processor import Prompter
from trainer.hardware.model_shapes import shape_of
from trainer.loops import process
from trainer.loops.process import explain_error
from trainer.node.launch import ray_client
from trainer.node.preflight import host, precheck
from trainer.ranks.process import RankPlace
from trainer.ranks.ray_ranks import RayRanks
from trainer.system.backoff import Backoff
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_RAY


def refuse(config, capsys, tmp_path, overrides=()) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(c.dump(config))

    def never(*_):
        raise AssertionError("the run was started")

    assert process._run(never, never, str(path), list(overrides)) == EXIT_CONFIG
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    assert not Path(config.run.dir).exists(), "a refused run must leave nothing behind"
    return lines[0]


def empty_folder(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    return tmp_path / "empty"


REFUSED = {
    "no model": (["model.path={}/nowhere"], "neither a folder nor a hub id"),
    "no weights": (["model.path={}/empty"], "no *.safetensors weights"),
    "not in the cache, offline": (["model.path=nobody/nothing"], "the hub is switched off"),
    "no data": (["data.path={}/no-data"], "no-data"),
    "no such split": (["data.split=trian"], "train"),
    "a batch that does not divide": (["algorithm.samples_per_update=5"], "use a divisor of 16"),
    "too little memory": (
        ["rollout.kv_cache_gib=10000"],
        "lower placement.workers_per_node, rollout.kv_cache_gib or",
    ),
    "fewer rows than a step takes": (
        ["rollout.prompts_per_step=66"],
        "has 64 rows in split train and a step takes 66: lower rollout.prompts_per_step",
    ),
}
NO_TEACHER = {
    "{}": "has no config.json",
    "nobody/nothing": "the hub is switched off",
    "/nowhere/at/all": "is neither a folder nor a hub id",
}
"""A teacher is looked for as the model is, before anything starts."""
for path, message in NO_TEACHER.items():
    options = [f"algorithm.teacher={path}", "algorithm.kl_coef=0"]
    REFUSED[f"teacher {path}"] = options, message


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused(small_config, capsys, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    empty_folder(tmp_path)
    options, message = REFUSED[name]
    options = [option.format(tmp_path) for option in options]
    line = refuse(small_config, capsys, tmp_path, options)
    assert message in line and (not name.startswith("teacher") or options[0].replace("=", " ") in line)


def test_an_architecture_without_parity_tests(small_config, tiny_model, capsys, tmp_path):
    """It might load and train. Refused from its config.json, or by its name where that is enough."""
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    text = (other / "config.json").read_text().replace('"model_type": "qwen2_5_vl"', '"model_type": "gemma3"')
    (other / "config.json").write_text(text)
    config = replace(small_config, model=replace(small_config.model, path=str(other)))
    message = refuse(config, capsys, tmp_path)
    assert "gemma3 is not supported" in message and "sliding windows" in message and "Qwen3-VL" in message
    for path in (str(other), "OpenGVLab/InternVL3_5-8B", "google/gemma-3-4b-it"):
        with pytest.raises(c.ConfigError, match="is not supported"):
            shape_of(path)


def test_a_trainer_whose_completions_come_from_workers_needs_no_memory_for_an_engine(
    small_config, capsys, tmp_path
):
    cache = ["rollout.kv_cache_gib=10000"]
    assert "CPU ranks need" in refuse(small_config, capsys, tmp_path, cache)
    config = c.override(
        small_config, [*cache, "fleet.workers=only", f"checkpoint.remote=file://{tmp_path}/b"]
    )
    precheck.precheck(config)


def test_memory_is_what_the_container_may_take(small_config, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 29)
    assert "and 0.5 are free" in refuse(small_config, capsys, tmp_path)


@pytest.mark.parametrize("wanted", ["fp32", "bf16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_parameters_are_counted_whatever_their_type_in_the_files(small_config, tmp_path, stored, wanted):
    """A model that was saved in bf16 and is trained in fp32 is not half as large."""
    (tmp_path / "model").mkdir()
    shutil.copy(Path(small_config.model.path) / "config.json", tmp_path / "model")
    tensors = {"a.weight": torch.zeros(300, 7, dtype=stored), "b.weight": torch.zeros(11, dtype=stored)}
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    config = c.override(small_config, [f"model.path={tmp_path}/model", f"model.dtype={wanted}"])
    assert precheck._parameters(config) == 300 * 7 + 11


def test_a_weight_file_that_is_none(small_config, capsys, tmp_path):
    shutil.copytree(small_config.model.path, tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    config = c.override(small_config, [f"model.path={tmp_path}/model"])
    assert "is no safetensors file" in refuse(config, capsys, tmp_path)


def test_too_little_disk(small_config, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "CHECKPOINT_BYTES_PER_PARAMETER", 10**9)
    assert "larger disk, or lower checkpoint.keep_last" in refuse(small_config, capsys, tmp_path)


def test_checkpoints_that_are_there_need_no_room_again(small_config, monkeypatch):
    """A disk that holds just the kept checkpoints must not turn a run away when it comes back after a
    preemption."""
    held = local_dir(small_config) / "step-00000002/rank-00000-of-00001.safetensors"
    held.parent.mkdir(parents=True)
    held.write_bytes(b"")
    usage = shutil.disk_usage(held.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1 << 20))
    with pytest.raises(c.ConfigError, match="larger disk"):
        precheck.precheck(small_config)
    os.truncate(held, 1 << 30)  # sparse
    precheck.precheck(small_config)


def test_gpu_that_is_not_there(small_config, capsys, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "set placement.device=cpu" in refuse(small_config, capsys, tmp_path, ["placement.device=cuda"])


def test_a_row_whose_picture_does_not_decode_is_named(small_config, mixed_dataset):
    from trainer.data.dataset import Dataset

    prompter, row = Prompter(small_config.model), Dataset(mixed_dataset, "train")[1]
    with pytest.raises(c.ConfigError, match=f"row {row.id}: its image does not decode"):
        prompter.encode(replace(row, images=[row.images[0][:60]]))
    with pytest.raises(c.ConfigError, match=f"row {row.id}"):
        prompter.encode(replace(row, images=[]))


def test_a_ray_that_does_not_start_is_tried_again(small_config, capsys, tmp_path, monkeypatch):
    """What Ray raises when its node does not answer within 30 s, as on a busy machine: twice, and for
    ever."""
    path, calls = tmp_path / "run.yaml", []
    path.write_text(c.dump(small_config))

    def slow(**_):
        calls.append(1)
        if len(calls) < 3 or forever:
            raise Exception("The current node timed out during startup. This\ncould happen because")

    def started(config, *_):
        raise c.ConfigError("connected")

    monkeypatch.setattr(process.ray, "init", slow)
    monkeypatch.setattr(ray_client, "STARTS", Backoff(attempts=3, first_wait_s=0.0))
    monkeypatch.setattr(process, "Session", started)
    forever = False
    assert process._run(None, None, str(path), []) == EXIT_CONFIG and len(calls) == 3
    assert "error: connected" in capsys.readouterr().err
    forever = True
    assert process._run(None, None, str(path), []) == EXIT_RAY and len(calls) == 6
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3 and "Traceback" not in " ".join(lines)
    assert lines[-1].startswith(
        "error: Ray did not start in 3 attempts (The current node timed out during startup. This)"
    )


def test_ranks_import_what_the_driver_imports(small_config, monkeypatch):
    """A variable that is given to Ray replaces that of the machine."""
    asked = {}
    monkeypatch.setenv("PYTHONPATH", "/my/rewards:/more")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_client, "connect_to_ray", asked.update)
    process.connect_ray(small_config)
    _, *own = asked["runtime_env"]["env_vars"]["PYTHONPATH"].split(":")
    assert own == ["/my/rewards", "/more"]


PLACES = [
    RankPlace("10.0.0.1", 0, 30001, 700, "a", "", 0),
    RankPlace("10.0.0.2", 0, 30001, 700, "b", "", 0),
    RankPlace("10.0.0.2", 1, 30002, 701, "b", "", 0),
]
KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: Worker
\tactor_id: 1f2e
\tpid: 701
\tnamespace: 5a
\tip: 10.0.0.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail:
Worker unexpectedly exits with a connection error code 2. End of file. There are some potential root causes.
(1) The process is killed by SIGKILL by OOM killer due to high memory usage."""
EVICTED = """Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.2, ID: 9c) where the task (actor ID: 1f2e, name=Worker.update, pid=700, memory
used=90GB) was running was 119.10GB / 120.00GB (0.99), which exceeds the memory usage threshold of 0.95."""


def test_the_rank_is_named_by_its_process_and_address(monkeypatch):
    """Ray names the out-of-memory killer among the causes that any death may have."""
    workers = object.__new__(RayRanks)
    workers._places = PLACES
    monkeypatch.setattr(workers, "cause", lambda said: "SIGSEGV in at::native::add")
    killed, evicted = ray.exceptions.ActorDiedError(), ray.exceptions.OutOfMemoryError(EVICTED)
    killed.error_msg = KILLED
    assert str(killed) == KILLED
    line = "error: a rank or node was lost: "
    assert explain_error(killed, workers) == (
        34,
        f"{line}rank 2 (process 701 on 10.0.0.2): SIGSEGV in at::native::add",
    )
    evicted_line = (
        f"{line}rank 1 (process 700 on 10.0.0.2): out of memory: Ray ended it. See docs/failures.md"
    )
    assert explain_error(evicted, workers) == (34, evicted_line)
    assert explain_error(ConnectionError("refused"), workers) == (34, f"{line}refused")
    assert explain_error(evicted)[1] == f"{line}Task was killed due to the node running low on memory."


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_that_cannot_be_placed(small_config, tmp_path):
    """The cluster is too small: the folder says `failed`, not `running` for ever."""
    options = [
        "placement.workers_per_node=2",
        "placement.threads_per_worker=400",
        "placement.start_timeout_s=3",
    ]
    job = Job(
        c.override(small_config, options), tmp_path / "job", {"RAY_OVERRIDE_RESOURCES": '{"CPU": 2}'}
    ).start()
    assert job.wait(200) == EXIT_CONFIG, job.tail()
    assert "the Ray cluster cannot hold 2 ranks" in job.tail()
    assert read_progress(small_config.run.dir)["status"] == "failed"
