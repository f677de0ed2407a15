"""setup.sh ends with an environment that is whole and that a run can import, or it says what is wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT
from trainer.shell import installed

FOREIGN = {"examples", "recipes", "trainer"}
OF_OTHERS = {
    "torchvision": "processors of transformers",
    "triton": "kernels of torch and vLLM",
    "accelerate": "transformers and peft, to load weights",
    "fla": "vLLM and the delta rule's kernels",
    "cuda": "vLLM", "flashinfer": "vLLM", "cutlass": "vLLM",
    "pytest": "the checks of a card", "pytest_timeout": "the checks of a card",
    "tensorboard": "torch.utils.tensorboard",
}  # fmt: skip
"""Packages that no line of ours imports, and who does."""
MODULE_OF = {
    "huggingface-hub": "huggingface_hub",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "nvidia-ml-py": "pynvml",
}
IMPORTED = re.compile(r"(?m)^ *(?:import|from) (\w+)[.\w]*(?: import | as |$)")


def imported_by(*rooms: str) -> set[str]:
    """Packages that files of these rooms import."""
    names: set[str] = set()
    for room in rooms:
        for path in (ROOT / room).rglob("*.py"):
            names.update(IMPORTED.findall(path.read_text()))
    return names


UV = """#!/bin/sh
echo "$*" >> uv.log
case "$*" in
    venv*) mkdir -p .venvs/gpu/bin && cp python .venvs/gpu/bin/python ;;
esac
"""
PYTHON = """#!/bin/sh
case "$2" in
    files) cat missing; : > missing ;;
    imports) exit "$(cat imports)" ;;
esac
"""


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def record(folder: Path, package: str, *paths: str) -> None:
    """An installed wheel's RECORD; no file is made."""
    found = folder / f"{package}-1.0.dist-info" / "RECORD"
    found.parent.mkdir()
    found.write_text("".join(f"{path},sha256=x,1\n" for path in paths) + f"{found.parent.name}/RECORD,,\n")


def test_a_file_that_another_package_took_away_is_missed(tmp_path):
    record(tmp_path, "pycasbin", "casbin/enforcer.py", "casbin/__pycache__/enforcer.pyc")
    record(tmp_path, "whole", "whole.py")
    (tmp_path / "whole.py").write_text("")
    assert installed.incomplete_packages(tmp_path) == ["pycasbin"]


def test_what_cannot_be_imported_is_named_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "broken_bindings.py").write_text("import os\nos.cudaLibrary_t\n")
    (tmp_path / "guards_imports_alone.py").write_text(
        "try:\n    import broken_bindings\nexcept ImportError:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    first, second, third = installed.import_failures(
        ("guards_imports_alone", "json", "is_not_there", "broken_bindings")
    )
    assert first.startswith(
        "guards_imports_alone: AttributeError: module 'os' has no attribute 'cudaLibrary_t'"
    )
    assert first.endswith("broken_bindings.py:2)")
    assert second.startswith("is_not_there: ModuleNotFoundError")
    assert third.startswith("broken_bindings: ")


def test_all_that_the_trainer_imports_is_imported():
    wanted = imported_by("trainer")
    listed = {module.partition(".")[0] for module in installed.MODULES}
    assert wanted - set(sys.stdlib_module_names) - FOREIGN <= listed
    assert {"flashinfer", "cutlass", "vllm.v1.worker.gpu.sample.sampler"} <= set(installed.MODULES)
    wanted = imported_by("trainer", "recipes", "data_prep")
    assert listed - wanted - OF_OTHERS.keys() == set(), "imported by nobody"


def test_nothing_is_installed_on_nodes_that_nobody_imports():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    used = imported_by("trainer", "recipes", "data_prep") | OF_OTHERS.keys()
    names = [re.split(r"[\[=<>]", requirement)[0] for requirement in extras["train"]]
    unused = [name for name in names if MODULE_OF.get(name, name.replace("-", "_")) not in used]
    assert unused == [], "name who imports it in OF_OTHERS, or move it to another extra"


@pytest.mark.parametrize("fails", [False, True])
def test_setup_mends_what_is_incomplete_and_does_not_end_well_where_an_import_fails(tmp_path, fails):
    (tmp_path / "trainer/shell").mkdir(parents=True)
    (tmp_path / "requirements").mkdir()
    for name in ("setup.sh", "installed.py"):
        shutil.copy(ROOT / "trainer/shell" / name, tmp_path / "trainer/shell")
    (tmp_path / "requirements/gpu.txt").write_text("one==1\n")
    (tmp_path / "missing").write_text("pycasbin\nnumpy\n")
    (tmp_path / "imports").write_text(f"{int(fails)}\n")
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin/uv", UV)
    program(tmp_path / "bin/df", "#!/bin/sh\necho head\necho disk 1 1 999999999 1\n")
    program(tmp_path / "python", PYTHON)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "trainer/shell/setup.sh", "gpu"], cwd=tmp_path, env=env, capture_output=True
    )

    asked = (tmp_path / "uv.log").read_text().splitlines()[-1]
    assert "--reinstall-package pycasbin --reinstall-package numpy requirements/gpu.txt" in asked
    assert (done.returncode != 0) == fails
    assert (tmp_path / ".venvs/gpu/.stamp").exists() != fails


@pytest.mark.long
@pytest.mark.skipif(
    not (ROOT / ".venvs/gpu/bin/python").exists(), reason="no .venvs/gpu: bash trainer/shell/setup.sh gpu"
)
def test_the_gpu_environment_is_imported_without_a_gpu():
    command = [".venvs/gpu/bin/python", "trainer/shell/installed.py", "imports"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "imported what a run imports" in done.stdout
