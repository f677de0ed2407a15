"""The store of checked images: one pass, a ledger to resume from, workers that may die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from data_prep.ingest.archive import Member, Refused, members
from data_prep.ingest.image_store import ImageStore
from data_prep.ingest.wanted import Wanted
from tests.data_prep.raw import image, write_tar
from trainer.images.decoding import ImageLimits

LIMITS = ImageLimits()
FILES = {f"top/{i}.png": image(i) for i in range(40)}


def stream(path: Path):
    return lambda: members(path, Refused())


def test_wanted_images_are_stored_checked_and_others_counted(tmp_path):
    path = write_tar(tmp_path / "img.tar.gz", FILES | {"top/bad.png": b"no image", "notes.txt": b"x"})
    store = ImageStore(tmp_path / "work", LIMITS, "k")
    unused = store.fill(stream(path), Wanted([*list(FILES)[:30], "top/bad.png"]), workers=2)
    assert unused == 11 and len(store.stored) == 31
    assert all(store.read(name) == FILES[name] for name in list(FILES)[:30])
    good, bad = store.facts("top/3.png"), store.facts("top/bad.png")
    assert good and (good.width, good.height, good.error) == (160, 120, "")
    assert bad and bad.error.startswith("image_undecodable")
    assert store.facts("top/35.png") is None


def test_links_give_their_targets_image_even_if_nobody_asked_for_the_target(tmp_path):
    def links(tar: tarfile.TarFile) -> None:
        for name, target in (
            ("a.png", "b.png"),
            ("b.png", "top/5.png"),
            ("ring1", "ring2"),
            ("ring2", "ring1"),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)

    path = write_tar(tmp_path / "img.tar.gz", FILES, links)
    store = ImageStore(tmp_path / "work", LIMITS, "k")
    store.fill(stream(path), Wanted(["a.png", "ring1"]), workers=1)
    assert store.read("a.png") == FILES["top/5.png"] and store.facts("ring1") is None


def test_other_limits_or_another_archive_start_anew(tmp_path):
    store = ImageStore(tmp_path / "work", LIMITS, "k")
    store.fill(lambda: [Member.of("a", FILES["top/0.png"])], Wanted(["a"]), workers=1)
    store.close()
    assert ImageStore(tmp_path / "work", LIMITS, "another key").resumed == 0


SLOW = """
import sys, time
from pathlib import Path
from data_prep.ingest import image_store
from data_prep.ingest.archive import Refused, members
from trainer.images.decoding import ImageLimits
from data_prep.ingest.wanted import Wanted
def slowly():
    for member in members(Path(sys.argv[1]), Refused()):
        time.sleep(0.05)
        yield member
if __name__ == "__main__":
    image_store.BATCH_FILES = 4
    store = image_store.ImageStore(Path(sys.argv[2]), ImageLimits(), "k")
    store.fill(slowly, Wanted(sys.argv[3].split()), 1)
"""


def test_a_fill_killed_with_sigkill_goes_on(tmp_path):
    path = write_tar(tmp_path / "img.tar.gz", FILES)
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, str(script), str(path), str(tmp_path / "work"), " ".join(FILES)],
        env=os.environ | {"PYTHONPATH": str(root)},
        start_new_session=True,
    )
    ledger = tmp_path / "work" / "images.jsonl"
    end = time.monotonic() + 60
    while time.monotonic() < end and not (ledger.exists() and len(ledger.read_bytes().splitlines()) > 8):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with open(ledger, "ab") as file:
        file.write(b'["half a li')
    store = ImageStore(tmp_path / "work", LIMITS, "k")
    assert 8 <= store.resumed < len(FILES)
    store.fill(stream(path), Wanted(FILES), workers=1)
    assert all(store.read(name) == data for name, data in FILES.items())
    store.close()
    assert (tmp_path / "work" / "images.bin").stat().st_size == sum(map(len, FILES.values()))
    assert ImageStore(tmp_path / "work", LIMITS, "k").resumed == len(FILES)
