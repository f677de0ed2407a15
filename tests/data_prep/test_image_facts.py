"""Facts about images: what decodes, sizes, tokens against the real processor's rule, looks of near-identical
ones."""

from __future__ import annotations

import random

import pytest
from PIL import Image, ImageDraw

from data_prep.ingest.images import NEAR_LEVELS, image_tokens, inspect, smart_resize
from tests.data_prep.raw import drawing, encoded, image
from trainer.images.decoding import ImageLimits

LIMITS = ImageLimits()


def distance(a: str, b: str) -> int:
    return max(abs(x - y) for x, y in zip(bytes.fromhex(a), bytes.fromhex(b), strict=True))


USUAL = [
    *((mode, "PNG") for mode in ("RGB", "RGBA", "P", "L", "1", "I;16", "LA")),
    ("P", "GIF"),
    ("RGB", "BMP"),
]
USUAL += [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "WEBP")]


@pytest.mark.parametrize(("mode", "kind"), USUAL)
def test_every_usual_mode_and_format_is_read(mode, kind):
    image = drawing(1).convert("L").convert("I;16") if mode == "I;16" else drawing(1, mode=mode)
    facts = inspect(encoded(image, kind), LIMITS)
    assert (facts.error, facts.width, facts.height, facts.format) == ("", 160, 120, kind)
    assert len(facts.look) == 512 and facts.mode == mode


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("keep", [0.3, 0.7, 0.95])
def test_a_truncated_image_is_found(kind, keep):
    data = image(2, kind, width=640, height=480)
    facts = inspect(data[: int(keep * len(data))], LIMITS)
    assert facts.error.startswith("image_undecodable: ")


def test_damage_inside_is_found_though_a_jpeg_is_decoded_at_a_reduced_scale():
    progressive = encoded(drawing(2, 640, 480), "JPEG", progressive=True)
    large = encoded(drawing(5, 2000, 1500), "JPEG", quality=95)
    checksum = bytearray(image(2, width=640, height=480))
    checksum[len(checksum) // 2] ^= 255
    assert inspect(progressive, LIMITS).error == ""
    for data in (progressive[: len(progressive) // 2], large[:-3000], bytes(checksum)):
        assert inspect(data, LIMITS).error.startswith("image_undecodable: ")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "image_empty"),
        (b"<html>not found</html>", "image_undecodable"),
        (encoded(Image.new("RGB", (1, 300))), "image_too_small"),
        (encoded(Image.new("RGB", (27, 300))), "image_too_small"),
        (encoded(Image.new("RGB", (5600, 28))), "image_ratio"),
        (encoded(Image.new("1", (12000, 9000))), "image_too_large"),
        (encoded(Image.new("1", (30000, 30000))), "image_too_large"),
    ],
)
def test_what_the_model_cannot_take_is_named(data, reason):
    assert inspect(data, LIMITS).error.partition(":")[0] == reason


def test_the_smallest_and_longest_allowed_images_pass():
    assert inspect(encoded(Image.new("RGB", (28, 28))), LIMITS).error == ""
    assert inspect(encoded(Image.new("RGB", (2800, 28))), LIMITS).error == ""


def test_sizes_are_those_of_the_processor():
    processor = pytest.importorskip("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    rng = random.Random(0)
    for _ in range(500):
        width, height = rng.randrange(28, 4000), rng.randrange(28, 4000)
        if max(width, height) > 200 * min(width, height):
            continue
        low, high = rng.choice([(4 * 784, 1280 * 784), (56 * 56, 640 * 784), (512 * 512, 2048 * 2048)])
        expected = processor.smart_resize(height, width, factor=28, min_pixels=low, max_pixels=high)
        assert smart_resize(height, width, low, high) == expected
    assert image_tokens(640, 480, 4 * 784, 1280 * 784) == 391


def diagram(seed: int) -> Image.Image:
    """A few thin lines and letters on white, like the figures of geometry problems."""
    rng = random.Random(seed)
    image = Image.new("RGB", (500, 400), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    corners = [(rng.randrange(40, 460), rng.randrange(40, 360)) for _ in range(3 + rng.randrange(3))]
    draw.polygon(corners, outline=(0, 0, 0))
    for letter, corner in zip("ABCDE", corners, strict=False):
        draw.text(corner, letter, fill=(0, 0, 0))
    return image


@pytest.mark.parametrize(
    "draw", [lambda seed: drawing(seed, 640, 480), diagram], ids=["photo-like", "diagram"]
)
def test_near_identical_images_look_near_and_others_far(draw):
    originals = [draw(seed) for seed in range(30)]
    looks = [inspect(encoded(image), LIMITS).look for image in originals]
    for one, look in zip(originals, looks, strict=True):
        small = one.resize((one.width // 2, one.height // 2), Image.Resampling.BICUBIC)
        variants = [
            encoded(one, "JPEG", quality=75),
            encoded(small),
            encoded(one.convert("RGBA")),
            encoded(one.convert("L")),
        ]
        assert all(distance(inspect(variant, LIMITS).look, look) <= NEAR_LEVELS for variant in variants)
    assert min(distance(a, b) for i, a in enumerate(looks) for b in looks[:i]) > 1.2 * NEAR_LEVELS


def test_transparent_pixels_count_as_white():
    drawn = drawing(3).convert("RGBA")
    on_white = Image.new("RGBA", (160, 160), (255, 255, 255, 255))
    on_white.paste(drawn, (0, 0))
    hidden = Image.new("RGBA", (160, 160), (0, 0, 0, 0))
    hidden.paste(drawn, (0, 0))
    assert inspect(encoded(hidden), LIMITS).look == inspect(encoded(on_white), LIMITS).look
