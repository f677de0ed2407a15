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


def test_a_folder_without_the_archives_top_is_matched_too():
    assert found(["/foreign/mathv60k_img/a/1.png"], ["a/1.png"]) == ["a/1.png"]


def test_equal_file_names_in_other_folders_are_not_confused():
    members = ["img/a/1.png", "img/b/1.png"]
    assert found(["/x/img/b/1.png", "/x/img/a/1.png", "/x/img/c/1.png"], members) == [
        "img/b/1.png",
        "img/a/1.png",
        None,
    ]


def test_a_bare_name_that_two_members_have_is_ambiguous():
    assert found(["1.png", "2.png"], ["a/1.png", "b/1.png", "b/2.png"]) == ["", "b/2.png"]


def test_the_exact_name_wins():
    assert found(["a/1.png"], ["backup/a/1.png", "a/1.png"]) == ["a/1.png"]
    assert found(["a/1.png"], ["a/1.png", "backup/a/1.png"]) == ["a/1.png"]


def test_a_path_that_climbs_is_no_way_around_the_names():
    assert found(["other/../1.png"], ["img/a/2.png", "other/1.png"]) == [None]


def test_sources_are_named_by_the_folder_below_the_archives_top():
    assert subsource(["x/mathv60k_img/IconQA/images/3.png"]) == "IconQA"
    assert (
        subsource(["x/mathv60k_img/3.png"])
        == ""
        == subsource(["3.png"])
        == subsource(["mathv60k_img/images/3.png"])
    )
