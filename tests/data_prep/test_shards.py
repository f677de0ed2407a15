"""Prepared datasets: written streaming, manifest last; read at random, in order, by many processes, and verified."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq
import pytest

from data_prep.write.shards import write_dataset, write_manifest
from trainer.config import ConfigError
from trainer.data.dataset import MANIFEST, Dataset, read_manifest
from trainer.data.schema import Manifest, Row, row_id


def rows(count: int, start: int = 0, image_bytes: int = 20_000):
    for i in range(start, start + count):
        images = [random.Random(i).randbytes(image_bytes) for _ in range(i % 3)]
        content = [{"type": "text", "text": f"Frage {i} – ∠ABC?"}] + [{"type": "image"}] * len(images)
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": content}]
        yield Row(row_id("t", messages, images), "t/sub", messages, images, str(i), "number", f"s{i}")


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


def test_one_column_is_read_without_the_pictures(dataset):
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
    with pytest.raises(ConfigError, match="no prepared dataset at .*: run `python launch.py data prepare"):
        Dataset(tmp_path)


def test_writing_again_replaces_all_of_the_former_dataset(tmp_path):
    write_dataset(tmp_path, "t", {"train": rows(300), "old": rows(3)}, {}, shard_bytes=1 << 20)
    write_dataset(tmp_path, "t", {"train": rows(10)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST, "train-00000-of-00001.parquet"]


def test_an_unknown_split_names_those_there_are(dataset):
    with pytest.raises(ConfigError, match="no split 'validation' in .*: it has train, test"):
        Dataset(dataset, "validation")


def test_a_row_out_of_range_is_an_index_error(dataset):
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


def test_a_damaged_manifest_is_one_line(tmp_path):
    write_dataset(tmp_path, "t", {"train": rows(3)}, {})
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(ConfigError, match="manifest.json is damaged"):
        Dataset(tmp_path)


def test_a_manifest_of_a_later_version_with_more_fields_is_read(tmp_path):
    write_manifest(tmp_path, Manifest("t", "", {}, []))
    data = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(data | {"of_the_future": 1}))
    assert read_manifest(tmp_path).name == "t"


def test_placeholders_and_pictures_must_agree(tmp_path):
    row = next(iter(rows(1, 2)))
    with pytest.raises(ValueError, match="2 image placeholders, 1 pictures"):
        write_dataset(tmp_path, "t", {"train": [Row(row.id, "t", row.messages, row.images[:1], "1", "number")]}, {})


def test_the_id_depends_on_question_and_pictures_only():
    first, again, other = (row_id("t", [{"role": "user", "content": q}], [p]) for q, p in
                           (("q", b"p"), ("q", b"p"), ("q", b"P")))  # fmt: skip
    assert first == again != other and len(first) == 16
