"""Samples of episodes: the report draws the dialog with what each observation showed."""

from __future__ import annotations

import io
import json

import torch
from PIL import Image

from tests.turns.test_built_in_tools import called
from tests.turns.test_dialogs import answered, replied
from trainer.algorithm.advantages import Advantages
from trainer.algorithm.credit import CreditedTraces
from trainer.algorithm.traces import Outcome
from trainer.config import override
from trainer.data.dataset import Dataset
from trainer.data.dialog import dialogs_of
from trainer.data.reader import RowReader
from trainer.observe.metrics import Metrics
from trainer.observe.report import write_report
from trainer.observe.step_stats import sample_rows
from trainer.run.step_log import EpisodeImages

EVIL = "<script>alert(1)</script>"


def test_the_report_shows_an_episode_turn_by_turn_with_its_crops(small_config, picture_dataset, tmp_path):
    changes = [f"data.path={picture_dataset}", "turns.environment=zoom", "turns.image_pixels=3136"]
    changes += ["data.prompt_max_tokens=600", "rollout.max_tokens=1500", "logging.samples_per_step=2"]
    config = override(small_config, changes)
    reader = RowReader(config)
    told = dialogs_of(config, reader)
    crops = []
    episode = None
    for box in ([0, 0, 20, 28], [9, 9, 9, 9], [0, 0, 28, 28]):
        episode = replied(reader, 0, f"{EVIL}{called('zoom', box=box)}", episode)
        episode, _, images = answered(told, episode, 1500)
        crops += images
    episode = replied(reader, 0, "It is 3.", episode)
    at_once = replied(reader, 1, "It is 4.")

    outcome = Outcome("correct", 1.0, 1.0, 1.5)
    batch = CreditedTraces([episode, at_once], [outcome, outcome], Advantages(torch.zeros(2)))
    dataset = Dataset(str(picture_dataset), "train")
    rows = sample_rows(config, dataset, 1, batch, EpisodeImages(config).of)
    assert rows[0]["shown"] == [1, 0, 1] and len(rows[0]["dialog"]) == 7
    again = [Image.open(io.BytesIO(data)).tobytes() for data in rows[0]["image_pngs"][1:]]
    assert again == [crop.tobytes() for crop in crops]
    assert "dialog" not in rows[1] and rows[1]["image_pngs"] == dataset[1].images

    metrics = Metrics(tmp_path / "run", config)
    metrics.log(1, {"reward/mean": 1.0})
    metrics.samples(1, rows)
    metrics.close()
    written = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert len(written["images"]) == 3
    page = write_report(tmp_path / "run").read_text()
    card, other = page.split("<article")[1:]
    parts = card.split('<div class="observed">')
    assert [part.count("<img") for part in parts] == [1, 1, 0, 1], "where it was shown"
    assert "Picture 1, box [0, 0, 20, 28]" in parts[1] and "Error: the box is empty" in parts[2]
    assert EVIL not in page and "It is 3." in parts[3] and "observed" not in other.partition("</article>")[0]
