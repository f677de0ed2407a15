"""Facts about a picture: whether it decodes, its size, its tokens, and a thumbnail that near-identical ones share."""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from dataclasses import dataclass

FACTOR = 28
"""One image token of Qwen2.5-VL is 28 x 28 pixels (patches of 14, merged 2 x 2)."""
LOOK_SIDE = 16
"""Pictures are compared as LOOK_SIDE x LOOK_SIDE gray thumbnails, their contrast stretched."""
MAX_STRETCH = 5.0
"""So that thin lines on white count, and the noise of a flat picture does not."""
NEAR_LEVELS = 50
"""Thumbnails that differ by at most this many of 255 levels everywhere are of near-identical pictures."""


@dataclass(frozen=True)
class Picture:
    """Facts about one encoded picture."""

    sha256: str
    """Of the encoded bytes."""
    width: int = 0
    height: int = 0
    """Pixels, before any resizing."""
    format: str = ""
    """Pillow's name: PNG, JPEG, WEBP..."""
    mode: str = ""
    """Pillow's name: RGB, RGBA, P, L, CMYK..."""
    look: str = ""
    """Thumbnail by which near-identical pictures are found, in hex (see `appearance`)."""
    error: str = ""
    """Why it cannot be used; empty if it can. The word before the colon is the reason that is counted."""


def smart_resize(height: int, width: int, min_pixels: int, max_pixels: int, factor: int = FACTOR) -> tuple[int, int]:
    """Height and width after the Qwen2.5-VL processor's resize (transformers, Qwen2VLImageProcessor).

    Both become multiples of `factor`, the area lies within [min_pixels, max_pixels], the ratio is kept as nearly as
    that allows. Raises ValueError for a ratio above 200, as the processor does.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"aspect ratio of {width}x{height} is above 200")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def image_tokens(width: int, height: int, min_pixels: int, max_pixels: int) -> int:
    """Number of `<|image_pad|>` tokens of one picture."""
    new_height, new_width = smart_resize(height, width, min_pixels, max_pixels)
    return (new_height // FACTOR) * (new_width // FACTOR)


@dataclass(frozen=True)
class ImageLimits:
    """What a picture must keep to."""

    min_side: int = FACTOR
    """Shortest side in pixels. Below 28 the processors in use disagree about the size after resizing."""
    max_ratio: float = 100.0
    """Longest over shortest side. The processor refuses above 200, and near it also its own output."""
    max_image_pixels: int = 89_478_485
    """Largest area in pixels (Pillow's own limit for what it takes as a decompression bomb)."""


def inspect(data: bytes, limits: ImageLimits, fast_png: bool = False) -> Picture:
    """Decodes the whole picture and returns the facts; never raises for bad data.

    A JPEG is decoded in gray at a reduced scale: every bit of the entropy-coded stream is read all the same, so a
    truncated file is found, and only the inverse transform of detail that nobody looks at is saved. With `fast_png`
    the usual kinds of PNG are read by `png.py`, which takes half a second to load and a third of the time.
    """
    from PIL import Image, UnidentifiedImageError

    sha256 = hashlib.sha256(data).hexdigest()
    if not data:
        return Picture(sha256, error="image_empty: zero bytes")
    width = height = 0
    kind = mode = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data)) as image:
                width, height, kind, mode = image.width, image.height, image.format or "", image.mode
                error = size_error(width, height, limits)
                if error:
                    return Picture(sha256, width, height, kind, mode, error=error)
                levels = _means_of_png(data) if fast_png and kind == "PNG" else None
                if levels is not None:
                    return Picture(sha256, width, height, kind, mode, stretched(levels))
                image.draft("L", (4 * LOOK_SIDE, 4 * LOOK_SIDE))
                image.load()
                return Picture(sha256, width, height, kind, mode, appearance(image))
    except Image.DecompressionBombError:
        return Picture(sha256, width, height, kind, mode, error="image_too_large: refused as a decompression bomb")
    except UnidentifiedImageError:
        return Picture(sha256, error="image_undecodable: no known picture format, or its header is damaged")
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, ValueError, struct.error, ...
        detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return Picture(sha256, width, height, kind, mode, error=f"image_undecodable: {detail}")


def _means_of_png(data: bytes):
    """As `png.gray_means`; None also where it fails, since only Pillow says that a picture is damaged."""
    try:
        from data_prep.ingest import png

        return png.gray_means(data, LOOK_SIDE)
    except Exception:
        return None


def size_error(width: int, height: int, limits: ImageLimits) -> str:
    """Why a picture of this size is left out; empty if it is not."""
    short, long = min(width, height), max(width, height)
    if short < limits.min_side:
        return f"image_too_small: {width}x{height}, shortest side below {limits.min_side}"
    if long > limits.max_ratio * short:
        return f"image_ratio: {width}x{height}, ratio above {limits.max_ratio:g}"
    if width * height > limits.max_image_pixels:
        return f"image_too_large: {width}x{height}, more than {limits.max_image_pixels} pixels"
    return ""


def appearance(image) -> str:
    """The thumbnail that near-identical pictures nearly share: LOOK_SIDE^2 bytes, in hex.

    Each level is the mean over its part of the picture (transparent pixels count as white), so it survives scaling and
    compression; contrast is stretched to the full range, by MAX_STRETCH at most.
    """
    import numpy as np
    from PIL import Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba)
    gray = image.convert("L").convert("F").resize((LOOK_SIDE, LOOK_SIDE), Image.Resampling.BOX)
    return stretched(np.asarray(gray, dtype=np.float32))


def stretched(levels) -> str:
    """Mean levels [LOOK_SIDE, LOOK_SIDE] as a thumbnail in hex, contrast stretched."""
    import numpy as np

    high, low = levels.max(), levels.min()
    stretch = min(MAX_STRETCH, 255.0 / max(high - low, 1.0))
    return (255.0 - (high - levels) * stretch).round().astype(np.uint8).tobytes().hex()
