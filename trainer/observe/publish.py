"""Publishes what a run trained: weights or adapter, a model card, curves, and what it takes to run it again.

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
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

from trainer.config import ConfigError, load
from trainer.config.model_name import is_hub_name
from trainer.config.run_folder import CONFIG, MANIFEST, METRICS
from trainer.observe.history import read_history
from trainer.observe.model_card import CURVES, draw_curves, model_card
from trainer.observe.report_page import run_name
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
    """Fills the empty folder `out` with what is published; returns its files.

    Weights are linked where the disk allows it. scores: benchmarks.json of an evaluation of this run.
    with_diff: the manifest keeps the changes of the tree. Raises ConfigError where something is missing.
    """
    history = read_history(run_dir)
    if not history:
        raise ConfigError(f"no metrics in {run_dir}: give a run that has made at least one step")
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
    picture = draw_curves(history, config)
    if picture:
        (out / CURVES).write_text(picture)
    model_card(run_name(run_dir), config, history, manifest, scored, run_dir, bool(picture)).save(out / CARD)
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
    else:
        _link(source, out / name)


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


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def to_hub(folder: Path, name: str, private: bool) -> str:
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


@dataclass(frozen=True)
class Publication:
    """What is published, and where."""

    run_dir: Path
    weights: Path
    to: str
    """OWNER/NAME on the hub, or a folder that holds nothing."""
    scores: Path | None = None
    """benchmarks.json of an evaluation of this run."""
    with_diff: bool = False
    private: bool = False
    """Whether a new repository is made private."""

    @property
    def is_hub(self) -> bool:
        """Whether `to` is a repository. A folder of that name that exists is taken for the folder."""
        return is_hub_name(self.to) and not Path(self.to).exists()


def publish(what: Publication, send: bool) -> None:
    """Shows the files and the card, or sends them. Raises ConfigError."""
    target = Path(what.to)
    if not what.is_hub and target.exists() and any(target.iterdir()):
        raise ConfigError(f"{what.to} is not empty: name a new folder, or OWNER/NAME on the hub")
    # beside the weights, so that they can be linked
    with tempfile.TemporaryDirectory(dir=what.weights.parent) as folder:
        for path in assemble_publication(
            what.run_dir, what.weights, Path(folder), what.scores, what.with_diff
        ):
            print(f"{path.relative_to(folder)!s:<40} {path.stat().st_size / 1e6:12.2f} MB")
        if not send:
            where = f"the hub as {what.to}" if what.is_hub else f"the folder {what.to}"
            print(f"\n{(Path(folder) / CARD).read_text()}\nnothing was sent: --yes publishes it to {where}")
        elif what.is_hub:
            print(f"published: {to_hub(Path(folder), what.to, what.private)}")
        else:
            shutil.copytree(folder, target, dirs_exist_ok=True)
            print(f"published: {target}")


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
    what = Publication(args.run, args.weights, args.to, args.scores, args.with_diff, args.private)
    try:
        publish(what, args.yes)
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
