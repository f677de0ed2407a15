"""What `up` and `up --dry-run` look at on the desk: reward functions, rows, teacher, judge, reward server."""

from __future__ import annotations

import json

import pytest

from recipes.commands.cli import main
from recipes.drivers import desk_checks, uploads
from recipes.presets import resolve
from recipes.records import manifest
from tests.servers import Reply, Request, answering
from trainer import config as c
from trainer.config import ConfigError, RunConfig

RAISES = "def reward(text, reference):\n    return text.no_such()\n"
WRONG_NUMBER = "def reward(text, reference, kind, more):\n    return 1.0\n"


def dry_run(capsys, *words: str) -> tuple[int, str]:
    code = main(["up", "demo", "--target", "local", "--dry-run", *words])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (WRONG_NUMBER, "it asks for more, and there is text"),
        (RAISES, "'str' object has no attribute 'no_such' (mine.py:2)"),
        ("x = (\n", "SyntaxError"),
        ("def other(text):\n    return 1.0\n", "has no function 'reward'"),
    ],
)
def test_a_dry_run_refuses_a_function_that_cannot_be_called(tmp_path, capsys, program, said):
    (tmp_path / "mine.py").write_text(program)
    code, text = dry_run(capsys, "--set", f"rewards.function={tmp_path}/mine.py:reward")
    assert code == 2 and said in text and "would run" not in text


def test_what_fails_on_a_made_up_row_is_said_and_refuses_nothing(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(text, reference):\n    return {}[reference]\n")
    config = c.override(RunConfig(), [f"rewards.function={tmp_path}/mine.py:reward"])
    (note,) = desk_checks._call_own_code(config, "local")
    assert "KeyError: '4' (mine.py:2)" in note and "made-up row" in note
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    (note,) = desk_checks._call_own_code(config, "local")
    assert "no_such_module" in note and "not on this machine" in note


def prepared(folder, **changes):
    folder.mkdir()
    manifest = {"rows": {"train": 64, "test": 8}, "statistics": {}} | changes
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return str(folder)


@pytest.mark.parametrize(
    ("manifest", "changes", "said"),
    [
        ({}, ["data.split=trian"], "no rows in data.split 'trian': it has train, test"),
        ({}, ["evaluation.every_steps=5", "evaluation.split=validation"], "evaluation.split 'validation'"),
        ({}, ["rollout.prompts_per_step=128"], "has 64 rows to train on, less than the 128"),
        ({"rows": {"train": 0}}, [], "no rows in data.split 'train'"),
        ({"rows": 3}, [], "is damaged"),
        (
            {"statistics": {"tokens": {"percentiles": {"1": 5000, "50": 6000}}}},
            [],
            "have 5000 tokens and more, and data.prompt_max_tokens is 4096",
        ),
        (
            {"statistics": {"answer_types": {"number": 64}}},
            ["rewards.judge_url=http://h/v1", "rewards.judge_model=m"],
            "the judge would never be asked",
        ),
    ],
)
def test_rows_that_a_run_cannot_use_are_refused(tmp_path, manifest, changes, said):
    path = prepared(tmp_path / "rows", **manifest)
    config = c.override(RunConfig(), [f"data.path={path}", "rollout.prompts_per_step=16", *changes])
    with pytest.raises(ConfigError, match=said):
        desk_checks._look_at_rows(config)


def test_rows_that_it_can_use_pass(tmp_path):
    path = prepared(tmp_path / "rows")
    config = c.override(RunConfig(), [f"data.path={path}", "rollout.prompts_per_step=16"])
    desk_checks._look_at_rows(config)
    desk_checks._look_at_rows(c.override(config, ["data.path=s3://b/rows"]))


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
    for name, size in (("teacher", 9), ("student", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"text_config": {"vocab_size": size}}))
    names = [f"algorithm.teacher={tmp_path}/teacher", f"model.path={tmp_path}/student"]
    with pytest.raises(ConfigError, match="vocabulary of 9 tokens and model.path one of 7"):
        desk_checks._look_at_teacher(c.override(RunConfig(), names))


@pytest.fixture
def served():
    """A judge that serves one model to those with the key, and a reward server's /health."""

    def answer(request: Request) -> Reply:
        key = request.headers.get("Authorization")
        refused = request.path.startswith("/v1/models") and key != "Bearer right"
        return 401 if refused else 200, json.dumps({"data": [{"id": "m"}]}).encode(), {}

    with answering(answer) as url:
        yield url


def test_the_judge_is_asked_for_its_model_and_the_key_is_tried(served):
    def ask(model: str, key: str, url: str = "") -> list[str]:
        changes = [f"rewards.judge_url={url or served}/v1", f"rewards.judge_model={model}"]
        return desk_checks.ask_servers(c.override(RunConfig(), changes), {"SPOTRL_JUDGE_KEY": key})

    assert ask("m", "right") == []
    with pytest.raises(ConfigError, match="none of those that rewards.judge_url serves: m"):
        ask("n", "right")
    with pytest.raises(ConfigError, match="answers 401: export the endpoint's key as SPOTRL_JUDGE_KEY"):
        ask("m", "wrong")
    (note,) = ask("m", "right", "http://127.0.0.1:9")
    assert "Connection refused" in note, "a judge that only the machines reach ends nothing"


def test_a_reward_server_that_is_not_reached_from_here_is_said(served):
    def ask(url: str) -> list[str]:
        return desk_checks.ask_servers(c.override(RunConfig(), [f"rewards.remote_url={url}/get_reward"]), {})

    assert ask(served) == [] and "the run waits for it" in ask("http://127.0.0.1:9")[0]


ENVIRONMENT = """
class Mine:
    calls = 0
    def answer(self, situation, replies):
        Mine.calls += 1
        {body}
"""


@pytest.mark.parametrize(
    ("body", "name", "said"),
    [
        ("return None", "Other", "has no function 'Other'"),
        ("return situation.no_such", "Mine", "no attribute 'no_such' (mine.py:6)"),
        ("assert Mine.calls < 2, open('/nowhere')", "Mine", "mine.py:6) (at call 2 in one process)"),
        ("return 5", "Mine", "turns.environment"),
    ],
)
def test_a_dry_run_refuses_an_environment_that_cannot_answer(tmp_path, capsys, body, name, said):
    (tmp_path / "mine.py").write_text(ENVIRONMENT.format(body=body))
    code, text = dry_run(capsys, "--set", f"turns.environment={tmp_path}/mine.py:{name}")
    assert code == 2 and said in text and "would run" not in text
    assert "at call 1" not in text


def test_an_environment_that_answers_passes(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        ENVIRONMENT.format(body="return 'Look again.' if len(replies) < 2 else None")
    )
    assert dry_run(capsys, "--set", f"turns.environment={tmp_path}/mine.py:Mine")[0] == 0


@pytest.mark.parametrize("option", ["rewards.function", "turns.environment"])
@pytest.mark.parametrize("path", ["nope.py", "/nowhere/nope.py"])
def test_a_file_that_is_not_there_is_refused_where_the_run_is_to_be_here(capsys, option, path):
    code, text = dry_run(capsys, "--set", f"{option}={path}:Nope")
    assert code == 2 and "with a file that exists" in text and "would run" not in text


def test_a_file_that_only_the_nodes_have_is_said(tmp_path):
    config = c.override(RunConfig(), ["turns.environment=/nowhere/nope.py:Nope"])
    (note,) = desk_checks._call_own_code(config, "slurm")
    assert "turns.environment /nowhere/nope.py:Nope is not on this machine" in note


def test_a_function_that_works_once_only_is_refused(tmp_path, capsys):
    program = (
        "calls = []\ndef reward(text, reference):\n    calls.append(1)\n    return {1: 1.0}.get(len(calls))\n"
    )
    (tmp_path / "mine.py").write_text(program)
    code, text = dry_run(capsys, "--set", f"rewards.function={tmp_path}/mine.py:reward")
    assert code == 2 and "it returned None" in text and "(at call 2 in one process)" in text


@pytest.mark.parametrize("path", ["../mine.py", "runs/mine.py"])
def test_code_that_is_not_copied_with_the_repository_is_refused(path, monkeypatch):
    recipe = resolve("grpo-qwen2.5-7b-gsm8k", [f"turns.environment={path}:Mine"])
    monkeypatch.setattr(uploads.Path, "is_file", lambda self: True)
    with pytest.raises(ConfigError, match="turns.environment .*mine.py is not .*nodes of skypilot-runpod"):
        uploads.with_uploads(recipe, "skypilot-runpod", {})


def test_own_code_and_what_stands_beside_it_is_hashed(tmp_path):
    for name in ("mine.py", "helper.py", "other.txt"):
        (tmp_path / name).write_text(name)
    config = c.override(RunConfig(), [f"rewards.function={tmp_path}/mine.py:reward"])
    hashes = manifest.code_hashes(config)
    assert [name.rpartition("/")[2] for name in hashes] == ["helper.py", "mine.py"]
    (tmp_path / "helper.py").write_text("changed")
    assert manifest.code_hashes(config) != hashes
