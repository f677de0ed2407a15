"""The batch scripts of Slurm and PBS: their directives, containers and bodies, the latter run under
stand-ins."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from recipes.presets import get
from recipes.recipe.spec import override
from recipes.records.run_record import RunRecord
from tests.recipes.rendered import launch_commands, render
from trainer.config import ConfigError

ROOT = Path(__file__).parents[2]


def test_slurm_directives():
    recipe = override(
        get("grpo-qwen2.5-vl-72b-mathv60k"), ["site.partition=gpu", "site.account=me", "site.grace_s=60"]
    )
    text = next(iter(render(recipe, "slurm").values()))
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--requeue", "--time=3-00:00:00"} <= set(
        lines
    )
    assert {"--partition=gpu", "--account=me", "--signal=TERM@60", "--open-mode=append"} <= set(lines)
    first = next(i for i, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
    assert all(
        i < first for i, line in enumerate(text.splitlines()) if line.startswith("#SBATCH")
    )  # later ones are ignored


@pytest.mark.parametrize(
    ("container", "inside"),
    [
        ("pyxis", "--container-image=pytorch/pytorch:2.13.0"),
        ("apptainer", "apptainer exec --nv"),
        ("", "inside=()"),
    ],
)
def test_slurm_containers(container, inside):
    recipe = override(get("grpo-qwen2.5-vl-7b-mathv60k"), [f"site.container={container}"])
    text = next(iter(render(recipe, "slurm").values()))
    assert inside in text
    assert ("UV_PYTHON_INSTALL_DIR" in text) == bool(container), (
        "uv's Python would be lost with the first container"
    )
    assert container != "pyxis" or "$DATA:$DATA" in text


def test_pyxis_sets_a_registry_apart():
    from recipes.platforms.slurm import pyxis_name

    assert pyxis_name("nvcr.io/nvidia/pytorch:25.01-py3") == "nvcr.io#nvidia/pytorch:25.01-py3"
    assert pyxis_name("localhost:5000/mine") == "localhost:5000#mine"
    assert pyxis_name("pytorch/pytorch:2.13.0") == "pytorch/pytorch:2.13.0"
    assert pyxis_name("nvcr.io#nvidia/pytorch:1") == "nvcr.io#nvidia/pytorch:1"


def slurm_body(tmp_path, name: str, set_up: str = "true") -> subprocess.CompletedProcess:
    """Runs the body under stand-ins for srun and scontrol, from a checkout where no environment stands
    yet."""
    python = tmp_path / ".venvs/gpu/bin/python"
    (tmp_path / "trainer/shell").mkdir(parents=True)
    shutil.copy(ROOT / "trainer/shell/task.sh", tmp_path / "trainer/shell")
    (tmp_path / "trainer/shell/setup.sh").write_text(
        f"mkdir -p {python.parent} && cp node {python}; {set_up}\n"
    )
    (tmp_path / "trainer/shell/driver.sh").write_text("")
    (tmp_path / "node").write_text('#!/bin/bash\necho "$2 $RUN_ID"\n')
    (tmp_path / "node").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text('#!/bin/bash\nwhile [[ "$1" == -* ]]; do shift; done\nexec "$@"\n')
    (tmp_path / "bin/srun").chmod(0o755)
    (tmp_path / "bin/scontrol").write_text('#!/bin/bash\necho "scontrol $*"\n')
    (tmp_path / "bin/sleep").write_text("#!/bin/bash\n")
    for stand_in in ("scontrol", "sleep"):
        (tmp_path / "bin" / stand_in).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "RUN_ID": "run",
        "HOME": str(tmp_path),
    }
    text = next(iter(render(get(name), "slurm").values()))
    return subprocess.run(["bash"], input=text, text=True, capture_output=True, env=env)


def test_slurm_body_sets_up_before_it_runs(tmp_path):
    done = slurm_body(tmp_path, "preflight")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["recipes.records.manifest run", "trainer.node run"]


@pytest.mark.parametrize(("code", "requeued"), [(35, True), (2, False), (1, False)])
def test_a_set_up_that_a_restart_can_cure_is_requeued(tmp_path, code, requeued):
    done = slurm_body(tmp_path, "grpo-qwen2.5-vl-7b-mathv60k", f"exit {code}")
    assert done.returncode == code, done.stderr
    assert ("scontrol requeue 7" in done.stdout) == requeued and "trainer.node" not in done.stdout


def test_what_a_site_asks_for_besides():
    site = ["site.prelude=[module purge, module load cuda/13.0]"]
    for target in ("slurm", "pbs"):
        text = next(iter(render(override(get("grpo-qwen2.5-vl-72b-mathv60k"), site), target).values()))
        assert text.index("module purge\nmodule load cuda/13.0\n") < text.index("trainer/shell/setup.sh")
    site.append("site.gres=gpu:h100:8")
    text = next(iter(render(override(get("grpo-qwen2.5-vl-72b-mathv60k"), site), "slurm").values()))
    assert "#SBATCH --gres=gpu:h100:8\n" in text and "--gpus-per-node" not in text
    assert 'SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"' in text


@pytest.mark.parametrize("target", ["slurm", "pbs"])
def test_where_compute_nodes_have_no_internet_all_is_prepared_where_the_job_is_submitted(target, tmp_path):
    """The set-up under stand-ins for the environment's programs: what it runs, in order."""
    recipe = override(
        get("grpo-qwen2.5-vl-7b-mathv60k"), ["site.offline=true", "site.prelude=[echo module load]"]
    )
    job, setup = render(recipe, target).items()
    assert setup[0].endswith(".setup.sh") and "HF_HUB_OFFLINE=1" in job[1] and "driver.sh" not in setup[1]
    (tmp_path / "trainer/shell").mkdir(parents=True)
    shutil.copy(ROOT / "trainer/shell/task.sh", tmp_path / "trainer/shell")
    (tmp_path / "trainer/shell/setup.sh").write_text("echo setup $1\n")
    for name in ("python", "hf"):
        program = tmp_path / ".venvs/gpu/bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/bash\necho "{name} $*"\n')
        program.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RUN_ID": "run"}
    done = subprocess.run(["bash"], input=setup[1], text=True, capture_output=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["module load", "setup gpu"] and "data_prep prepare mathv60k" in lines[2]
    assert lines[3] == "hf download Qwen/Qwen2.5-VL-7B-Instruct"
    record = RunRecord(run_id="r", recipe="r", target=target)
    up = launch_commands(record, ["a", "a.setup.sh"], {}, [], True).up
    assert [command[0] for command in up] == ["bash", {"slurm": "sbatch", "pbs": "qsub"}[target]]


def test_amd_gpus_change_environment_and_variables():
    recipe = override(get("grpo-qwen2.5-vl-7b-mathv60k"), ["cluster.gpu=MI300X", "cluster.alternatives=[]"])
    text = next(iter(render(recipe, "slurm").values()))
    assert (
        "trainer/shell/setup.sh rocm" in text
        and "HSA_NO_SCRATCH_RECLAIM=1" in text
        and ".venvs/rocm/bin/python" in text
    )


@pytest.mark.parametrize(
    ("dialect", "request_"), [("pro", "select=4:ncpus=72:ngpus=8:mem="), ("torque", "nodes=4:ppn=72:gpus=8")]
)
def test_pbs_dialects(dialect, request_):
    recipe = override(get("grpo-qwen2.5-vl-72b-mathv60k"), [f"site.pbs={dialect}"])
    text = next(iter(render(recipe, "pbs").values()))
    options = [line for line in text.splitlines() if line.startswith("#PBS -")]
    assert any(request_ in option for option in options)
    assert all(re.fullmatch(r"#PBS -(N \S{1,15}|l \S+|j oe|r y|q \S+|A \S+)", option) for option in options)


def test_pbs_body_starts_one_launcher_per_node(tmp_path):
    """The body under a stand-in for PBS: two hosts in the node file, pbsdsh that runs here, a launcher that
    reports."""
    recipe = override(get("preflight"), ["site.prelude=[export NCCL_IB_HCA=mlx5]"])
    text = next(iter(render(recipe, "pbs").values()))
    (tmp_path / "trainer/shell").mkdir(parents=True)
    shutil.copy(ROOT / "trainer/shell/task.sh", tmp_path / "trainer/shell")
    (tmp_path / "trainer/shell/setup.sh").write_text("exit 0\n")
    (tmp_path / "trainer/shell/driver.sh").write_text("")
    python = tmp_path / ".venvs/gpu/bin/python"
    python.parent.mkdir(parents=True)
    report = 'echo "$SPOTRL_NODE_RANK/$SPOTRL_NODES peers=$SPOTRL_PEERS run=$RUN_ID token=${HF_TOKEN:-}'
    report += ' nccl=${NCCL_IB_HCA:-} ${NCCL_SOCKET_IFNAME:-} proxy=${https_proxy:-} tmp=${TMPDIR:-}"'
    python.write_text(f'#!/bin/bash\n[ "$2" = trainer.node ] || exit 0\n{report}\n')
    python.chmod(0o755)
    pbsdsh = tmp_path / "bin/pbsdsh"
    pbsdsh.parent.mkdir()
    pbsdsh.write_text(
        '#!/bin/bash\n[ "$1" = -n ] && [ "$3" = -- ] || exit 9\nshift 3\nexec env -i PATH="$PATH" "$@"\n'
    )
    pbsdsh.chmod(0o755)
    (tmp_path / "nodes").write_text("alpha\nalpha\nbeta\n")
    env = {
        "PATH": f"{pbsdsh.parent}:{os.environ['PATH']}",
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PBS_JOBID": "7.x",
        "PBS_O_WORKDIR": str(tmp_path),
        "RUN_ID": "run",
        "HF_TOKEN": "a b'c",
        "HOME": str(tmp_path),
        "NCCL_SOCKET_IFNAME": "ib0",  # by qsub -v or -V, as the proxy
        "https_proxy": "http://proxy:3128",
        "CUDA_VISIBLE_DEVICES": "0",
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank}/2 peers=alpha beta run=run token=a b'c nccl=mlx5 ib0 proxy=http://proxy:3128 tmp={own}"
        for rank, own in enumerate([tmp_path, ""])
    ]
    assert not list((tmp_path / ".cache").glob("*.sh")), "the node's script holds tokens and must be gone"


@pytest.mark.parametrize(
    ("container", "image", "inside"),
    [
        ("apptainer", "/shared/spotrl.sif", '--pwd "$PWD" /shared/spotrl.sif)'),
        ("pyxis", "/shared/spotrl.sqsh", "--container-image=/shared/spotrl.sqsh "),
    ],
)
def test_an_image_may_be_a_file_where_a_site_runs_containers(container, image, inside):
    given = [f"site.container={container}", f"cluster.image={image}"]
    (text,) = render(override(get("preflight"), given), "slurm").values()
    assert inside in text and "docker://" not in text
    with pytest.raises(ConfigError, match=r"an image's file, which site.container alone takes"):
        render(override(get("preflight"), given[1:]), "kubernetes")
    for name in ("docker://rocm/vllm", "docker:rocm/vllm"):
        with pytest.raises(ConfigError, match="leave docker: out, for example rocm/vllm"):
            render(override(get("preflight"), [f"cluster.image={name}"]), "skypilot-gcp")


def test_containers_without_internet_are_refused_since_their_environment_is_made_elsewhere():
    given = ["site.container=apptainer", "site.offline=true"]
    with pytest.raises(ConfigError, match="leave one of site.offline and site.container out"):
        render(override(get("preflight"), given), "slurm")


def test_pbs_refuses_a_node_file_of_the_wrong_length(tmp_path):
    text = next(iter(render(get("preflight"), "pbs").values()))
    (tmp_path / "trainer/shell").mkdir(parents=True)
    shutil.copy(ROOT / "trainer/shell/task.sh", tmp_path / "trainer/shell")
    (tmp_path / "trainer/shell/setup.sh").write_text("exit 0\n")
    (tmp_path / "trainer/shell/driver.sh").write_text("")
    python = tmp_path / ".venvs/gpu/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/bash\n")
    python.chmod(0o755)
    (tmp_path / "nodes").write_text("alpha\n")
    env = os.environ | {
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PBS_JOBID": "7",
        "PBS_O_WORKDIR": str(tmp_path),
    }
    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, env=env)
    assert done.returncode == 2 and "PBS gave 1 nodes, the recipe wants 2" in done.stderr
