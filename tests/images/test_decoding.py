"""The one decoder: orientation, depth, transparency, allowed formats, and sizes from headers alone."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from trainer.config import ConfigError
from trainer.images import decoding
from trainer.images.decoding import decode_image, image_size
from trainer.sampling import api_server


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def scene(width: int = 60, height: int = 40) -> Image.Image:
    """No two corners alike, so that every turning shows."""
    image = Image.new("RGB", (width, height), "white")
    for box, color in (((0, 0, 19, 9), "red"), ((40, 0, 59, 9), "green"), ((0, 30, 19, 39), "blue")):
        image.paste(color, box)
    return image


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied_and_the_header_tells_the_size(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = (
        {"quality": 100, "subsampling": 0} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    )
    data = encoded(scene(), kind, exif=exif, **options)
    plain = scene()
    plain.getexif()[0x0112] = orientation
    wanted = ImageOps.exif_transpose(plain)
    got = decode_image(data, "r")
    assert got.size == wanted.size == image_size(data, "r") == ((40, 60) if orientation > 4 else (60, 40))
    assert np.abs(np.asarray(got, dtype=int) - np.asarray(wanted, dtype=int)).max() <= (
        40 if kind == "JPEG" else 0
    )


RAMP = np.linspace(0, 1, 64 * 48).reshape(48, 64)


@pytest.mark.parametrize(
    ("levels", "kind"),
    [
        ((RAMP * 65535).astype(np.uint16), "PNG"),
        ((RAMP * 65535).astype(np.uint16), "TIFF"),
        ((RAMP * 65535).astype(np.int32), "TIFF"),
        (RAMP.astype(np.float32), "TIFF"),
        ((RAMP * 255).astype(np.float32), "TIFF"),
        ((RAMP * 3 - 1).astype(np.float32), "TIFF"),
    ],
    ids=["png-16", "tiff-16", "tiff-32", "float-1", "float-255", "float-any"],
)
def test_more_than_eight_bits_are_scaled_and_not_cut_off(levels, kind):
    got = np.asarray(decode_image(encoded(Image.fromarray(levels), kind), "r"), dtype=int)
    assert got.shape == (48, 64, 3) and np.abs(got[..., 0] - RAMP * 255).max() <= 1


def test_dark_sixteen_bit_images_stay_dark():
    dark = Image.fromarray(np.full((48, 64), 257 * 40, dtype=np.uint16))
    assert set(decode_image(encoded(dark), "r").get_flattened_data()) == {(40, 40, 40)}


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(mode):
    image = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 20, 40))
    if mode == "P":
        image = image.quantize(4)
    got = decode_image(encoded(image.convert(mode)), "r")
    assert got.getpixel((5, 5)) == (0, 0, 0) and got.getpixel((35, 5)) == (255, 255, 255)


@pytest.mark.parametrize("mode", ["1", "L", "CMYK", "YCbCr"])
def test_other_modes_become_rgb(mode):
    assert (
        decode_image(encoded(scene().convert(mode), "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"), "r").mode
        == "RGB"
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n",
        encoded(scene(), "PPM"),
        encoded(scene())[:-30],
        encoded(scene(), "JPEG")[:300],
    ],
    ids=["empty", "eps", "ppm", "cut png", "cut jpeg"],
)
def test_what_is_not_allowed_or_damaged_is_one_line_that_names_the_row(data):
    with pytest.raises(ConfigError, match="row r7: its image does not decode") as caught:
        decode_image(data, "r7")
    assert "\n" not in str(caught.value)


def test_an_image_above_the_limit_is_not_decoded(monkeypatch):
    monkeypatch.setattr(decoding, "MAX_PIXELS", 2000)
    with pytest.raises(ConfigError, match="60x40 is more than 2000 pixels"):
        decode_image(encoded(scene()), "r")


def test_sizes_are_read_without_decoding(monkeypatch):
    data = [encoded(scene(), kind) for kind in ("PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP")]
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    for one in data:
        assert image_size(one, "r") == (60, 40)


@pytest.fixture
def served(monkeypatch):
    """vLLM's loader of a request's images, as `serve` has it."""
    from vllm.multimodal.media.connector import MediaConnector
    from vllm.multimodal.media.image import ImageMediaIO

    monkeypatch.setattr(ImageMediaIO, "load_bytes", ImageMediaIO.load_bytes)
    api_server.decode_as_training()

    def load(data: bytes) -> Image.Image:
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        return MediaConnector().fetch_image(url)

    return load


def test_serving_shows_what_training_shows(served):
    deep = encoded(Image.fromarray((RAMP * 65535).astype(np.uint16)))
    clear = encoded(Image.new("LA", (40, 40), (0, 0)))
    for data in (deep, clear, encoded(scene(), "JPEG"), encoded(scene().convert("CMYK"), "TIFF")):
        assert served(data).tobytes() == decode_image(data, "r").tobytes()
    for size, kind in (((40, 3), "PNG"), ((600, 5), "PNG"), ((40, 40), "PPM")):
        with pytest.raises(ValueError, match="the image cannot be shown: "):
            served(encoded(Image.new("RGB", size), kind))
