"""Images that hold the locked environment: what one is called, and which of them this desk knows."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.config.run_folder import write_whole

FILES = (
    "Dockerfile",
    ".dockerignore",
    "requirements/gpu.txt",
    "trainer/shell/setup.sh",
    "trainer/shell/installed.py",
)
"""All that an image is built from."""
RECORD = Path(".cache/images.json")
"""The images that `launch.py image` has pushed, or found in a registry."""
TAGGED = re.compile(r":([\w.-]+-[0-9a-f]{16})$")


@dataclass(frozen=True)
class Image:
    """One image that holds an environment."""

    reference: str
    """As cluster.image takes it: NAME@sha256:DIGEST, or NAME:TAG."""
    tag: str
    """Ends with the digest of what it was built from."""
    pulled_bytes: int = 0
    """Compressed layers, as a registry sends them; 0: not known."""

    @property
    def current(self) -> bool:
        """Whether its environment is the one of this checkout, so that a machine takes it as it is."""
        return self.tag.rpartition("-")[2] == environment_digest()


def environment_digest() -> str:
    """The digest of all files that an image is built from: another one is another environment."""
    found = hashlib.sha256()
    for name in FILES:
        content = Path(name).read_bytes()
        found.update(f"{name} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


def find_image(reference: str) -> Image | None:
    """The image of that name, if it is one that holds an environment: known from this desk, or by its tag."""
    for image in known_images():
        if image.reference == reference:
            return image
    tagged = TAGGED.search(reference)
    return Image(reference, tagged[1]) if tagged else None


def known_images() -> list[Image]:
    """Those that this desk has pushed or found."""
    try:
        return [Image(**row) for row in json.loads(RECORD.read_text())]
    except (OSError, ValueError, TypeError):
        return []


def remember_image(image: Image) -> None:
    """Keeps an image for the plan."""
    others = [asdict(one) for one in known_images() if one.reference != image.reference]
    RECORD.parent.mkdir(exist_ok=True)
    write_whole(RECORD, f"{json.dumps([*others, asdict(image)], indent=1)}\n".encode())
