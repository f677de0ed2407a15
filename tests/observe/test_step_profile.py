"""The profile of a step: of real updates of a small network, asked for by the configuration, a file or the
bucket."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import config as c
from trainer.observe import mirror
from trainer.observe.step_profile import REQUEST, RankProfile, Recorder, StepProfiles
from trainer.observe.stream import Stream
from trainer.storage.storage import Storage


class Rank:
    """What a worker does with a recorder, around a network of its own."""

    def __init__(self, config: c.RunConfig) -> None:
        self.config, self.recorder = config, None
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)

    def update(self, steps: int = 1, pause_s: float = 0.0) -> float:
        with self.recorder("update") if self.recorder else contextlib.nullcontext():
            for _ in range(steps):
                loss = self.net(torch.ones(8, 64)).square().mean()
                loss.backward()
                self.optimizer.step()
                time.sleep(pause_s)
            return loss.item()

    def record(self, step: int) -> None:
        self.recorder = Recorder(self.config, step, 3)

    def recorded(self) -> RankProfile:
        taken, self.recorder = self.recorder.push(), None
        return taken

    def profiles(self) -> StepProfiles:
        return StepProfiles(self.config, self.record, lambda: [self.recorded()])


def configured(tmp_path: Path, remote: bool = True, **logging: Any) -> c.RunConfig:
    return c.RunConfig(
        run=c.Run(name="one", id="one", dir=str(tmp_path / "run")),
        checkpoint=c.Checkpoint(remote=str(tmp_path / "bucket") if remote else ""),
        logging=c.Logging(**logging),
        placement=c.Placement(device="cpu"),
    )


def names_in(path: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]


def test_the_configured_step_is_recorded_call_by_call_and_pushed(tmp_path, capsys):
    config = configured(tmp_path, profile_step=2)
    rank = Rank(config)
    profiles = rank.profiles()
    for step in (1, 2, 3):
        profiles.begin(step)
        rank.update()
        rank.update(2)
        profiles.end()
    folder = tmp_path / "run/profile/step-00000002"
    files = sorted(folder.iterdir())
    assert [f.name for f in files] == ["rank-3-00-update.json.gz", "rank-3-01-update.json.gz"]
    assert {"aten::addmm", "autograd::engine::evaluate_function: AddmmBackward0"} <= set(names_in(files[0]))
    assert any(name.startswith("Optimizer.step#AdamW") for name in names_in(files[1]))
    stored = tmp_path / "bucket/one/profile/step-00000002"
    assert [f.read_bytes() for f in sorted(stored.iterdir())] == [f.read_bytes() for f in files]
    out = capsys.readouterr().out
    assert out.startswith(f"profile of step 2: {folder}, up to") and out.count("\n") == 1


def test_a_request_while_it_runs_records_the_next_step_once(tmp_path):
    rank = Rank(configured(tmp_path, remote=False))
    profiles = rank.profiles()
    (tmp_path / "run").mkdir()
    for step in (1, 2, 3):
        if step == 2:
            (tmp_path / "run" / REQUEST).touch()
        profiles.begin(step)
        rank.update()
        profiles.end()
    assert [p.name for p in (tmp_path / "run/profile").iterdir()] == ["step-00000002"]


def test_a_long_call_is_recorded_for_so_many_seconds_and_one_that_fails_raises_its_own_error(tmp_path):
    rank = Rank(configured(tmp_path, remote=False, profile_s=0.1))
    rank.record(1)
    rank.update(10, pause_s=0.04)
    (file,) = (tmp_path / "run/profile/step-00000001").iterdir()
    assert 2 <= names_in(file).count("aten::addmm") < 16  # of 20
    with pytest.raises(UnboundLocalError):
        rank.update(0)
    rank.update()
    assert rank.recorded().files == 2


def test_a_bucket_that_fails_costs_the_copy_only(tmp_path, capsys):
    config = configured(tmp_path, profile_step=1)
    (tmp_path / "bucket").write_text("a file in place of the folder")
    rank = Rank(config)
    profiles = rank.profiles()
    profiles.begin(1)
    rank.update()
    profiles.end()
    assert "warning: the profile did not reach the bucket" in capsys.readouterr().out
    assert len(list((tmp_path / "run/profile/step-00000001").iterdir())) == 1


def test_a_desk_asks_through_the_bucket_and_fetches_what_was_recorded(tmp_path):
    config = configured(tmp_path)
    run, url = tmp_path / "run", f"{tmp_path}/bucket/one"
    run.mkdir()
    stream = Stream(run, Storage(url), "1-abcdef", 0.05, lambda: False)
    try:
        (run / "attempts.jsonl").write_text("")
        (run / "progress.json").write_text(json.dumps({"status": "running", "phase": "update"}))
        deadline = time.monotonic() + 10
        while not Storage(url).list("stream") and time.monotonic() < deadline:
            time.sleep(0.02)
        mirror.run(["profile", url, str(tmp_path / "desk")])
        while not (run / REQUEST).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        stream.close()
    rank = Rank(config)
    profiles = rank.profiles()
    profiles.begin(7)
    rank.update()
    profiles.end()
    mirror.run(["profile", url, str(tmp_path / "desk"), "--fetch"])
    (fetched,) = (tmp_path / "desk/profile/step-00000007").iterdir()
    assert "aten::addmm" in names_in(fetched)
    assert not (run / REQUEST).exists() and not Storage(url).list("requests")
