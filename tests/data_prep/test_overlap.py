"""Which images are one: scaled and re-encoded ones are, templates that differ in a number are not."""

from __future__ import annotations

import pytest
from PIL import Image, ImageDraw, ImageFont

from data_prep.checks.overlap import same_image
from tests.data_prep.raw import drawing, encoded


def triangle(number: int) -> Image.Image:
    image = Image.new("RGB", (420, 320), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=18)
    draw.polygon([(60, 260), (360, 260), (200, 50)], outline="black", width=2)
    for place, text in (((200, 265), number), ((90, 140), 12), ((300, 140), 9)):
        draw.text(place, str(text), fill="black", font=font)
    return image


@pytest.mark.parametrize(
    "image", [triangle(47), drawing(1, 640, 480), drawing(2, 320, 240)], ids=["drawing", "large", "small"]
)
def test_the_same_image_scaled_or_re_encoded_is_found(image):
    half = image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC)
    for other in (encoded(image, "JPEG", quality=50), encoded(half), encoded(image, "WEBP", quality=70)):
        assert same_image(encoded(image), other) and same_image(other, encoded(image))


def test_templates_that_differ_in_one_number_are_not_the_same():
    theirs = encoded(triangle(47))
    taken = [number for number in range(10, 100) if same_image(encoded(triangle(number)), theirs)]
    assert 47 in taken and len(taken) <= 2  # 42 differs from 47 by a few thin pixels
