"""Seconds per step of supervised fine-tuning, ours and TRL's `SFTTrainer`, side by side on CPU.

    python benchmarks/sft_step_time.py            # writes sft_step_time.json; quiet machine

Same model, rows with images in the same order, batch, loss on the solutions alone, AdamW; two cores for
each (ours: two ranks of one thread under ZeRO-2, started by torchrun, as TRL's two processes are). TRL runs
in each setting of TRLS; the fastest counts. They take turns, so that a slow spell falls on all.

Both must compute the same, so the script ends where the losses of step 1 differ by more than SAME. TRL
reads the text that we read: its chat template would also learn the line break behind a reply. And it divides
by the tokens of the whole step, as it does for text models: for vision models it takes the mean of the
passes' means.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import processor  # noqa: E402
from benchmarks.step_time import WARM_UP, build_pretrained, measured  # noqa: E402
from trainer import config as c  # noqa: E402
from trainer.config import RunConfig  # noqa: E402

LEARNING_RATE, ROWS = 1e-5, 128
SAME = 1e-5
"""Largest relative difference of two losses at step 1."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@dataclass(frozen=True)
class Setting:
    model: Literal["tiny", "medium", "pretrained"]
    batch: int
    """Rows per optimizer step."""
    sentences: int
    """Tokens of a solution in the mean; lengths are lognormal."""
    image: tuple[int, int]
    """Width and height; the pretrained model reads text only, and learns equations."""
    micro_batch: int
    """Rows per forward pass of TRL over both cores together; ours packs."""
    steps: int
    lora: int = 0


SETTINGS = {
    "tiny": Setting("tiny", 32, 2, (84, 84), 16, 8),
    "tiny, real lengths": Setting("tiny", 16, 40, (640, 480), 4, 3),
    "medium": Setting("medium", 16, 10, (168, 168), 8, 3),
    "medium, LoRA": Setting("medium", 16, 10, (168, 168), 8, 3, lora=16),
    "pretrained": Setting("pretrained", 16, 0, (0, 0), 8, 3),
}
TRLS = {
    "trl, 1 process": (1, False),
    "trl, 2 processes": (2, False),
    "trl, 2 processes, whole batch": (2, True),
}
"""(processes, whether all rows of a step are one pass)."""


def build(setting: Setting, out: Path) -> None:
    """Model and dataset of a setting."""
    from data_prep.write.shards import write_dataset
    from examples.demo import tiny_model
    from tests.soak import rows

    if setting.model == "pretrained":
        return build_pretrained(out)
    tiny_model.build(out / "model", 0, setting.model)
    rng = random.Random(0)

    def solved() -> Any:
        one = rows.row(rng, [(setting.image, "RGB")], sentences=2)
        count = max(1, round(setting.sentences * math.exp(rng.gauss(-0.18, 0.6))))
        return replace(
            one, solution=" ".join(f"The sum of {rng.randrange(99)} and {i} is it." for i in range(count))
        )

    write_dataset(out / "data", "bench", {"train": (solved() for _ in range(ROWS))}, {})


def configured(setting: Setting, folder: Path, run: Path) -> RunConfig:
    """Our run of a setting, whose model and data are in `folder`."""
    return c.RunConfig(
        method="sft",
        run=c.Run(name="bench", dir=str(run), max_steps=setting.steps + WARM_UP),
        model=c.Model(path=str(folder / "model"), dtype="fp32", gradient_checkpointing=False, min_pixels=784),
        lora=c.LoRA(rank=setting.lora),
        data=c.Data(path=str(folder / "data")),
        optimizer=c.Optimizer(learning_rate=LEARNING_RATE, zero_stage=2),
        sft=c.SFT(batch_size=setting.batch, epochs=100),
        checkpoint=c.Checkpoint(every_steps=10**6, export_hf="never"),
        placement=c.Placement(workers_per_node=2, device="cpu"),
        logging=c.Logging(tensorboard=False),
        rewards=c.Rewards(workers=1),
    )


def ours(setting: Setting, folder: Path) -> dict[str, Any]:
    """Runs our trainer; returns its seconds per step."""
    run = folder / f"ours-{time.time_ns()}"
    path = folder / "ours.yaml"
    path.write_text(c.dump(configured(setting, folder, run)))
    command = [*TORCHRUN, "-m", "trainer.loops.sft", "--config", str(path)]
    memory = measured(command, os.environ | {"OMP_NUM_THREADS": "1"}, folder / "log")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step_s" in line]
    seconds = [step["time/step_s"] for step in steps[WARM_UP:]]
    tokens = statistics.mean(step["tokens/step"] for step in steps[WARM_UP:])
    loss = [step["sft/loss"] for step in steps]
    return {"step_s": seconds, "tokens": tokens, "loss": loss, "peak_memory_gib": memory}


def trl(name: str, folder: Path, kind: str) -> dict[str, Any]:
    """Runs TRL in processes of its own; returns its seconds per step."""
    out, (processes, _) = folder / f"trl-{time.time_ns()}.json", TRLS[kind]
    launcher = TORCHRUN if processes == 2 else [sys.executable]
    command = [*launcher, __file__, "--inside", name, kind, str(folder), str(out)]
    env = os.environ | {
        "OMP_NUM_THREADS": str(2 // processes),
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    memory = measured(command, env, out.with_suffix(".log"))
    return json.loads(out.read_text()) | {"peak_memory_gib": memory}


def parts(setting: Setting, folder: Path) -> list[dict[str, Any]]:
    """The rows of all steps in the order in which our run takes them, as TRL reads them: the text of our
    prompts, the solutions with their end token, decoded images."""
    from trainer.data.prompt_stream import PromptStream
    from trainer.data.reader import RowReader

    config = configured(setting, folder, folder / "none")
    reader, split = RowReader(config), config.train_split
    prompter, dataset = reader.prompter, reader.datasets[split]
    stream = PromptStream(range(len(dataset)), setting.batch, config.run.seed)
    out = []
    for step in range(1, setting.steps + WARM_UP + 1):
        for prompt in stream.batch(step):
            row = dataset[prompt.row]
            solution = row.solution + prompter.tokenizer.eos_token
            part = {"prompt": prompter.texts([row.messages])[0], "completion": solution}
            images = reader.decoded(split, prompt.row)
            out.append(part | ({"images": images} if images else {}))
    return out


def trl_inside(setting: Setting, kind: str, folder: Path, out: Path) -> None:
    """The process that runs TRL."""
    import torch
    from datasets import Dataset as HFDataset
    from peft import LoraConfig
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        TrainerCallback,
    )
    from trl import SFTConfig, SFTTrainer

    processes, whole = TRLS[kind]
    torch.set_num_threads(2 // processes)

    class Clock(TrainerCallback):
        seconds: list[float] = []
        losses: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.monotonic() - self.began)

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                self.losses.append(logs["loss"])

    reader: Any = AutoProcessor.from_pretrained(folder / "model")  # a tokenizer where the model reads text
    vision = setting.model != "pretrained"
    if vision:
        reader.image_processor.size = {"shortest_edge": 784, "longest_edge": 1280 * 784}
    loader = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    per_pass = (setting.batch if whole else setting.micro_batch) // processes
    arguments = SFTConfig(
        output_dir=str(out.with_suffix("")),
        use_cpu=True,
        bf16=False,
        max_length=None,
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=setting.batch // (per_pass * processes),
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        max_steps=setting.steps + WARM_UP,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        ddp_backend="gloo" if processes > 1 else None,
    )
    trainer = SFTTrainer(
        model=loader.from_pretrained(folder / "model", dtype=torch.float32),
        args=arguments,
        train_dataset=HFDataset.from_list(parts(setting, folder)),
        processing_class=reader,
        peft_config=LoraConfig(**c.LoRA(rank=setting.lora).peft()) if setting.lora else None,
        callbacks=[Clock()],
    )
    trainer.model_accepts_loss_kwargs = True  # divide by the tokens of the whole step
    trainer.train()
    if int(os.environ.get("RANK", "0")) == 0:
        out.write_text(json.dumps({"step_s": Clock.seconds[WARM_UP:], "loss": Clock.losses}))


def check_losses(name: str, losses: dict[str, list[float]]) -> None:
    """Ends the script where two did not compute the same at step 1."""
    first = losses["ours"][0]
    for contender, loss in losses.items():
        if not math.isclose(first, loss[0], rel_tol=SAME):
            raise SystemExit(f"{name}: the loss of step 1 is {first} of ours and {loss[0]} of {contender}")


def compare(name: str, rounds: int) -> dict[str, Any]:
    """Runs one setting; all contenders take turns."""
    setting = SETTINGS[name]
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        build(setting, folder)
        contenders = {"ours": functools.partial(ours, setting, folder)}
        contenders |= {kind: functools.partial(trl, name, folder, kind) for kind in TRLS}
        runs: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
        for i in range(rounds):
            for contender, run in contenders.items():
                runs[contender].append(run())
                took = statistics.median(runs[contender][-1]["step_s"])
                print(f"{name} round {i + 1}: {contender}: {took:.2f} s", flush=True)
            check_losses(name, {contender: done[-1]["loss"] for contender, done in runs.items()})
    medians = {k: statistics.median(s for r in v for s in r["step_s"]) for k, v in runs.items()}
    best = min((k for k in medians if k != "ours"), key=lambda k: medians[k])
    memory = {k: statistics.median(r["peak_memory_gib"] for r in v) for k, v in runs.items()}
    differences = []
    for kind in TRLS:
        pairs = zip(runs["ours"][0]["loss"], runs[kind][0]["loss"], strict=True)
        differences.append([abs(mine - theirs) / mine for mine, theirs in pairs])
    return {
        "setting": setting.__dict__,
        "median_step_s": medians,
        "fastest_trl": best,
        "loss_difference_at_step_1": max(apart[0] for apart in differences),
        "largest_loss_difference": max(max(apart) for apart in differences),
        "ratio_ours_to_trl": medians["ours"] / medians[best],
        "peak_memory_ours_to_trl": memory["ours"] / memory[best],
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=[*SETTINGS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        name, kind, folder, out = arguments.inside
        return trl_inside(SETTINGS[name], kind, Path(folder), Path(out))
    result = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in SETTINGS if arguments.setting == "all" else [arguments.setting]:
        result[name] = compare(name, arguments.rounds)
        ratio, memory = result[name]["ratio_ours_to_trl"], result[name]["peak_memory_ours_to_trl"]
        print(f"{name}: ours / TRL = {ratio:.2f} of the time, {memory:.2f} of the memory", flush=True)
        result["machine"] = {"cpus": os.cpu_count(), "processor": processor()}
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
