"""vLLM's resolved configuration on each card is what it was: a new version of vLLM shows what it changes.

Wants the gpu environment (`bash trainer/shell/setup.sh gpu`, which needs no driver) and a C compiler. After a
change that is meant: `.venvs/test/bin/python -m tests.rehearsal.test_engine_config` writes the file anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from recipes.plan import hub_config
from recipes.presets import get
from tests.conftest import ROOT
from tests.rehearsal.engine_config import CARDS

PYTHON = ROOT / ".venvs/gpu/bin/python"
GOLDEN = Path(__file__).with_name("engine_config.json")
MODELS = "qwen2.5-vl-7b", "qwen2.5-vl-72b", "qwen3-vl-8b", "qwen3-vl-30b-a3b", "qwen3.5-9b", "qwen3.5-35b-a3b"
RECIPES = tuple(f"grpo-{model}-mathv60k" for model in MODELS)


def found(scratch: Path) -> dict[str, dict]:
    """By recipe and card; a model's folder is its configuration and the tiny model's tokenizer."""
    from transformers import AutoProcessor

    from examples.demo import tiny_model
    from tests.rehearsal.models import model_class, model_config

    stub = Path(__file__).with_name("driver_stub.c")
    library = scratch / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", str(library), str(stub)], check=True)
    for recipe in RECIPES:
        shape = hub_config.shape(get(recipe).config.model)
        assert shape is not None
        model = model_config(shape)
        model.architectures = [model_class(shape).__name__]
        folder = scratch / recipe
        model.save_pretrained(folder)
        tiny = scratch / model.model_type
        if not tiny.exists():
            tiny_model.build(tiny, 0, "tiny", model.model_type)
        AutoProcessor.from_pretrained(tiny).save_pretrained(folder)

    out = {}
    for card in CARDS:
        command = [str(PYTHON), "-m", "tests.rehearsal.engine_config", card, str(scratch), *RECIPES]
        env = os.environ | {"LD_LIBRARY_PATH": str(scratch)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        for recipe, resolved in json.loads(done.stdout.splitlines()[-1]).items():
            out[f"{recipe} on {card}"] = resolved
    return dict(sorted(out.items()))


def written(engines: dict[str, dict]) -> str:
    """The file: what is the same in every engine, and the rest of each."""
    first = next(iter(engines.values()))
    every = {key: value for key, value in first.items() if all(one[key] == value for one in engines.values())}
    rest = {}
    for name, one in engines.items():
        rest[name] = {key: value for key, value in one.items() if key not in every}
    return json.dumps({"every engine": every, "engines": rest}, indent=1) + "\n"


def golden() -> dict[str, dict]:
    """The file's engines, whole."""
    kept = json.loads(GOLDEN.read_text())
    return {name: kept["every engine"] | one for name, one in kept["engines"].items()}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venvs/gpu: bash trainer/shell/setup.sh gpu")
def test_engines_resolve_as_they_did(tmp_path):
    assert found(tmp_path) == golden()


def test_every_card_of_the_file_keeps_what_the_trainer_rests_on():
    engines = golden()
    assert set(engines) == {f"{recipe} on {card}" for recipe in RECIPES for card in CARDS}
    for name, one in engines.items():
        assert one["model runner V2"] and one["sleep mode"] and one["prefix caching"], name
        assert one["asynchronous scheduling"] and "FULL" in one["CUDA graphs"], name
        assert one["largest graph"] == one["sequences"], f"{name}: graphs by need"
        tuned = one["FlashInfer is tuned at the start"]
        assert not tuned or name.endswith("B200"), name
        assert one["prompts' recurrence"] == ("triton" if "qwen3.5" in name else ""), name


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as scratch:
        GOLDEN.write_text(written(found(Path(scratch))))
