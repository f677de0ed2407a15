"""Kubernetes without a tool between: the JobSet against published schemas, its rules, and its shell as
processes."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import jsonschema
import pytest
import yaml

from recipes.plan.memory import with_resources
from recipes.platforms import script
from recipes.platforms.job_set import ARCHIVE, ARCHIVE_FOLDER, LONGEST_NAME, NODE, of_run, set_name
from recipes.platforms.targets import targets_for
from recipes.presets import RECIPES, get, resolve
from tests.recipes.rendered import make_checkout, render, render_unchecked
from tests.recipes.test_restarts import AGAIN, CODES
from tests.recipes.test_targets import pod_of
from trainer.config import ConfigError
from trainer.node import topology
from trainer.system.exit_codes import FINAL_EXIT_CODES, RECOVER_EXIT_CODES

ROOT = Path(__file__).parents[2]
ONE, BIG = "grpo-qwen2.5-vl-7b-mathv60k", "grpo-qwen2.5-vl-72b-mathv60k"
SCHEMAS = json.loads((Path(__file__).parent / "schemas/kubernetes.json").read_text())
NAMES = [name for name in RECIPES if "kubernetes" in targets_for(get(name))]


def check_schema(data):
    """Raises where the API server would refuse an object: a field that its kind has not, or another type."""
    schema = {"$ref": f"#/definitions/{data['kind']}", "definitions": SCHEMAS["definitions"]}
    jsonschema.Draft7Validator(schema).validate(data)


def job_set(name, *overrides):
    files = render(resolve(name, list(overrides)), "kubernetes")
    return yaml.safe_load(files[f"{name}.yaml"])


def job_of(data):
    return data["spec"]["replicatedJobs"][0]["template"]["spec"]


def container_of(data):
    return pod_of(data)["containers"][0]


def env_of(data):
    return {entry["name"]: entry.get("value") for entry in container_of(data)["env"]}


# --- Schemas ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_a_job_set_by_the_published_schemas(name):
    check_schema(job_set(name))


def test_what_a_site_asks_for_is_by_the_published_schemas():
    site = ["site.namespace=research", "site.queue=gpus", "site.topology=example.com/rack",
            "site.rdma=rdma/ib:8", "site.node_pool=h100", "site.gpu_label=example.com/card=h100",
            "storage.volume=cache", "site.storage_class=nfs", "cluster.spot=only"]  # fmt: skip
    recipe = resolve(BIG, site)
    task, claim = map(yaml.safe_load, render(recipe, "kubernetes").values())
    check_schema(task)
    check_schema(claim)
    assert task["metadata"]["namespace"] == claim["metadata"]["namespace"] == "research"
    assert task["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    topology_key = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "example.com/rack"}
    assert task["metadata"]["annotations"] == topology_key
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": f"{with_resources(recipe).cluster.disk_gib}Gi"}},
        "storageClassName": "nfs",
    }
    workspace = next(v for v in pod_of(task)["volumes"] if v["name"] == "workspace")
    assert workspace["persistentVolumeClaim"] == {"claimName": "cache"}
    container = container_of(task)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/ib": 8}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert container["resources"]["requests"]["ephemeral-storage"] == "60Gi", "the rest is on the claim"
    assert pod_of(task)["nodeSelector"]["cloud.google.com/gke-nodepool"] == "h100"


def test_a_site_that_names_nothing_gets_nothing():
    task = job_set(ONE)
    assert "namespace" not in task["metadata"] and "annotations" not in task["metadata"]
    assert not any("kueue" in label for label in task["metadata"]["labels"])
    with pytest.raises(ConfigError, match="site.topology is rack, and kubernetes does nothing with it"):
        job_set(ONE, "site.topology=rack")  # one pod needs no network domain for itself
    with pytest.raises(ConfigError, match="write it otherwise"):
        job_set(ONE, "model.path=/models/a$(b)")  # Kubernetes would replace it
    workspace = next(v for v in pod_of(task)["volumes"] if v["name"] == "workspace")
    assert workspace["emptyDir"] == {}


# --- Nodes ------------------------------------------------------------------------------------------


def test_nodes_are_the_pods_of_one_indexed_job():
    recipe, task = get(BIG), job_set(BIG)
    job = job_of(task)
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == recipe.cluster.nodes == 4
    assert task["spec"]["replicatedJobs"][0]["replicas"] == 1
    assert task["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    limits = container_of(task)["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": recipe.cluster.gpus_per_node}
    shm = next(v["emptyDir"] for v in pod_of(task)["volumes"] if v["name"] == "shm")
    assert shm["medium"] == "Memory" and shm["sizeLimit"].endswith("Gi")


def test_a_pods_place_is_its_completion_index_and_the_head_is_the_name_of_index_0():
    text = of_run(next(iter(render(get(BIG), "kubernetes").values())), "try")
    env = {name: value for name, value in env_of(yaml.safe_load(text)).items() if value is not None}
    assert env["RUN_ID"] == "try"
    node = topology.read_node_environment(env | {"SPOTRL_NODE_RANK": "2"})
    assert (node.rank, node.nodes, node.gpus_per_node) == (2, 4, 8)
    # JobSet: <set>-<replicated job>-<job index>-<pod index>.<subdomain, by default the set>
    assert node.head == "try-node-0-0.try"
    assert 'export SPOTRL_NODE_RANK="${JOB_COMPLETION_INDEX:?}"' in container_of(job_set(BIG))["command"][2]
    entry = next(e for e in container_of(job_set(BIG))["env"] if e["name"] == "SPOTRL_RESTART")
    path = entry["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    assert topology.start_names({"SPOTRL_RESTART": "1"}) == {"SPOTRL_RESTART": "1"}


def test_names_of_pods_have_63_characters_at_most():
    names = {set_name(f"{'a' * length}") for length in range(1, 64)}
    assert len(names) == 63 and max(map(len, names)) == LONGEST_NAME
    for suffix, pods in (("", 64), ("-sample", 64)):
        pod = f"{'a' * LONGEST_NAME}{suffix}-{NODE}-0-{pods - 1}-abcde"
        assert len(pod) <= 63, pod
    long = "a" * 62 + "b"
    data = yaml.safe_load(of_run(next(iter(render(get(BIG), "kubernetes").values())), long))
    name = set_name(long)
    assert env_of(data)["RUN_ID"] == long and data["metadata"]["name"] == name
    assert env_of(data)["SPOTRL_HEAD"] == f"{name}-node-0-0.{name}"


# --- Where ------------------------------------------------------------------------------------------


def terms_of(task):
    affinity = pod_of(task)["affinity"]["nodeAffinity"]
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {"nodeSelectorTerms": []})
    return [term["matchExpressions"] for term in required["nodeSelectorTerms"]]


def takes(task, labels):
    """Whether the scheduler's rule lets the pods go to a node with these labels."""

    def met(rule):
        found = labels.get(rule["key"]) in rule["values"]
        return found if rule["operator"] == "In" else not found

    return any(all(map(met, term)) for term in terms_of(task))


A100, H100, H100_PCIE, L4 = (
    {"nvidia.com/gpu.product": name}
    for name in ("NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-L4")
)


def test_pods_go_to_the_planned_card_by_either_label():
    task = job_set(BIG)
    assert takes(task, A100) and takes(task, {"cloud.google.com/gke-accelerator": "nvidia-a100-80gb"})
    assert not takes(task, L4)
    assert not takes(task, H100), "four pods of one kind"
    assert not takes(task, {}), "a node without a label is not known to have the card"
    one = job_set(ONE, "cluster.gpus_per_node=1", "rollout.tensor_parallel=1")
    assert takes(one, H100_PCIE) and not takes(job_set(ONE), H100_PCIE), "eight want NVLink"
    own = job_set(BIG, "site.gpu_label=example.com/card=a100")
    assert takes(own, {"example.com/card": "a100"}) and not takes(own, A100)


def test_spot_nodes_are_preferred_required_or_refused():
    spot = A100 | {"karpenter.sh/capacity-type": "spot"}
    prefer, only, never = (job_set(BIG, f"cluster.spot={rule}") for rule in ("prefer", "only", "never"))
    assert takes(prefer, A100) and takes(prefer, spot)
    assert not takes(only, A100) and takes(only, spot)
    assert takes(only, A100 | {"cloud.google.com/gke-spot": "true"})
    assert takes(never, A100) and not takes(never, spot)
    tolerated = {toleration["key"] for toleration in pod_of(prefer)["tolerations"]}
    assert {"nvidia.com/gpu", "cloud.google.com/gke-spot", "karpenter.sh/capacity-type"} <= tolerated
    assert {toleration["key"] for toleration in pod_of(never)["tolerations"]} == {"nvidia.com/gpu"}
    assert env_of(prefer)["SPOTRL_NOTICE_S"] == "15" and env_of(never)["SPOTRL_NOTICE_S"] == "120"


# --- Restarts ---------------------------------------------------------------------------------------


def outcome(task, code, disrupted=False):
    """What Kubernetes does after a pod has left with `code`: the first rule that is met, by the order of
    podFailurePolicy."""
    if code == 0 and not disrupted:
        return "done"
    for rule in job_of(task).get("podFailurePolicy", {}).get("rules", []):
        if "onPodConditions" in rule:
            if disrupted:
                return rule["action"]
            continue
        codes = rule["onExitCodes"]
        assert codes["containerName"] == container_of(task)["name"]
        if (code in codes["values"]) == (codes["operator"] == "In"):
            return rule["action"]
    return "Count"


@pytest.mark.parametrize("name", [ONE, BIG])
def test_pods_are_started_again_after_our_codes_alone(name):
    task = job_set(name)
    assert pod_of(task)["restartPolicy"] == "Never", "what podFailurePolicy asks for"
    found = {code: outcome(task, code) for code in CODES}
    assert {code for code in CODES if found[code] == "Count"} == AGAIN == set(RECOVER_EXIT_CODES)
    assert all(found[code] == "FailJob" for code in FINAL_EXIT_CODES)
    assert all(found[code] == "FailJob" for code in (1, 130, 137, 139))
    rule = task["spec"]["failurePolicy"]["rules"][0]
    assert rule["action"] == "FailJobSet"
    assert {"PodFailurePolicy", "DeadlineExceeded"} == set(rule["onJobFailureReasons"])


def test_restarts_are_counted_by_the_run_alone():
    """Its count begins anew with each checkpoint; that of a Job or a set never does."""
    one, big = job_set(ONE), job_set(BIG, "budget.max_requeues=7")
    assert (job_of(one)["backoffLimit"], one["spec"]["failurePolicy"]["maxRestarts"]) == (2**31 - 1, 0)
    assert (job_of(big)["backoffLimit"], big["spec"]["failurePolicy"]["maxRestarts"]) == (0, 7)
    final, again = big["spec"]["failurePolicy"]["rules"]
    assert again["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert again["onJobFailureReasons"] == ["BackoffLimitExceeded"], (
        "what a pod's end is, of a Job that has no spare"
    )
    assert not set(again["onJobFailureReasons"]) & set(final["onJobFailureReasons"])
    # 137 is what the container of an evicted pod may leave with.
    assert outcome(one, 137, disrupted=True) == "Ignore", "the run counts its own losses"
    assert outcome(big, 137, disrupted=True) == "Count", "a pod that came back alone would find no head"
    task = job_set("preflight", "budget.max_hours=1.5")
    assert job_of(task)["backoffLimit"] == task["spec"]["failurePolicy"]["maxRestarts"] == 0
    assert {outcome(task, code) for code in CODES} == {"done", "Count"}, "it is never started again"
    assert job_of(task)["activeDeadlineSeconds"] == 5400


def test_machines_that_sample_are_pods_that_restart_each_for_itself(monkeypatch):
    monkeypatch.setattr(script, "SAMPLING_PROGRAM", "sampler_of_this_test")
    recipe = resolve(BIG, ["sample.nodes=4", "storage.volume=cache", "site.topology=rack"])
    files = render_unchecked(recipe, "kubernetes")
    task = yaml.safe_load(files[f"{BIG}.sample.yaml"])
    check_schema(task)
    job = job_of(task)
    assert job["completions"] == job["parallelism"] == 4 and "backoffLimit" not in job
    assert job["backoffLimitPerIndex"] == recipe.budget.max_requeues
    assert {code: outcome(task, code) for code in CODES if outcome(task, code) == "Count"} == {33: "Count"}
    assert outcome(task, 2) == "FailIndex" and outcome(task, 137, disrupted=True) == "Ignore"
    assert "SPOTRL_NODES" not in env_of(task) and "annotations" not in task["metadata"]
    assert all("persistentVolumeClaim" not in volume for volume in pod_of(task)["volumes"])
    run = yaml.safe_load(files[f"{BIG}.yaml"])
    assert task["metadata"]["name"] != run["metadata"]["name"]
    assert task["metadata"]["labels"] != run["metadata"]["labels"]
    assert container_of(task)["envFrom"] == container_of(run)["envFrom"]


# --- What runs --------------------------------------------------------------------------------------


TOPOLOGY_PROBE = """
import json, os, sys
sys.path.insert(0, {root!r})
from trainer.node import topology
node = topology.read_node_environment(os.environ)
print(json.dumps([sys.argv[2:], node.rank, node.nodes, node.head]), flush=True)
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def code(tmp_path):
    """The archive of a checkout whose environment is a stand-in: its `trainer.node` tells its place."""
    folder = tmp_path / "code"
    node = f'[ "$2" = trainer.node ] || {{ echo "$2"; exit 0; }}\nexec {sys.executable} -P node.py "$@"'
    make_checkout(folder, node, setup='echo "setup $1"')
    (folder / "trainer/shell/driver.sh").write_text('echo "driver $1"\n')
    (folder / "node.py").write_text(TOPOLOGY_PROBE.format(root=str(ROOT)))
    path = tmp_path / "mounted" / ARCHIVE
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, ".")
    return path


def pods(tmp_path, archive, name, run_id="try", ranks=1, **more):
    """[(exit code, output)] of the pods' own command, each a process in an empty folder of its own."""
    text = of_run(next(iter(render(get(name), "kubernetes").values())), run_id)
    task = yaml.safe_load(text)
    command = list(container_of(task)["command"])
    mounted = f"{ARCHIVE_FOLDER}/{ARCHIVE}"
    assert mounted in command[2]
    command[2] = command[2].replace(mounted, str(archive))
    processes = []
    for rank in range(ranks):
        folder = tmp_path / f"pod{rank}"
        folder.mkdir()
        given = {key: value for key, value in env_of(task).items() if value is not None}
        env = {"PATH": os.environ["PATH"], "HOME": str(folder), "WORK": str(folder / "w")}
        env |= given | {"JOB_COMPLETION_INDEX": str(rank), "SPOTRL_RESTART": "0", "BUCKET": "s3://mine"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, cwd=folder, env=env | more, **pipes))
    said = [process.communicate(timeout=60)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def test_the_pods_command_unpacks_the_code_sets_up_and_runs_each_node(tmp_path, code):
    nodes = get(BIG).cluster.nodes
    for rank, (left, said) in enumerate(pods(tmp_path, code, BIG, ranks=2)):
        assert left == 0, said
        lines = said.splitlines()
        assert lines[:2] == ["driver 36", "setup gpu"]
        assert {"data_prep", "recipes.records.manifest"} <= set(lines)
        told = json.loads(next(line for line in lines if line.startswith("[[")))
        assert told[1:4] == [rank, nodes, "try-node-0-0.try"]
        assert told[0] == ["trainer.node", "--config", ".cache/try.yaml"]
        config = yaml.safe_load((tmp_path / f"pod{rank}/.cache/try.yaml").read_text())
        assert config["run"]["id"] == "try" and config["checkpoint"]["remote"] == "s3://mine"


def test_the_pod_leaves_with_the_nodes_exit_code_and_with_2_without_code_or_bucket(tmp_path, code):
    for number, wanted in enumerate((33, 37)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert pods(folder, code, ONE, CODE=str(wanted))[0][0] == wanted
    folder = tmp_path / "no-code"
    folder.mkdir()
    assert pods(folder, tmp_path / "nothing", ONE)[0][0] == 2
    folder = tmp_path / "no-bucket"
    folder.mkdir()
    left, said = pods(folder, code, ONE, BUCKET="")[0]
    assert left == 2 and "the bucket that checkpoints are pushed to is missing" in said
