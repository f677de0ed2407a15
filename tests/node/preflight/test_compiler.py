"""What Triton needs to build its launchers."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.node.shells import ROOT, bash, program
from trainer.node.preflight.host import missing_compiler_parts


@pytest.fixture
def tools(tmp_path):
    """A PATH with what setup.sh calls, but no compiler."""
    for name in ("bash", "dirname", "cat", "sha256sum", "cut", "mkdir", "flock", "df", "awk", "uv", "sed"):
        if found := shutil.which(name):
            (tmp_path / name).symlink_to(found)
    return tmp_path


def test_a_compiler_by_any_of_its_names_or_by_cc(tools, tmp_path):
    (tmp_path / "Python.h").write_text("")
    env = {"PATH": str(tools)}
    assert missing_compiler_parts(env, str(tmp_path)) == ["no C compiler (gcc or clang or cc)"]
    assert missing_compiler_parts(env | {"CC": "icx"}, str(tmp_path)) == ["no C compiler (icx)"]
    program(tools / "icx", "")
    assert missing_compiler_parts(env | {"CC": "icx"}, str(tmp_path)) == []
    program(tools / "clang", "")
    assert missing_compiler_parts(env, str(tmp_path)) == []


def test_the_headers_of_this_python(tmp_path):
    lacks = missing_compiler_parts(os.environ, str(tmp_path))
    assert lacks[-1] == f"no Python.h in {tmp_path}"


def test_the_gpu_environment_is_not_downloaded_in_vain(tools, tmp_path):
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "requirements", clone / "requirements")
    (clone / "trainer/shell").mkdir(parents=True)
    shutil.copy(ROOT / "trainer/shell/setup.sh", clone / "trainer/shell")
    env = {"PATH": str(tools), "HOME": str(tmp_path)}
    code, out = bash("bash trainer/shell/setup.sh gpu", env, clone)
    assert code == 2 and "install gcc" in out
    assert not (clone / ".venvs/gpu").exists()
