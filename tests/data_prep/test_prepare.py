"""The whole preparation on raw sets with planted defects: what is kept, what is quarantined and why, splits,
resume."""

from __future__ import annotations

import io
import json
import shutil
import tarfile

import pytest
from PIL import Image

from data_prep.checks.validate import Settings
from data_prep.prepare import prepare
from data_prep.sources.own_files import own
from tests.data_prep import raw
from trainer.config import ConfigError
from trainer.data.dataset import Dataset
from trainer.data.schema import question_text
from trainer.images.decoding import ImageLimits

IMG = raw.FOREIGN + "mathv60k_img/"


def sound(folder):
    """The source of twelve sound rows."""
    jsonl, archive = raw.mathv60k(folder / "raw")
    (source,) = own(jsonl, "mathv60k", [archive])
    return source


WHOLE = Settings(validation=0)


def quarantine(out) -> dict[str, list[dict]]:
    entries: dict[str, list[dict]] = {}
    for line in (out / "quarantine.jsonl").read_text().splitlines():
        entry = json.loads(line)
        entries.setdefault(entry["reason"], []).append(entry)
    return entries


@pytest.fixture(scope="module")
def defects(tmp_path_factory):
    """Rows with every defect, and four that are sound."""
    folder = tmp_path_factory.mktemp("defects")
    good, big = raw.image(1), raw.image(2, "JPEG", width=900, height=700)

    def flat(*size):
        return raw.encoded(Image.new("RGB", size, (200, 30, 30)))

    files = {
        "mathv60k_img/good.png": good,
        "mathv60k_img/rgba.png": raw.image(3, mode="RGBA"),
        "mathv60k_img/palette.png": raw.image(4, mode="P"),
        "mathv60k_img/cmyk.jpg": raw.image(5, "JPEG", mode="CMYK"),
        "mathv60k_img/truncated.jpg": big[: len(big) // 2],
        "mathv60k_img/empty.png": b"",
        "mathv60k_img/side.png": flat(1, 200),
        "mathv60k_img/ratio.png": flat(5600, 28),
        "mathv60k_img/giant.png": raw.encoded(Image.new("1", (12000, 9000))),
        "mathv60k_img/wide.jpg": raw.encoded(raw.drawing(6, 4000, 3000), "JPEG"),
        "mathv60k_img/a/twice.png": raw.image(7),
        "mathv60k_img/b/twice.png": raw.image(8),
        "mathv60k_img/copy.png": good,
    }

    def escape(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo("../../mathv60k_img/escape.png")
        info.size = len(good)
        tar.addfile(info, io.BytesIO(good))

    line = raw.line
    lines = {
        "good": line("Good?", "$\\boxed{A}$", [IMG + "good.png"]),
        "rgba escaped": raw.escaped(line("RGBA?", "$\\boxed{B}$", [IMG + "rgba.png"])),
        "palette file://": line("P?", "$\\boxed{0.5}$", ["file://" + IMG + "palette.png"]),
        "cmyk bare": line("<script>CMYK?", "$\\boxed{7}$", ["cmyk.jpg"]),
        "missing": line("Missing?", "$\\boxed{A}$", [IMG + "none.png"]),
        "escape": line("Escape?", "$\\boxed{A}$", ["/x/y/mathv60k_img/escape.png"]),
        "truncated": line("Truncated?", "$\\boxed{A}$", [IMG + "truncated.jpg"]),
        "empty": line("Empty?", "$\\boxed{A}$", [IMG + "empty.png"]),
        "side": line("Side?", "$\\boxed{A}$", [IMG + "side.png"]),
        "ratio": line("Ratio?", "$\\boxed{A}$", [IMG + "ratio.png"]),
        "giant": line("Giant?", "$\\boxed{A}$", [IMG + "giant.png"]),
        "ambiguous": line("Ambiguous?", "$\\boxed{A}$", ["twice.png"]),
        "too long": line("Long?", "$\\boxed{A}$", [IMG + "wide.jpg"]),
        "no gold": line("No gold?", "$\\boxed{}$", [IMG + "good.png"]),
        "dollars": line("Dollars?", "$$", [IMG + "good.png"]),
        "no image's text": line("", "$\\boxed{A}$", [IMG + "good.png"]),
        "duplicate": line("Good?  ", "$\\boxed{A}$", [IMG + "copy.png"]),
        "conflict 1": line("Conflict?", "$\\boxed{1}$", [IMG + "good.png"]),
        "conflict 2": line("conflict?", "$\\boxed{2}$", [IMG + "copy.png"]),
        "same by value 1": line("Half?", "$\\boxed{0.5}$", [IMG + "good.png"]),
        "same by value 2": line("Half?", "$\\boxed{\\frac{1}{2}}$", [IMG + "good.png"]),
        "bad json": "{broken",
    }
    (folder / "rows.jsonl").write_text("\n".join(lines.values()) + "\n")
    raw.write_tar(folder / "img.tar.gz", files, escape)
    out = folder / "out"
    (source,) = own(folder / "rows.jsonl", "mathv60k", [folder / "img.tar.gz"])
    manifest = prepare([source], out, "defects", Settings(validation=0, max_tokens=1000))
    return out, manifest, list(lines)


def test_sound_rows_are_kept_with_their_images(defects):
    out, manifest, _ = defects
    rows = list(Dataset(out))
    assert [question_text(row.messages).strip() for row in rows] == [
        "Good?",
        "RGBA?",
        "P?",
        "<script>CMYK?",
        "Half?",
    ]
    assert [row.answer for row in rows] == ["A", "B", "0.5", "7", "0.5"]
    assert [row.answer_type for row in rows] == ["letter"] * 2 + ["number"] * 3
    assert rows[0].images == [raw.image(1)] and manifest.rows == {"train": 5}


def test_every_defect_is_quarantined_with_its_reason(defects):
    out, manifest, names = defects
    found = {
        reason: sorted(names[entry["index"]] for entry in entries)
        for reason, entries in quarantine(out).items()
    }
    assert found == {
        "image_missing": ["missing"],
        "image_refused": ["escape"],
        "image_undecodable": ["truncated"],
        "image_empty": ["empty"],
        "image_too_small": ["side"],
        "image_ratio": ["ratio"],
        "image_too_large": ["giant"],
        "image_ambiguous": ["ambiguous"],
        "too_long": ["too long"],
        "bad_answer": ["dollars", "no gold"],
        "no_question": ["no image's text"],
        "duplicate": ["duplicate", "same by value 2"],
        "conflicting_answers": ["conflict 1", "conflict 2"],
        "bad_json": ["bad json"],
    }
    assert manifest.quarantined == {reason: len(entries) for reason, entries in found.items()}
    assert sum(manifest.rows.values()) + sum(manifest.quarantined.values()) == len(names)


def test_an_unsafe_member_is_reported_and_nothing_but_the_dataset_is_left(defects):
    out, manifest, _ = defects
    escape = ["../../mathv60k_img/escape.png", "path leaves the archive"]
    assert manifest.statistics["images"]["refused"] == [escape]
    names = {"manifest.json", "preview.html", "quarantine.jsonl", "train-00000-of-00001.parquet"}
    assert {path.name for path in out.iterdir()} == names


def test_the_preview_shows_images_tables_and_reasons_and_runs_no_script_of_a_row(defects):
    page = (defects[0] / "preview.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 5
    for text in ("conflicting_answers", "image_undecodable", "answer types", "letter", "longest side"):
        assert text in page
    assert "<script>" not in page and "&lt;script&gt;CMYK?" in page


def test_the_same_command_again_does_nothing_and_another_one_refuses(tmp_path):
    source = sound(tmp_path)
    first = prepare([source], tmp_path / "out", "mathv60k", WHOLE)
    before = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    assert prepare([source], tmp_path / "out", "mathv60k", WHOLE).fingerprint == first.fingerprint
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="another --out, or pass --overwrite"):
        prepare([source], tmp_path / "out", "mathv60k", Settings(validation=0, limit=5))
    small = prepare([source], tmp_path / "out", "mathv60k", Settings(validation=0, limit=5), overwrite=True)
    assert small.rows == {"train": 5}


def test_a_folder_that_holds_other_files_is_refused_and_left_as_it_is(tmp_path):
    source = sound(tmp_path)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("kept")
    with pytest.raises(ConfigError, match="holds notes.txt and is no dataset's folder"):
        prepare([source], mine, "mathv60k", WHOLE)
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


def test_a_folder_and_an_archive_give_the_same_rows(tmp_path):
    jsonl, archive = raw.mathv60k(tmp_path / "raw")
    shutil.unpack_archive(archive, tmp_path / "folder", filter="data")
    rows = [
        list(Dataset(tmp_path / name))
        for name, images in (("a", archive), ("b", tmp_path / "folder"))
        if prepare(own(jsonl, images=[images]), tmp_path / name, "m", WHOLE)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 12


def test_an_interrupted_preparation_goes_on(tmp_path):
    source = sound(tmp_path)

    class Killed(Exception):
        pass

    def killer(stage: str, done: int, total: int) -> None:
        if stage == "rows written":
            raise Killed

    with pytest.raises(Killed):
        prepare([source], tmp_path / "out", "mathv60k", WHOLE, on_progress=killer)
    assert not (tmp_path / "out" / "manifest.json").exists()
    manifest = prepare([source], tmp_path / "out", "mathv60k", WHOLE)
    assert manifest.statistics["images"]["resumed"] == 12 and manifest.rows == {"train": 12}
    untouched = prepare([source], tmp_path / "other", "mathv60k", WHOLE)
    assert untouched.fingerprint == manifest.fingerprint


def families(folder, count: int = 60, copies: int = 3):
    """Images in families of near-identical ones: re-encoded, scaled, in other formats."""
    files, lines = {}, []
    for family in range(count):
        original = raw.drawing(family, 320, 240)
        half = original.resize((160, 120), Image.Resampling.BICUBIC)
        for k, data in enumerate(
            [raw.encoded(original), raw.encoded(original, "JPEG", quality=75), raw.encoded(half)]
        ):
            if k < copies:
                name = f"mathv60k_img/{family}-{k}.png"
                files[name] = data
                lines.append(raw.line(f"Family {family}, question {k}?", f"$\\boxed{{{k}}}$", [IMG + name]))
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (source,) = own(folder / "rows.jsonl", "mathv60k", [raw.write_tar(folder / "img.tar.gz", files)])
    return source


def family_of(row) -> str:
    return question_text(row.messages).split(",")[0]


def test_near_identical_images_never_stand_on_both_sides(tmp_path):
    source = families(tmp_path / "raw")
    manifest = prepare([source], tmp_path / "out", "f", Settings(validation=0.3))
    train, validation = (
        {family_of(row) for row in Dataset(tmp_path / "out", s)} for s in ("train", "validation")
    )
    assert (
        not train & validation
        and len(train) + len(validation) == 60 == manifest.statistics["groups"]["count"]
    )
    assert 0.15 < manifest.rows["validation"] / 180 < 0.45
    again = prepare([source], tmp_path / "again", "f", Settings(validation=0.3, split_seed=1))
    assert {family_of(row) for row in Dataset(tmp_path / "again", "validation")} != validation
    assert sum(again.rows.values()) == 180


def test_new_rows_do_not_move_old_ones_between_the_splits(tmp_path):
    def splits(count: int) -> dict[str, str]:
        out = tmp_path / f"out{count}"
        prepare([families(tmp_path / f"raw{count}", count, copies=1)], out, "f", Settings(validation=0.3))
        return {row.id: split for split in ("train", "validation") for row in Dataset(out, split)}

    small, large = splits(40), splits(60)
    assert len(small) == 40 and {row: large[row] for row in small} == small


def test_rows_near_an_evaluation_set_are_left_out_on_request(tmp_path):
    evaluation = families(tmp_path / "eval_raw", 4, copies=1)
    prepare([evaluation], tmp_path / "eval", "evaluation", WHOLE)
    source = families(tmp_path / "raw", 10, copies=3)
    manifest = prepare([source], tmp_path / "out", "f", WHOLE, exclude=[str(tmp_path / "eval")])
    assert manifest.quarantined == {"overlap": 12} and manifest.rows == {"train": 18}
    assert {family_of(row) for row in Dataset(tmp_path / "out")} == {f"Family {i}" for i in range(4, 10)}
    report = manifest.statistics["overlaps"][0]
    assert (report["set"], report["rows_excluded"]) == ("evaluation", 12)
    assert sum(report["evaluation_rows_touched"].values()) == 4


def test_too_little_disk_is_refused_before_anything_is_unpacked(tmp_path, monkeypatch):
    source = sound(tmp_path)
    free = shutil.disk_usage(tmp_path)._replace(free=50_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(ConfigError, match=r"GiB free, the preparation needs up to .* GiB: free some"):
        prepare([source], tmp_path / "out", "m", WHOLE)
    assert not any(p.name.endswith(".parquet") for p in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / ".work" / "0" / "images.bin").stat().st_size == 0


def test_statistics_add_up_and_every_stage_reaches_its_end(tmp_path):
    source = sound(tmp_path)
    last: dict[str, tuple[int, int]] = {}

    def note(stage: str, done: int, total: int) -> None:
        last[stage] = done, total

    stats = prepare([source], tmp_path / "out", "m", WHOLE, on_progress=note).statistics
    assert stats["sources"] == {"mathv60k/IconQA": 6, "mathv60k/TabMWP": 6}
    assert sum(stats["answer_types"].values()) == sum(stats["tokens"]["histogram"].values()) == 12
    assert stats["tokens"]["percentiles"]["50"] == 24 == 6 * 4  # 160 x 120 -> 168 x 112 pixels
    assert stats["images"]["formats"] == {"PNG RGB": 6, "JPEG RGB": 6}
    assert last == dict.fromkeys(("images of mathv60k", "rows checked", "rows written"), (12, 12))
    with pytest.raises(ConfigError, match="no row can be used: 12 image_too_small"):
        prepare([source], tmp_path / "none", "m", Settings(limits=ImageLimits(min_side=200)))
