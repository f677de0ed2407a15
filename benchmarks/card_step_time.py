"""Seconds per GRPO step of a 3B model on one GPU, ours and TRL's `GRPOTrainer`: on a machine with a card and
an environment that has both,

    python benchmarks/card_step_time.py --folder /dev/shm/bench --steps 4

Both get the same random weights at the true shape of Qwen2.5-VL-3B, rows of one picture, 32 prompts of 8
completions of about 400 tokens and at most 2,048, reward by a hash, and KL; both have vLLM in the process,
which sleeps during the update. TRL runs with each of `--sizes` sequences per pass, and its fastest counts.
The first step is left out on both sides. Writes what it measured to `--out`. No figure of it is published
yet.

`--tiny` tries all of it on a CPU, with two narrow layers and TRL's own generation: its seconds mean nothing.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RECIPE = "grpo-qwen2.5-vl-3b-mathv60k"
TEXT: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "window_size": 112,
}
"""Shape of Qwen2.5-VL-3B-Instruct."""
ROWS, PICTURE = 256, (560, 420)
REWARD = """import zlib


def reward(text: str, reference: str, answer_type: str) -> float:
    return float(zlib.crc32(text.encode()) % 2)
"""


# --- what both read -----------------------------------------------------------------------------------------


def make_model(folder: Path, tiny: bool) -> None:
    """Random weights. The end token has about the same probability everywhere, 1 of the mean length."""
    import torch
    from transformers import AutoConfig, AutoProcessor, Qwen2_5_VLForConditionalGeneration

    from examples.demo import tiny_model

    base = tiny_model.build(folder / "base", 0)
    config = AutoConfig.from_pretrained(base)
    if not tiny:
        for part, shape in ((config.text_config, TEXT), (config.vision_config, VISION)):
            for name, value in shape.items():
                setattr(part, name, value)
    text = config.text_config
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        model = Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16).eval()
    for layer in model.model.language_model.layers:
        # All positions share a direction, along which one row of the head sets the end token's logit.
        layer.self_attn.v_proj.bias.data.normal_(0, 3)
    processor = AutoProcessor.from_pretrained(base)
    _set_end(model, processor.tokenizer, mean_tokens=30 if tiny else 400)
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    _fill_vocabulary(folder / "model/tokenizer.json", text.vocab_size)


def _set_end(model: Any, tokenizer: Any, mean_tokens: int) -> None:
    """Fits the end token's row of the head by least squares over hidden states of random tokens."""
    import torch

    head, width = model.lm_head, model.config.text_config.hidden_size
    gram = torch.eye(width, device=head.weight.device, dtype=torch.float64)
    wanted = torch.zeros(width, device=head.weight.device, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(16):
            ids = torch.randint(0, len(tokenizer) - 20, (8, 256), device=head.weight.device)
            hidden = model.model.language_model(input_ids=ids).last_hidden_state.reshape(-1, width)
            others = [head(part).float().logsumexp(-1) for part in hidden.split(512)]
            logit = torch.cat(others).double() - torch.log(torch.tensor(mean_tokens - 1.0))
            gram += hidden.double().T @ hidden.double()
            wanted += hidden.double().T @ logit
        head.weight.data[tokenizer.eos_token_id] = torch.linalg.solve(gram, wanted).to(head.weight.dtype)


def _fill_vocabulary(path: Path, size: int) -> None:
    """Gives every id of the head a token, so that none is banned and all completions are text."""
    told = json.loads(path.read_text())
    known = set(told["model"]["vocab"].values())
    known.update(token["id"] for token in told["added_tokens"])
    for number in range(size):
        if number not in known:
            told["model"]["vocab"][f"zq{number}"] = number
    path.write_text(json.dumps(told))


def make_run(folder: Path, tiny: bool, steps: int) -> None:
    """Rows, reward and the recipe's configuration."""
    from data_prep.write.shards import write_dataset
    from recipes.presets import get
    from tests.soak import rows
    from trainer import config

    chance = random.Random(0)
    picture = [((84, 84) if tiny else PICTURE, "RGB")]
    train = [rows.row(chance, picture, sentences=1) for _ in range(ROWS)]
    write_dataset(folder / "data", "bench", {"train": train, "test": train[:8]}, {})
    (folder / "reward.py").write_text(REWARD)
    changes = {
        "model.path": folder / "model",
        "data.path": folder / "data",
        "data.episodes": 100,
        "run.dir": folder / "run",
        "run.max_steps": steps,
        "rewards.function": f"{folder}/reward.py:reward",
        "checkpoint.remote": "",
        "checkpoint.every_steps": 1_000_000,
        "checkpoint.export_hf": "never",
        "evaluation.every_steps": 0,
        "logging.wandb": "disabled",
        "logging.tensorboard": "false",
    }
    if tiny:
        changes |= {"placement.device": "cpu", "rollout.sleep_level": 0, "rollout.max_tokens": 64}
        changes |= {"rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4}
        changes |= {"data.prompt_max_tokens": 1024}
    sets = [f"{name}={value}" for name, value in changes.items()]
    (folder / "run.yaml").write_text(config.dump(config.override(get(RECIPE).config, sets)))


# --- the two trainers ---------------------------------------------------------------------------------------


def ours(folder: Path) -> list[float]:
    """Seconds of each step."""
    command = [sys.executable, "-m", "trainer.loops.grpo", "--config", str(folder / "run.yaml")]
    subprocess.run(command, cwd=ROOT, check=True)
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [line["time/step_s"] for line in map(json.loads, lines) if line["step"]]


def trl(folder: Path, size: int, steps: int, tiny: bool) -> list[float]:
    """The same of TRL with `size` sequences per pass, in a process of its own."""
    out = folder / f"trl-{size}.json"
    command = [
        sys.executable,
        __file__,
        "--folder",
        str(folder),
        "--steps",
        str(steps),
        "--inside",
        str(size),
    ]
    done = subprocess.run([*command, *(["--tiny"] if tiny else [])], cwd=ROOT)
    return json.loads(out.read_text()) if done.returncode == 0 else []


def trl_inside(folder: Path, size: int, steps: int, tiny: bool) -> None:
    """Trains with TRL by the run's own configuration; writes the seconds of each step."""
    one = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    os.environ |= one | {"HF_HUB_OFFLINE": "1"}
    import torch
    from datasets import Dataset as Table
    from PIL import Image
    from transformers import AutoProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from trainer import config as configuration
    from trainer.data.dataset import Dataset

    config = configuration.load(str(folder / "run.yaml"))
    columns = []
    for row in Dataset(str(folder / "data"), "train"):
        image = Image.open(io.BytesIO(row.images[0])).convert("RGB")
        columns.append({"prompt": [{"role": "user", "content": row.messages[-1]["content"]}], "image": image})
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if not tiny:
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - self.began)

    def reward(completions: list[Any], **_: Any) -> list[float]:
        texts = [one[0]["content"] if isinstance(one, list) else one for one in completions]
        return [float(zlib.crc32(text.encode()) % 2) for text in texts]

    samples = config.samples_per_step
    engine: dict[str, Any] = {"use_vllm": False, "use_cpu": True}
    if not tiny:
        engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
        engine |= {"vllm_gpu_memory_utilization": 0.35, "vllm_max_model_length": 4096}
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        bf16=True,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=samples // size,
        steps_per_generation=samples // size,
        num_generations=config.rollout.samples_per_prompt,
        max_completion_length=config.rollout.max_tokens,
        temperature=1.0,
        beta=config.algorithm.kl_coef,
        learning_rate=config.optimizer.learning_rate,
        max_steps=steps,
        gradient_checkpointing=config.model.gradient_checkpointing,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "sdpa"},
        **engine,
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Table.from_list(columns),
        processing_class=AutoProcessor.from_pretrained(folder / "model"),
        callbacks=[Clock()],
    )
    trainer.train()
    (folder / f"trl-{size}.json").write_text(json.dumps(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the model (8 GB), rows and runs")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16], help="sequences per pass of TRL")
    parser.add_argument("--out", type=Path, help="where the figures go (JSON)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.inside:
        trl_inside(folder, options.inside, options.steps, options.tiny)
        return

    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder, options.tiny)
    make_run(folder, options.tiny, options.steps)
    import torch

    result: dict[str, Any] = {"device": "cpu" if options.tiny else torch.cuda.get_device_name()}
    result["ours"] = ours(folder)
    result["trl"] = {size: trl(folder, size, options.steps, options.tiny) for size in options.sizes}
    finished = [seconds for seconds in result["trl"].values() if len(seconds) > 1]
    if not finished:
        raise SystemExit("TRL came to its end with none of these sizes: no comparison")
    best = min(statistics.median(seconds[1:]) for seconds in finished)
    result["ratio"] = statistics.median(result["ours"][1:]) / best
    text = json.dumps(result, indent=1)
    print(text)
    if options.out and not options.tiny:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
