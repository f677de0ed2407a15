"""`launch.py config` writes what torchrun's nodes start from."""

from desk import elsewhere as elsewhere
from desk import run

from trainer import config as run_config

RECIPE = "sft-qwen2.5-7b-lora"


def test_a_run_of_two_nodes_is_written_whole(capsys, tmp_path):
    out = tmp_path / "run.yaml"
    given = ["--set", "cluster.nodes=2", "--set", "optimizer.learning_rate=2e-5", "--bucket", "s3://mine"]
    code, said, err = run(capsys, "config", RECIPE, *given, "--run-id", "mine", "--out", str(out))
    assert code == 0, err
    config = run_config.load(str(out))
    run_config.validate(config)
    assert "${" not in out.read_text()
    assert (config.method, config.run.id, config.placement.nodes) == ("sft", "mine", 2)
    assert (config.optimizer.learning_rate, config.checkpoint.remote) == (2e-5, "s3://mine")
    assert config.run.dir.startswith("/") and config.run.dir.endswith("runs/mine")
    assert f"prepare alpaca --out {config.data.path}" in said
    assert f"NNODES=2 NODE_RANK=0 MASTER_ADDR=... GPUS_PER_NODE=1 bash examples/torchrun/sft.sh {out}" in said


def test_what_torchrun_cannot_start_is_refused_in_a_line(capsys, tmp_path):
    out = ["--out", str(tmp_path / "run.yaml")]
    code, _, err = run(capsys, "config", "grpo-qwen2.5-7b-gsm8k", *out)
    assert code == 2 and "torchrun starts method sft only" in err
    code, _, err = run(capsys, "config", RECIPE, "--set", "cluster.nodes=2", *out)
    assert code == 2 and "give --bucket" in err and not (tmp_path / "run.yaml").exists()
