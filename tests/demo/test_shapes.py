import io
import json
import math
import tarfile
from collections import Counter

import pytest
from PIL import Image, ImageDraw

from examples.demo import shapes
from trainer.data.dataset import Dataset
from trainer.rewards.grading.extraction import format_reward
from trainer.rewards.grading.grader import grade


def read(folder):
    lines = [json.loads(line) for line in (folder / "shapes_message.jsonl").read_text().splitlines()]
    with tarfile.open(folder / "shapes_img.tar.gz") as archive:
        files = {m.name: archive.extractfile(m) for m in archive.getmembers()}
        images = {name: file.read() for name, file in files.items() if file}
    return lines, images


def test_the_same_arguments_write_the_same_bytes(tmp_path):
    a, b, other = (shapes.write(tmp_path / name, 24, seed) for name, seed in (("a", 7), ("b", 7), ("c", 8)))
    for name in ("shapes_message.jsonl", "shapes_img.tar.gz"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
        assert (a / name).read_bytes() != (other / name).read_bytes()


def test_rows_have_the_raw_format_of_mathv60k(tmp_path):
    lines, images = read(shapes.write(tmp_path, 40))
    assert len(lines) == len(images) == 40
    for line in lines:
        assert {"question", "answer", "message"} <= set(line)
        assert line["answer"].startswith("$\\boxed{") and line["answer"].endswith("}$")
        system, user = json.loads(line["message"])
        assert system["role"] == "system" and user["role"] == "user"
        text, image = user["content"]
        assert text == {"type": "text", "text": line["question"]}
        assert image["image"].removeprefix("/data/shapes/") in images


def test_a_prefix_of_a_split_does_not_depend_on_its_length():
    short, long = list(shapes.unique(3, "train", 20)), list(shapes.unique(3, "train", 60))
    assert [e.content for e in short] == [e.content for e in long[:20]]


@pytest.mark.parametrize("kind", shapes.KINDS)
def test_no_answer_can_be_guessed_from_the_text(kind):
    examples = [shapes.example(0, "train", i, (kind,)) for i in range(900)]
    assert len({e.question for e in examples}) == 1
    answers = Counter(e.answer for e in examples)
    choices = examples[0].choices
    assert set(answers) == set(choices)
    expected = len(examples) / len(choices)
    assert all(abs(n - expected) < 4 * math.sqrt(expected) for n in answers.values())


def components(image):
    """Connected dark areas, counted by painting them white one after the other."""
    image, count = image.convert("L").point(lambda v: 255 if v > 240 else 0), 0
    while (box := image.point(lambda v: 255 - v).getbbox()) is not None:
        x = next(x for x in range(box[0], box[2]) if image.getpixel((x, box[1])) == 0)
        ImageDraw.floodfill(image, (x, box[1]), 255)
        count += 1
    return count


def ink(image, color=None):
    return sum(n for n, c in image.getcolors(10**6) if (c == color if color else c != (255, 255, 255)))


def test_the_answer_is_what_the_image_shows():
    counted = [shapes.example(0, "train", i, ("count",)) for i in range(60)]
    apart = [e for e in counted if components(e.image) == int(e.answer)]
    assert len(apart) > 40 and all(components(e.image) <= int(e.answer) for e in counted)  # circles may touch
    for i in range(40):
        bars = shapes.example(0, "train", i, ("bar",))
        heights = {name: ink(bars.image, shapes.COLORS[name]) for name in ("red", "green", "blue")}
        assert bars.think == f"{max(heights, key=heights.__getitem__)} bar"
        assert bars.answer == "ABC"[["red", "green", "blue"].index(bars.think.split()[0])]
        total = shapes.example(0, "train", i, ("add",))
        left, rest = total.think.split("+")
        assert int(left) + int(rest.split("=")[0]) == int(total.answer)
    sectors = [shapes.example(0, "train", i, ("angle",)) for i in range(60)]
    areas = {a: [ink(e.image) for e in sectors if e.answer == str(a)] for a in (30, 90, 150)}
    assert max(areas[30]) < min(areas[90]) and max(areas[90]) < min(areas[150])


def test_worked_answers_are_graded_right_and_slipped_ones_wrong():
    for item in shapes.examples(1, "train", 40):
        kind = "letter" if item.kind == "bar" else "number"
        assert grade(item.solution, item.answer, kind) == "correct"
        assert grade(item.slipped, item.answer, kind) == "wrong"
        assert format_reward(item.solution) == format_reward(item.slipped) == 1.0


def test_prepared_splits_share_no_image_and_only_warm_slips(tmp_path):
    manifest = shapes.prepare(tmp_path / "out", train_rows=200, test_rows=80, warm_rows=200, slips=0.5)
    assert manifest.rows == {"train": 200, "test": 80, "warm": 200} and not sum(manifest.quarantined.values())
    splits = {name: list(Dataset(tmp_path / "out", name)) for name in manifest.rows}
    asked = {
        name: {(json.dumps(r.messages), Image.open(io.BytesIO(r.images[0])).tobytes()) for r in rows}
        for name, rows in splits.items()
    }
    assert sum(map(len, asked.values())) == len(set.union(*asked.values())) == 480
    right = {
        name: sum(grade(r.solution, r.answer, r.answer_type) == "correct" for r in rows) / len(rows)
        for name, rows in splits.items()
    }
    assert right["train"] == right["test"] == 1.0 and 0.35 < right["warm"] < 0.65
    assert {r.source for r in splits["train"]} == {f"shapes/{kind}" for kind in shapes.KINDS}
