"""What a rank and a process with a user's environment say to each other: JSON, and pixels behind it; and
images that others send."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from typing import Any

from PIL import Image

from trainer.images.decoding import open_image, to_rgb

LENGTH = struct.Struct("!Q")


def packed(about: Any, images: Sequence[Image.Image] = ()) -> bytes:
    """about: JSON values, in which half a character becomes a question mark. images: any, sent as RGB."""
    shown = list(map(to_rgb, images))
    sizes = [image.size for image in shown]
    header = json.dumps([about, sizes], ensure_ascii=False).encode(errors="replace")
    return b"".join([LENGTH.pack(len(header)), header, *map(Image.Image.tobytes, shown)])


def unpacked(message: bytes) -> tuple[Any, list[Image.Image]]:
    """The inverse of `packed`. Raises ValueError for anything else."""
    if len(message) < LENGTH.size:
        raise ValueError("a message without a length")
    start = LENGTH.size + LENGTH.unpack_from(message)[0]
    try:
        about, sizes = json.loads(message[LENGTH.size : start])
        images = []
        for width, height in sizes:
            end = start + 3 * width * height
            if type(end) is not int or not start < end <= len(message):
                raise ValueError("an image of another size than it says")
            images.append(Image.frombytes("RGB", (width, height), message[start:end]))
            start = end
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return about, images


def image_of(encoded: str) -> Image.Image:
    """The image of a file in base64, not decoded yet. Raises ValueError or OSError."""
    return open_image(base64.b64decode(encoded, validate=True))
