"""Publishes what a run trained: weights or adapter, a model card, and what it takes to run it again.

    python -m trainer.observe.publish RUN_DIR --weights RUN_DIR/hf --to OWNER/NAME|FOLDER [--yes]

To a repository of the Hugging Face hub (HF_ENDPOINT, HF_TOKEN) or into a folder. Without --yes the files and
the card are shown and nothing is sent. The changes of the tree that a run was launched from may hold
anything: they are left out of its manifest unless --with-diff says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

import huggingface_hub
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError

from trainer import config as configuration
from trainer.config import ConfigError, RunConfig, load
from trainer.config.run_folder import CONFIG, MANIFEST, METRICS
from trainer.config.run_store import is_hub_name, model_name
from trainer.observe.compare import metrics_of
from trainer.observe.history import column, format_cost, run_name
from trainer.observe.live import format_duration
from trainer.observe.scores import scores_table
from trainer.system.contained_path import inside
from trainer.system.errors import UNWRITABLE
from trainer.system.terminal_text import terminal_line

CARD = "README.md"
SENT = (
    *("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"),
    *("LICENSE*", "NOTICE*"),
)
"""Names of the files that a run exports with its weights, without the card, which is written here."""
RUNS_CODE = "auto_map"
"""Field of a configuration that names Python code which a reader's library is to run."""


def assemble_publication(
    run_dir: Path, weights: Path, out: Path, scores: Path | None = None, with_diff: bool = False
) -> list[Path]:
    """Fills the empty folder `out` with what is published; returns its files. Weights are linked where the
    disk allows it. scores: benchmarks.json of an evaluation of this run. with_diff: the manifest keeps the
    changes of the tree. Raises ConfigError where something is missing."""
    history = metrics_of(run_dir)
    if not any(weights.glob("*.safetensors")):
        raise ConfigError(
            f"no weights in {weights}: a run exports them at its end (checkpoint.export_hf), and `launch.py"
            " pull RUN --weights` fetches them"
        )
    config = load(run_dir / CONFIG)
    for path in sorted(weights.iterdir()):
        _take(weights, path.name, out)
    manifest = _json(run_dir / MANIFEST)
    launch = manifest.get("launch", {})
    if not with_diff and (launch.get("diff") or launch.get("untracked")):
        launch |= {"diff": None, "untracked": {}}
    scored = _json(scores) if scores else {}
    model_card(run_name(run_dir), config, history, manifest, scored, run_dir).save(out / CARD)
    (out / "run").mkdir()
    for name in (CONFIG, METRICS):
        shutil.copyfile(run_dir / name, out / "run" / name)
    if manifest:
        (out / "run" / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return sorted(path for path in out.rglob("*") if path.is_file())


def _take(weights: Path, name: str, out: Path) -> None:
    """Takes one file of the weights' folder if it is of a model's kinds: the folder may come from a bucket,
    and goes out in this person's name to people whose libraries run what it holds."""
    source = inside(weights, name)
    if source is None or not _is_of_a_model(source):
        print(f"{terminal_line(name)} is not sent: it is no file of a model")
        return
    content = json.loads(source.read_bytes()) if source.suffix == ".json" else None
    if isinstance(content, dict) and content.pop(RUNS_CODE, None) is not None:
        print(f"{name} is sent without {RUNS_CODE}, which has a reader's library run somebody's code")
        (out / name).write_text(json.dumps(content, indent=2))
        return
    try:
        os.link(source, out / name)
    except OSError:
        shutil.copyfile(source, out / name)


def _is_of_a_model(path: Path) -> bool:
    """Whether a file is of a kind that a run exports, by its name and by what it holds."""
    if not path.is_file() or not any(fnmatchcase(path.name, pattern) for pattern in SENT):
        return False
    try:
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                return length < path.stat().st_size and isinstance(json.loads(file.read(length)), dict)
    except (ValueError, RecursionError):
        return False
    return True


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def send_to_hub(folder: Path, name: str, private: bool) -> str:
    """Uploads a folder as one commit of a model repository, which is made if it is not there; returns its
    address. Raises ConfigError where the hub refuses."""
    api = huggingface_hub.HfApi()
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Weights, card and record of a run"
        )
    except HfHubHTTPError as error:
        reply = str(error).strip().splitlines()[-1]
        raise ConfigError(
            f"the hub refuses {name}: {reply}; set HF_TOKEN to one that may write there"
        ) from None
    return str(url)


def publish(what: argparse.Namespace) -> None:
    """Shows the files and the card, or sends them. Raises ConfigError."""
    target = Path(what.to)
    to_hub = is_hub_name(what.to) and not target.exists()
    if not to_hub and target.exists() and any(target.iterdir()):
        raise ConfigError(f"{what.to} is not empty: name a new folder, or OWNER/NAME on the hub")
    # beside the weights, so that they can be linked
    with tempfile.TemporaryDirectory(dir=what.weights.parent) as folder:
        for path in assemble_publication(what.run, what.weights, Path(folder), what.scores, what.with_diff):
            print(f"{path.relative_to(folder)!s:<40} {path.stat().st_size / 1e6:12.2f} MB")
        if not what.yes:
            where = f"the hub as {what.to}" if to_hub else f"the folder {what.to}"
            print(f"\n{(Path(folder) / CARD).read_text()}\nnothing was sent: --yes publishes it to {where}")
        elif to_hub:
            print(f"published: {send_to_hub(Path(folder), what.to, what.private)}")
        else:
            shutil.copytree(folder, target, dirs_exist_ok=True)
            print(f"published: {target}")


# --- the card -------------------------------------------------------------------------------------------


def model_card(
    name: str,
    config: RunConfig,
    history: Sequence[dict[str, Any]],
    manifest: Mapping[str, Any],
    scores: Mapping[str, Any],
    folder: Path,
) -> ModelCard:
    """The card of a run: what it was made from and how, its scores, hours and dollars. scores: the content of
    its evaluation's benchmarks.json, or {}."""
    data = ModelCardData(
        base_model=config.model.path if is_hub_name(config.model.path) else None,
        library_name="peft" if config.lora.rank else "transformers",
        tags=["spotrl", config.method],
    )
    launch = manifest.get("launch", {})
    parts = [
        f"# {name}",
        _opening(config, launch),
        _figures(history, folder),
        scores_table(scores["benchmarks"], scores["judge"], scores["system_prompt"])
        if scores
        else "No benchmark was scored.",
        _origin(launch, manifest.get("run", {})),
        _options(config),
        _again(launch),
    ]
    body = "\n\n".join(filter(None, parts))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def _opening(config: RunConfig, launch: Mapping[str, Any]) -> str:
    what = "An adapter for" if config.lora.rank else "Weights of"
    method = {"grpo": "GRPO", "sft": "supervised fine-tuning"}[config.method]
    if config.teaches:
        method = f"on-policy distillation from {model_name(config.algorithm.teacher)}"
    recipe = f" by the recipe `{launch['recipe']}`" if "recipe" in launch else ""
    return f"{what} {model_name(config.model.path)}, trained with {method}{recipe} of SpotRL."


def _figures(history: Sequence[dict[str, Any]], folder: Path) -> str:
    """A table of what the run reached and took."""
    rows = []
    for label, metric in (
        ("held-out accuracy", "eval/accuracy"),
        ("reward", "reward/mean"),
        ("KL to the reference", "kl/mean"),
        ("KL to the teacher", "teacher/kl"),
        ("loss", "sft/loss"),
    ):
        values = column(history, metric)
        if values:
            rows.append(f"| {label} | {values[0]:.4g} | {values[-1]:.4g} |")
    stamps = column(history, "time/unix_s")
    took = format_duration(stamps[-1] - stamps[0]) if stamps else "not known"
    table = "\n".join(["| | first | last |", "|---|---|---|", *rows])
    return (
        f"{table}\n\n{history[-1]['step']} steps in {took}; dollars: {format_cost(folder)}. Its curves:"
        " `python3 launch.py report run` draws them from `run/metrics.jsonl`."
    )


def _origin(launch: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Commit, diff, data and machines."""
    lines = ["## What it was made from", ""]
    if "commit" in launch:
        patch = launch.get("diff")
        changed = " with the changes in `run/manifest.json`" if patch else ""
        changed = " with changes that are not published" if patch is None else changed
        lines.append(f"- Code: commit `{launch['commit']}`{changed}")
    data = run.get("data") or {}
    if data.get("fingerprint"):
        lines.append(f"- Data: {data.get('name', '')}, fingerprint `{data['fingerprint']}`")
    for name, digest in (data.get("files") or {}).items():
        lines.append(f"  - `{name}`: sha256 `{digest[:16]}...`")
    for name, digest in (launch.get("locks") or {}).items():
        lines.append(f"- `requirements/{name}`: sha256 `{digest[:16]}...`")
    hardware = run.get("hardware")
    if hardware:
        lines.append(f"- Machines: {json.dumps(hardware)}")
    return "\n".join(lines)


def _options(config: RunConfig) -> str:
    """Every option that is not the default."""
    default = configuration.to_dict(RunConfig())
    changed: dict[str, Any] = {}
    for section, values in configuration.to_dict(config).items():
        if not isinstance(values, dict):
            changed[section] = values
            continue
        own = {}
        for key, value in values.items():
            if value != default[section][key]:
                own[key] = PurePath(value).name if str(value).startswith("/") else value
        if own and section not in ("expected", "placement", "checkpoint"):
            changed[section] = own
    shown = yaml.safe_dump(changed, sort_keys=False)
    return f"## Options\n\nWhat is not the default; all are in `run/config.yaml`.\n\n```yaml\n{shown}```"


def _again(launch: Mapping[str, Any]) -> str:
    if not launch.get("commit"):
        return ""
    how = (
        "```bash\npython3 launch.py reproduce run/manifest.json\n```\n\n"
        "On CPUs of one kind the result is equal to the bit; on GPUs the prompts, seeds and order are."
    )
    if launch.get("diff") is None:
        how = "The code had changes that are not published: who launched the run can repeat it exactly, and"
        how += " others can train with the options above."
    return f"## The same run again\n\n{how}"


def main(argv: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m trainer.observe.publish", description=__doc__, formatter_class=form
    )
    parser.add_argument("run", type=Path, help="folder with the run's metrics, configuration, manifest")
    parser.add_argument("--weights", type=Path, required=True, help="folder that the run exported")
    parser.add_argument("--to", required=True, metavar="OWNER/NAME|FOLDER")
    parser.add_argument("--scores", type=Path, metavar="benchmarks.json", help="of an evaluation of this run")
    parser.add_argument("--with-diff", action="store_true", help="keep the changes of the tree")
    parser.add_argument("--private", action="store_true", help="a new repository is private")
    parser.add_argument("--yes", action="store_true", help="send it")
    args = parser.parse_args(argv)
    try:
        publish(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        cure = "give --to a folder that this user can write; weights are linked from a folder beside them"
        print(f"{error.filename}: {error.strerror}: {cure}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
