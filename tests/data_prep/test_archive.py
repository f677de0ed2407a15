"""Streams of real archives: every kind, unsafe names and links refused, damage found."""

from __future__ import annotations

import io
import os
import tarfile
import tracemalloc
import zipfile

import pytest

from data_prep.ingest.archive import Refused, members, unpacked_bytes
from tests.data_prep.raw import image, write_tar
from trainer.config import ConfigError

FILES = {f"top/{i}.png": image(i) for i in range(5)}


def read(path):
    refused = Refused()
    return {m.name: f"-> {m.link}" if m.link else m.read() for m in members(path, refused)}, dict(
        refused.members
    )


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "tgz", "tar.bz2", "tar.xz"])
def test_every_kind_of_tar_is_read(tmp_path, ending):
    assert read(write_tar(tmp_path / f"img.{ending}", FILES)) == (FILES, {})


def test_zip_and_folder_are_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "img.zip", "w") as archive:
        for name, data in FILES.items():
            archive.writestr(name, data)
            (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "folder" / name).write_bytes(data)
    assert read(tmp_path / "img.zip") == (FILES, {})
    assert read(tmp_path / "folder") == (FILES, {})


def test_unsafe_members_are_refused_and_the_rest_is_read(tmp_path):
    hostile_names = "../escape.png", "/etc/absolute.png", "top/../../up.png", "C:/windows.png", "a\\b.png"
    hostile_links = (
        ("top/out.png", tarfile.SYMTYPE, "../../outside.png"),
        ("top/abs.png", tarfile.SYMTYPE, "/etc/passwd"),
        ("top/hard.png", tarfile.LNKTYPE, "../hard.png"),
        ("top/device", tarfile.CHRTYPE, ""),
    )

    def hostile(tar: tarfile.TarFile) -> None:
        for name in hostile_names:
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"bad"))
        for name, kind, target in hostile_links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)

    before = set(os.listdir(tmp_path.parent))
    found, refused = read(write_tar(tmp_path / "img.tar.gz", FILES, hostile))
    assert found == FILES
    assert set(refused) == {*hostile_names, *(name for name, _, _ in hostile_links)}
    assert refused["top/abs.png"] == "link to '/etc/passwd' leaves the archive"
    assert set(os.listdir(tmp_path.parent)) == before and os.listdir(tmp_path) == ["img.tar.gz"]


def test_links_inside_are_followed_as_aliases(tmp_path):
    def links(tar: tarfile.TarFile) -> None:
        soft, hard = ("top/soft.png", tarfile.SYMTYPE, "0.png"), ("hard.png", tarfile.LNKTYPE, "top/1.png")
        for name, kind, target in (soft, hard):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)

    found, refused = read(write_tar(tmp_path / "img.tar.gz", FILES, links))
    assert (found["top/soft.png"], found["hard.png"], refused) == ("-> top/0.png", "-> top/1.png", {})


def test_a_folder_of_links_is_read_as_the_hubs_cache_has_it(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "c0ffee" / "imgs").mkdir(parents=True)
    (tmp_path / "blobs" / "aa").write_bytes(image(1))
    (tmp_path / "snapshots" / "c0ffee" / "imgs" / "a.png").symlink_to("../../../blobs/aa")
    assert read(tmp_path / "snapshots" / "c0ffee") == ({"imgs/a.png": image(1)}, {})


def test_broken_and_looping_links_of_a_folder_are_refused(tmp_path):
    (tmp_path / "good.png").write_bytes(image(1))
    (tmp_path / "nothing.png").symlink_to("gone.png")
    (tmp_path / "ring.png").symlink_to("ring.png")
    (tmp_path / "again").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    found, refused = read(tmp_path)
    assert found == {"good.png": image(1)} and set(refused) == {"nothing.png", "ring.png", "pipe.png"}
    assert unpacked_bytes(tmp_path) == len(image(1))


def test_a_link_that_hides_in_a_zip_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "img.zip", "w") as archive:
        link = zipfile.ZipInfo("a.png")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("../b.png", b"x")
    found, refused = read(tmp_path / "img.zip")
    assert found == {} and set(refused) == {"a.png", "../b.png"}


def test_long_and_foreign_names_survive(tmp_path):
    files = {f"{'d' * 90}/{'e' * 120}/image.png": b"1", "top/ünï çödé 图.png": b"2"}
    assert read(write_tar(tmp_path / "img.tar.gz", files))[0] == files


def test_a_damaged_header_does_not_end_the_archive_in_silence(tmp_path):
    path = write_tar(tmp_path / "img.tar", FILES)
    data = bytearray(path.read_bytes())
    second = 512 + -(-len(FILES["top/0.png"]) // 512) * 512
    data[second + 148 : second + 156] = b"garbage!"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="not a header where one should be"):
        read(path)


def test_an_unknown_kind_is_named(tmp_path):
    (tmp_path / "img.rar").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"use .tar, .tar.gz"):
        read(tmp_path / "img.rar")


def test_the_unpacked_size_is_known_beforehand(tmp_path):
    content = sum(map(len, FILES.values()))
    for name in ("img.tar.gz", "img.tar"):
        size = unpacked_bytes(write_tar(tmp_path / name, FILES))
        assert content <= size <= content + 20 * 1024


def zipped(path, files: dict[str, bytes], **how):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, **how) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_a_member_that_inflates_a_thousandfold_is_refused_unread(tmp_path):
    path = zipped(tmp_path / "img.zip", {"bomb.png": bytes(64 << 20), "huge.png": bytes(200 << 20)} | FILES)
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    found, refused = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == FILES and peak < 8 << 20
    assert (
        "inflate to 67108864" in refused["bomb.png"] and "209715200 bytes, more than" in refused["huge.png"]
    )


def test_a_large_member_of_a_tar_or_folder_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.ingest.archive.MAX_MEMBER_BYTES", 5000)
    files = FILES | {"top/large.png": bytes(5001)}
    (tmp_path / "top").mkdir()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for where in (tmp_path / "top", write_tar(tmp_path / "img.tar.gz", files)):
        found, refused = read(where)
        assert len(found) == 5 and [*refused.values()] == ["5001 bytes, more than 5000"]


METHOD = b"PK\x01\x02\x14\x03\x14\0\0\0"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("cut.tar.gz", lambda data: data[: len(data) // 2]),
        ("no-checksum.tar.gz", lambda data: data[:-8]),
        ("wrong-checksum.tar.gz", lambda data: data[:-8] + b"abcd" + data[-4:]),
        ("torn.tar.gz", lambda data: data[: len(data) // 2] + bytes(200) + data[len(data) // 2 + 200 :]),
        ("html.tar.gz", lambda data: b"<html>404</html>"),
        ("empty.tar.gz", lambda data: b""),
        ("html.zip", lambda data: b"<html>404</html>"),
        ("cut.zip", lambda data: data[: len(data) // 2]),
        ("torn.zip", lambda data: data[:60] + bytes(40) + data[100:]),
        ("method.zip", lambda data: data.replace(METHOD + b"\x08", METHOD + b"\x63")),
    ],
)
def test_a_damaged_archive_is_never_taken_for_a_short_one(tmp_path, name, damage):
    path = tmp_path / name
    (zipped if path.suffix == ".zip" else write_tar)(path, FILES)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        ConfigError, match="is truncated, damaged or no archive .*: download it again"
    ) as caught:
        read(path)
        unpacked_bytes(path)
    assert "\n" not in str(caught.value)


def test_an_encrypted_zip_says_what_to_do(tmp_path):
    data = bytearray(zipped(tmp_path / "img.zip", {"a.png": image(1)}).read_bytes())
    for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(header) + flags] |= 1
    (tmp_path / "img.zip").write_bytes(data)
    with pytest.raises(ConfigError, match=r"a.png in .*img.zip is encrypted: unpack it"):
        read(tmp_path / "img.zip")
