"""Prepared datasets: written streaming, manifest last; read at random, in order, by many processes, and
verified."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.write import shards
from data_prep.write.shards import SplitWriter, write_dataset, write_manifest
from tests.data_prep.raw import image
from trainer.config import ConfigError
from trainer.data.dataset import MANIFEST, Dataset, read_manifest
from trainer.data.schema import Manifest, Row, row_id


def rows(count: int, start: int = 0, image_bytes: int = 20_000):
    for i in range(start, start + count):
        images = [random.Random(i).randbytes(image_bytes) for _ in range(i % 3)]
        text, extra = f"Frage {i} – ∠ABC?", {"pass_rate": i / 7} if i % 2 else {}
        content = [{"type": "text", "text": text}] + [{"type": "image"}] * len(images) if images else text
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": content}]
        name = row_id("t", messages, images)
        yield Row(name, "t/sub", messages, images, str(i), "number", f"s{i}", extra)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    out = tmp_path_factory.mktemp("dataset")
    write_dataset(out, "t", {"train": rows(700), "test": rows(5, 1000)}, {"a": 1}, "rev", shard_bytes=4 << 20)
    return out


def test_rows_come_back_as_they_went_in(dataset):
    assert list(Dataset(dataset)) == list(rows(700))
    test = Dataset(dataset, "test")
    assert [test[i] for i in range(5)] == list(rows(5, 1000)) and test[-1] == test[4] and len(test) == 5


def test_random_access_in_any_order_and_from_threads(dataset):
    train = Dataset(dataset)
    order = random.Random(0).sample(range(700), 300)
    with ThreadPoolExecutor(4) as pool:
        assert [int(row.answer) for row in pool.map(train.__getitem__, order)] == order


def answers(train: Dataset, indexes: list[int]) -> list[str]:
    return [train[i].answer for i in indexes]


def test_a_dataset_is_pickled_to_other_processes_open_or_not(dataset):
    train = Dataset(dataset)
    assert train[3].answer == "3"
    assert len(pickle.dumps(train)) < 20_000
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.starmap(answers, [(train, [0, 699]), (train, [350])]) == [["0", "699"], ["350"]]


def test_shards_are_plain_parquet_with_uncompressed_pages(dataset):
    manifest = read_manifest(dataset)
    assert [f["path"] for f in manifest.files if f["split"] == "train"][0] == "train-00000-of-00003.parquet"
    for entry in manifest.files:
        metadata = pq.read_metadata(dataset / entry["path"])
        assert metadata.num_rows == entry["rows"]
        chunks = [metadata.row_group(0).column(i) for i in range(metadata.num_columns)]
        assert {chunk.compression for chunk in chunks} == {"UNCOMPRESSED"}


def test_one_column_is_read_without_the_images(dataset):
    assert Dataset(dataset).column("answer") == [str(i) for i in range(700)]


def test_equal_content_has_an_equal_fingerprint_and_settings_count(tmp_path):
    made = [
        write_dataset(tmp_path / str(i), "t", {"train": rows(30)}, settings, "rev")
        for i, settings in enumerate([{"a": 1}, {"a": 1}, {"a": 2}])
    ]
    other = write_dataset(tmp_path / "other", "t", {"train": rows(31)}, {"a": 1}, "rev")
    assert made[0].fingerprint == made[1].fingerprint
    assert len({made[0].fingerprint, made[2].fingerprint, other.fingerprint}) == 3


def test_without_a_manifest_it_is_no_dataset(dataset, tmp_path):
    class Killed(Exception):
        pass

    def interrupted():
        yield from rows(200)
        raise Killed

    with pytest.raises(Killed):
        write_dataset(tmp_path, "t", {"train": interrupted()}, {})
    with pytest.raises(ConfigError, match="no prepared dataset at .*: run `python3 launch.py data prepare"):
        Dataset(tmp_path)


def test_writing_again_replaces_all_of_the_former_dataset(tmp_path):
    write_dataset(tmp_path, "t", {"train": rows(300), "old": rows(3)}, {}, shard_bytes=1 << 20)
    write_dataset(tmp_path, "t", {"train": rows(10)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST, "train-00000-of-00001.parquet"]


def test_an_unknown_split_or_row_is_an_error(dataset):
    with pytest.raises(ConfigError, match="no split 'validation' in .*: it has train, test"):
        Dataset(dataset, "validation")
    for index in (700, -701):
        with pytest.raises(IndexError):
            Dataset(dataset)[index]


def test_a_missing_or_short_shard_is_found_when_opened_and_a_changed_one_when_verified(tmp_path):
    manifest = write_dataset(tmp_path, "t", {"train": rows(50)}, {})
    shard = tmp_path / manifest.files[0]["path"]
    data = shard.read_bytes()
    Dataset(tmp_path).verify()
    shard.write_bytes(data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    with pytest.raises(ConfigError, match="is damaged"):
        Dataset(tmp_path).verify()
    shard.write_bytes(data[:-1])
    with pytest.raises(ConfigError, match=f"is {len(data) - 1} bytes, the manifest says {len(data)}"):
        Dataset(tmp_path)
    shard.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        Dataset(tmp_path)


def test_a_manifest_of_a_later_version_with_more_fields_is_read_and_an_older_format_refused(tmp_path):
    write_manifest(tmp_path, Manifest("t", "", {}, []))
    data = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(data | {"of_the_future": 1}))
    assert read_manifest(tmp_path).name == "t"
    (tmp_path / MANIFEST).write_text(json.dumps(data | {"format": 1}))
    with pytest.raises(ConfigError, match="is of format 1, this version reads 2: prepare it again"):
        read_manifest(tmp_path)
    of_tasks = data | {"statistics": {"answer_types": {"task": 3}}}
    (tmp_path / MANIFEST).write_text(json.dumps(of_tasks))
    with pytest.raises(ConfigError, match="rows of the answer type `task`, .*: prepare it again"):
        read_manifest(tmp_path)


def test_placeholders_and_images_must_agree(tmp_path):
    row = next(iter(rows(1, 2)))
    with pytest.raises(ValueError, match="2 image placeholders, 1 images"):
        write_dataset(
            tmp_path, "t", {"train": [Row(row.id, "t", row.messages, row.images[:1], "1", "number")]}, {}
        )


def test_the_id_depends_on_question_and_images_only():
    first, again, other = (
        row_id("t", [{"role": "user", "content": q}], [p]) for q, p in (("q", b"p"), ("q", b"p"), ("q", b"P"))
    )
    assert first == again != other and len(first) == 16


def test_the_manifest_states_the_hash_of_what_lies_on_the_disk(dataset):
    for entry in read_manifest(dataset).files:
        data = (dataset / entry["path"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"])


def test_a_shard_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1]
    )
    monkeypatch.setattr(Path, "replace", lambda a, b: (events.append(str(b)), replace(a, b))[1])
    write_dataset(tmp_path, "t", {"train": rows(5)}, {})
    assert [Path(event).name for event in events] == [
        ".train-00000.part",
        "train-00000-of-00001.parquet",
        ".manifest.json.part",
        MANIFEST,
    ]


def test_a_full_disk_is_an_error_and_leaves_no_dataset(tmp_path):
    writer = SplitWriter(tmp_path, "train")
    (tmp_path / ".train-00000.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        for row in rows(50, image_bytes=1 << 20):
            writer.add(row)


def test_the_datasets_library_reads_images_and_messages(dataset, tmp_path):
    datasets = pytest.importorskip("datasets")
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Q?"}]}]
    row = Row("i", "s", asked, [image(1)], "4", "number", "w", {"choices": ["3", "4"]})
    write_dataset(tmp_path / "d", "t", {"train": [row]}, {})
    read = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "d" / "train-*.parquet"), cache_dir=str(tmp_path / "cache")
    )["train"]
    assert type(read.features["images"].feature).__name__ == "Image"
    one = read[0]
    assert one["images"][0].size == (160, 120)
    assert [part["type"] for part in one["messages"][0]["content"]] == ["image", "text"]
    assert one["messages"][0]["content"][1]["text"] == "Q?"


def test_rows_that_were_prepared_without_a_reading_are_read_as_before(tmp_path, monkeypatch):
    columns = [field for field in shards.SCHEMA if field.name != "reading"]
    monkeypatch.setattr(shards, "SCHEMA", pa.schema(columns, metadata=shards.SCHEMA.metadata))
    write_dataset(tmp_path / "old", "old", {"train": rows(3)}, {})
    old = list(Dataset(tmp_path / "old", "train"))
    assert [row.answer for row in old] == ["0", "1", "2"] and {row.reading for row in old} == {""}
