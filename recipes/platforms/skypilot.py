"""SkyPilot: `sky launch` on demand, `sky jobs launch` for spot. Checked against SkyPilot 0.14.1.

What shapes its tasks: RunPod runs one node and has no FUSE, so nothing is mounted and checkpoints go up by
our own uploader; SkyPilot's ids change on recovery, so checkpoints are keyed by RUN_ID; rclone's cached
mounts upload in any order and may lose their tail on `down` (skypilot#8519), so no checkpoint is ever
committed through one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any
from urllib.parse import SplitResult

from recipes.platforms import clouds, pods, programs, restarts, script
from recipes.platforms.answers import LAUNCH_FAILED, PlatformAnswer, PlatformAnswers, is_end, state_word
from recipes.platforms.base import Commands, Disposable, LaunchGiven, Platform, for_each, ssh_tunnel, to_yaml
from recipes.recipe.resolved import MachineChoice, ResolvedRecipe
from recipes.recipe.spec import Cluster, Recipe
from recipes.records.run_record import RunRecord
from trainer.config import ConfigError
from trainer.system.exit_codes import EXIT_PREFLIGHT

DEFAULT_CLOUDS = ("runpod", "gcp")
PENDING_S = 2400
"""How long pods may wait for nodes. SkyPilot's own 10 seconds end before an autoscaler has begun; this is
what it gives DWS for many nodes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SkyPilot(Disposable):
    fast: tuple[str, ...] = ()
    """GPUs of which nodes of eight take SkyPilot's `network_tier: best`."""
    program = "sky"
    title = "SkyPilot"
    hint = programs.LAUNCHERS
    follows_one_job = True
    log_program = "sky"

    @property
    def chooses(self) -> bool:
        return not self.cloud

    def members(self, recipe: Recipe) -> list[Platform]:
        if not self.chooses:
            return [self]
        known = {target.cloud: target for target in (*TARGETS, *MORE_CLOUDS) if target.sold and target.cloud}
        chosen = recipe.site.clouds or DEFAULT_CLOUDS
        unknown = [cloud for cloud in chosen if cloud not in known]
        if unknown:
            raise ConfigError(
                f"site.clouds has {', '.join(unknown)}: give some of {', '.join(sorted(known))}"
            )
        return [known[cloud] for cloud in chosen]

    def refusal(self, recipe: Recipe) -> str:
        if self.chooses:
            reasons = [cloud.refusal(recipe) for cloud in self.members(recipe)]
            return "; ".join(dict.fromkeys(reasons)) if all(reasons) else ""
        cluster = recipe.cluster
        refusal = super().refusal(recipe)
        if not refusal and recipe.environment == "rocm" and cluster.image == Cluster.image:
            why = f"{cluster.image} is for NVIDIA's GPUs, and {self.name} runs {recipe.name} on {cluster.gpu}"
            return f"{why}: set cluster.image to one with PyTorch and vLLM for ROCm"
        return refusal

    def is_managed(self, recipe: Recipe) -> bool:
        """Whether SkyPilot's jobs controller runs it."""
        trains = recipe.cluster.gpus_per_node > 0 and recipe.kind in ("train", "sample")
        return trains and (self.uses_spot(recipe) or self.on_kubernetes)

    def engine_gpu(self, gpu: str, count: int) -> str:
        return clouds.runpod_card(gpu, count) if self.cloud == "runpod" else self.gpus[gpu]

    def obeys(self, recipe: Recipe) -> frozenset[str]:
        managed = self.is_managed(recipe)
        own = {"budget.idle_minutes" if managed else "budget.keep_minutes"}
        if self.sold:
            own |= {"budget.max_hourly_usd", "site.region"}
        if self.chooses:
            own.add("site.clouds")
        if self.on_kubernetes:
            own |= pods.obeyed(recipe)
        if self.cloud == "runpod" and recipe.storage.volume:
            own.add("storage.volume_gib")
        return self.OBEYS | own

    def render(self, run: ResolvedRecipe) -> dict[str, str]:
        """Task file, and the volume's where the recipe names one."""
        recipe = run.recipe
        bucket = recipe.storage.bucket or (None if recipe.uses_bucket else "")
        task: dict[str, Any] = {
            "name": script.job_name(recipe),
            "workdir": ".",
            "num_nodes": recipe.cluster.nodes,
            "resources": self._resources(recipe, run.machines),
            "envs": {"RUN_ID": None, "BUCKET": bucket} | dict.fromkeys(script.SETTINGS, ""),
        }
        if recipe.storage.volume:
            task["volumes"] = {"/workspace": recipe.storage.volume}
        if self.on_kubernetes:
            own: dict[str, Any] = {"provision_timeout": PENDING_S}
            if recipe.site.queue:  # SkyPilot gives a queue, and DWS behind one, a day
                own = {"kueue": {"local_queue_name": recipe.site.queue}}
            task["config"] = {"kubernetes": {**own, "pod_config": _pod(recipe)}}
        elif recipe.cluster.nodes > 1 and any(place.target == "skypilot-gcp" for place in run.machines):
            # GCP's older interface stays below 50 Gb/s, and SkyPilot takes that unless it is told.
            task["config"] = {"gcp": {"enable_gvnic": True}}
        begin = self.begin_shell(
            recipe, "/workspace" if self.cloud == "runpod" or recipe.storage.volume else "$HOME/spotrl"
        )
        task["setup"] = begin + script.setup_commands(recipe, EXIT_PREFLIGHT)
        check = script.leave_if_over(recipe) + script.driver_check(recipe, EXIT_PREFLIGHT)
        ready = check + script.write_config(recipe) + script.keep_commands(recipe)
        task["run"] = begin + ready + f"exec {script.node_command(recipe, '0.0.0.0')}\n"
        name = f"{recipe.name}.yaml"
        files = {name: to_yaml(task, self._head(recipe, f"recipes/generated/{self.name}/{name}"))}
        if recipe.storage.volume and (self.cloud == "runpod" or self.on_kubernetes):
            files[f"{recipe.name}.volume.yaml"] = self._volume(recipe)
        return files

    def commands(self, record: RunRecord, given: LaunchGiven) -> Commands:
        options = given.options("--env")
        for name in given.secrets:
            options += ["--secret", name]
        names = record.names()
        volume = for_each(["sky", "volumes", "apply", "-y"], given.files_ending(".volume.yaml"))
        what = [*(["-d"] if given.detach else []), *record.flags, given.files[0], *options]
        if record.managed:
            jobs = ["sky", "jobs"]
            return Commands(
                up=[*volume, *for_each([*jobs, "launch", "-y", "-n"], names, what)],
                status=[[*jobs, "queue"]],
                logs=[[*jobs, "logs", record.cluster]]
                if record.cluster
                else for_each([*jobs, "logs", "-n"], names),
                down=for_each([*jobs, "cancel", "-y", "-n"], names),
            )
        endpoint = [["sky", "status", "--endpoint", str(script.PORT), record.run_id]]
        return Commands(
            up=[*volume, *for_each(["sky", "launch", "-y", "-c"], names, what)],
            status=[*for_each(["sky", "queue"], names), *(endpoint if record.recipe == "serve" else [])],
            logs=for_each(["sky", "logs"], names),
            down=for_each(["sky", "down", "-y"], names),
        )

    def is_cluster(self, record: RunRecord) -> bool:
        return not record.managed

    def is_open(self, record: RunRecord) -> bool:
        """A cluster counts until it was seen to be gone."""
        if record.managed:
            return not record.ended_s
        return record.state not in ("gone", LAUNCH_FAILED)

    def ask_job(self, record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
        return _managed_job(record, answers) if record.managed else _cluster(record, answers)

    def server_address(self, record: RunRecord) -> tuple[str, str]:
        return f"http://$(sky status --endpoint {script.PORT} {record.run_id})", ""

    def read_from_head(self, record: RunRecord, path: str, dry_run: bool) -> list[str]:
        if record.managed:
            cure = "only its controller knows the machines: use `status --watch`"
            raise ConfigError(f"{record.run_id} is a managed job, and {cure}")
        return ["ssh", "-o", "BatchMode=yes", record.run_id, f"cat {path}"]

    def tunnel(self, record: RunRecord, port: int, there: SplitResult) -> list[str]:
        return ssh_tunnel(["ssh", "-o", "BatchMode=yes", record.run_id], port, there)

    def _volume(self, recipe: Recipe) -> str:
        """The volume or claim at /workspace, which outlives machines and pods: models, data and packages are
        there after a recovery. Raises ConfigError."""
        site = recipe.site
        volume: dict[str, Any] = {"name": recipe.storage.volume}
        size = {"size": str(pods.claim_gib(recipe))}
        if self.on_kubernetes:
            infra = f"k8s/{site.kubernetes_context}" if site.kubernetes_context else "k8s"
            config = {"access_mode": pods.claim_mode(recipe)}
            if site.storage_class:
                config["storage_class_name"] = site.storage_class
            volume |= {"type": "k8s-pvc", "infra": infra, **size, "config": config}
        else:
            if len(recipe.storage.volume) > 30:
                raise ConfigError(f"storage.volume {volume['name']!r}: RunPod takes at most 30 characters")
            if "/" not in site.region:
                raise ConfigError(
                    "a RunPod volume lives in one data centre: set site.region, for example US/US-KS-2"
                )
            volume |= {"type": "runpod-network-volume", "infra": f"runpod/{site.region}", **size}
        word = "claim" if self.on_kubernetes else "volume"
        return to_yaml(volume, f"The {word} at /workspace; once: sky volumes apply {recipe.name}.volume.yaml")

    def _head(self, recipe: Recipe, path: str) -> str:
        managed = self.is_managed(recipe)
        bucket = "" if recipe.storage.bucket or not recipe.uses_bucket else " --env BUCKET=s3://..."
        command = "sky jobs launch" if managed else "sky launch"
        begin = end = ""
        if recipe.kind == "sample":
            own_name = "-n" if managed else "-c"
            begin = f"for i in $(seq {recipe.jobs}); do "
            command, end = f"{command} -y -d {own_name} {script.job_name(recipe)}-$i", "; done"
        url = recipe.storage.bucket or recipe.storage.weights or ("s3://" if recipe.uses_bucket else "")
        needs = script.bucket_keys(url)
        if url.startswith("gs://") and self.cloud == "gcp":
            needs = ()  # the machines' own account
        secrets = "".join(f" --secret {name}" for name in (*needs, *script.launch_secrets(recipe)))
        again = ""
        if restarts.restart_codes(recipe) and not managed:
            again = (
                "\nSkyPilot does not start it again after a failure or a lost machine: the same command does."
            )
        return (
            f"{script.written_by(recipe, self.name)}\n"
            f"  {begin}{command} {path} --env RUN_ID=my-run{bucket}{secrets}{end}\n"
            f"{script.run_id_comment(recipe)}{again}"
        )

    def _resources(self, recipe: Recipe, places: Sequence[MachineChoice]) -> dict[str, Any]:
        cluster = recipe.cluster
        budget = recipe.budget
        common: dict[str, Any] = {
            "image_id": f"docker:{cluster.image}",
            "memory": f"{cluster.memory_gib}+",
            "disk_size": cluster.disk_gib,
            "autostop": self._autostop(recipe),
        }
        if self.is_managed(recipe):  # nothing else reads it
            rule: dict[str, Any] = {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 0}
            if codes := restarts.restart_codes(recipe):
                rule["recover_on_exit_codes"] = list(codes)
            common["job_recovery"] = rule
        if recipe.kind == "serve":  # Ray's dashboard goes through ssh: a port here is open to the internet
            common["ports"] = [script.PORT]
        if cluster.cpus or not cluster.gpus_per_node or self.on_kubernetes:
            common = {"cpus": f"{recipe.cpus}+"} | common
        if budget.max_hourly_usd:
            common["max_hourly_cost"] = budget.max_hourly_usd
        if self.on_kubernetes:
            del common["disk_size"]  # pods have their node's disk, or the claim
        rows = {target.name: target for target in (*TARGETS, *MORE_CLOUDS)}
        choices = [rows[place.target]._choice(recipe, place) for place in places]
        if len(choices) == 1:
            return choices[0] | common
        return {"ordered": choices} | common

    def _autostop(self, recipe: Recipe) -> dict[str, Any]:
        """When machines without a job go down. SkyPilot takes 0 minutes for 1; an open ssh session, which is
        also that of `launch.py dashboard`, would keep a cluster, so only jobs count."""
        if self.is_managed(recipe):
            return {"idle_minutes": recipe.budget.idle_minutes, "down": True}
        return {"idle_minutes": recipe.budget.keep_minutes, "wait_for": "jobs", "down": True}

    def _choice(self, recipe: Recipe, place: MachineChoice) -> dict[str, Any]:
        """A place as SkyPilot takes it."""
        cluster, site = recipe.cluster, recipe.site
        where = site.kubernetes_context if self.on_kubernetes else site.region
        cloud = "k8s" if self.on_kubernetes else self.cloud
        entry: dict[str, Any] = {"infra": f"{cloud}/{where}" if where else cloud}
        if place.gpu:
            card = self.engine_gpu(place.gpu, cluster.gpus_per_node)
            entry["accelerators"] = f"{card}:{cluster.gpus_per_node}"
        if cluster.nodes > 1 and cluster.gpus_per_node == 8 and place.gpu in self.fast:
            entry["network_tier"] = "best"
        if self.disk and self.disk.tier and place.gpu and recipe.kind == "train":
            entry["disk_tier"] = self.disk.tier
        if self.spot and place.gpu:
            entry["use_spot"] = place.spot
        return entry


TARGETS = (
    SkyPilot(name="skypilot", max_nodes=16, spot=True, gpus=clouds.ANY,
             network_gbit_s=clouds.NIC | {"": 100},
             note="cheapest of RunPod (one node only) and GCP, or of site.clouds, spot before on-demand"),
    SkyPilot(name="skypilot-runpod", cloud="runpod", spot=True, gpus=clouds.RUNPOD, network_gbit_s={"": 0},
             note="one node; no FUSE, so checkpoints go up by our own uploader; machines go down, never"
                  " stop"),
    SkyPilot(name="skypilot-gcp", cloud="gcp", max_nodes=16, spot=True, gpus=clouds.GCP,
             network_gbit_s=clouds.NIC | {"": 100}, disk=clouds.DISKS["gcp"],
             note="between nodes one gVNIC: GPUDirect's images have drivers of their own"),
    SkyPilot(name="skypilot-kubernetes", cloud="kubernetes", max_nodes=64, gpus=clouds.LABELLED,
             network_gbit_s={"": 400},
             note="your cluster's own node pools; spot only as the pool you name"),
)  # fmt: skip
MORE_CLOUDS = (
    SkyPilot(name="skypilot-aws", cloud="aws", max_nodes=16, spot=True, gpus=clouds.AWS,
             network_gbit_s={"": 100}, needs="skypilot[aws]", disk=clouds.DISKS["aws"],
             note="between nodes TCP: EFA is not set up"),
    SkyPilot(name="skypilot-azure", cloud="azure", max_nodes=16, spot=True, gpus=clouds.AZURE,
             network_gbit_s={"": 24}, needs="skypilot[azure]", disk=clouds.DISKS["azure"],
             note="between nodes TCP; H100 by one and two: SkyPilot lists the machine of eight as one of"
                  " twelve"),
    SkyPilot(name="skypilot-lambda", cloud="lambda", max_nodes=16, gpus=clouds.LAMBDA,
             network_gbit_s={"": 100}, note="on demand; machines go down, never stop"),
    SkyPilot(name="skypilot-nebius", cloud="nebius", max_nodes=16, spot=True, gpus=clouds.NEBIUS,
             network_gbit_s={"H100": 3200, "H200": 3200, "B200": 3200, "": 100},
             fast=("H100", "H200", "B200"), needs="skypilot[nebius]", disk=clouds.DISKS["nebius"],
             note="InfiniBand between nodes of eight (network_tier: best)"),
)  # fmt: skip
"""Clouds that are named after all other targets where a recipe is refused."""


def _managed_job(record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
    rows = answers.rows("sky", "jobs", "queue", "-a", "-v", "-o", "json")
    if rows is None:
        return None
    same_name = [row for row in rows if row["job_name"] == record.run_id]
    if not same_name:
        return PlatformAnswer(text=f"managed job {record.run_id}: not known to SkyPilot", known=False)
    job = max(same_name, key=itemgetter("job_id"))
    parts = [job.get(key) for key in ("infra", "cluster_resources")]
    places = [part for part in parts if part not in (None, "", "-")]
    place = ", ".join(places) or "no machine yet"
    reason = job.get("failure_reason") or ""
    why = f" ({reason})" if reason else ""
    moved = f"recovered {job.get('recovery_count') or 0} times"
    cloud = (job.get("cloud") or "").lower()

    ended_s = 0.0
    usd_per_hour = 0.0
    if is_end(job["status"]):
        ended_s = job.get("end_at") or time.time()
    elif gpu := next(iter(job.get("accelerators") or {}), ""):
        spot = "[spot]" in (job.get("cluster_resources") or "")
        usd_per_hour = answers.price(record, cloud, gpu, spot)
    return PlatformAnswer(
        text=f"managed job {job['job_id']}: {job['status']}{why}, {place}, {moved}",
        state=state_word(job["status"]),
        why=reason,
        ended_s=ended_s,
        name=str(job["job_id"]),
        usd_per_hour=usd_per_hour,
        rented=f"{job.get('infra') or cloud}, {job['cluster_resources']}" if usd_per_hour else "",
    )


def _cluster(record: RunRecord, answers: PlatformAnswers) -> PlatformAnswer | None:
    # Refreshed: SkyPilot's own list has a cluster that went down by itself until it is asked again.
    rows = answers.rows("sky", "status", "--refresh", "-o", "json")
    if rows is None:
        return None
    same_name = [row for row in rows if row["name"] == record.run_id]
    if not same_name:
        text = f"cluster {record.run_id}: gone"
        return PlatformAnswer(text=text, state="gone", ended_s=time.time(), known=False)
    status = same_name[0]["status"]
    text = f"cluster {record.run_id}: {status}, {same_name[0].get('resources_str') or ''}"
    state = {"INIT": "starting", "UP": "running"}.get(status, status.lower())
    return PlatformAnswer(text=text, state=state, whole=False)


def _pod(recipe: Recipe) -> dict[str, Any]:
    """What is merged into SkyPilot's own pod, lists by name: `dshm` is its memory volume at /dev/shm."""
    memory = {"medium": "Memory", "sizeLimit": f"{recipe.cluster.shm_gib}Gi"}
    # Else pods go to nodes whose disk is too small, and are evicted amid training.
    requests: dict[str, Any] = {"ephemeral-storage": f"{pods.own_disk_gib(recipe)}Gi"}
    resources = {"requests": requests}
    container: dict[str, Any] = {"resources": resources}
    devices = pods.rdma_devices(recipe)
    if devices:
        # A namespace with the policy `baseline` refuses it.
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
        resources["limits"] = devices
        requests |= devices
    spec: dict[str, Any] = {"containers": [container], "volumes": [{"name": "dshm", "emptyDir": memory}]}
    if recipe.site.node_pool:
        spec["nodeSelector"] = {"cloud.google.com/gke-nodepool": recipe.site.node_pool}
    return {"spec": spec | pods.pull_secret(recipe)}
