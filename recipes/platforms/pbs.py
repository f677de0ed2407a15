"""A PBS batch script (PBS Professional, OpenPBS, Torque): one launcher per node of $PBS_NODEFILE.

The script runs on the first node of that file; the others are reached by pbsdsh, or by ssh where there is
none.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from recipes.platforms import clouds, restarts, script
from recipes.platforms.base import LaunchGiven
from recipes.platforms.batch import OFFLINE, Batch, runs_folder
from recipes.recipe.resolved import ResolvedRecipe
from recipes.recipe.spec import Recipe
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from trainer.config.run_folder import write_whole
from trainer.system.exit_codes import EXIT_CONFIG

TOKENS_FILE = "SPOTRL_TOKENS_FILE"
"""Names the file with a job's tokens, NAME=value a line as a shell takes them."""

NODE = """\
# pbsdsh and ssh carry no environment along: the node's script holds this one, but for what is a node's own.
mapfile -t hosts < <(awk '!seen[$0]++' "${PBS_NODEFILE:?}")
[ "${#hosts[@]}" -eq WANTED ] || { echo "PBS gave ${#hosts[@]} nodes, the recipe wants WANTED" >&2; exit 2; }
script=".cache/$RUN_ID.$PBS_JOBID.sh"
install -m 700 /dev/null "$script" # it holds the tokens that you exported
{
  echo "#!/usr/bin/env bash"
  echo "set -euo pipefail"
  printf 'hosts=(%s)\\n' "${hosts[*]}"
  for name in $(compgen -e); do
    case "$name" in
      HOST | HOSTNAME | PWD | OLDPWD | SHLVL | _ | TMPDIR | XDG_RUNTIME_DIR | SSH_* | SHELLOPTS | BASHOPTS) ;;
      *_VISIBLE_DEVICES | GPU_DEVICE_ORDINAL | PBS_NODENUM | PBS_TASKNUM | PBS_VNODENUM | PBS_MOMPORT) ;;
      *) printf 'export %s=%q\\n' "$name" "${!name}" ;;
    esac
  done
  printf 'cd %q\\n' "$PWD"
  cat <<"BODY"
export SPOTRL_NODE_RANK=${1:?} SPOTRL_NODES=${#hosts[@]} SPOTRL_PEERS="${hosts[*]}"GPUS
DRIVERexec COMMAND
BODY
} > "$script"
trap 'rm -f "$script"' EXIT
"""

TAKE_TOKENS = f"""\
# `qstat -f` shows what `qsub -v` gave a job: tokens come in a file that you alone may read.
if [ -n "${{{TOKENS_FILE}:-}}" ]; then
  [ -r "${TOKENS_FILE}" ] || {{ echo "error: ${TOKENS_FILE} is not readable here" >&2; exit 2; }}
  set -a
  # shellcheck source=/dev/null
  . "${TOKENS_FILE}"
  set +a
fi
"""

LAUNCH = """\
pids=()
for rank in "${!hosts[@]}"; do
  if [ "$rank" -eq 0 ]; then # this node: a child of this script, so that what PBS does to the job reaches it
    bash "$script" 0 &
  elif command -v pbsdsh >/dev/null; then
    pbsdsh WHERE bash "$PWD/$script" "$rank" &
  else
    ssh -n -o BatchMode=yes "${hosts[$rank]}" "bash $(printf %q "$PWD/$script") $rank" &
  fi
  pids+=("$!")
done
# The head passes the notice on to the others, and ends them: ssh would only be cut off before they saved.
trap 'kill "${pids[0]}" 2>/dev/null || true' TERM INT
code=0
for pid in "${pids[@]}"; do # the head's exit code first: that of a cut ssh says nothing
  outlast "$pid" || code=$((code ? code : $?))
done
exit "$code"
"""
WHERE = {"pro": '-n "$rank" --', "torque": '-h "${hosts[$rank]}"'}
"""How pbsdsh names one node: the number of its task, or the host."""

ARRAY = {"pro": "-J", "torque": "-t"}
"""Option of qsub that starts a script several times."""


class Pbs(Batch):
    program = "qsub"
    title = "PBS"
    job_id = r"\d+(\[\d*\])?(\.[A-Za-z0-9][A-Za-z0-9.-]*)?"
    asks = "qstat"
    cancels = "qdel"
    index = "^array_index^"

    def render(self, run: ResolvedRecipe) -> dict[str, str]:
        """The batch script, submitted from the repository's root: `qsub -v RUN_ID=my-run FILE`. Machines that
        sample are an array of jobs."""
        recipe = run.recipe
        sampling = recipe.kind == "sample"
        comment, named = self.head(recipe, "qsub -v RUN_ID=my-run", "pbs", "${PBS_JOBID%%.*}")
        node = NODE.replace("WANTED", str(recipe.cluster.nodes))
        gpus = f" SPOTRL_GPUS_PER_NODE={recipe.cluster.gpus_per_node}" if recipe.cluster.gpus_per_node else ""
        node = node.replace("GPUS", gpus).replace("COMMAND", script.node_command(recipe))
        node = node.replace("DRIVER", script.driver_check(recipe))
        launch = LAUNCH.replace("WHERE", WHERE[recipe.site.pbs])
        text = "\n".join(
            [
                "#!/usr/bin/env bash",
                *pbs_directives(recipe),
                *comment,
                'cd "${PBS_O_WORKDIR:?}"',
                named if sampling else f"{named} # keeps its number when run again",
                TAKE_TOKENS.rstrip("\n"),
                self.begin_shell(recipe).rstrip("\n"),
                leave_if_started_too_often(recipe).rstrip("\n"),
                *([OFFLINE] if recipe.site.offline else []),
                script.setup_commands(recipe, prepare=not sampling).rstrip("\n"),
                script.write_config(recipe).rstrip("\n"),
                node.rstrip("\n"),
                script.OUTLAST.rstrip("\n"),
                launch.rstrip("\n"),
            ]
        )
        return {f"{recipe.name}.pbs": text + "\n"} | script.login_files(recipe, runs_folder(recipe))

    def obeys(self, recipe: Recipe) -> frozenset[str]:
        return self.OBEYS | {"site.pbs"}

    def submit(self, record: RunRecord, given: LaunchGiven, output: str) -> list[str]:
        # What `-v` names stands in `qstat -f`, and is cut at commas: secrets go by a file.
        names = list(given.env)
        if given.secrets:
            names.append(f"{TOKENS_FILE}={tokens_file(record.run_id)}")
        return ["qsub", "-v", ",".join(names), "-o", output, *record.flags, given.files[0]]

    def keep_tokens(self, run_id: str, tokens: Mapping[str, str]) -> None:
        """Writes the tokens as a shell takes them."""
        lines = [f"{name}={shlex.quote(value)}\n" for name, value in tokens.items()]
        path = tokens_file(run_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(lines).encode(), private=True)


PBS = Pbs(
    name="pbs",
    max_nodes=64,
    gpus=clouds.ANY,
    network_gbit_s={"": 400},
    note="PBS Professional, OpenPBS, Torque: pbsdsh where it is, else ssh over the node file",
)


def tokens_file(run_id: str) -> Path:
    """Where a job's tokens wait for it: on the file system that its nodes share, for you alone."""
    return run_record.RUNS / run_id / "tokens"


def pbs_directives(recipe: Recipe) -> list[str]:
    """The #PBS lines of the site's dialect."""
    cluster = recipe.cluster
    site = recipe.site
    hours = recipe.job_hours
    walltime = f"{int(hours)}:{int(hours * 60 % 60):02d}:00"
    gpus = cluster.gpus_per_node
    if site.pbs == "torque":
        request = f"nodes={cluster.nodes}:ppn={recipe.cpus}" + (f":gpus={gpus}" if gpus else "")
        options = [f"-l {request}", f"-l mem={cluster.memory_gib * cluster.nodes}gb"]
    else:
        request = f"select={cluster.nodes}:ncpus={recipe.cpus}" + (f":ngpus={gpus}" if gpus else "")
        options = [f"-l {request}:mem={cluster.memory_gib}gb:mpiprocs=1", "-l place=scatter"]
    options = [f"-N {script.job_name(recipe)[:15]}", *options, f"-l walltime={walltime}", "-j oe", "-r y"]
    if recipe.jobs > 1:  # PBS takes no array of one
        options.append(f"{ARRAY[site.pbs]} 0-{recipe.jobs - 1}")
    options += [f"-q {site.partition}"] if site.partition else []
    options += [f"-A {site.account}"] if site.account else []
    return [f"#PBS {option}" for option in options]


def leave_if_started_too_often(recipe: Recipe) -> str:
    """Counts the starts of this job in a file, since PBS does not report them, and ends one that has had too
    many."""
    most = recipe.budget.max_requeues
    return f"""\
starts=".cache/$RUN_ID.$PBS_JOBID.starts"
echo >> "$starts"
if [ "$(wc -l < "$starts")" -gt {most + 1} ]; then
  echo "{restarts.FINAL}: PBS has restarted this job {most} times: that is budget.max_requeues" >&2
  exit {EXIT_CONFIG}
fi
"""
