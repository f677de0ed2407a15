"""What stands in a record where an image should be: a path, or a file's content in one of several forms."""

from __future__ import annotations

import base64
import re
from pathlib import PurePosixPath
from typing import Any

from data_prep.sources.file_records import first_value, structure
from data_prep.sources.row_source import BadRecord

MOST_PATH = 1024
"""Characters of a path; longer texts are contents, or no images."""
MOST_FOLDERS = 32
"""Parts of a path, each of which is looked for with those behind it."""
MOST_NAME_BYTES = 255
_BASE64_STARTS = ("iVBOR", "/9j/", "R0lGOD", "UklGR", "SUkq", "TU0AK", "Qk0")
"""First characters of PNG, JPEG, GIF, WebP, TIFF and BMP in base64."""
_BASE64 = re.compile(r"[A-Za-z0-9+/\r\n]+")
_CONTROL = re.compile("[\0-\x1f\x7f]")
_PYTHON = re.compile(r"""b['"]|\{\s*['"]""")
"""Start of bytes, or of a structure, as Python prints them into a table."""


def image_path(value: Any) -> str:
    """The path of an image that is a file of its own; empty where its content stands in the record.

    Raises BadRecord for a text that is neither.
    """
    value = _written(value)
    if isinstance(value, dict):
        if value.get("bytes") is not None:
            return ""
        return image_path(first_value(value, ("path", "url", "image", "image_url")))
    if not isinstance(value, str) or _is_content(value):
        return ""
    if re.match(r"https?://", value):
        raise BadRecord(
            "image_url", f"{value[:200]} is not on this machine: download the images, and give --images"
        )
    path = normalized(value) if len(value) <= MOST_PATH else ""
    names = path.split("/")
    longest = max(len(name.encode("utf-8", "replace")) for name in names)
    if not path or _CONTROL.search(path) or len(names) > MOST_FOLDERS or longest > MOST_NAME_BYTES:
        raise BadRecord("image_missing", f"a text of {len(value)} characters is no image: {value[:100]!r}")
    return path


def image_content(value: Any) -> bytes:
    """Bytes of an image inside a record. Raises ValueError."""
    value = _written(value)
    if isinstance(value, dict):
        return image_content(first_value(value, ("bytes", "url", "image", "image_url", "path"), b""))
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        head, comma, body = value.partition(",")
        encoded = body if comma and head.startswith("data:") else value
        return base64.b64decode("".join(encoded.split()), validate=True)  # lines of 76 characters
    raise ValueError(f"a {type(value).__name__} where an image should be")


def _written(value: Any) -> Any:
    """The value that a text writes as Python does, as tables of data frames have it; others as they are."""
    if not isinstance(value, str) or not _PYTHON.match(value):
        return value
    return value if (read := structure(value)) is None else read


def _is_content(text: str) -> bool:
    """Whether a text is a file's content, as a data URL or in base64."""
    if text.startswith("data:"):
        return True
    if len(text) > MOST_PATH:
        return _BASE64.fullmatch(text, 0, MOST_PATH) is not None
    return len(text) > 64 and text.startswith(_BASE64_STARTS)


def normalized(path: str) -> str:
    """An image's path without scheme, backslashes, `.` and leading slash; `..` is kept, and then
    matches nothing."""
    path = re.sub(r"^file:(//(localhost)?(?=/))?", "", path.strip()).replace("\\/", "/").replace("\\", "/")
    return str(PurePosixPath("/" + path)).lstrip("/")
