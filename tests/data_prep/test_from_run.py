"""A run's rollout log as rows: the advantages of the update, one history, what `worked` takes."""

import json
from dataclasses import replace

import pytest

from data_prep.commands import main
from data_prep.from_run import rows
from data_prep.write.derive import read_completions
from trainer import config as configuration
from trainer.algorithm.traces import Outcome, completed_trace
from trainer.checkpoint.attempt import Attempts
from trainer.checkpoint.rollout_archive import GradedStep
from trainer.checkpoint.rollout_log import RolloutLog
from trainer.config import ConfigError, override
from trainer.storage.storage import Storage


def graded(step: int, text: str = "so") -> GradedStep:
    """Two groups of two: one told right from wrong, one flat."""
    samples = []
    for g in range(2):
        for i in range(2):
            about = {"group": g, "row": 10 * step + g, "index": i, "text": f"{text} {step}.{g}.{i}"}
            logprobs = [-0.5] * (1 + i)
            samples.append(
                completed_trace([1] * 5, [7, 8, 9][: 1 + i], logprobs=logprobs, version=step, **about)
            )
    right, wrong = Outcome("correct", 1.0, 1.0, 1.5), Outcome("wrong", 0.0, 1.0, 0.5)
    return GradedStep(samples, [right, wrong, wrong, wrong], {})


@pytest.fixture
def config(tmp_path):
    given = [f"run.dir={tmp_path}/runs/mine", "run.id=mine", f"checkpoint.remote=file://{tmp_path}/bucket"]
    given += ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "logging.keep_rollouts=true"]
    given += ["rewards.accuracy_weight=1", "rewards.format_weight=0.5", "algorithm.kl_coef=0"]
    found = override(configuration.RunConfig(), [*given, "algorithm.advantage=group_norm"])
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/config.yaml").write_text(configuration.dump(found))
    (tmp_path / "runs/mine/launch.json").write_text(json.dumps({"bucket": found.checkpoint.remote}))
    return found


def log(config, *steps, text="so", disk="mine"):
    """The next attempt logs these steps, on a node whose disk is gone afterwards unless it is `mine`."""
    mine = override(config, [f"run.dir={config.run.dir}-{disk}"]) if disk != "mine" else config
    held = Attempts(Storage(f"{config.checkpoint.remote}/mine/attempts")).take(0)
    one = RolloutLog(mine, attempt=held)
    for step in steps:
        one.write(step, graded(step, text), floor=step - 1)
        one._pool.submit(int).result()
    one.close()


def test_a_run_becomes_rows_of_one_history_with_the_advantages_of_the_update(
    config, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    log(config, 1, 2, 3, 4, 5, disk="lost")
    log(config, 3, 4, text="again")
    assert main(["from-run", "mine", "--out", "out/mine.jsonl"]) == 0
    assert capsys.readouterr().out == "out/mine.jsonl: steps: 4, completions: 16, without advantage: 0\n"
    lines = [json.loads(line) for line in (tmp_path / "out/mine.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[::4]] == [1, 2, 3, 4], "5 is of the attempt that was replaced"
    assert [line["completion"] for line in lines[::4]] == [
        "so 1.0.0",
        "so 2.0.0",
        "again 3.0.0",
        "again 4.0.0",
    ]
    first = lines[:4]
    assert [line["advantage"] for line in first] == pytest.approx([2**-0.5, -(2**-0.5), 0.0, 0.0], rel=1e-5)
    assert [(line["row"], line["reward"], line["verdict"], line["tokens"]) for line in first[:2]] == [
        (10, 1.5, "correct", 1),
        (10, 0.5, "wrong", 2),
    ]
    assert read_completions("out/mine.jsonl", [str(i) for i in range(60)])["20"] == "so 2.0.0", (
        "`worked` takes it"
    )


def test_token_ids_on_request_and_no_guess_where_the_log_does_not_tell(config):
    (line, *_) = rows(config, 1, graded(1), None, tokens=True)
    assert (line["token_ids"], line["logprobs"], line["prompt_token_ids"]) == ([7], [-0.5], [1] * 5)
    normalized = override(config, ["algorithm.normalize_reward=true"])
    assert {line["advantage"] for line in rows(normalized, 7, graded(7), None)} == {None}


def test_without_keeping_only_what_a_restart_needs_is_there(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log(override(config, ["logging.keep_rollouts=false"]), 1, 2, 3)
    assert main(["from-run", "mine"]) == 0
    assert {json.loads(line)["step"] for line in (tmp_path / "data/mine.jsonl").read_text().splitlines()} == {
        3
    }


def test_what_is_not_there_is_one_line(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["from-run", "other"]) == 2 and "no run at other" in capsys.readouterr().err
    assert main(["from-run", "mine"]) == 2 and "mine has no rollout log" in capsys.readouterr().err
    assert not list(tmp_path.glob("data/*"))


def test_episodes_of_several_turns_are_no_worked_solutions(config, tmp_path):
    """Theirs is the last reply alone, which speaks of what tools returned."""
    step = graded(1)
    (first, *rest) = step.traces
    episode = replace(first, dialog=("a call", "its result"))
    told = [*rows(config, 1, replace(step, traces=[episode, *rest]), None)]
    assert told[0]["dialog"] == ["a call", "its result"] and "dialog" not in told[1]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, told)))
    with pytest.raises(ConfigError, match=r"log.jsonl, line 1: an episode of several turns"):
        read_completions(tmp_path / "log.jsonl", [str(i) for i in range(60)])
