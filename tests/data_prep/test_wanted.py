"""Which member of an archive a row's path means."""

from __future__ import annotations

import pytest

from data_prep.ingest.wanted import Wanted
from data_prep.sources.image_values import normalized
from data_prep.sources.own_files import subsource


def found(paths: list[str], members: list[str]) -> list[str | None]:
    wanted = Wanted(normalized(path) for path in paths)
    for member in members:
        wanted.match(member)
    return [wanted.member(normalized(path)) for path in paths]


@pytest.mark.parametrize(
    "path",
    [
        "/foreign/prefix/mathv60k_img/a/1.png",
        "\\/foreign\\/prefix\\/mathv60k_img\\/a\\/1.png",
        "file:///foreign/mathv60k_img/a/1.png",
        "file://localhost/foreign/mathv60k_img/a/1.png",
        "file:/x/mathv60k_img/a/1.png",
        "data/mathv60k/mathv60k_img/a/1.png",
        "./mathv60k_img//a/./1.png",
        "mathv60k_img/a/1.png",
        "a/1.png",
        "1.png",
        "C:\\data\\mathv60k_img\\a\\1.png",
    ],
)
def test_every_way_to_write_a_path_finds_its_member(path):
    assert found([path], ["mathv60k_img/a/0.png", "mathv60k_img/a/1.png"]) == ["mathv60k_img/a/1.png"]


AB = ["img/a/1.png", "img/b/1.png"]
NAMED = ["/x/img/b/1.png", "/x/img/a/1.png", "/x/img/c/1.png"]


@pytest.mark.parametrize(
    ("paths", "members", "expected"),
    [
        (["/foreign/mathv60k_img/a/1.png"], ["a/1.png"], ["a/1.png"]),
        (NAMED, AB, ["img/b/1.png", "img/a/1.png", None]),
        (["1.png", "2.png"], ["a/1.png", "b/1.png", "b/2.png"], ["", "b/2.png"]),
        (["a/1.png"], ["backup/a/1.png", "a/1.png"], ["a/1.png"]),
        (["a/1.png"], ["a/1.png", "backup/a/1.png"], ["a/1.png"]),
        (["other/../1.png"], ["img/a/2.png", "other/1.png"], [None]),
    ],
    ids=["without the top", "equal names", "ambiguous", "exact name last", "exact name first", "climbs"],
)
def test_a_path_means_one_member_or_none(paths, members, expected):
    assert found(paths, members) == expected


def test_sources_are_named_by_the_folder_below_the_archives_top():
    assert subsource(["x/mathv60k_img/IconQA/images/3.png"]) == "IconQA"
    for path in ("x/mathv60k_img/3.png", "3.png", "mathv60k_img/images/3.png"):
        assert subsource([path]) == ""
