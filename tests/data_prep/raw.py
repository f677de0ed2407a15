"""Raw datasets for the tests, made here: images of every kind, archives, MathV60K lines with defects."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path

from PIL import Image, ImageDraw

FOREIGN = "/apdcephfs_gy2/share_302735770/someone/data/mathv60k/"
SYSTEM = "Solve the question. Wrap the answer in \\boxed{}."


def drawing(seed: int, width: int = 160, height: int = 120, mode: str = "RGB") -> Image.Image:
    """An image that no other seed gives, not even nearly: coarse random blocks."""
    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    for _ in range(40):
        x, y = rng.randrange(width), rng.randrange(height)
        color = tuple(rng.randrange(256) for _ in range(3))
        draw.rectangle((x, y, x + rng.randrange(10, 60), y + rng.randrange(10, 60)), fill=color)
    return image if mode == "RGB" else image.convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def image(seed: int, kind: str = "PNG", **shape) -> bytes:
    return encoded(drawing(seed, **shape), kind)


def write_tar(path: Path, files: dict[str, bytes], extra=None) -> Path:
    """A tar, compressed as its name says; `extra(tar)` adds what `files` cannot say."""
    mode = {".gz": "w:gz", ".tgz": "w:gz", ".bz2": "w:bz2", ".xz": "w:xz", ".tar": "w"}[path.suffix]
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        if extra:
            extra(tar)
    return path


def line(question: str, answer: str, paths: list[str], **changes) -> str:
    """One row as MathV60K has it: the chat as a string, the text first."""
    content: list[dict] = [{"type": "text", "text": question}]
    content += [{"type": "image", "image": path} for path in paths]
    message = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    row = {"question": question, "answer": answer, "message": json.dumps(message)} | changes
    return json.dumps(row)


def escaped(text: str) -> str:
    """With slashes escaped inside the inner JSON, as pandas writes it."""
    row = json.loads(text)
    return json.dumps(row | {"message": row["message"].replace("/", "\\/")})


def mathv60k(folder: Path, rows: int = 12) -> tuple[Path, Path]:
    """A sound set: `rows` rows, one PNG or JPEG each, with absolute foreign paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files, lines = {}, []
    for i in range(rows):
        name = f"mathv60k_img/{('IconQA', 'TabMWP')[i % 2]}/{i}.{('png', 'jpg')[i % 2]}"
        files[name] = image(i, ("PNG", "JPEG")[i % 2])
        answer = f"$\\boxed{{{'ABCD'[i % 4] if i % 3 else i}}}$"
        lines.append(line(f"Question {i}?", answer, [FOREIGN + name]))
    jsonl = folder / "mathv60k_message.jsonl"
    jsonl.write_text("\n".join(lines) + "\n")
    return jsonl, write_tar(folder / "mathv60k_img.tar.gz", files)
