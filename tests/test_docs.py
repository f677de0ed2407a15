"""The pages are what the code says, and a site without a broken link."""

import json
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import tables  # ty: ignore[unresolved-import]

PAGES = sorted((ROOT / "docs").glob("*.md"))
CONFIG = ROOT / ".ci/mkdocs.yml"
MOST_WORDS = 30_600
"""In all pages and README together, without what is generated, drawn, or a command."""
GENERATED = re.compile(
    r"<!-- (\w+): python.*?<!-- end of \1 -->|<!-- drawn by.*?<!-- end of the drawing -->", re.S
)
CODE = re.compile(r"^```.*?^```|^ {4}\S[^\n]*", re.M | re.S)


@pytest.mark.parametrize("page", tables.TABLES)
def test_a_table_is_what_the_code_says(page):
    text = (ROOT / "docs" / page).read_text()
    assert tables.written(page, text) == text, f"run `{tables.COMMAND}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_who_it_is_for(page):
    head, audience = page.read_text().split("\n\n")[:2]
    assert re.fullmatch("# .+", head)
    assert re.match(r"\*For [^*]+\.\* ", audience) and len(audience.split()) <= 60


def test_a_person_can_read_them():
    pages = [*PAGES, ROOT / "README.md"]
    text = GENERATED.sub("", "\n".join(page.read_text() for page in pages))
    text = CODE.sub("", text)
    assert sum(any(map(str.isalnum, word)) for word in text.split()) <= MOST_WORDS


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as mkdocs builds it, every warning an error, with the config that CI has."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", CONFIG, "-d", out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_the_site_has_every_page_and_no_broken_link(site):
    found = json.loads((site / "search/search_index.json").read_text())["docs"]
    searched = {entry["location"].partition("#")[0] for entry in found}
    assert {page.with_suffix(".html").name for page in PAGES} <= searched | {"index.html"}
    assert "" in searched or "index.html" in searched


def test_links_from_outside_lead_to_a_heading(site):
    outside = [*ROOT.glob("*.md"), *ROOT.glob("*/*/*.md")]
    links = {
        (page.name, found[1], found[2])
        for page in outside
        for found in re.finditer(r"\]\((?:\.\./)*docs/([a-z0-9-]+)\.md#([^)]+)\)", page.read_text())
    }
    assert len(links) > 3
    for page, name, heading in links:
        assert f'id="{heading}"' in (site / f"{name}.html").read_text(), (page, name, heading)


def test_a_reader_of_the_site_asks_nobody_else(site):
    for page in site.glob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert loaded == [], page.name


def test_the_start_page_leads_to_every_page():
    start = (ROOT / "docs/index.md").read_text()
    assert [page.name for page in PAGES if page.name != "index.md" and f"]({page.name})" not in start] == []


def test_a_broken_link_fails_the_site(tmp_path):
    """The build would not say that all is well if it were not."""
    sys.path.insert(0, str(CONFIG.parent))
    import mkdocs_links  # ty: ignore[unresolved-import]

    with pytest.raises(FileNotFoundError, match=r"nothing\.py"):
        mkdocs_links.outside("[x](../trainer/nothing.py)", "page.md")
    assert mkdocs_links.outside("[x](../trainer/__init__.py)", "page.md") == "x (`trainer/__init__.py`)"
    assert "strict: true\n" in CONFIG.read_text()
