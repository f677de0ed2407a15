"""Host memory that images take: rows of 1,280 image tokens, read as a rank reads them.

    python benchmarks/image_memory.py --rows 1000 --out benchmarks/image_memory.json

A rank keeps decoded and encoded images within `data.image_cache_gib`. The script reads every row twice, once
for the engine and once for the policy, in another order, and records the process's memory. Beside it stands
what the same rows take where every decoded and encoded image is kept.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import random
import tempfile
from pathlib import Path

from PIL import Image

from benchmarks.machine import processor
from data_prep.write.shards import write_dataset
from examples.demo import tiny_model
from trainer import config as c
from trainer.data.reader import RowReader, decoded_bytes
from trainer.data.schema import Row

GIB = 1 << 30
WIDTH, HEIGHT = 40 * 28, 32 * 28
"""1,280 tokens of 28 x 28 pixels."""
CACHE_GIB = 0.5


def row(number: int) -> Row:
    """A row with an image of its own."""
    draw = random.Random(number)
    small = Image.frombytes("RGB", (WIDTH // 16, HEIGHT // 16), draw.randbytes(WIDTH * HEIGHT * 3 // 256))
    data = io.BytesIO()
    small.resize((WIDTH, HEIGHT)).save(data, "JPEG", quality=90)
    content = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    return Row(
        id=str(number),
        source="noise",
        messages=[{"role": "user", "content": content}],
        images=[data.getvalue()],
        answer="1",
        answer_type="number",
        solution="",
    )


def resident_bytes() -> int:
    """Memory of this process that is its own, without pages of files that it maps."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def measure(rows: int, folder: Path) -> dict[str, float]:
    """Figures of `rows` rows; bytes in GiB."""
    model = tiny_model.build(folder / "model", 0)
    write_dataset(folder / "data", "noise", {"train": map(row, range(rows))}, {})
    reader = RowReader(
        c.RunConfig(
            model=c.Model(path=str(model), min_pixels=784, max_pixels=1280 * 784),
            data=c.Data(path=str(folder / "data"), prompt_max_tokens=2048, image_cache_gib=CACHE_GIB),
        )
    )
    split = reader.config.train_split
    first = reader.encoded(split, 0)
    kept_bytes = first.size_bytes + decoded_bytes(reader.decoded(split, 0))
    assert first.token_ids.count(reader.image_token_id) == 1280

    gc.collect()
    before = resident_bytes()
    highest = before
    order = list(range(rows))
    for read in (reader.request, reader.encoded):
        random.Random(0).shuffle(order)
        for index in order:
            read(split, index)
            highest = max(highest, resident_bytes())
    return {
        "rows": rows,
        "cache_gib": CACHE_GIB,
        "growth_gib": round((highest - before) / GIB, 2),
        "kept_whole_gib_per_1000_rows": round(1000 * kept_bytes / GIB, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {"machine": processor(), **measure(args.rows, Path(folder))}
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
