"""NCCL's library of InfiniBand is looked for before anything is downloaded: the real shell and loader, with a
/sys/class/infiniband that is made here and libraries that do not open."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.node.shells import ROOT, bash, program
from trainer.hardware.verbs import PACKAGES, missing_libraries

LIBRARIES = ("libibverbs.so.1", "libmlx5.so.1")


@pytest.fixture
def machine(tmp_path):
    """A machine with a driver that will do, two devices, and libraries that are no libraries; its apt-get
    mends them."""
    good = tmp_path / "good"
    for folder in ("good", "bin", "lib", "infiniband/mlx5_0", "infiniband/mlx5_1"):
        (tmp_path / folder).mkdir(parents=True)
    source = "int cuInit(unsigned f) { return 0; } int cuDriverGetVersion(int *v) { *v = 13000; return 0; }\n"
    (tmp_path / "cuda.c").write_text(source)
    for name in ("libcuda.so.1", *LIBRARIES):
        subprocess.run(["cc", "-shared", "-fPIC", "-o", good / name, tmp_path / "cuda.c"], check=True)
        (tmp_path / "lib" / name).write_text("no library")
    (tmp_path / "lib/libcuda.so.1").write_bytes((good / "libcuda.so.1").read_bytes())
    program(tmp_path / "bin/id", "echo 0")
    mends = f'echo "$*" >> {tmp_path}/calls; [ "$1" = update ] || cp {good}/* {tmp_path}/lib'
    program(tmp_path / "bin/apt-get", mends)
    return tmp_path


def start(machine, **more):
    env = {"PATH": f"{machine}/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": f"{machine}/lib"}
    env |= {"SPOTRL_INFINIBAND": f"{machine}/infiniband", "SPOTRL_NODES": "2"} | more
    return bash(". trainer/shell/driver.sh 36\necho goes on", env)


def test_root_installs_it(machine):
    code, out = start(machine)
    assert code == 0 and out.endswith("goes on\n") and "no libibverbs.so.1 libmlx5.so.1 here" in out
    update, install = (machine / "calls").read_text().splitlines()
    assert update.startswith("update") and install.endswith(PACKAGES)
    assert start(machine) == (0, "goes on\n") and len((machine / "calls").read_text().splitlines()) == 2


@pytest.mark.parametrize("lacks", ["root", "a mirror"])
def test_who_cannot_install_it_is_told_the_command(machine, lacks):
    program(
        *((machine / "bin/id", "echo 1000") if lacks == "root" else (machine / "bin/apt-get", "exit 100"))
    )
    code, out = start(machine)
    assert code == 2 and "goes on" not in out
    last = out.splitlines()[-1]
    assert last.startswith("error: without libibverbs.so.1 libmlx5.so.1 NCCL") and PACKAGES in last


@pytest.mark.parametrize(
    "more", [{"SPOTRL_NODES": "1"}, {"NCCL_IB_DISABLE": "1"}, {"SPOTRL_INFINIBAND": "/nowhere"}]
)
def test_nothing_is_asked_where_it_is_not_used(machine, more):
    assert start(machine, **more) == (0, "goes on\n") and not (machine / "calls").exists()


def test_a_set_up_that_is_not_told_the_nodes_goes_on(machine):
    program(machine / "bin/id", "echo 1000")
    assert start(machine, SPOTRL_NODES="") == (0, "goes on\n")


def test_devices_of_other_makers_need_no_mellanox_library(tmp_path):
    (tmp_path / "irdma0").mkdir()
    assert "libmlx5.so.1" not in missing_libraries(tmp_path)
    assert missing_libraries(tmp_path / "none") == []


def test_the_image_has_it():
    assert PACKAGES in (ROOT / "Dockerfile").read_text()
