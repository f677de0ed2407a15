"""Prepared sets shown, filtered, mixed and worked through the command line."""

from __future__ import annotations

from tests.data_prep.test_own import lines, plain, run, virl39k
from trainer.data.dataset import Dataset


def test_show_mix_and_filter(tmp_path, capsys):
    for name, write in (("v", virl39k), ("p", plain)):
        source = write(tmp_path / f"raw-{name}")
        assert run("prepare", source, "--name", name, "--out", tmp_path / name, "--validation", 0) == 0
    capsys.readouterr()
    assert run("show", tmp_path / "v", "--row", 2, "-n", 1) == 0
    shown = capsys.readouterr().out
    assert (
        "row 2 of train" in shown and "[image 160x120, " in shown and "reference answer: 2 (number)" in shown
    )
    assert run("filter", tmp_path / "v", "--pass-rate", "0.1..0.9", "--out", tmp_path / "f") == 0
    assert "too hard: 1, kept: 4, too easy: 1" in capsys.readouterr().out
    kept = list(Dataset(tmp_path / "f"))
    assert [row.extra["pass_rate"] for row in kept] == [0.2, 0.4, 0.6, 0.8]
    rates = lines(tmp_path / "rates.jsonl", [{"id": kept[0].id, "pass_rate": 0.5}])
    assert (
        run("filter", tmp_path / "f", "--pass-rate", "0..1", "--rates", rates, "--out", tmp_path / "g") == 0
    )
    assert [row.id for row in Dataset(tmp_path / "g")] == [
        kept[0].id
    ] and "no rate: 3" in capsys.readouterr().out
    assert run("mix", f"{tmp_path}/v=2", tmp_path / "p", "--out", tmp_path / "m") == 0
    sources = Dataset(tmp_path / "m").column("source")
    assert (sources.count("v"), sources.count("p")) == (12, 6) and sources != sorted(sources)


def test_the_mask_shows_every_token_of_the_whole_chat_and_which_are_learned(
    mixed_dataset, tiny_model, capsys
):
    from transformers import AutoProcessor

    from trainer.images.decoding import decode_image

    processor = AutoProcessor.from_pretrained(tiny_model)
    options = ("--tokenizer", tiny_model, "--min-pixels", 784, "--max-pixels", 50176, "-n", 4, "--mask")
    assert run("show", mixed_dataset, *options) == 0
    shown = capsys.readouterr().out.split("row ")[1:]
    for text, row in zip(shown, Dataset(str(mixed_dataset)), strict=False):
        ids: dict[str, list[int]] = {" ": [], "+": []}
        for line in text.splitlines()[1:]:
            times = line.rpartition(" x ")[2] if line.rpartition("'")[2].startswith(" x ") else "1"
            ids[line[0]] += [int(line[1:].split()[0])] * int(times)
        chat = (
            processor.apply_chat_template(row.messages, add_generation_prompt=True)
            + row.solution
            + "<|im_end|>"
        )
        images = {"images": [decode_image(data, row.id) for data in row.images]} if row.images else {}
        size = {"images_kwargs": {"size": {"shortest_edge": 784, "longest_edge": 50176}}} if images else {}
        assert (
            ids[" "] + ids["+"]
            == processor(text=[chat], return_tensors="pt", **images, **size)["input_ids"][0].tolist()
        )
        assert processor.tokenizer.decode(ids["+"]) == row.solution + "<|im_end|>"
    assert len(shown) == 4 and any(" x " in text for text in shown), "no row with an image"
    assert run("show", mixed_dataset, "--mask") == 2 and "--tokenizer MODEL" in capsys.readouterr().err


def test_correct_completions_of_a_log_become_solutions(tmp_path, capsys):
    assert run("prepare", plain(tmp_path / "raw"), "--out", tmp_path / "p", "--validation", 0) == 0
    ids = Dataset(tmp_path / "p").column("id")
    samples = [
        {"row": 1, "completion": "a long way to 1", "verdict": "correct"},
        {"row": 1, "completion": "it is 1", "verdict": "correct"},
        {"row": 2, "completion": "it is 3", "verdict": "wrong"},
    ]
    log = lines(tmp_path / "samples.jsonl", samples)
    assert run("worked", tmp_path / "p", "--log", log, "--out", tmp_path / "s") == 0
    assert [(row.id, row.solution) for row in Dataset(tmp_path / "s")] == [(ids[1], "it is 1")]
    assert "without a correct completion: 5 rows" in capsys.readouterr().out
    rates = [
        {"id": ids[4], "pass_rate": 0.5, "samples": 8, "completion": "it is 4"},
        {"id": ids[5], "pass_rate": 0.0, "samples": 8, "completion": ""},
    ]
    log = lines(tmp_path / "pass_rates.jsonl", rates)
    assert run("worked", tmp_path / "p", "--log", log, "--out", tmp_path / "t") == 0
    assert [(row.id, row.solution) for row in Dataset(tmp_path / "t")] == [(ids[4], "it is 4")]
    for bad in ({"row": 6, "completion": "x"}, {"id": "other", "completion": "x"}):
        assert run("worked", tmp_path / "p", "--log", lines(log, [bad]), "--out", tmp_path / "u") == 2


def test_a_text_question_that_train_and_test_share_is_noted(tmp_path, capsys):
    asked = [
        ("train", "What is 2 + 3?"),
        ("train", "What is 4?"),
        ("test", "What is 2 + 3?"),
        ("test", "Why?"),
    ]
    rows = [{"question": question, "answer": 5, "split": split} for split, question in asked]
    assert run("prepare", lines(tmp_path / "d.jsonl", rows), "--out", tmp_path / "out") == 0
    note = "note: 1 rows of test have an image that train nearly has, or its text question"
    assert note in capsys.readouterr().out
    assert "or whose text question" in (tmp_path / "out" / "preview.html").read_text()
