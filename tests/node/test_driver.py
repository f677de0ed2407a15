"""trainer/driver.sh against shared objects that answer as CUDA's driver does: new, old, old with what helps, none."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = (
    "int cuInit(unsigned flags) {{ return {code}; }}\nint cuDriverGetVersion(int *v) {{ *v = {version}; return 0; }}\n"
)

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler: the driver's stand-in is compiled")


def driver(folder: Path, version: int, code: int = 0) -> Path:
    folder.mkdir()
    (folder / "cuda.c").write_text(SOURCE.format(version=version, code=code))
    command = ["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"]
    subprocess.run(command, check=True)
    return folder


def check(libraries="", compat="/nowhere"):
    """(exit code, what it says, LD_LIBRARY_PATH afterwards) of a strict shell that sources the check."""
    env = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(libraries), "SPOTRL_CUDA_COMPAT": str(compat)}
    code = 'set -euo pipefail\n. trainer/driver.sh 36\necho "path=$LD_LIBRARY_PATH"\n'
    done = subprocess.run(["bash", "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


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
    code, said = check(old, driver(tmp_path / "consumer", 13000, code=804))  # as on a GeForce
    assert code == 36 and "CUDA 12.8" in said


def test_a_machine_without_a_driver_or_with_a_broken_one_is_refused(tmp_path):
    code, said = check()
    assert code == 36 and "no GPU driver" in said
    code, said = check(driver(tmp_path / "broken", 13000, code=999))
    assert code == 36 and "cuInit says error 999" in said
