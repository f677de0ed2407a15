"""trainer/shell/driver.sh against shared objects that answer as CUDA's driver does: new, old, old with what
helps, none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.shells import ROOT, bash, program

SOURCE = """int cuInit(unsigned flags) {{ return {code}; }}
int cuDriverGetVersion(int *v) {{ *v = {version}; return 0; }}
"""

pytestmark = pytest.mark.skipif(
    not shutil.which("cc"), reason="no C compiler: the driver's stand-in is compiled"
)


def driver(folder: Path, version: int, code: int = 0) -> Path:
    folder.mkdir()
    (folder / "cuda.c").write_text(SOURCE.format(version=version, code=code))
    command = ["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"]
    subprocess.run(command, check=True)
    return folder


def check(libraries="", compat="/nowhere"):
    """(exit code, what it says, LD_LIBRARY_PATH afterwards) of a strict shell that sources the check."""
    env = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(libraries), "SPOTRL_CUDA_COMPAT": str(compat)}
    return bash('. trainer/shell/driver.sh 36\necho "path=$LD_LIBRARY_PATH"', env)


def asked(libraries):
    """(exit code, what it says) of the command that asks the driver, with these libraries."""
    env = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(libraries)}
    return bash(f"{sys.executable} -I trainer/hardware/driver.py", env)


def test_a_new_driver_is_used_as_it_is(tmp_path):
    new = driver(tmp_path / "new", 13000)
    assert check(new) == (0, f"path={new}\n")
    assert check(driver(tmp_path / "newer", 13010))[0] == 0


def test_an_old_driver_leaves_with_the_code_that_asks_for_another_machine(tmp_path):
    code, said = check(driver(tmp_path / "old", 12080))
    assert code == 36 and said.count("\n") == 1
    assert "its GPU driver is of CUDA 12.8, CUDA 13 needs driver 580 or newer" in said


def test_compatibility_libraries_are_used_where_they_work_and_only_there(tmp_path):
    old, compat = driver(tmp_path / "old", 12080), driver(tmp_path / "compat", 13000)
    code, said = check(old, compat)
    assert code == 0 and f"path={compat}:{old}\n" in said and "CUDA 12080" not in said
    assert asked(f"{compat}:{old}") == (0, "the loaded driver library runs CUDA 13\n")
    assert asked(old)[0] == 36
    code, said = check(old, driver(tmp_path / "consumer", 13000, code=804))  # as on a GeForce
    assert code == 36 and "CUDA 12.8" in said


def test_a_machine_without_a_driver_or_with_a_broken_one_is_refused(tmp_path):
    code, said = check()
    assert code == 36 and "no GPU driver" in said
    code, said = check(driver(tmp_path / "broken", 13000, code=999))
    assert code == 36 and "cuInit says error 999" in said


def test_refused_machines_are_counted_in_the_bucket_and_come_to_an_end(tmp_path):
    """A checkout whose `desk` environment is this one; every start gets this machine again."""
    work = tmp_path / "work"
    shutil.copytree(ROOT / "trainer", work / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    (work / "requirements").mkdir()
    shutil.copy(ROOT / "requirements/gpu.txt", work / "requirements")
    (work / "trainer/shell/setup.sh").write_text('[ "$1" = desk ]\n')
    program(work / ".venvs/desk/bin/python", f'exec {sys.executable} "$@"')
    (tmp_path / "bucket").mkdir()
    env = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(driver(tmp_path / "old", 12080)), "RUN_ID": "r"}
    env |= {"BUCKET": f"file://{tmp_path}/bucket", "SPOTRL_CUDA_COMPAT": "/nowhere", "HOME": str(tmp_path)}

    def start(launch="first", **more):
        own = env | {"SPOTRL_LAUNCH": launch} | more
        return bash(". trainer/shell/driver.sh 36 10\necho on", own, work)

    done = [start() for _ in range(4)]
    assert [code for code, _ in done] == [36, 36, 38, 38], done
    assert "has failed its checks 3 times" in done[-1][1] and "resume" in done[-1][1]
    assert start("resumed")[0] == 36, "a new launch starts counting again"
    assert start(BUCKET="")[0] == 36
