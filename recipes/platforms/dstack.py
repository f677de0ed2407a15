"""dstack: a task, the fleet that it runs on, and the volume where the recipe names one. Checked against
0.22.5.

What shapes them: a node lost on RunPod, Kubernetes or own machines counts as `error`, not as `interruption`,
so both are retried; several nodes need a fleet with `placement: cluster`; commands are joined with && unless
one block.
"""

from __future__ import annotations

import hashlib
import math
import subprocess
from collections.abc import Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any
from urllib.parse import SplitResult

from recipes.platforms import clouds, pods, programs, restarts, script
from recipes.platforms.answers import PlatformAnswer, PlatformAnswers, is_end, state_word
from recipes.platforms.base import Commands, Disposable, LaunchGiven, for_each, ssh_tunnel, to_yaml
from recipes.platforms.ssh import hosts_of, parse_address
from recipes.recipe.resolved import MachineChoice, ResolvedRecipe
from recipes.recipe.spec import Recipe
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError
from trainer.hardware.gpus import gpu_named
from trainer.system.exit_codes import EXIT_PREFLIGHT

INSTANT_CLUSTER = "runpod-cluster"
"""What the price list calls RunPod's clusters of several pods."""
LONGEST_NAME = 36
"""Characters of a task's name: dstack's 41, less what a fleet's name has behind it."""
CODE = "/spotrl"
"""Where the repository stands in the container."""
PARTS = ("", "data_prep", "trainer/checkpoint", "trainer/fleet", "trainer/node", "trainer/rewards/grading")
"""The repository in uploads: one is 2 MB at most, and `.dstackignore` leaves the others out of the first."""
CHECKS = (
    "recipes/gpu_check.py", "recipes/recipe/recipe_files.py", "recipes/plan", "recipes/platforms",
    "recipes/presets", "tests/conftest.py", "tests/families.py", "tests/servers.py", "tests/gpu",
    "tests/learning",
)  # fmt: skip
"""What a check of a card needs besides, left out of the first too."""
CAPACITY_HOURS = 8.0
"""How long dstack looks for machines before it gives up, hours."""


class Dstack(Disposable):
    program = "dstack"
    title = "dstack"
    hint = programs.LAUNCHERS
    follows_one_job = True

    @property
    def asks_bucket(self) -> bool:
        return bool(self.cloud)

    @property
    def backend(self) -> str:
        """dstack's name of the cloud; "": machines of your own."""
        return "runpod" if self.cloud == INSTANT_CLUSTER else self.cloud

    def price_market(self, recipe: Recipe) -> str:
        """RunPod has one price for pods and another for clusters."""
        return self.backend if recipe.cluster.nodes == 1 else self.cloud

    def obeys(self, recipe: Recipe) -> frozenset[str]:
        own = {"cluster.shm_gib", "site.image_secret"}
        if not self.cloud:
            return (self.OBEYS - {"storage.volume"}) | own | {"site.hosts", "site.ssh_key"}
        own.add("budget.idle_minutes" if restarts.restart_codes(recipe) else "budget.keep_minutes")
        if self.sold:
            own |= {"budget.max_hourly_usd", "site.region"}
        if recipe.storage.volume:
            own.add("storage.volume_gib")
        return self.OBEYS | own

    def render(self, run: ResolvedRecipe) -> dict[str, str]:
        """Task, fleet and, where the recipe names one, volume."""
        recipe = run.recipe
        name = _task_name(recipe)
        if len(name) > LONGEST_NAME:
            most = f"dstack takes names of up to {LONGEST_NAME} characters here"
            raise ConfigError(f"{most}, and {name} has {len(name)}: rename the recipe")
        rented = self._rented(recipe, run.machines)
        files = {
            f"{recipe.name}.yaml": to_yaml(self._task(recipe, rented, name), self._head(recipe)),
            f"{recipe.name}.fleet.yaml": to_yaml(
                self._fleet(recipe, rented, name), "The machines; once, before the task."
            ),
        }
        if recipe.storage.volume:
            files[f"{recipe.name}.volume.yaml"] = to_yaml(
                self._volume(recipe), "The volume; once, before the fleet."
            )
        return files

    def commands(self, record: RunRecord, given: LaunchGiven) -> Commands:
        before = given.files_ending(".volume.yaml", ".fleet.yaml")
        options = given.options("-e")
        own = ["HF_TOKEN", script.API_KEY, script.FLEET_KEY]
        if "AWS_SESSION_TOKEN" in given.secrets:  # temporary keys open nothing without each other
            own += ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
        for name in own:
            if name in given.secrets:
                # Without a value dstack's client takes its own environment's. Other secrets are its server's.
                options += ["-e", name]
        names = list(map(run_name, record.names()))
        apply = ["dstack", "apply", "-y", "-f"]
        what = [*options, *(["-d"] if given.detach else []), *record.flags]
        return Commands(
            up=[*for_each(apply, before), *for_each([*apply, given.files[0], "-n"], names, what)],
            status=[["dstack", "ps", "-a"]],
            logs=for_each(["dstack", "logs"], names),
            down=for_each(["dstack", "stop", "-y"], names),
        )

    def check(self, recipe: Recipe, record: RunRecord, task: str) -> None:
        """dstack's secrets: its server looks for them only when the machines are there."""
        wanted = [*map(str.lower, self.secrets(recipe)), *registry_secrets(recipe)]
        if not wanted:
            return
        command = [programs.find_program("dstack"), "secret", "list"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            complaint = programs.last_line(done.stderr.strip() or done.stdout, "nothing")
            raise ConfigError(
                f"dstack secret list said {complaint!r}: point dstack at your server (dstack project add)"
            )
        missing = [name for name in wanted if name not in done.stdout.split()]
        if missing:
            cure = f"run dstack secret set {missing[0]} VALUE"
            raise ConfigError(f"dstack has no secret {', '.join(missing)}: {cure}")

    def ask_job(self, record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
        name = run_name(record.run_id)
        listed = answers.rows("dstack", "ps", "-a", "--json")
        if listed is None:
            return None
        same_name = [row for row in listed.get("runs", []) if row["run_spec"]["run_name"] == name]
        if not same_name:
            return PlatformAnswer(text=f"dstack run {name}: not known to dstack", known=False)
        return _answer(name, max(same_name, key=itemgetter("submitted_at")))

    def server_address(self, record: RunRecord) -> tuple[str, str]:
        attach = f" (`dstack attach {run_name(record.run_id)}` opens the port)"
        return super().server_address(record)[0], attach

    def read_from_head(self, record: RunRecord, path: str, dry_run: bool) -> list[str]:
        return ["ssh", "-o", "BatchMode=yes", run_name(record.run_id), f"cat {path}"]

    def tunnel(self, record: RunRecord, port: int, there: SplitResult) -> list[str]:
        return ssh_tunnel(["ssh", "-o", "BatchMode=yes", run_name(record.run_id)], port, there)

    def cure_of_silence(self, record: RunRecord) -> str:
        attach = f"dstack attach {run_name(record.run_id)}"
        return f"is it running? `{attach}` in another terminal opens its ssh"

    def fleet_name(self, name: str) -> str:
        """One fleet per recipe and cloud."""
        return f"{name}-{self.name.partition('-')[2].replace('kubernetes', 'k8s').replace('runpod', 'rp')}"

    def _head(self, recipe: Recipe) -> str:
        folder = f"recipes/generated/{self.name}/{recipe.name}"
        apply = f"dstack apply -f {folder}.yaml -e RUN_ID=my-run"
        if recipe.uses_bucket and not recipe.storage.bucket:
            apply += " -e BUCKET=s3://..."
        for name in script.launch_secrets(recipe):
            apply += f" -e {name}"
        if recipe.kind == "sample":
            each = apply.replace("apply", f"apply -y -d -n {_task_name(recipe)}-$i")
            apply = f"for i in $(seq {recipe.jobs}); do {each}; done"

        lines = [script.written_by(recipe, self.name)]
        for name in (*map(str.lower, self.secrets(recipe)), *registry_secrets(recipe)):
            lines.append(f"  dstack secret set {name} ...")
        lines += [f"  dstack apply -f {folder}.fleet.yaml", f"  {apply}", script.run_id_comment(recipe)]
        return "\n".join(lines)

    def secrets(self, recipe: Recipe) -> tuple[str, ...]:
        """Tokens that the task takes from dstack's own secrets, which have these names in lower case.

        No others: a secret that the task names and the server does not have ends the run, once the machines
        are there.
        """
        if not recipe.uses_bucket and not recipe.storage.weights:
            return ()
        default = "gs" if self.cloud == "gcp" else "s3"
        names = script.bucket_keys(recipe.storage.bucket or recipe.storage.weights or f"{default}://")
        online = recipe.config.logging.wandb == "online" and recipe.kind != "sample"
        return names + (("WANDB_API_KEY",) if online else ())

    def _task(self, recipe: Recipe, rented: dict[str, Any], name: str) -> dict[str, Any]:
        login = {}
        for field, secret in zip(("username", "password"), registry_secrets(recipe), strict=False):
            login[field] = f"${{{{ secrets.{secret} }}}}"
        task: dict[str, Any] = {
            "type": "task",
            "name": name,
            "nodes": recipe.cluster.nodes,
            "fleets": [self.fleet_name(name)],
            "image": recipe.cluster.image,
            **({"registry_auth": login} if login else {}),
            "user": "root",
            "shell": "bash",
            "working_dir": CODE,
            "files": [_file(path) for path in (*PARTS, *(CHECKS if recipe.kind == "check" else ()))],
            "env": self._env(recipe),
            **({"ports": [script.PORT]} if recipe.kind == "serve" else {}),
            "resources": self._resources(recipe),
        }
        if self.cloud:
            task |= rented | {"idle_duration": _idle(recipe)}
        if recipe.storage.volume:
            task["volumes"] = [{"name": recipe.storage.volume, "path": "/workspace"}]
        task |= {
            "retry": retry(recipe),
            "max_duration": duration(recipe.budget.max_hours),
            "stop_duration": "5m",
            "startup_order": "master-first",
            "stop_criteria": "master-done",
        }
        if recipe.cluster.gpus_per_node and recipe.kind != "serve":
            task["utilization_policy"] = {"min_gpu_utilization": 5, "time_window": "1h"}
        body = self.begin_shell(recipe) + script.setup_commands(recipe, EXIT_PREFLIGHT)
        body += script.write_config(recipe) + script.keep_commands(recipe)
        task["commands"] = [command(recipe, body)]
        return task

    def _env(self, recipe: Recipe) -> list[str]:
        env = ["RUN_ID"]
        if recipe.uses_bucket:
            # A name without a value is asked for at the launch.
            env.append(f"BUCKET={recipe.storage.bucket}" if recipe.storage.bucket else "BUCKET")
        own = [f"{key}=${{{{ secrets.{key.lower()} }}}}" for key in self.secrets(recipe)]
        return [*env, *script.launch_secrets(recipe), *own]

    def _resources(self, recipe: Recipe) -> dict[str, Any]:
        cluster = recipe.cluster
        cpus = recipe.cpus if cluster.cpus or not cluster.gpus_per_node else 8 * cluster.gpus_per_node
        resources: dict[str, Any] = {
            "cpu": f"x86:{cpus}..",
            "memory": f"{cluster.memory_gib}GB..",
            "shm_size": f"{cluster.shm_gib}GB",
            "disk": f"{cluster.disk_gib}GB..",
        }
        if cluster.gpus_per_node:
            cards = self.cards(recipe)
            least = min(gpu_named(gpu).memory_gib for gpu in cards)
            resources["gpu"] = {
                "vendor": "amd" if cluster.gpu.startswith("MI") else "nvidia",
                "name": list(dict.fromkeys(self.gpus[gpu] for gpu in cards)),
                "memory": f"{int(least)}GB..",
                "count": cluster.gpus_per_node,
            }
        return resources

    def _rented(self, recipe: Recipe, machines: Sequence[MachineChoice]) -> dict[str, Any]:
        """Which machines task and fleet take; of your own all."""
        if not self.cloud:
            return {}
        site = recipe.site
        where: dict[str, Any] = {"backends": [self.backend]}
        if site.region:
            where["regions"] = [site.region]
        count = recipe.cluster.gpus_per_node
        if self.cloud == INSTANT_CLUSTER and count:  # `gpu: name` alone takes PCIe cards too
            planned = [clouds.runpod_card(gpu, count) for gpu in self.cards(recipe)]
            where["instance_types"] = [clouds.RUNPOD_CARDS[card] for card in planned]
        market = "spot" if recipe.cluster.spot == "only" else "auto"
        where["spot_policy"] = market if self.uses_spot(recipe) else "on-demand"
        # Dollars per node and hour: the recipe's, else one and a half times the dearest known price.
        cards = self.cards(recipe)
        dearest = max((choice.listed_usd for choice in machines if choice.gpu in cards), default=0.0)
        most = recipe.budget.max_hourly_usd or round(1.5 * dearest * recipe.cluster.gpus_per_node, 2)
        if most:
            where["max_price"] = most
        return where

    def _fleet(self, recipe: Recipe, rented: dict[str, Any], name: str) -> dict[str, Any]:
        cluster = recipe.cluster
        site = recipe.site
        fleet: dict[str, Any] = {"type": "fleet", "name": self.fleet_name(name)}
        if cluster.nodes > 1:
            fleet["placement"] = "cluster"
        if not self.cloud:
            users = [parse_address(host)[0].rpartition("@")[0] for host in hosts_of(recipe)]
            return fleet | {
                "ssh_config": {
                    "user": next(filter(None, users), "ubuntu"),
                    "identity_file": site.ssh_key or "~/.ssh/id_ed25519",
                    "hosts": list(map(_host, hosts_of(recipe))),
                }
            }
        fleet |= {"nodes": f"0..{cluster.nodes * recipe.jobs}", "resources": self._resources(recipe)} | rented
        return fleet | {"idle_duration": _idle(recipe)}

    def _volume(self, recipe: Recipe) -> dict[str, Any]:
        if not self.backend:
            raise ConfigError(
                f"{self.name} runs on your machines: mount the volume there and leave storage.volume empty"
            )
        if not recipe.site.region and not self.on_kubernetes:
            raise ConfigError("a volume lives in one region: set site.region, for example US-KS-2 on RunPod")
        where = {"region": recipe.site.region} if recipe.site.region else {}
        volume = {"type": "volume", "name": recipe.storage.volume, "backend": self.backend}
        return volume | where | {"size": f"{pods.claim_gib(recipe)}GB"}


TARGETS = (
    Dstack(name="dstack-runpod", cloud=INSTANT_CLUSTER, max_nodes=8, cpu_only=False,
           gpus=clouds.DSTACK_RUNPOD, network_gbit_s={"A100-80GB": 1600, "H100": 3200, "": 3200},
           note="one pod, or an Instant Cluster of 2 to 8: on demand, one network volume, never spot"),
    Dstack(name="dstack-gcp", cloud="gcp", max_nodes=16, spot=True, gpus=clouds.DSTACK_GCP,
           network_gbit_s=clouds.NIC | {"": 100}, disk=clouds.DISKS["dstack-gcp"]),
    Dstack(name="dstack-kubernetes", cloud="kubernetes", max_nodes=64, gpus=clouds.DSTACK,
           network_gbit_s={"": 400}, note="your cluster's node pools"),
    Dstack(name="dstack-ssh", max_nodes=64, gpus=clouds.DSTACK, network_gbit_s={"": 100},
           note="own machines as an SSH fleet: --hosts"),
)  # fmt: skip


def run_name(run_id: str) -> str:
    """The run id as dstack takes it: at most 40 characters, still one of a kind."""
    return run_id if len(run_id) <= 40 else f"{run_id[:31]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


def _answer(name: str, run: dict[str, Any]) -> PlatformAnswer:
    why = run.get("error") or run.get("termination_reason") or ""
    ended_s = 0.0
    if is_end(run["status"]):
        ended_s = datetime.fromisoformat(run["last_processed_at"]).timestamp()
    # dstack gets 0 so that it does not start the run again: its own status does not show success.
    log = programs.printed_text(["dstack", "logs", name]).splitlines() if run["status"] == "done" else []
    final = [line.strip() for line in log if restarts.FINAL in line][-1:]
    text = f"dstack run {name}: {run['status']}" + (f" ({why})" if why else "")
    state = state_word(run["status"])
    if final:
        why, state = final[0], "failed"
        text = f"dstack run {name}: FAILED: {why}"
    if ended_s:
        return PlatformAnswer(text=text, state=state, why=why, ended_s=ended_s, usd=run.get("cost"))

    last = [job["job_submissions"][-1] for job in run.get("jobs", [])]
    nodes = [node for job in last if (node := job.get("job_provisioning_data"))]
    what = f"{len(nodes)} x {nodes[0]['instance_type']['name']} in {nodes[0]['region']}" if nodes else ""
    per_hour = sum(node["price"] for node in nodes)
    return PlatformAnswer(text=text, state=state, usd=run.get("cost"), usd_per_hour=per_hour, rented=what)


def _task_name(recipe: Recipe) -> str:
    """The task's name. That of a sampling machine is cut, where the run's own name is almost as long as one
    can be."""
    name = script.job_name(recipe)
    if recipe.kind != "sample" or len(name) <= LONGEST_NAME:
        return name
    run = script.job_name(recipe).removesuffix("-sample")
    return f"{run[:20].rstrip('-')}-{hashlib.sha256(run.encode()).hexdigest()[:4]}-sample"


def registry_secrets(recipe: Recipe) -> tuple[str, ...]:
    """dstack's secrets with the login of the image's registry."""
    name = recipe.site.image_secret
    return (f"{name}_username", f"{name}_password") if name else ()


def _idle(recipe: Recipe) -> str:
    """How long a machine without a job costs on. dstack submits a failed job again after 15 seconds, and then
    after 30 and 60 more."""
    waits = bool(restarts.restart_codes(recipe))
    return f"{recipe.budget.idle_minutes if waits else recipe.budget.keep_minutes}m"


def _host(address: str) -> str | dict[str, Any]:
    """A machine as dstack takes it: its address alone where no more is given."""
    login, internal, port = parse_address(address)
    user, _, machine = login.rpartition("@")
    host: dict[str, Any] = {"hostname": machine} | ({"user": user} if user else {})
    host |= {"port": port} if port != 22 else {}
    if internal != machine:
        host["internal_ip"] = internal
    return host if len(host) > 1 else machine


def _file(path: str) -> dict[str, str]:
    """A folder or file of the repository, as seen from the rendered file."""
    return {"local_path": f"../../../{path}".rstrip("/"), "path": f"{CODE}/{path}".rstrip("/")}


def retry(recipe: Recipe) -> dict[str, Any]:
    """dstack's `retry`. A node lost on RunPod, Kubernetes or own machines is an `error` to it, as is a failed
    job."""
    events = ["no-capacity", "interruption", "error"] if restarts.restart_codes(recipe) else ["no-capacity"]
    return {"on_events": events, "duration": duration(min(recipe.budget.max_hours, CAPACITY_HOURS))}


def duration(hours: float) -> str:
    """Hours as dstack writes them: it takes whole numbers only."""
    return f"{hours:g}h" if hours == int(hours) else f"{math.ceil(hours * 60)}m"


def command(recipe: Recipe, body: str) -> str:
    """The task's one command: `body`, then the node's process; dstack sees 0 for what it must not start
    again.

    In a shell of its own, because dstack's is interactive, where an unset variable ends less than it should.
    """
    node = script.node_command(recipe)
    if not restarts.restart_codes(recipe):
        return f"{body}exec {node}\n"
    keep = "|".join(map(str, (0, *restarts.restart_codes(recipe))))
    then = "\\`python3 launch.py resume ${RUN_ID:-}\\`"
    if recipe.kind == "sample":
        then = "start this machine again"
    task = f"""\
final() {{
  code=$?
  case "$code" in
    {keep}) ;;
    *)
      echo "{restarts.FINAL}: exit code $code; fix what the lines above say, then {then}"
      exit 0 # dstack starts a job again after every other code
      ;;
  esac
}}
trap final EXIT
{body}{script.OUTLAST}{node} &
node=$!
trap 'kill -s INT "$node" 2>/dev/null || true' INT
trap 'kill -s TERM "$node" 2>/dev/null || true' TERM
outlast "$node"
"""
    return f'exec bash -c "$(cat <<"TASK"\n{task}TASK\n)"\n'
