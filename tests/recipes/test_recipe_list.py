"""`list`: a line for each recipe with kept figures, which are planned anew as soon as anything that decides
them has changed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.plan import cost
from recipes.platforms.targets import TARGETS, targets_for
from recipes.presets import RECIPES, get
from recipes.screens import recipe_list
from recipes.screens.recipe_list import ListedRecipe

ROOT = Path(__file__).parents[2]
SHOWN = {"path": "a/b", "model": "b", "gpus": "1 x 1 L4", "hours": 1.5, "usd": 2.0, "steps": 3, "where": "L"}
ONE = ListedRecipe(name="kept", purpose=recipe_list.TEXT, **SHOWN)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache of its own, and a plan that counts its calls."""
    calls = []
    monkeypatch.setattr(recipe_list, "CACHE", tmp_path / "cache/list.json")
    monkeypatch.setattr(recipe_list, "planned_recipes", lambda: calls.append(1) or [ONE])
    return calls


def test_figures_are_planned_once(kept):
    assert recipe_list.listed_recipes() == recipe_list.listed_recipes() == [ONE]
    assert len(kept) == 1
    assert [path.name for path in recipe_list.CACHE.parent.iterdir()] == ["list.json"]


@pytest.mark.parametrize("damage", ["", "x", "[]", "{}", "\udcff", "shorter"])
def test_a_damaged_cache_is_ignored(kept, damage):
    recipe_list.listed_recipes()
    whole = recipe_list.CACHE.read_text()
    damaged = whole[:-2] if damage == "shorter" else damage
    recipe_list.CACHE.write_bytes(damaged.encode(errors="surrogateescape"))
    assert recipe_list.listed_recipes() == [ONE] and len(kept) == 2
    assert recipe_list.CACHE.read_text() == whole


def test_a_folder_that_cannot_be_written_is_no_error(kept, tmp_path):
    (tmp_path / "cache").touch()
    assert recipe_list.listed_recipes() == recipe_list.listed_recipes() == [ONE]
    assert len(kept) == 2


@pytest.mark.parametrize(
    "file",
    [
        "recipes/plan/prices.json",
        "recipes/plan/cost.py",
        "recipes/presets/reinforcement.py",
        "trainer/hardware/gpus.py",
        "trainer/config/schema.py",
    ],
)
def test_a_changed_price_recipe_or_plan_is_planned_anew(file, tmp_path):
    for folder in recipe_list.SOURCES:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = recipe_list.sources_hash(tmp_path)
    assert before == recipe_list.sources_hash()
    path = tmp_path / file
    text = path.read_text()
    digit = next(one for one in text if one in "123456789")
    path.write_text(text.replace(digit, "8" if digit == "9" else "9", 1))
    assert recipe_list.sources_hash(tmp_path) != before
    path.write_text(text)
    assert recipe_list.sources_hash(tmp_path) == before
    path.rename(path.with_stem("renamed"))
    assert recipe_list.sources_hash(tmp_path) != before


def test_every_module_that_planning_loads_is_under_the_hash():
    code = (
        "import json, sys; from recipes.screens import recipe_list; recipe_list.planned_recipes();"
        "print(json.dumps([getattr(m, '__file__', None) for m in sys.modules.values()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [Path(file) for file in json.loads(done.stdout) if file]
    loaded = {path for path in files if path.is_relative_to(ROOT) and ".venvs" not in path.parts}
    inner = {
        path for path in loaded if path.relative_to(ROOT).parts[0] == "recipes" or "/trainer/" in str(path)
    }
    # Imported for a constant, an error or a file's writing: none of them plans.
    plain = {ROOT / "trainer" / name for name in PLAIN}
    assert len(inner) > 60 and inner - set(recipe_list.figure_sources()) <= plain


ALONE = ("errors", "exit_codes", "guarded_process", "own_file", "process_set", "processes", "records")
ALONE += ("__init__", "redaction", "terminal_text", "web_request")
PLAIN = ("__init__.py", *(f"system/{name}.py" for name in ALONE))


def test_lines_say_what_the_plan_says_and_where_each_target_is():
    named = [target for _, targets in recipe_list.PLACES.values() for target in targets]
    assert sorted([*named, "skypilot"]) == sorted(TARGETS), "skypilot stands for its clouds"
    rows = {one.name: one for one in recipe_list.planned_recipes()}
    assert list(rows) == list(RECIPES)
    for name in ("demo", "serve", "grpo-qwen2.5-vl-72b-mathv60k", "sft-qwen2.5-7b-lora"):
        recipe, row = get(name), rows[name]
        likely = recipe_list.likely_offer(recipe)
        assert (row.hours, row.usd) == ((likely.hours_50, likely.usd_50) if likely else (None, None))
        assert row.steps == (cost.steps_of(recipe) if likely else None)
        for letter, (_, targets) in recipe_list.PLACES.items():
            assert (letter in row.where) == bool(set(targets) & set(targets_for(recipe))), (name, letter)
    assert {one.purpose for one in rows.values()} == set(recipe_list.PURPOSES)


def test_a_line_a_recipe_within_a_screen_s_width(capsys):
    from recipes.commands.cli import main

    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in RECIPES]
    assert sorted(named) == sorted(RECIPES) and max(map(len, lines)) <= 110
    assert len(lines) == len(RECIPES) + len(recipe_list.PURPOSES) + 6


def test_a_models_name_where_a_recipes_stands_is_known_for_one(capsys):
    from recipes.commands.cli import main

    assert main(["plan", "google/gemma-3-4b-it"]) == 2
    said = capsys.readouterr().err
    assert "google/gemma-3-4b-it is a model, and here stands a recipe's name" in said
    assert "--set model.path=google/gemma-3-4b-it" in said
