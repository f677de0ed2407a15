"""The only decoder of images: policy, engine, thumbnails and data preparation all see what `to_rgb` gives.

It applies the EXIF orientation, puts transparent pixels on white, and scales more than 8 bits a channel
to 8. Pillow's own `convert` ignores the first two and cuts the third off: 16-bit gray becomes white,
floating point black.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image, ImageOps

from trainer.config import ConfigError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are opened. Some others that Pillow knows start programs (EPS: Ghostscript)."""
MAX_PIXELS = 89_478_485
"""Largest area that is decoded. Beyond it Pillow, too, suspects a decompression bomb."""
MIN_SIDE = 28
"""Shortest side in pixels. Below 28 the processors in use disagree about the size after resizing."""
MAX_RATIO = 100.0
"""Longest over shortest side. The processor refuses above 200, and near it also its own output."""
_EXIF_IN_PNG = re.compile(rb"eXIf|Raw profile type exif|XML:com\.adobe\.xmp")


def open_image(data: bytes) -> Image.Image:
    """The image with its header read and nothing decoded.

    Raises what Pillow raises for other formats and damaged files.
    """
    return Image.open(io.BytesIO(data), formats=FORMATS)


@dataclass(frozen=True)
class ImageLimits:
    """Limits of an image."""

    min_side: int = MIN_SIDE
    max_ratio: float = MAX_RATIO
    max_image_pixels: int = MAX_PIXELS
    """Largest area in pixels."""


def size_error(width: int, height: int, limits: ImageLimits) -> str:
    """Why an image of this size is left out; empty if it is not. The word before the colon is counted."""
    short = min(width, height)
    long = max(width, height)
    if short < limits.min_side:
        return f"image_too_small: {width}x{height}, shortest side below {limits.min_side}"
    if long > limits.max_ratio * short:
        return f"image_ratio: {width}x{height}, ratio above {limits.max_ratio:g}"
    if width * height > limits.max_image_pixels:
        return f"image_too_large: {width}x{height}, more than {limits.max_image_pixels} pixels"
    return ""


def shown_image(image: Image.Image, limits: ImageLimits) -> Image.Image:
    """The RGB image of one that a tool made or opened, which `to_rgb` may change.

    Raises ValueError for one that no model can be shown, by its header if it is not decoded yet.
    """
    error = size_error(image.width, image.height, limits)
    if error:
        detail = error.partition(", ")[2]
        raise ValueError(f"an image of {image.width} x {image.height} cannot be shown: {detail}")
    return to_rgb(image)


def upright_size(image: Image.Image, data: bytes) -> tuple[int, int]:
    """Width and height after the EXIF orientation is applied, for an image that was just opened."""
    if image.format == "TIFF":  # Pillow gives the size after it turned the image
        return image.size
    if image.format == "PNG" and not _EXIF_IN_PNG.search(data):
        return image.size  # `getexif` of a PNG would decode it
    sideways = image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
    return (image.height, image.width) if sideways else image.size


def image_size(data: bytes, row_id: str) -> tuple[int, int]:
    """Width and height of encoded bytes as `decode_image` will give them, without decoding.

    Raises ConfigError that names the row.
    """
    try:
        with open_image(data) as image:
            return upright_size(image, data)
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, ValueError, struct.error, ...
        raise _undecodable(row_id, error) from None


def decode_image(data: bytes, row_id: str) -> Image.Image:
    """RGB image of encoded bytes.

    Raises ConfigError that names the row if they do not decode or hold more than MAX_PIXELS.
    """
    try:
        with open_image(data) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width}x{image.height} is more than {MAX_PIXELS} pixels")
            return to_rgb(image)
    except Exception as error:
        raise _undecodable(row_id, error) from None


def _undecodable(row_id: str, error: Exception) -> ConfigError:
    detail = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(f"row {row_id}: its image does not decode ({detail}); run `data prepare` again")


def to_rgb(image: Image.Image) -> Image.Image:
    """An opened image as a person would see it: upright, 8 bits a channel, on white.

    `image` itself is changed.
    """
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I") or image.mode == "F":
        return _eight_bits(image).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """8-bit gray of 16-bit, 32-bit or floating-point levels.

    16 bits span their full range. The other two state no range: it is the first of 0 to 1 (floating
    point), 0 to 255 and 0 to 65535 that holds all levels, or else the range of the levels themselves.
    """
    levels = np.nan_to_num(np.asarray(image, dtype=np.float32), posinf=0, neginf=0)
    low, high = float(levels.min()), float(levels.max())
    if image.mode.startswith("I;16"):
        low, high = 0.0, 65535.0
    elif low >= 0 and high <= 65535:
        tops = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
        low, high = 0.0, tops[bisect_left(tops, high)]
    scaled = (levels - low) * (255.0 / max(high - low, 1e-30))
    return Image.fromarray(np.round(scaled).clip(0, 255).astype(np.uint8))
