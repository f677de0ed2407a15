"""What a run publishes: into a folder, and to a hub on loopback that keeps what it is sent."""

import base64
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from written_run import write_run

from tests import servers
from trainer import config as c
from trainer.config.run_folder import CONFIG
from trainer.observe import publish

FIGURES = {"accuracy": 0.61, "interval": [0.58, 0.64], "problems": 1000, "no_answer": 0.0, "truncated": 0.0}
FIGURES |= {"too_long": 0, "tokens": 9.0, "published": {"accuracy": 0.682, "model": "Qwen2.5-VL-7B"}}
SCORES = {"benchmarks": {"mathvista": FIGURES}, "judge": "", "system_prompt": "rows"}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "mine"
    write_run(folder, 12)
    config = c.load(folder / CONFIG)
    config = replace(config, model=replace(config.model, path="Qwen/Qwen2.5-VL-3B-Instruct"))
    config = replace(config, data=replace(config.data, path="/home/somebody/data/mathv60k"))
    (folder / CONFIG).write_text(c.dump(config))
    launch = {"recipe": "demo", "commit": "0123abc", "diff": "secret = 1", "locks": {"gpu.txt": "ff" * 32}}
    data = {"name": "mathv60k", "fingerprint": "aa" * 32, "files": {"train.parquet": "bb" * 32}}
    (folder / "manifest.json").write_text(json.dumps({"launch": launch, "run": {"data": data}}))
    (folder / "cost.json").write_text(json.dumps({"usd": 12.5, "hours": 2.0, "planned_usd": 40.0}))
    weights = folder / "hf"
    weights.mkdir()
    save_file({"weight": torch.ones(4)}, weights / "model.safetensors")
    (weights / "config.json").write_text("{}")
    return folder


def published(run, to, *options):
    return publish.main([str(run), "--weights", str(run / "hf"), "--to", str(to), *options])


def test_nothing_is_sent_without_yes(run, tmp_path, capsys):
    assert published(run, tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "nothing was sent" in out and "model.safetensors" in out and not (tmp_path / "out").exists()


def test_a_folder_holds_weights_card_and_record(run, tmp_path):
    (tmp_path / "benchmarks.json").write_text(json.dumps(SCORES))
    assert published(run, tmp_path / "out", "--yes", "--scores", str(tmp_path / "benchmarks.json")) == 0
    out = tmp_path / "out"
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert names == {
        *("README.md", "config.json", "model.safetensors"),
        *("run/config.yaml", "run/manifest.json", "run/metrics.jsonl"),
    }
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == "Qwen/Qwen2.5-VL-3B-Instruct" and card.data.library_name == "transformers"
    assert "| mathvista | 1000 | 61.0% | 58.0% to 64.0% | 68.2% |" in card.text
    assert (
        "$12.50 of 40.00 planned" in card.text and "commit `0123abc` with changes that are not" in card.text
    )
    assert "mathv60k, fingerprint `aaaa" in card.text and "train.parquet" in card.text
    assert "/home/somebody" not in card.text


def test_nothing_but_files_of_a_models_own_kinds_is_sent(run, tmp_path, capsys):
    weights = run / "hf"
    (tmp_path / "secret.json").write_text('{"key": "AKIA"}')
    for name in ("evil.py", "pytorch_model.bin", "notes.html", "model.pkl", ".netrc", "README.md"):
        (weights / name).write_bytes(b"import os")
    (weights / "more.safetensors").write_bytes(b"\x80\x04cposix\nsystem\n.")
    (weights / "huge.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    (weights / "torn.json").write_text("{")
    (weights / "link.json").symlink_to(tmp_path / "secret.json")
    (weights / "config.json").write_text('{"auto_map": {"AutoModel": "evil/repo--evil.Model"}, "a": 1}')
    for name in ("merges.txt", "chat_template.jinja", "LICENSE"):
        (weights / name).write_text("text")
    out = tmp_path / "out"
    assert published(run, out, "--yes") == 0
    sent = {path.name for path in out.iterdir()}
    kept = {"model.safetensors", "config.json", "merges.txt", "chat_template.jinja", "LICENSE"}
    assert sent == kept | {"README.md", "run"}
    assert json.loads((out / "config.json").read_text()) == {"a": 1}
    assert (out / "README.md").read_text().startswith("---"), "the card is ours"
    said = capsys.readouterr().out
    for name in ("evil.py", "more.safetensors", "huge.safetensors", "torn.json", "link.json"):
        assert f"{name} is not sent: it is no file of a model" in said
    assert "config.json is sent without auto_map" in said


@pytest.mark.parametrize(
    ("diff", "options", "kept", "again"),
    [
        ("secret = 1", (), None, False),
        ("secret = 1", ("--with-diff",), "secret = 1", True),
        ("", (), "", True),
    ],
)
def test_changes_of_the_tree_are_published_only_when_asked_for(run, tmp_path, diff, options, kept, again):
    """An unchanged tree can be repeated by anybody."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["launch"]["diff"] = diff
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert published(run, tmp_path / "out", "--yes", *options) == 0
    assert json.loads((tmp_path / "out/run/manifest.json").read_text())["launch"]["diff"] == kept
    card = (tmp_path / "out/README.md").read_text()
    assert ("launch.py reproduce run/manifest.json" in card) == again == ("not published" not in card)


def test_a_distilled_model_names_its_teacher(run, tmp_path):
    config = c.override(c.load(run / CONFIG), ["algorithm.teacher=me/large-teacher", "algorithm.kl_coef=0"])
    (run / CONFIG).write_text(c.dump(config))
    assert published(run, tmp_path / "out", "--yes") == 0
    assert "on-policy distillation from large-teacher" in (tmp_path / "out/README.md").read_text()


def test_what_cannot_be_published_is_said(run, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    assert published(run, tmp_path / "full", "--yes") == 2
    assert "is not empty" in capsys.readouterr().err
    assert published(run, "/sys/kernel/out", "--yes") == 2
    assert "/sys/kernel/out: Operation not permitted: give --to a folder" in capsys.readouterr().err
    (run / "hf/model.safetensors").unlink()
    assert published(run, tmp_path / "out", "--yes") == 2
    assert "no weights in" in capsys.readouterr().err


@pytest.fixture
def hub(monkeypatch):
    """The part of a hub that an upload speaks with; `huggingface_hub` speaks with it. What it was sent."""
    sent = SimpleNamespace(refuse=False, repos=[], files={})

    def answer(request):
        here = f"http://{request.headers['Host']}/me/mine"
        reply = {"id": "me/mine", "sha": "0" * 40, "siblings": []} if request.method == "GET" else {}
        if request.method == "POST" and sent.refuse:
            return 403, json.dumps({"error": "no right to write"}).encode(), {}
        if request.path == "/api/repos/create":
            sent.repos.append(json.loads(request.body))
            reply = {"url": here, "name": "me/mine"}
        elif "/preupload/" in request.path:
            files = json.loads(request.body)["files"]
            reply = {"files": [file | {"uploadMode": "regular", "shouldIgnore": False} for file in files]}
        elif "/commit/" in request.path:
            for line in map(json.loads, request.body.splitlines()):
                if line["key"] == "file":
                    sent.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            reply = {"commitUrl": f"{here}/commit/{'1' * 40}", "commitOid": "1" * 40}
        return 200, json.dumps(reply).encode(), {"Content-Type": "application/json"}

    with servers.answering(answer) as address:
        api = publish.huggingface_hub.HfApi
        monkeypatch.setattr(publish.huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(publish.huggingface_hub, "HfApi", lambda: api(endpoint=address, token="hf_test"))
        yield sent


def test_a_hub_gets_every_file_in_one_commit(run, hub, capsys):
    assert published(run, "me/mine", "--yes", "--private") == 0
    assert hub.repos[0]["name"] == "mine" and "private" in hub.repos[0].values()
    assert hub.files["model.safetensors"] == (run / "hf/model.safetensors").read_bytes()
    assert {"README.md", "run/manifest.json"} <= hub.files.keys()
    assert "published: " in capsys.readouterr().out


def test_a_hub_that_refuses_is_one_line(run, hub, capsys):
    hub.refuse = True
    assert published(run, "me/mine", "--yes") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "the hub refuses me/mine" in err and "HF_TOKEN" in err
