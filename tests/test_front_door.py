"""launch.py on a machine that has Python and nothing else. Every interpreter here lacks pip, PyYAML and
rich."""

import ast
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bare(tmp_path):
    """Runs launch.py of a copy of the repository by a bare Python, with only the given programs on PATH."""
    venv.create(tmp_path / "bare", with_pip=False)
    for name in ("launch.py", "recipes", "trainer", "examples"):
        source = ROOT / name
        (shutil.copy if source.is_file() else shutil.copytree)(source, tmp_path / name)

    def run(*arguments: str, path: str = "") -> subprocess.CompletedProcess:
        keep = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
        env = keep | ({"PATH": path} if path == os.environ["PATH"] else {"PATH": path, "HOME": str(tmp_path)})
        command = [tmp_path / "bare/bin/python", tmp_path / "launch.py", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture
def shim(tmp_path):
    """Puts a `uv` of this text into a folder, whose path it gives."""

    def put(text: str) -> str:
        (tmp_path / "shims").mkdir()
        (tmp_path / "shims/uv").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "shims/uv").chmod(0o755)
        return str(tmp_path / "shims")

    return put


def test_the_file_is_python_3_9():
    ast.parse((ROOT / "launch.py").read_text(), feature_version=(3, 9))


def test_without_uv_and_pip_one_line_says_which_package_to_install(bare):
    done = bare("demo")
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert "python3-pip" in line


@pytest.mark.skipif(not shutil.which("uv"), reason="no uv here")
def test_it_restarts_itself_under_uv_and_passes_arguments_and_exit_code_on(bare):
    path = os.environ["PATH"]
    assert "2 CPU ranks" in bare("plan", "demo", path=path).stdout
    done = bare("up", "demoo", path=path)
    assert done.returncode == 2 and "did you mean demo?" in done.stderr


def test_uv_trusts_this_machines_certificates_where_it_has_a_list(bare, shim, tmp_path, monkeypatch):
    """A company's proxy signs with its own: uv's built-in list knows none of them."""
    monkeypatch.delenv("UV_SYSTEM_CERTS", raising=False)
    path_of_uv = shim('echo "certificates ${UV_SYSTEM_CERTS:-built in}"')
    file = tmp_path / "launch.py"
    (tmp_path / "ca.crt").touch()
    text = file.read_text()
    for path, said in (("ca.crt", "certificates 1"), ("nothing.crt", "certificates built in")):
        moved = text.replace("/etc/ssl/certs/ca-certificates.crt", str(tmp_path / path))
        for other in ("/etc/pki/tls", "/etc/ssl/cert.pem"):
            moved = moved.replace(other, "/nothing")
        file.write_text(moved)
        assert said in bare("list", path=path_of_uv).stdout


def test_a_uv_that_does_not_answer_is_not_taken(bare, shim):
    assert "python3-pip" in bare("list", path=shim("exit 127")).stderr


def test_a_uv_that_brings_nothing_ends_the_second_start(bare, shim, tmp_path):
    """No endless loop: this `uv` starts the file again with the same bare Python."""
    again = f"{tmp_path}/bare/bin/python {tmp_path}/launch.py list"
    done = bare("list", path=shim(f'[ "$1" = run ] && exec {again}\nexit 0'))
    assert done.returncode == 2 and "without Click, msgspec, PyYAML or rich" in done.stderr


def test_the_front_page_is_short():
    page = (ROOT / "README.md").read_text()
    assert len(page.split()) <= 900 and page.count("<img ") == 2
    bullets = re.findall(r"^- \*\*.*?(?=^- |^$)", page, re.M | re.S)
    assert len(bullets) == 5
    assert all(re.search(r"\d", one) and "](docs/" in one for one in bullets), "each a figure and a link"


PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
"""Those that are not in the site (tests/test_docs.py)."""


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page):
    file = ROOT / page
    for target in re.findall(r"(?:\]\(|src=\")([^)#\"]+)", file.read_text()):
        assert "://" in target or (file.parent / target).exists(), target


def test_the_help_of_the_tests_is_instant_and_installs_nothing(tmp_path):
    for name in ("launch.py", "recipes", "trainer"):
        (tmp_path / name).symlink_to(ROOT / name)
    began = time.monotonic()
    command = [sys.executable, "launch.py", "test", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - began < 10
    assert done.returncode == 0 and "--fast" in done.stdout and "-m nullgpu" in done.stdout
    assert not done.stderr and not (tmp_path / ".venvs").exists()
