"""The batch scripts of Slurm and PBS: their directives, containers and bodies, the latter run under
stand-ins."""

import os
import re
import subprocess

import pytest

from recipes.platforms.slurm import pyxis_name
from recipes.presets import get
from recipes.recipe.spec import override
from recipes.records.run_record import RunRecord
from tests.recipes.rendered import launch_commands, main_file, make_checkout, make_program, render
from trainer.config import ConfigError

SEVEN, BIG = "grpo-qwen2.5-vl-7b-mathv60k", "grpo-qwen2.5-vl-72b-mathv60k"
SRUN = 'while [[ "$1" == -* ]]; do shift; done\nexec "$@"'


def test_slurm_directives_and_what_a_site_asks_for_besides():
    text = main_file(BIG, "slurm", "site.partition=gpu", "site.account=me", "site.grace_s=60")
    lines = text.splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--requeue"} <= options
    assert {"--time=3-00:00:00", "--partition=gpu", "--account=me"} <= options
    assert {"--signal=TERM@60", "--open-mode=append"} <= options
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:]), "later ones are ignored"
    assert 'SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"' in text
    site = "site.prelude=[module purge, module load cuda/13.0]"
    for target in ("slurm", "pbs"):
        own = main_file(BIG, target, site)
        assert own.index("module purge\nmodule load cuda/13.0\n") < own.index("trainer/shell/setup.sh")
    own = main_file(BIG, "slurm", "site.gres=gpu:h100:8")
    assert "#SBATCH --gres=gpu:h100:8\n" in own and "--gpus-per-node" not in own
    amd = main_file(SEVEN, "slurm", "cluster.gpu=MI300X", "cluster.alternatives=[]")
    for part in ("trainer/shell/setup.sh rocm", "HSA_NO_SCRATCH_RECLAIM=1", ".venvs/rocm/bin/python"):
        assert part in amd


@pytest.mark.parametrize(
    ("container", "image", "inside"),
    [
        ("pyxis", "", "--container-image=pytorch/pytorch:2.13.0"),
        ("pyxis", "/shared/spotrl.sqsh", "--container-image=/shared/spotrl.sqsh "),
        ("apptainer", "", "apptainer exec --nv"),
        ("apptainer", "/shared/spotrl.sif", '--pwd "$PWD" /shared/spotrl.sif)'),
        ("", "", "inside=()"),
    ],
)
def test_slurm_containers(container, image, inside):
    """An image may be a file where a site runs containers."""
    given = [f"site.container={container}", *([f"cluster.image={image}"] if image else [])]
    text = main_file(SEVEN, "slurm", *given)
    assert inside in text and not (image and "docker://" in text)
    kept = "UV_PYTHON_INSTALL_DIR" in text
    assert kept == bool(container), "uv's Python would be lost with the first container"
    assert container != "pyxis" or "$DATA:$DATA" in text
    if image:
        with pytest.raises(ConfigError, match=r"an image's file, which site.container alone takes"):
            main_file("preflight", "kubernetes", given[1])
    if container:
        with pytest.raises(ConfigError, match="leave one of site.offline and site.container out"):
            main_file("preflight", "slurm", given[0], "site.offline=true")


def test_names_of_images_are_those_of_their_program():
    """Pyxis sets a registry apart."""
    assert pyxis_name("nvcr.io/nvidia/pytorch:25.01-py3") == "nvcr.io#nvidia/pytorch:25.01-py3"
    assert pyxis_name("localhost:5000/mine") == "localhost:5000#mine"
    for name in ("pytorch/pytorch:2.13.0", "nvcr.io#nvidia/pytorch:1"):
        assert pyxis_name(name) == name
    for name in ("docker://rocm/vllm", "docker:rocm/vllm"):
        with pytest.raises(ConfigError, match="leave docker: out, for example rocm/vllm"):
            main_file("preflight", "skypilot-gcp", f"cluster.image={name}")


@pytest.mark.parametrize(("name", "code"), [("preflight", 0), (SEVEN, 35), (SEVEN, 2), (SEVEN, 1)])
def test_slurm_body_sets_up_before_it_runs_and_is_requeued_where_a_restart_can_cure_that(
    tmp_path, name, code
):
    make_checkout(tmp_path, 'echo "$2 $RUN_ID"', setup=f"exit {code}")
    for program, body in (("srun", SRUN), ("scontrol", 'echo "scontrol $*"'), ("sleep", "")):
        make_program(tmp_path / "bin" / program, body)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    env |= {"SLURM_JOB_ID": "7", "RUN_ID": "run", "HOME": str(tmp_path)}
    script = main_file(name, "slurm")
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, env=env)
    assert done.returncode == code, done.stderr
    assert ("scontrol requeue 7" in done.stdout) == (code == 35)
    if code:
        assert "trainer.node" not in done.stdout
    else:
        assert done.stdout.splitlines() == ["recipes.records.manifest run", "trainer.node run"]


@pytest.mark.parametrize("target", ["slurm", "pbs"])
def test_where_compute_nodes_have_no_internet_all_is_prepared_where_the_job_is_submitted(target, tmp_path):
    """The set-up under stand-ins for the environment's programs: what it runs, in order."""
    recipe = override(get(SEVEN), ["site.offline=true", "site.prelude=[echo module load]"])
    job, setup = render(recipe, target).items()
    assert setup[0].endswith(".setup.sh") and "HF_HUB_OFFLINE=1" in job[1] and "driver.sh" not in setup[1]
    make_checkout(tmp_path, 'echo "python $*"', setup="echo setup $1")
    make_program(tmp_path / ".venvs/gpu/bin/hf", 'echo "hf $*"')
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RUN_ID": "run"}
    done = subprocess.run(["bash"], input=setup[1], text=True, capture_output=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["module load", "setup gpu"] and "data_prep prepare mathv60k" in lines[2]
    assert lines[3] == "hf download Qwen/Qwen2.5-VL-7B-Instruct"
    record = RunRecord(run_id="r", recipe="r", target=target)
    up = launch_commands(record, ["a", "a.setup.sh"], {}, [], True).up
    assert [command[0] for command in up] == ["bash", {"slurm": "sbatch", "pbs": "qsub"}[target]]


@pytest.mark.parametrize(
    ("dialect", "request_"), [("pro", "select=4:ncpus=72:ngpus=8:mem="), ("torque", "nodes=4:ppn=72:gpus=8")]
)
def test_pbs_dialects(dialect, request_):
    text = main_file(BIG, "pbs", f"site.pbs={dialect}")
    options = [line for line in text.splitlines() if line.startswith("#PBS -")]
    assert any(request_ in option for option in options)
    assert all(re.fullmatch(r"#PBS -(N \S{1,15}|l \S+|j oe|r y|q \S+|A \S+)", option) for option in options)


@pytest.mark.parametrize("hosts", [["alpha", "beta"], ["alpha"]])
def test_pbs_body_starts_one_launcher_per_node(tmp_path, hosts):
    """The body under a stand-in for PBS: two hosts in the node file, pbsdsh that runs here, a launcher that
    reports. A node file of another length is refused."""
    report = 'echo "$SPOTRL_NODE_RANK/$SPOTRL_NODES peers=$SPOTRL_PEERS run=$RUN_ID token=${HF_TOKEN:-}'
    report += ' nccl=${NCCL_IB_HCA:-} ${NCCL_SOCKET_IFNAME:-} proxy=${https_proxy:-} tmp=${TMPDIR:-}"'
    make_checkout(tmp_path, f'[ "$2" = trainer.node ] || exit 0\n{report}')
    remote = '[ "$1" = -n ] && [ "$3" = -- ] || exit 9\nshift 3\nexec env -i PATH="$PATH" "$@"'
    make_program(tmp_path / "bin/pbsdsh", remote)
    (tmp_path / "nodes").write_text("".join(f"{host}\n{host}\n" for host in hosts))
    env = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
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
    script = main_file("preflight", "pbs", "site.prelude=[export NCCL_IB_HCA=mlx5]")
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, env=env)
    if len(hosts) == 1:
        assert done.returncode == 2 and "PBS gave 1 nodes, the recipe wants 2" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank}/2 peers=alpha beta run=run token=a b'c nccl=mlx5 ib0 proxy=http://proxy:3128 tmp={own}"
        for rank, own in enumerate([tmp_path, ""])
    ]
    assert not list((tmp_path / ".cache").glob("*.sh")), "the node's script holds tokens and must be gone"
