"""Made the checkpoint in this folder, at revision 5ad573f. It stays as it is: later code resumes it
(test_golden.py).

    git worktree add ../old 5ad573f && cd ../old && python .../tests/checkpoint/golden/make.py OUT

A run of two CPU ranks over a text model of 30,000 parameters: adaptive KL coefficient, normalized rewards,
dynamic sampling, several updates a step, a learning rate that decays. It is saved after step 2; step 3 is in
the rollout log, as if the run had been killed in its update. `after.jsonl` has the metrics of steps 3 and 4
of the undisturbed run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

from data_prep.write.shards import write_dataset
from examples.demo import tiny_model
from tests.conftest import make_rows
from trainer import config as c

REWARD = '''"""A reward that falls out differently for most completions."""


def reward(text, reference, answer_type):
    return (sum(map(ord, text)) % 17) / 17
'''


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    tiny_model.SHAPES["tiny"] = tiny_model.TinyShape(32, 64, 2, 1, 1, 32, 64, 1, True)
    tiny_model.MERGES = 64
    tiny_model.build(out / "model", 0, "tiny", "qwen2")
    write_dataset(out / "data", "text", {"train": make_rows("train", 16, 1)}, {})
    (out / "reward.py").write_text(REWARD)
    config = c.RunConfig(
        run=c.Run(name="golden", dir=str(out / "run"), max_steps=4),
        model=c.Model(path=str(out / "model"), dtype="fp32", gradient_checkpointing=False),
        data=c.Data(path=str(out / "data"), prompt_max_tokens=400),
        rollout=c.Rollout(
            prompts_per_step=2, samples_per_prompt=4, max_tokens=8, kv_cache_gib=0.25, sleep_level=0
        ),
        algorithm=c.Algorithm(
            micro_batch_tokens=900,
            kl_coef=0.01,
            kl_target=1e-3,
            kl_horizon=100,
            normalize_reward=True,
            refill_rounds=1,
            samples_per_update=4,
            epochs=2,
        ),
        optimizer=c.Optimizer(learning_rate=1e-3, schedule="cosine", warmup_steps=1, weight_decay=0.01),
        rewards=c.Rewards(function=f"{out}/reward.py:reward", workers=1),
        checkpoint=c.Checkpoint(every_steps=2, keep_last=4, export_hf="never"),
        placement=c.Placement(workers_per_node=2, device="cpu"),
        logging=c.Logging(tensorboard=False, samples_per_step=0, keep_rollouts=True),
    )
    (out / "run.yaml").write_text(c.dump(config))
    subprocess.run([sys.executable, "-m", "trainer.grpo", "--config", str(out / "run.yaml")], check=True)

    run = out / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (out / "after.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if line["step"] > 2))
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= 2)
    )
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    for name in ("step-00000001.npz", "step-00000002.npz", "step-00000004.npz"):
        (run / "rollouts" / name).unlink(missing_ok=True)
    kept = {"checkpoints", "rollouts", "metrics.jsonl", "config.yaml"}
    for path in run.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
