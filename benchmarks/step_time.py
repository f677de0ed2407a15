"""Seconds per GRPO step, ours and TRL's `GRPOTrainer`, side by side on CPU: `python benchmarks/step_time.py`.

Same model, prompts, batch, generation limit, reward and KL; two cores for each (ours: two ranks of one
thread). TRL runs in each setting of TRLS; the fastest counts. They take turns, so that a slow spell of the
machine falls on all. Writes step_time.json: medians, phases, tokens/s, peak memory of all processes together,
ratios per round.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import processor  # noqa: E402

PRETRAINED = "SmolLM2-135M-Instruct"
"""The pretrained demo's model: 30 layers, 49,152 tokens, text only."""


@dataclass(frozen=True)
class Setting:
    model: str
    prompts: int
    samples: int
    max_tokens: int
    mean_tokens: int
    """The end token is given this mean waiting time, so that lengths are skewed; 0: as the model comes."""
    micro_batch: int
    """Sequences per forward pass of TRL over both cores together, but for the other settings of TRLS; ours
    packs."""
    steps: int
    kv_cache_gib: float
    """KV cache of each of our two engines: about twice what its half of a step needs. TRL's grows as it needs
    it."""
    image: tuple[int, int] | None = None
    """Width and height of each prompt's image; None: the demo's own, or none where the model reads text."""

    @property
    def form(self) -> str:
        """Where completions state their answer (`rewards.answer`)."""
        return "whole" if self.model == PRETRAINED else "block"


SETTINGS = {
    "demo": Setting("tiny", 32, 8, 32, 0, 64, 8, 1 / 16),
    "medium": Setting("medium", 8, 8, 256, 64, 16, 2, 1 / 4),
    "real lengths": Setting("tiny", 4, 4, 1024, 250, 8, 8, 1 / 16, (640, 480)),
    "pretrained": Setting(PRETRAINED, 8, 8, 14, 0, 16, 2, 1 / 4),
}


@dataclass(frozen=True)
class Trl:
    processes: int
    batch: str = "micro"
    """Sequences per pass: `micro` of the setting, `all` of a step, or `default` of GRPOConfig."""
    recompute: bool = False
    """Gradient checkpointing, which GRPOConfig has on."""


TRLS = {
    "trl, 1 process": Trl(1),
    "trl, 2 processes": Trl(2),
    "trl, largest batch": Trl(2, "all"),
    "trl, defaults": Trl(2, "default", True),
}
WARM_UP = 1
LEARNING_RATE, KL = 1e-5, 1e-3


def build(setting: Setting, out: Path) -> None:
    """Model and dataset of a setting."""
    from data_prep.write.shards import write_dataset
    from examples.demo import tiny_model
    from tests.conftest import make_rows
    from tests.soak import rows

    if setting.model == PRETRAINED:
        return build_pretrained(out)
    model = tiny_model.build(out / "model", 0, setting.model)
    if setting.mean_tokens:
        skew_lengths(model, setting.mean_tokens)
    made = make_rows("train", 128)
    if setting.image:
        rng = random.Random(0)
        made = (rows.row(rng, [(setting.image, "RGB")], sentences=3) for _ in range(32))
    write_dataset(out / "data", "bench", {"train": made}, {})


def build_pretrained(out: Path) -> None:
    """The pretrained model, and rows of arithmetic with their solutions."""
    from examples.pretrained import arithmetic, smollm2

    smollm2.main(["--out", str(out / "model")])
    arithmetic.prepare(out / "data", 128, 8, list(arithmetic.FAMILIES), 0)


def skew_lengths(model_dir: Path, mean_tokens: int) -> None:
    """Gives the end token a probability of about 1 / mean_tokens at every position: lengths become geometric.

    The head has no bias, so the end token's row is fitted (ridge regression) to give that log-odds on hidden
    states.
    """
    import torch
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    torch.manual_seed(0)
    ids = torch.randint(0, len(tokenizer) - 20, (32, 128))
    with torch.no_grad():
        hidden = (
            model.model.language_model(input_ids=ids)
            .last_hidden_state.reshape(-1, model.lm_head.in_features)
            .double()
        )
        rest = model.lm_head(hidden.float()).double().logsumexp(-1)
        target = rest - torch.log(torch.tensor(mean_tokens - 1.0, dtype=torch.float64))
        gram = hidden.T @ hidden + 1.0 * torch.eye(hidden.shape[1], dtype=torch.float64)
        model.lm_head.weight[tokenizer.eos_token_id] = torch.linalg.solve(gram, hidden.T @ target).float()
    model.save_pretrained(model_dir)


def ours(setting: Setting, folder: Path, steps: int) -> dict[str, Any]:
    """Runs our trainer; returns its metrics per step."""
    from trainer import config as c

    run = folder / f"ours-{time.time_ns()}"
    config = c.RunConfig(
        run=c.Run(name="bench", dir=str(run), max_steps=steps + 1),  # the last one does not sync
        model=c.Model(path=str(folder / "model"), dtype="fp32", gradient_checkpointing=False, min_pixels=784),
        data=c.Data(path=str(folder / "data"), prompt_max_tokens=1000, episodes=100),
        rollout=c.Rollout(
            prompts_per_step=setting.prompts,
            samples_per_prompt=setting.samples,
            max_tokens=setting.max_tokens,
            kv_cache_gib=setting.kv_cache_gib,
            sleep_level=0,
        ),
        algorithm=c.Algorithm(kl_coef=KL),
        rewards=c.Rewards(answer=setting.form),  # ty: ignore[invalid-argument-type]
        optimizer=c.Optimizer(learning_rate=LEARNING_RATE),
        checkpoint=c.Checkpoint(every_steps=10**6, export_hf="never"),
        placement=c.Placement(workers_per_node=2, device="cpu"),
        logging=c.Logging(tensorboard=False, samples_per_step=0),
    )
    path = folder / "ours.yaml"
    path.write_text(c.dump(config))
    command = [sys.executable, "-m", "trainer.loops.grpo", "--config", str(path)]
    memory = measured(command, dict(os.environ), folder / "ours.log")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM_UP:-1]

    def series(name: str) -> list[float]:
        return [line[name] for line in lines]

    phases = ("rollout", "grade", "update", "sync")
    return {
        "step_s": series("time/step_s"),
        "phases_s": {phase: statistics.median(series(f"time/{phase}_s")) for phase in phases},
        "rollout_tokens_per_s": statistics.median(series("perf/rollout_tokens_per_s")),
        "train_tokens_per_s": statistics.median(series("perf/train_tokens_per_s")),
        "peak_memory_gib": memory,
        "response_tokens_mean": statistics.mean(series("tokens/response_mean")),
        "response_tokens_max": max(series("tokens/response_max")),
    }


def trl(setting: Setting, folder: Path, steps: int, kind: str) -> dict[str, Any]:
    """Runs TRL in processes of its own; returns its seconds per step."""
    out, processes = folder / f"trl-{time.time_ns()}.json", TRLS[kind].processes
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if processes == 2 else []
    name = next(k for k, v in SETTINGS.items() if v == setting)
    command = [sys.executable, *launcher, __file__, "--inside", name, kind, str(folder), str(steps), str(out)]
    env = os.environ | {
        "OMP_NUM_THREADS": str(2 // processes),
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    memory = measured(command, env, out.with_suffix(".log"))
    return json.loads(out.read_text()) | {"peak_memory_gib": memory}


def measured(command: list[str], env: dict[str, str], log: Path) -> float:
    """Runs a command; returns the most memory that it and its descendants held, GiB (PSS).

    PSS takes the kernel up to 100 ms a process, which a step would feel: it is read only when the sum of RSS,
    sampled every second, is above all before.
    """
    import psutil

    with open(log, "w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=stream, stderr=stream)
        most = 0
        largest = 0
    while process.poll() is None:
        time.sleep(1)
        try:
            alive = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            if (held := sum(one.memory_info().rss for one in alive)) > 1.02 * largest:
                largest, most = held, max(most, sum(pss_kib(one.pid) for one in alive))
        except (OSError, psutil.Error):  # a process ended meanwhile: this sample is lost
            pass
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} failed:\n{log.read_text()[-3000:]}")
    return most / 2**20


def pss_kib(pid: int) -> int:
    """Memory of a process, of shared pages its share."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def trl_inside(setting: Setting, kind: Trl, folder: Path, steps: int, out: Path) -> None:
    """The process that runs TRL."""
    import io

    import torch
    from datasets import Dataset as HFDataset
    from PIL import Image
    from transformers import AutoProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from trainer.config import Model
    from trainer.data.dataset import Dataset
    from trainer.data.processor import Prompter
    from trainer.rewards.grading.grader import grade
    from trainer.rewards.grading.stated_answers import FORMS

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(2 // processes)
    rows = list(Dataset(folder / "data", "train"))
    columns = []
    for row in rows:
        column: dict[str, Any] = {"prompt": row.messages, "reference": row.answer, "kind": row.answer_type}
        if row.images:
            column["prompt"] = [{"role": "user", "content": row.messages[0]["content"]}]
            column["image"] = Image.open(io.BytesIO(row.images[0])).convert("RGB")
        columns.append(column)
    data = HFDataset.from_list(columns)
    lengths: list[int] = []

    def reward(completions: list, completion_ids: list, reference: list, kind: list, **_: Any) -> list[float]:
        texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
        lengths.extend(len(ids) for ids in completion_ids)
        pairs = zip(texts, reference, kind, strict=True)
        credit = FORMS[setting.form].credit
        return [(grade(t, g, k, form=setting.form) == "correct") + 0.5 * credit(t) for t, g, k in pairs]

    class Clock(TrainerCallback):
        seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.monotonic() - self.began)

    reader: Any = AutoProcessor.from_pretrained(folder / "model")  # a tokenizer where the model reads text
    if hasattr(reader, "image_processor"):
        reader.image_processor.size = {"shortest_edge": 784, "longest_edge": 1280 * 784}
    total = setting.prompts * setting.samples
    per_pass = {"micro": setting.micro_batch // processes, "all": total // processes, "default": 8}[
        kind.batch
    ]
    accumulate = total // (per_pass * processes)
    arguments = GRPOConfig(
        output_dir=str(out.with_suffix("")),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate,
        num_generations=setting.samples,
        max_completion_length=setting.max_tokens,
        temperature=1.0,
        beta=KL,
        learning_rate=LEARNING_RATE,
        max_steps=steps,
        gradient_checkpointing=kind.recompute,
        save_strategy="no",
        report_to="none",
        logging_steps=10**6,
        disable_tqdm=True,
        generation_kwargs={"suppress_tokens": Prompter(Model(path=str(folder / "model"))).banned_token_ids()},
        ddp_backend="gloo" if processes > 1 else None,
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=arguments,
        train_dataset=data,
        processing_class=reader,
        callbacks=[Clock()],
    )
    trainer.train()
    if int(os.environ.get("RANK", "0")) == 0:
        skip = WARM_UP * setting.prompts * setting.samples // processes
        result = {
            "step_s": Clock.seconds[WARM_UP:],
            "response_tokens_mean": statistics.mean(lengths[skip:]),
            "response_tokens_max": max(lengths[skip:]),
        }
        out.write_text(json.dumps(result))


def compare(name: str, rounds: int, save: Callable[[dict[str, Any]], None]) -> None:
    """Runs one setting; all contenders take turns. What was measured is saved after every round."""
    setting = SETTINGS[name]
    steps = setting.steps + WARM_UP
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        build(setting, folder)
        contenders = {
            "ours": lambda: ours(setting, folder, steps),
            **{kind: functools.partial(trl, setting, folder, steps, kind) for kind in TRLS},
        }
        runs: dict[str, list[dict[str, Any]]] = {k: [] for k in contenders}
        for i in range(rounds):
            for contender, run in contenders.items():
                runs[contender].append(run())
                found = runs[contender][-1]
                figures = f"{statistics.median(found['step_s']):.2f} s, {found['peak_memory_gib']:.2f} GiB"
                figures += f", completions of {found['response_tokens_mean']:.0f} tokens"
                print(f"{name} round {i + 1}: {contender}: {figures}", flush=True)
            save(summary(setting, runs))


def summary(setting: Setting, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians and ratios of the rounds so far."""
    medians = {k: statistics.median(s for r in v for s in r["step_s"]) for k, v in runs.items()}
    best = min((k for k in medians if k != "ours"), key=lambda k: medians[k])
    ratios = [
        statistics.median(a["step_s"])
        / min(statistics.median(runs[k][i]["step_s"]) for k in runs if k != "ours")
        for i, a in enumerate(runs["ours"])
    ]
    return {
        "setting": setting.__dict__,
        "processor": processor(),
        "load_average": os.getloadavg(),
        "median_step_s": medians,
        "fastest_trl": best,
        "ratio_ours_to_trl_per_round": ratios,
        "ratio_ours_to_trl": statistics.median(ratios),
        "peak_memory_ours_to_trl": statistics.median(r["peak_memory_gib"] for r in runs["ours"])
        / statistics.median(r["peak_memory_gib"] for r in runs[best]),
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", choices=[*SETTINGS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--inside", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        name, kind, folder, steps, out = arguments.inside
        return trl_inside(SETTINGS[name], TRLS[kind], Path(folder), int(steps), Path(out))
    result = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in list(SETTINGS) if arguments.setting == "all" else [arguments.setting]:

        def save(found: dict[str, Any], name: str = name) -> None:
            arguments.out.write_text(json.dumps(result | {name: found}, indent=1) + "\n")
            print(f"{name}: ours / TRL = {found['ratio_ours_to_trl']:.2f}", flush=True)
            result[name] = found

        compare(name, arguments.rounds, save)


if __name__ == "__main__":
    main()
