"""What tools show comes in by the one decoder; what cannot be shown is a tool's failure."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from trainer.config import Turns
from trainer.turns.environments import environment_of
from trainer.turns.episode import FAILED, Observation, Situation
from trainer.turns.messages import image_of, packed, unpacked

MINE = """
from PIL import Image
from trainer.turns.episode import Observation


class Shows:
    shows_images = True

    def answer(self, situation, replies):
        width, height, text = eval(replies[-1])
        if width < 0:
            return text
        return Observation(text, [Image.new("RGB", (width, height))])
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(MINE)
    return environment_of(Turns(environment=f"{path}:Shows", tool_seconds=60.0))


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("(300, 1, 'thin')", "300 x 1"),
        ("(0, 5, 'empty')", "0 x 5"),
        ("(5000, 40, 'long')", "5000 x 40 cannot be shown: ratio above 100"),
        ("(5000, 5000, 'large')", "5000 x 5000 cannot be shown: more than"),
        ("(50, 50, 'half \\ud83d')", "half a character"),
        ("(-1, 0, 'half \\ud83d')", "half a character"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise_('\\ud83d')", "NameError"),
        ("(50, 50, 17)", "text"),
        ("(50, 50, None)", "text"),
    ],
)
def test_what_cannot_be_shown_is_a_tools_failure(environment, reply, reason):
    situation = Situation((), {}.get)
    shown = environment.answer(situation, [reply])
    assert shown.text.startswith(FAILED) and reason in shown.text and not shown.images
    shown.text.encode()
    again = environment.answer(situation, ["(300, 4, 'fine')"])
    assert (again.text, again.images[0].size) == ("fine", (300, 4)), "its process goes on"


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def through(image: Image.Image) -> Image.Image:
    """An image as a rank has it when a tool has sent it."""
    return unpacked(packed({}, Observation("", [image]).images))[1][0]


def test_transparency_is_white_and_levels_are_scaled_and_images_are_upright():
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert through(clear).getpixel((0, 0)) == (255, 255, 255)
    assert unpacked(packed({}, [clear]))[1][0].getpixel((0, 0)) == (255, 255, 255)
    deep = Image.new("I;16", (8, 8), 32896)
    assert through(deep).getpixel((0, 0)) == (128, 128, 128)
    exif = Image.Exif()
    exif[0x112] = 6
    turned = Image.open(io.BytesIO(encoded(Image.new("RGB", (8, 16)), "JPEG", exif=exif)))
    assert through(turned).size == (16, 8)


def test_a_server_sends_the_formats_of_rows_and_no_others(monkeypatch):
    picture = Image.new("RGB", (8, 8), "red")
    for kind in ("PNG", "WEBP", "BMP"):
        sent = image_of(base64.b64encode(encoded(picture, kind)).decode())
        assert through(sent).getpixel((0, 0))[0] > 250
    for kind in ("EPS", "PPM"):
        with pytest.raises(OSError, match="cannot identify"):
            image_of(base64.b64encode(encoded(picture, kind)).decode())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    bomb = base64.b64encode(encoded(Image.new("1", (12_000, 12_000)))).decode()
    with pytest.raises(ValueError, match="12000 x 12000"):
        Observation("", [image_of(bomb)])
