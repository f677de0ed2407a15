"""Rows that used to be prepared wrongly without a word: images, choices, answers and files of odd shapes."""

from __future__ import annotations

import base64
import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.checks.tokens import image_token_side
from data_prep.checks.validate import Settings, judge
from data_prep.ingest.archive import Refused, members
from data_prep.ingest.images import ImageFacts
from data_prep.sources.forms import BadRecord, detect
from data_prep.sources.own_files import own
from data_prep.sources.row_source import BadRow, Candidate, stated_answer
from tests.data_prep import raw
from tests.data_prep.test_own import lines, run
from trainer.config import ConfigError
from trainer.data.dataset import Dataset, read_manifest
from trainer.data.schema import count_placeholders, question_text


def parsed(record: dict, **options):
    return detect([record], {}, **options).parse(record)


def turns(text) -> list[dict]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "5"}]


def judged(record: dict) -> str:
    """The reason for which a record is left out, as judged from its placeholders and images alone."""
    try:
        found = parsed(record)
    except BadRecord as error:
        return error.args[0]
    row = Candidate(0, "s", found.messages, [f"@0-{k}" for k in range(len(found.images))], found.answer)
    facts = [ImageFacts("0" * 64, 100, 100)] * len(found.images)
    return judge(row, ("number", ""), facts, 0, Settings()).reason.partition(":")[0]


A = {"bytes": b"a", "path": None}
B = {"bytes": b"b", "path": None}
PART = {"type": "image"}


@pytest.mark.parametrize(
    "record",
    [
        {"question": "<image>\nHow many?", "answer": 5},
        {"question": "<image 1> How many?", "answer": 5},
        {"question": "How many? <image_1>", "answer": 5},
        {"question": "<image>\nHow many?", "answer": 5, "image": None},
        {"question": "<image> and <image>?", "answer": 5, "image": "a.png"},
        {"question": "<image>?", "answer": 5, "images": ["a.png", "b.png"]},
        {"question": "<image 2>?", "answer": 5, "images": ["a.png", "b.png"]},
        {"question": "![](c.png)?", "answer": 5, "images": ["a.png"]},
        {"question": "<image 1> and <image>?", "answer": 5, "images": ["a.png", "b.png"]},
        {"question": "<image 3>?", "answer": 5, "images": ["a.png", "b.png"]},
        {"messages": turns("<image>How many?")},
        {"messages": turns([{"type": "image"}, {"type": "text", "text": "?"}])},
        {"messages": turns([{"type": "text", "text": "<image>?"}])},
        {"messages": turns([{"type": "image", "image": "a.png"}, {"type": "text", "text": "<image>?"}])},
        {"conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "5"}]},
        {"prompt": turns("<image>?")[:1], "reward_model": {"ground_truth": "5"}},
        {"message": json.dumps(turns("<image>?")[:1]), "answer": "5"},
        {"question": "?", "choices": ["<image 1>", "none"], "answer": "A"},
    ],
)
def test_a_text_that_names_other_images_than_there_are_is_left_out(record):
    assert judged(record) == "image_count"


@pytest.mark.parametrize(
    ("record", "images"),
    [
        ({"question": "<image 2> then <image 1>", "answer": 5, "images": [A, B]}, [B, A]),
        ({"question": "<image_2> then <image_1>", "answer": 5, "image_1": A, "image_2": B}, [B, A]),
        ({"question": "<image 1>?", "answer": 5, "image_1": A, "image_2": None, "image_3": None}, [A]),
        ({"question": "<image 2>?", "answer": 5, "image_1": None, "image_2": B}, [B]),
        ({"question": "<image 1>, <image 2>, <image 1>", "answer": 5, "images": [A, B]}, [A, B, A]),
        ({"question": "<img>c.png</img> and <image>", "answer": 5, "images": [A]}, ["c.png", A]),
        ({"question": "<image> and <img>c.png</img>", "answer": 5, "images": [A]}, [A, "c.png"]),
        ({"question": '![](a/b.png) and ![a (b)](c.png "t")?', "answer": 5}, ["a/b.png", "c.png"]),
        (
            {"question": "![x](b.png), ![](a.png)?", "answer": 5, "images": ["a.png", "b.png"]},
            ["b.png", "a.png"],
        ),
        ({"question": "<img src='a.png'>?", "answer": 5, "image": "a.png"}, ["a.png"]),
        ({"question": "?", "answer": 5, "images": [[A], [B]]}, [A, B]),
        ({"question": "?", "answer": 5, "image_1": A, "image_2": B}, [A, B]),
        ({"question": "?", "choices": ["<image 2>", "<image 1>"], "answer": "B", "images": [A, B]}, [B, A]),
        ({"messages": turns("<image 2>, <image 1>"), "images": [A, B]}, [B, A]),
        ({"messages": turns([PART, {"type": "text", "text": "?"}, PART]), "images": [A, B]}, [A, B]),
    ],
)
def test_images_stand_where_the_text_names_them(record, images):
    found = parsed(record)
    assert found.images == images
    assert count_placeholders(found.messages) == len(images)
    assert "<im" not in question_text(found.messages) and "![" not in question_text(found.messages)


QUESTION = "Is the ball red or blue?"
COLORS = ["red", "blue"]


BOTH = "A. red\nB. blue"


@pytest.mark.parametrize(
    ("question", "choices", "given", "answer", "shown"),
    [
        (QUESTION, COLORS, "red", "A", BOTH),
        (f"{QUESTION}\n(A) red\n(B) blue", COLORS, "blue", "B", "(B) blue"),
        (f"{QUESTION} A: red B: blue", COLORS, "B", "B", "B: blue"),
        (QUESTION, ["A. red", "B. blue"], "B. blue", "B", BOTH),
        (QUESTION, ["(A) red", "(B) blue"], "blue", "B", BOTH),
        (QUESTION, {"A": "red", "B": "blue"}, "B", "B", BOTH),
        (QUESTION, {"A": "red", "B": "blue", "C": None}, "b", "B", "B. blue"),
        (QUESTION, {"text": COLORS, "label": ["1", "2"]}, "2", "B", "B. blue"),
        (QUESTION, COLORS, 1, "B", BOTH),
        ("1 + 1?", ["1", "2", "3"], "2", "B", "C. 3"),
        ("1 + 1?", ["0", "1", "2"], 1, "B", "C. 2"),
    ],
)
def test_choices_are_shown_with_letters_once(question, choices, given, answer, shown):
    found = parsed({"question": question, "choices": choices, "answer": given})
    asked = question_text(found.messages)
    assert found.answer == answer
    assert shown in asked and asked.count("blue") + asked.count("3") <= 3
    if "A. red\nB. blue" in asked and "blue B" not in asked:
        assert asked.count("A. red") == 1


@pytest.mark.parametrize(
    ("question", "choices", "answer"),
    [
        ("1 + 1?", ["1", "2", "3"], 2),
        ("?", [["red"], ["blue"]], "A"),
        ("?", {"first": "red", "second": "blue"}, "red"),
        ("?", COLORS, 2),
        ("?", COLORS, "C"),
        ("Which?\nA. blue\nB. red", COLORS, "red"),
    ],
)
def test_choices_whose_answer_could_be_two_are_left_out_by_name(question, choices, answer):
    assert judged({"question": question, "choices": choices, "answer": answer}) == "bad_choices"


def rows_of(path) -> list:
    (source,) = own(path)
    return list(source.rows())


@pytest.mark.parametrize("kind", [pa.float32(), pa.float16(), pa.float64()])
def test_decimals_keep_their_shortest_digits_and_what_is_no_number_is_no_answer(tmp_path, kind):
    table = pa.table(
        {
            "question": ["a", "b", "c", "d"],
            "answer": pa.array([0.1, 2.5, float("nan"), float("inf")], pa.float64()).cast(kind),
            "more": pa.array([[{"x": 0.1}]] * 4, pa.list_(pa.struct([("x", pa.float32())]))),
        }
    )
    pq.write_table(table, tmp_path / "d.parquet")
    first, second, *bad = rows_of(tmp_path / "d.parquet")
    assert (first.answer, second.answer) == ("0.1", "2.5")
    assert [row.reason for row in bad] == ["bad_answer"] * 2


def test_json_that_says_nan_or_infinity_has_no_answer(tmp_path):
    (tmp_path / "d.jsonl").write_text(
        '{"question": "a", "answer": NaN}\n{"question": "a", "answer": -Infinity}\n'
    )
    assert [row.reason for row in rows_of(tmp_path / "d.jsonl")] == ["bad_answer"] * 2


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is \\boxed{x=2}", "x=2"),
        ("<<6*7=42>>\n#### 1,242", "1242"),
        ("The answer is B", "B"),
        ("Answer: 3.5.", "3.5"),
        ("<think>no</think><answer>7</answer>", "7"),
        ("\\fbox{4}", "4"),
        ("#### {1,2,3}", "{1,2,3}"),
        ("#### (1,2)", "(1,2)"),
        ("#### 1,234", "1234"),
        ("#### $1,234,567.50", "$1234567.50"),
        ("#### 1,2", "1,2"),
        ("#### {100,200}", "{100,200}"),
        ("so \\boxed{5}. Again \\boxed{5}", "5"),
        ("The answer is 12 apples. Thanks.", "12 apples"),
        ("The answer is J. R. Smith.", "J. R. Smith"),
        ("The answer is 3.5.", "3.5"),
        ("so \\boxed{0.5}, that is \\boxed{\\frac12}", "\\frac12"),
    ],
)
def test_what_a_solution_states(text, answer):
    assert stated_answer(text) == answer


def test_a_solution_with_two_different_boxes_has_no_answer():
    for text in ("\\boxed{3}, so \\boxed{4}", "\\boxed{x}\\boxed{y}", "\\fbox{1} \\boxed{2}"):
        with pytest.raises(BadRecord, match="conflicting_answers"):
            stated_answer(text)


def test_structures_as_json_text_and_base64_with_line_breaks_are_read(tmp_path):
    pictures = [base64.encodebytes(raw.image(i)).decode() for i in range(2)]
    records = [
        {
            "prompt": [{"role": "user", "content": f"<image>Q{i}?"}],
            "images": [[picture]],
            "reward_model": json.dumps({"style": "rule", "ground_truth": f"{i}"}),
        }
        for i, picture in enumerate(pictures)
    ]
    source = lines(tmp_path / "d.jsonl", records)
    assert run("prepare", source, "--out", tmp_path / "out", "--validation", 0) == 0
    assert [row.answer for row in Dataset(tmp_path / "out")] == ["0", "1"]
    assert [row.images for row in Dataset(tmp_path / "out")] == [[raw.image(0)], [raw.image(1)]]


def test_json_of_any_depth_inside_a_string_costs_its_row_alone(tmp_path):
    deep = "[" * 100_000 + "]" * 100_000
    good = {"messages": json.dumps(turns("Q?"))}
    records = [good, {"messages": deep}, {"messages": '[{"role": ' + deep + "}]"}, good | {"images": deep}]
    good_row, *others, image = rows_of(lines(tmp_path / "d.jsonl", records))
    assert isinstance(good_row, Candidate)
    assert isinstance(image, BadRow) and image.reason == "image_missing", "no image has such a path"
    assert [row.reason for row in others if isinstance(row, BadRow)] == ["bad_message", "bad_message"]


def test_a_member_whose_name_is_no_utf_8_is_refused_and_the_others_are_read(tmp_path):
    archive = tmp_path / "img.tar"
    with tarfile.open(archive, "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as tar:
        for name in ("b\xe4d.png", "0.png"):
            info = tarfile.TarInfo(name)
            data = raw.image(0)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    refused = Refused()
    assert [member.name for member in members(archive, refused)] == ["0.png"]
    assert refused.members == [("b\\udce4d.png", "name is not UTF-8")]
    source = lines(tmp_path / "d.jsonl", [{"question": "Q?", "answer": 1, "image": "0.png"}])
    assert run("prepare", source, "--images", archive, "--out", tmp_path / "out", "--validation", 0) == 0
    assert read_manifest(tmp_path / "out").rows == {"train": 1}


@pytest.mark.parametrize(
    ("kind", "patch", "side"), [("qwen2_5_vl", 14, 28), ("qwen3_vl", 16, 32), ("qwen2", None, 28)]
)
def test_image_tokens_are_counted_by_the_model_s_patches(tmp_path, kind, patch, side):
    config: dict = {"model_type": kind}
    if patch:
        config["vision_config"] = {"patch_size": patch, "spatial_merge_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert image_token_side(str(tmp_path)) == side
    row = Candidate(
        0, "s", [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}], ["i"], "1"
    )
    checked = judge(row, ("number", ""), [ImageFacts("0" * 64, 640, 640)], 0, Settings(), side)
    assert checked.tokens == (640 // 32) ** 2 if side == 32 else (644 // 28) ** 2


def test_a_model_without_a_configuration_cannot_say_how_images_are_counted(tmp_path):
    with pytest.raises(ConfigError, match="--tokenizer"):
        image_token_side(str(tmp_path))
