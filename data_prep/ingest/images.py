"""Facts about an image: whether it decodes, its size, its tokens, and a thumbnail that near-identical
ones share."""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

from trainer.images.decoding import FORMATS, ImageLimits, open_image, size_error, to_rgb, upright_size

FACTOR = 28
"""Side in pixels of an image token of Qwen2.5-VL (patches of 14, merged 2 x 2)."""
LOOK_SIDE = 16
"""Side of the gray thumbnails with stretched contrast by which images are compared."""
MAX_STRETCH = 5.0
"""Largest stretch: thin lines on white count, but the noise of a flat image does not."""
NEAR_LEVELS = 50
"""Levels, of 255, by which thumbnails of near-identical images differ at most."""


@dataclass(frozen=True)
class ImageFacts:
    """Facts about one encoded image."""

    sha256: str
    """sha256 of the encoded bytes."""
    width: int = 0
    height: int = 0
    """Width and height are in pixels, before any resizing."""
    format: str = ""
    """Pillow's name: PNG, JPEG, WEBP..."""
    mode: str = ""
    """Pillow's name: RGB, RGBA, P, L, CMYK..."""
    look: str = ""
    """Thumbnail by which near-identical images are found, in hex (see `stretched`)."""
    frames: int = 1
    """Frames or pages, of which the first is the image."""
    error: str = ""
    """Why it cannot be used; empty if it can. The word before the colon is the reason that is counted."""


def smart_resize(
    height: int, width: int, min_pixels: int, max_pixels: int, factor: int = FACTOR
) -> tuple[int, int]:
    """Height and width after the Qwen2.5-VL processor's resize (transformers, Qwen2VLImageProcessor).

    Both become multiples of `factor`, the area lies within [min_pixels, max_pixels], the ratio is kept
    as nearly as that allows. Raises ValueError for a ratio above 200, as the processor does.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"aspect ratio of {width}x{height} is above 200")
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def image_tokens(width: int, height: int, min_pixels: int, max_pixels: int, factor: int = FACTOR) -> int:
    """Number of `<|image_pad|>` tokens of one image. factor: side in pixels of an image token."""
    new_height, new_width = smart_resize(height, width, min_pixels, max_pixels, factor)
    return (new_height // factor) * (new_width // factor)


def inspect(data: bytes, limits: ImageLimits) -> ImageFacts:
    """Decodes the whole image, as training will, and returns the facts; never raises for bad data.

    A JPEG is decoded in gray at a reduced scale: every bit of the entropy-coded stream is read all the
    same, so a truncated file is found, and only the inverse transform of detail that nobody looks at is
    saved.
    """
    sha256 = hashlib.sha256(data).hexdigest()
    if not data:
        return ImageFacts(sha256, error="image_empty: zero bytes")
    width = height = 0
    kind = mode = ""
    try:
        with warnings.catch_warnings(action="ignore"), open_image(data) as image:
            kind, mode = image.format or "", image.mode
            width, height = upright_size(image, data)
            error = size_error(width, height, limits)
            if error:
                return ImageFacts(sha256, width, height, kind, mode, error=error)
            if kind == "PNG":
                open_image(data).verify()  # decoding takes what is damaged inside for black
            frames = getattr(image, "n_frames", 1)
            image.draft("L", (4 * LOOK_SIDE, 4 * LOOK_SIDE))
            look = stretched(levels(to_rgb(image))).tobytes().hex()
            return ImageFacts(sha256, width, height, kind, mode, look, frames)
    except Image.DecompressionBombError:
        return ImageFacts(
            sha256, width, height, kind, mode, error="image_too_large: refused as a decompression bomb"
        )
    except UnidentifiedImageError:
        return ImageFacts(
            sha256, error=f"image_undecodable: none of {', '.join(FORMATS)}, or its header is damaged"
        )
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, ValueError, struct.error, ...
        detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return ImageFacts(sha256, width, height, kind, mode, error=f"image_undecodable: {detail}")


def levels(image: Image.Image, side: int = LOOK_SIDE) -> np.ndarray:
    """Mean gray levels of an upright RGB image, [side, side] float32, which survive scaling and
    compression."""
    gray = image.convert("L").convert("F").resize((side, side), Image.Resampling.BOX)
    return np.asarray(gray, dtype=np.float32)


def stretched(means: np.ndarray) -> np.ndarray:
    """Mean levels as uint8, the brightest white, contrast stretched to the full range, by MAX_STRETCH
    at most."""
    high, low = means.max(), means.min()
    stretch = min(MAX_STRETCH, 255.0 / max(high - low, 1.0))
    return (255.0 - (high - means) * stretch).round().astype(np.uint8)
