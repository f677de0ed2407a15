"""The plan of a model that no table has: its config.json in a folder, in the hub's cache, or from the hub
itself."""

import json

import pytest
from desk import elsewhere as elsewhere
from desk import run

from recipes.plan import hub_config
from tests.servers import Reply, Request, answering
from trainer.hardware import model_shapes
from trainer.hardware.model_shapes import KNOWN, shape_of

RECIPE = "grpo-qwen2.5-7b-gsm8k"
CODER = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064}  # fmt: skip
"""As Qwen2.5-Coder-7B has it: the shape of Qwen2.5-7B."""
COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_config, "CACHE", tmp_path / "hub")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub(monkeypatch):
    """Serves config.json of me/coder at main, of me/other (not supported), and me/closed only with a
    token."""
    asked = []

    def answer(request: Request) -> Reply:
        asked.append(request.path)
        closed = "closed" in request.path and request.headers.get("Authorization") != "Bearer good"
        config = CODER | ({"model_type": "mistral"} if "other" in request.path else {})
        known = (
            any(name in request.path for name in ("coder", "other", "closed")) and "/main/" in request.path
        )
        return 401 if closed else 200 if known else 404, json.dumps(config).encode(), {}

    with answering(answer) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield asked


def plan(capsys, path, *more):
    return run(capsys, "plan", RECIPE, "--target", "slurm", "--set", f"model.path={path}", *more)


def figures(planned):
    """A plan without its heading, which names the model."""
    code, out, err = planned
    verdict, _heading, *others = out.splitlines()
    return code, [verdict, *others], err


def test_a_folder_and_the_hubs_cache_give_the_shape(capsys, tmp_path):
    published = plan(capsys, "Qwen/Qwen2.5-7B-Instruct")
    assert published[0] == 0
    published = figures(published)
    model = tmp_path / "hf/hub/models--me--coder"
    for folder in (tmp_path / "coder", model / "snapshots" / COMMIT):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CODER))
    (model / "refs").mkdir()
    (model / "refs/main").write_text(COMMIT)
    for path in (str(tmp_path / "coder"), "me/coder"):
        assert figures(plan(capsys, path)) == published
        assert shape_of(path) == KNOWN["Qwen/Qwen2.5-7B-Instruct"]
    assert model_shapes.has_known_shape("me/coder", COMMIT) and not model_shapes.has_known_shape(
        "me/coder", "b" * 40
    )


def test_config_json_is_fetched_once(capsys, hub):
    published = figures(plan(capsys, "Qwen/Qwen2.5-7B-Instruct"))
    assert hub == []
    assert figures(plan(capsys, "me/coder")) == figures(plan(capsys, "me/coder")) == published
    assert hub == ["/me/coder/resolve/main/config.json"]


def test_what_the_hub_refuses_is_one_line(capsys, hub, monkeypatch):
    for path, more, message in (
        ("me/other", [], "mistral is not supported"),
        ("me/nothing", [], "said 404: look at its name"),
        ("me/coder", ["--set", "model.revision=v9"], "said 404"),
        ("me/closed", [], "said 401: export HF_TOKEN"),
    ):
        code, out, err = plan(capsys, path, *more)
        assert code == 2 and out == "" and err.count("\n") == 1 and message in err
    monkeypatch.setenv("HF_TOKEN", "good")
    assert plan(capsys, "me/closed")[0] == 0


def test_without_a_network_the_line_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    for setting in ("", "1"):
        monkeypatch.setenv("HF_HUB_OFFLINE", setting)
        code, out, err = plan(capsys, "me/coder")
        assert code == 2 and out == "" and err.count("\n") == 1
        assert "download config.json of me/coder into a folder and set model.path to it" in err
