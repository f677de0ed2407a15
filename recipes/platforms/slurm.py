"""Slurm: a batch script with one task per node, requeued when preempted, containers by Pyxis or Apptainer as
an option."""

from __future__ import annotations

from recipes.platforms import clouds, script
from recipes.platforms.base import LaunchGiven
from recipes.platforms.batch import OFFLINE, Batch, runs_folder
from recipes.platforms.restarts import FINAL, restart_codes
from recipes.recipe.resolved import ResolvedRecipe
from recipes.recipe.spec import Recipe
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError
from trainer.system.exit_codes import EXIT_CONFIG, EXIT_PREFLIGHT

ROCM = """\
export HSA_NO_SCRATCH_RECLAIM=1 GPU_MAX_HW_QUEUES=2 TORCH_NCCL_HIGH_PRIORITY=1 RCCL_MSCCL_ENABLE=0
# Ray and vLLM want one name for the devices; Slurm sets ROCR_VISIBLE_DEVICES.
unset ROCR_VISIBLE_DEVICES
"""
"""For AMD GPUs: clocks and queues as AMD's own training guides set them."""


WHOLE_NODE = 8
"""GPUs of a node from which on a run has it for itself."""


LAUNCH = """\
code=0
srun --nodes=1 --ntasks=1 "${inside[@]}" bash -euo pipefail -c "$setup" || code=$?
if [ "$code" -eq 0 ]; then
  trap : TERM # the nodes obey it, and this script must outlast them
  srun --kill-on-bad-exit=0BIND "${inside[@]}" bash -euo pipefail -c "$node" &
  outlast "$!" || code=$?
fi
"""
"""A set-up that ends with a code that a restart can cure is requeued as a run is."""

EXCLUDE = f"""\
    # possible only once the job is pending again
    if [ "$code" -eq {EXIT_PREFLIGHT} ] && [ -s "$RUNS/$RUN_ID/refused" ]; then
      bad="$(sort -u "$RUNS/$RUN_ID/refused" | paste -sd,)"
      echo "machines that failed their checks are excluded: $bad"
      scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$bad" || true
    fi
"""
"""What a Slurm job that is requeued does with machines that its checks have refused."""


class Slurm(Batch):
    program = "sbatch"
    title = "Slurm"
    job_id = r"\d+(_\d+)?"
    asks = "squeue -j"
    cancels = "scancel"
    index = "%a"

    def render(self, run: ResolvedRecipe) -> dict[str, str]:
        """The batch script, submitted from the repository's root: `sbatch FILE`. Machines that sample are an
        array of jobs."""
        recipe = run.recipe
        if recipe.site.offline and recipe.site.container:
            raise ConfigError(
                "site.offline prepares the environment with this machine's Python, and a container has one of"
                " its own: leave one of site.offline and site.container out"
            )
        sampling = recipe.kind == "sample"
        comment, named = self.head(recipe, "RUN_ID=my-run sbatch", "sbatch", "${SLURM_JOB_ID:?}")
        body = [
            "#!/usr/bin/env bash",
            *slurm_directives(recipe),
            *comment,
            'cd "${SLURM_SUBMIT_DIR:?}"',
            leave_if_requeued_too_often(recipe).rstrip("\n"),
            named if sampling else f"{named} # a requeued job keeps its number",
            f'export SPOTRL_NOTICE_S="${{SPOTRL_NOTICE_S:-{recipe.site.grace_s}}}"',
            self.begin_shell(recipe).rstrip("\n"),
            # Since Slurm 22.05 srun takes one CPU per task unless it is told, whatever the job has.
            '[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
            *([OFFLINE] if recipe.site.offline else []),
        ]
        if recipe.environment == "rocm":
            body.append(ROCM.rstrip("\n"))
        setup = script.setup_commands(recipe, begun=False, prepare=not sampling) + script.manifest_command(
            recipe
        )
        body += [
            script.config_file(recipe).rstrip("\n"),
            f'setup=$(cat <<"SETUP"\n{setup}SETUP\n)',
            container(recipe),
            f'node=$(cat <<"NODE"\n{script.driver_check(recipe)}exec {script.node_command(recipe)}\nNODE\n)',
            script.OUTLAST.rstrip("\n"),
            # Every rank sees all of its node's GPUs, whatever the site binds tasks to.
            LAUNCH.rstrip("\n").replace("BIND", " --gpu-bind=none" if recipe.cluster.gpus_per_node else ""),
            requeue(recipe).rstrip("\n"),
        ]
        return {f"{recipe.name}.sbatch": "\n".join(body) + "\n"} | script.login_files(
            recipe, runs_folder(recipe)
        )

    def obeys(self, recipe: Recipe) -> frozenset[str]:
        names = ("qos", "constraint", "reservation", "gres", "container", "grace_s")
        own = {f"site.{name}" for name in names}
        if recipe.site.container:
            own.add("cluster.image")
        return self.OBEYS | own

    def submit(self, record: RunRecord, given: LaunchGiven, output: str) -> list[str]:
        return ["sbatch", "--parsable", f"--output={output}", *record.flags, given.files[0]]


SLURM = Slurm(
    name="slurm",
    max_nodes=64,
    gpus=clouds.ANY,
    network_gbit_s={"": 400},
    note="requeued on preemption; no spot market of its own",
)


def slurm_directives(recipe: Recipe) -> list[str]:
    cluster, site = recipe.cluster, recipe.site
    hours = recipe.job_hours
    options = [
        f"--job-name={script.job_name(recipe)}",
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={recipe.cpus}",
        f"--mem={cluster.memory_gib}G",
        f"--time={int(hours // 24)}-{int(hours % 24):02d}:{int(hours * 60 % 60):02d}:00",
        "--output=slurm-%x-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=TERM@{site.grace_s}",
    ]
    if recipe.kind == "sample":
        options.insert(1, f"--array=0-{recipe.jobs - 1}")
    if cluster.gpus_per_node:
        options.insert(3, f"--gres={site.gres}" if site.gres else f"--gpus-per-node={cluster.gpus_per_node}")
        if cluster.gpus_per_node == WHOLE_NODE:  # no neighbor's NCCL, memory or disk beside the run's
            options.insert(3, "--exclusive")
    options += [f"--partition={site.partition}"] if site.partition else []
    named = ("account", "qos", "constraint", "reservation")
    options += [f"--{name}={value}" for name in named if (value := getattr(site, name))]
    return [f"#SBATCH {option}" for option in options]


def container(recipe: Recipe) -> str:
    """The array `inside`: what goes between srun and the command."""
    gpus, site = recipe.cluster.gpus_per_node, recipe.site
    # uv may bring a Python of its own: it must outlive the container that set the environment up.
    keep = 'export UV_PYTHON_INSTALL_DIR="$WORK/python"\nmkdir -p "$DATA" "$MODELS" "$RUNS"\n'
    folders = ("$PWD", "$WORK", "$DATA", "$MODELS", "$RUNS")
    image = recipe.cluster.image
    if site.container == "pyxis":
        mounts = ",".join(f"{folder}:{folder}" for folder in folders)
        return (
            f"{keep}inside=(--container-image={pyxis_name(image)}"
            f' --container-workdir="$PWD" --container-mounts="{mounts}" --no-container-mount-home)'
        )
    if site.container == "apptainer":
        flag = ("--rocm " if recipe.environment == "rocm" else "--nv ") if gpus else ""
        image = image if image.startswith("/") else f"docker://{image}"
        return f'{keep}inside=(apptainer exec {flag}--bind "{",".join(folders)}" --pwd "$PWD" {image})'
    return "inside=()"


def pyxis_name(image: str) -> str:
    """An image as Pyxis and enroot write it: a registry other than Docker Hub is set apart by "#"."""
    host, _, rest = image.partition("/")
    return f"{host}#{rest}" if rest and "#" not in host and ("." in host or ":" in host) else image


def leave_if_requeued_too_often(recipe: Recipe) -> str:
    """Ends a job that Slurm has started too often, whatever the reason, before it does anything."""
    most = recipe.budget.max_requeues
    return f"""\
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt {most} ]; then
  echo "{FINAL}: Slurm has restarted this job $SLURM_RESTART_COUNT times, budget.max_requeues is {most}" >&2
  exit {EXIT_CONFIG}
fi
"""


def requeue(recipe: Recipe) -> str:
    """Asks for the requeue after a code that a restart can cure, while the budget lasts; `code` is the
    job's."""
    if not restart_codes(recipe):
        return 'exit "$code"\n'
    most = recipe.budget.max_requeues
    who = "machine" if recipe.kind == "sample" else "run"
    return f"""\
case "$code" in
  {"|".join(map(str, restart_codes(recipe)))})
    if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {most} ]; then
      echo "{FINAL}: exit $code after ${{SLURM_RESTART_COUNT:-0}} restarts, budget.max_requeues is {most}" >&2
      exit "$code"
    fi
    echo "the {who} asks to be started again (exit $code): requeueing"
    scontrol requeue "$SLURM_JOB_ID" || true
{EXCLUDE if EXIT_PREFLIGHT in restart_codes(recipe) else ""}\
    sleep {recipe.site.grace_s + 30} # until Slurm ends this script: one that exits by itself is FAILED
    ;;
esac
exit "$code"
"""
