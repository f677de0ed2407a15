"""Prepared datasets in the forms that other trainers load: Parquet files with their columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.write.shards import GROUP_ROWS, SCHEMA, image_records
from trainer.data.dataset import Dataset, read_manifest
from trainer.data.schema import Row

Target = Literal["trl", "verl"]
_S = pa.string()
_STRING = {"dtype": "string", "_type": "Value"}
_IMAGES = SCHEMA.field("images")
_TURN_WITH_PARTS = SCHEMA.field("messages").type
_TURN = pa.list_(pa.struct([("role", _S), ("content", _S)]))


def _trl(row: Row, split: str, index: int) -> dict[str, Any]:
    """TRL's GRPO and SFT trainers: a conversational `prompt` with image parts, `images`, and what
    rewards read."""
    prompt = []
    for message in row.messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        prompt.append({"role": message["role"], "content": parts})
    completion = [{"role": "assistant", "content": [{"type": "text", "text": row.solution}]}]
    return {
        "prompt": prompt,
        "completion": completion,
        "images": image_records(row),
        "solution": row.answer,
        "id": row.id,
    }


def _verl(row: Row, split: str, index: int) -> dict[str, Any]:
    """verl's RLHFDataset (and EasyR1 with `prompt_key`): `<image>` in the text, the reward model's
    ground truth."""
    prompt = []
    for message in row.messages:
        content = message["content"]
        if not isinstance(content, str):
            text = ""
            for part in content:
                text += "<image>" if part["type"] == "image" else part["text"]
            content = text
        prompt.append({"role": message["role"], "content": content})
    return {
        "data_source": row.source,
        "prompt": prompt,
        "images": image_records(row),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row.answer},
        "extra_info": {"split": split, "index": index, "id": row.id, "answer_type": row.answer_type},
    }


_REWARD_MODEL = pa.struct([("style", _S), ("ground_truth", _S)])
_INFO = pa.struct([("split", _S), ("index", pa.int64()), ("id", _S), ("answer_type", _S)])
_SCHEMAS: dict[Target, list[tuple[str, pa.DataType]]] = {
    "trl": [
        ("prompt", _TURN_WITH_PARTS),
        ("completion", _TURN_WITH_PARTS),
        ("images", _IMAGES.type),
        ("solution", _S),
        ("id", _S),
    ],
    "verl": [
        ("data_source", _S),
        ("prompt", _TURN),
        ("images", _IMAGES.type),
        ("ability", _S),
        ("reward_model", _REWARD_MODEL),
        ("extra_info", _INFO),
    ],
}


def _feature(kind: pa.DataType) -> Any:
    """The Hugging Face feature of an Arrow type."""
    if kind == _IMAGES.type:
        return [{"_type": "Image"}]
    if pa.types.is_list(kind):
        return [_feature(kind.value_type)]
    if pa.types.is_struct(kind):
        return {field.name: _feature(field.type) for field in kind}
    return _STRING if kind == _S else {"dtype": str(kind), "_type": "Value"}


def export(path: str, target: Target, out: str | Path) -> dict[str, int]:
    """Writes `SPLIT.parquet` into `out` for every split of the dataset at `path`.

    Returns the rows of each.
    """
    make: Callable[[Row, str, int], dict[str, Any]] = _trl if target == "trl" else _verl
    fields = _SCHEMAS[target]
    features = {name: _feature(kind) for name, kind in fields}
    schema = pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": features}})})
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split in read_manifest(path).rows:
        dataset = Dataset(path, split)
        part = folder / f".{split}.parquet.part"
        with pq.ParquetWriter(part, schema) as writer:
            for batch in _batches(dataset):
                records = [make(row, split, index) for index, row in batch]
                writer.write_table(pa.Table.from_pylist(records, schema=schema))
        part.replace(folder / f"{split}.parquet")
        counts[split] = len(dataset)
    return counts


def _batches(dataset: Dataset) -> Iterator[list[tuple[int, Row]]]:
    batch: list[tuple[int, Row]] = []
    for index, row in enumerate(dataset):
        batch.append((index, row))
        if len(batch) == GROUP_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch
