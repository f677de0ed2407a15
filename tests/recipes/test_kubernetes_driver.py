"""`launch.py` on Kubernetes with the real kubectl, against a stand-in for the API server; what the cluster's
controllers do is played."""

import ast
import base64
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
import time
import uuid
from pathlib import Path

import pytest

from recipes.drivers import dashboard_tunnel, desk_driver, kubernetes_driver
from recipes.drivers.task_files import GENERATED
from recipes.platforms import job_set, kubernetes, script
from recipes.platforms.answers import LAUNCH_FAILED
from recipes.presets import get
from recipes.records import run_record
from tests.recipes.desk import elsewhere, run, stand_in  # noqa: F401
from tests.recipes.kubernetes_api import Api
from tests.recipes.test_kubernetes import check_schema, container_of, env_of
from trainer.config import ConfigError, never_sent

pytestmark = pytest.mark.skipif(
    not shutil.which("kubectl"), reason="no kubectl: install your cluster's client"
)
ONE = "grpo-qwen2.5-vl-7b-mathv60k"
TOKEN = f"hf_{uuid.uuid4().hex}"
CHECK = ("up", "preflight", "--target", "kubernetes", "--set", "cluster.nodes=2", "--run-id", "try")
STAMP = "2026-11-24T01:00:00Z"


@pytest.fixture
def api(tmp_path, monkeypatch):
    server = Api(check_schema)
    server.kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(kubernetes_driver, "POLL_S", 0.05)
    monkeypatch.setattr("sys.executable", "at_run_folder")
    yield server
    server.close()


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """The driver is called where launch.py would start it, so that it has this test's folders."""
    from recipes.drivers import launching

    def foreground(argv, env):
        assert argv[1:3] == ["-m", "recipes.drivers.desk_driver"]
        before = dict(os.environ)
        os.environ.update(env)
        try:
            return desk_driver.main(*argv[3:]), False
        finally:
            os.environ.clear()
            os.environ.update(before)

    monkeypatch.setattr(launching, "_foreground", foreground)


def started(capsys, *more):
    """What a detached `up` prints that soon gives up looking for pods: no controller makes any here."""
    soon = ("--set", "placement.start_timeout_s=0.01")
    code, out, err = run(capsys, *CHECK, "--detach", *soon, *more)
    assert code == 0, err
    return out


def the_set(api):
    (found,) = api.named("jobsets")
    return found


def play(api, pods=1, ready=0, failed=0, conditions=(), of_job=()):
    """What the controllers write: a Job with its pods of rank 0, and the JobSet's conditions."""
    name = the_set(api)["metadata"]["name"]
    labels = {job_set.SET_LABEL: name}
    status = {"ready": ready, "failed": failed, "conditions": list(of_job)}
    api.put("jobs", {"metadata": {"name": f"{name}-node-0", "labels": labels}, "status": status})
    for number in range(pods):
        metadata = {"name": f"{name}-node-0-0-{number}", "labels": labels | {job_set.RANK_LABEL: "0"}}
        metadata["creationTimestamp"] = f"2026-11-24T01:0{number}:00Z"
        state = {"running": {}} if number == pods - 1 else {"terminated": {}}
        status = {"containerStatuses": [{"name": "spotrl", "state": state}]}
        spec = {"containers": [{"name": "spotrl"}]}
        kinds = {"kind": "Pod", "apiVersion": "v1"}
        api.put("pods", kinds | {"metadata": metadata, "spec": spec, "status": status})
        api.logs[metadata["name"]] = f"line of pod {number}\n"
    the_set(api)["status"] = {"restarts": 0, "conditions": list(conditions)}


def ended(kind, message=""):
    return {"type": kind, "status": "True", "message": message, "lastTransitionTime": STAMP}


# --- up ---------------------------------------------------------------------------------------------


def test_up_creates_the_set_and_what_its_pods_wait_for(api, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("WANDB_API_KEY", "NOT-USED")
    assert "JobSet try is created" in started(capsys)
    created = the_set(api)
    (secret,), (code,) = api.named("secrets"), api.named("configmaps")
    assert {found["metadata"]["name"] for found in (created, secret, code)} == {"try"}
    assert env_of(created)["RUN_ID"] == "try" and env_of(created)["SPOTRL_HEAD"] == "try-node-0-0.try"
    assert container_of(created)["envFrom"] == [{"secretRef": {"name": "try"}}]
    assert TOKEN not in json.dumps(created)
    values = secret["stringData"]
    assert values["HF_TOKEN"] == TOKEN and "WANDB_API_KEY" not in values
    assert values["SPOTRL_LAUNCH"] and values["SPOTRL_SOURCE"]
    for found in (secret, code):
        assert [owner["uid"] for owner in found["metadata"]["ownerReferences"]] == [
            created["metadata"]["uid"]
        ]
    for path in (run_record.RUNS / "try").rglob("*"):
        assert not path.is_file() or TOKEN not in path.read_text()
    data = base64.b64decode(code["binaryData"][job_set.ARCHIVE])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        names = archive.getnames()
    modules = {
        "trainer/node/__main__.py",
        "recipes/records/manifest.py",
        "data_prep/__main__.py",
        "examples/demo",
    }
    assert modules | {"trainer/shell/task.sh", "requirements/gpu.txt"} <= set(names)
    hidden = [name for name in names if any(part.startswith(".") for part in Path(name).parts)]
    assert not hidden and not any(name.startswith(("tests", "docs", "runs")) for name in names)


def missing_test_modules(root: Path) -> list[str]:
    """Modules of tests/ that those under `root` import when they are imported, or that have a scenario of
    tests/gpu, and that are not there."""
    wanted = set()
    asked = set()
    for path in (root / "tests").rglob("*.py"):
        text = path.read_text()
        asked |= set(re.findall(r'run_ranks\(\s*"(\w+)"', text)) if path.parent.name == "gpu" else set()
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
                wanted.add(node.module)
            if path.name == "scenarios.py" and ast.unparse(node).startswith("IN_MODULES ="):
                scenarios = ast.literal_eval(node.value)
    wanted |= {module for module, names in scenarios.items() if asked & set(names)}
    assert {"rates", "parity"} <= asked
    files = {module: Path(root, *module.split(".")) for module in wanted}
    return [
        module for module, path in files.items() if not (path.is_dir() or path.with_suffix(".py").exists())
    ]


def test_a_check_of_a_card_brings_its_tests_and_fits(tmp_path):
    data = kubernetes_driver.packed_tree(kubernetes_driver.ROOT, get("gpu-check"))
    assert data == kubernetes_driver.packed_tree(kubernetes_driver.ROOT, get("gpu-check")), "the same files"
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        names = set(archive.getnames())
        archive.extractall(tmp_path / "node", filter="data")
    assert {"tests/conftest.py", "tests/gpu", "tests/learning"} <= names and "tests/lab" not in names
    assert missing_test_modules(tmp_path / "node") == [], "a rank would end with ModuleNotFoundError"
    assert len(data) < 0.92 * kubernetes_driver.MOST_BYTES, "a user's own modules come on top"
    (tmp_path / "mine" / "targets").mkdir(parents=True)
    (tmp_path / "mine" / "targets" / "test.txt").write_text("a name of ours, in a folder of a user's")
    with tarfile.open(
        fileobj=io.BytesIO(kubernetes_driver.packed_tree(tmp_path, get("preflight")))
    ) as archive:
        assert "mine/targets/test.txt" in archive.getnames()
    (tmp_path / "rows.bin").write_bytes(os.urandom(2 << 20))
    with pytest.raises(ConfigError, match="a ConfigMap holds 1024: move data and results out of it"):
        kubernetes_driver.packed_tree(tmp_path, get("preflight"))


def test_up_makes_the_claim_and_names_context_and_namespace(api, tmp_path, capsys):
    api.kubeconfig(tmp_path / "kubeconfig", namespace="elsewhere")
    site = ("--set", "site.namespace=research", "--set", "site.kubernetes_context=here")
    started(capsys, *site, "--set", "storage.volume=cache")
    assert {namespace for _, namespace, _ in api.objects} == {"research"}
    assert [claim["metadata"]["name"] for claim in api.named("persistentvolumeclaims")] == ["cache"]
    code, out, _ = run(capsys, "down", "try")
    assert code == 0 and [key[0] for key in api.objects] == ["persistentvolumeclaims"], "it outlives the run"


def test_up_follows_the_heads_log_through_restarts_to_the_end(api, capfd):
    def controllers():
        until = time.monotonic() + 30
        while not api.named("configmaps") and time.monotonic() < until:
            time.sleep(0.02)
        play(api, pods=1, ready=2)
        time.sleep(0.5)
        play(api, pods=2, ready=2, conditions=[ended("Completed")])

    thread = threading.Thread(target=controllers)
    thread.start()
    code, out, _ = run(capfd, *CHECK)
    thread.join()
    assert code == 0
    assert out.index("line of pod 0") < out.index("line of pod 1") < out.index("JobSet try: Completed")
    assert run_record.load_record("try").state == "finished"


def test_a_second_launch_of_a_set_that_lives_is_refused_and_an_ended_one_is_replaced(api, capsys):
    started(capsys)
    first = the_set(api)["metadata"]["uid"]
    record = run_record.load_record("try")
    with pytest.raises(ConfigError, match="`python3 launch.py down try` ends it"):
        kubernetes_driver.create(record)
    play(api, conditions=[ended("Failed", "x")])
    started(capsys)
    assert the_set(api)["metadata"]["uid"] != first and len(api.named("secrets")) == 1


@pytest.mark.parametrize("name", ["preflight", "gpu-check"])
def test_the_head_of_a_committed_file_is_commands_that_start_it(api, tmp_path, monkeypatch, name):
    folder = tmp_path / "repository"
    place = folder / "recipes/generated/kubernetes"
    place.mkdir(parents=True)
    text = (GENERATED / f"kubernetes/{name}.yaml").read_text()
    (place / f"{name}.yaml").write_text(text)
    for part in ("trainer/shell/task.sh", "docs/page.md", *(f"{check}/part" for check in kubernetes.CHECKS)):
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / part).write_text("part\n")
    (folder / "recipes/tokens.env").write_text("HF_TOKEN=left-behind\n")
    listed = folder / never_sent.IN_TREE
    listed.parent.mkdir()
    listed.write_text(never_sent.FILE.read_text())
    kept = folder / ".spotrl/tokens.env"
    kept.parent.mkdir()
    kept.write_text(f"HF_TOKEN={TOKEN}\n")
    monkeypatch.setenv("HOME", str(folder))
    commands = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    assert len(commands) == 4
    done = subprocess.run(["bash", "-euc", "\n".join(commands)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {key[2] for key in api.objects} == {"try-1"}
    assert job_set.NAME not in json.dumps(the_set(api))
    data = base64.b64decode(api.named("configmaps")[0]["binaryData"][job_set.ARCHIVE])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        names = archive.getnames()
    assert not any(one.endswith("tokens.env") for one in names)
    assert "trainer/shell/task.sh" in names and not any("docs" in one or "generated" in one for one in names)
    assert any(one.startswith("tests/gpu") for one in names) == (name == "gpu-check")


# --- What says what to change -----------------------------------------------------------------------


def test_what_the_cluster_refuses_is_named_and_nothing_is_left_there(api, capsys):
    def refused(words):
        code, _, err = run(capsys, *CHECK, "--detach")
        assert code == 2 and words in err and not api.objects, err

    api.without_job_sets = True
    refused("the cluster has no JobSet controller: have JobSet installed there")
    api.without_job_sets = False
    api.forbidden = {"jobsets"}
    refused("your account lacks a right (")
    assert not run_record.is_known("try"), "refused before anything is created"
    api.forbidden = {"secrets"}  # the set's pods would wait for ever
    refused("or set site.namespace")
    assert run_record.load_record("try").state == LAUNCH_FAILED
    api.close()
    refused("kubectl does not reach the cluster")


# --- status, logs, down, dashboard --------------------------------------------------------------------


def status(capsys):
    code, out, _ = run(capsys, "status", "try")
    assert code == 0
    return out


def test_status_tells_place_restarts_and_end(api, capsys):
    started(capsys)
    the_set(api)["spec"]["suspend"] = True
    assert "waits for its queue" in status(capsys)
    del the_set(api)["spec"]["suspend"]
    play(api)
    pod = api.named("pods")[0]
    no_room = "0/5 nodes are available: 5 Insufficient nvidia.com/gpu."
    pod["status"] = {"conditions": [{"type": "PodScheduled", "status": "False", "message": no_room}]}
    assert f"JobSet try: starting, 0 of 2 pods run, restarted 0 times; {no_room}" in status(capsys)
    assert run_record.load_record("try").state == "queued", "it costs nothing yet"
    pull = {"reason": "ImagePullBackOff", "message": "no such image"}
    pod["status"] = {"containerStatuses": [{"state": {"waiting": pull}}]}
    assert "ImagePullBackOff: no such image" in status(capsys)
    assert run_record.load_record("try").state == "starting"
    play(api, ready=2, failed=1)
    assert "JobSet try: running, 2 of 2 pods run, restarted 1 times" in status(capsys)
    why = "Container spotrl failed with exit code 2 matching FailJob rule at index 1"
    play(api, conditions=[ended("Failed", "jobset failed")], of_job=[ended("Failed", why)])
    assert f"JobSet try: Failed ({why})" in status(capsys)
    record = run_record.load_record("try")
    assert (record.state, record.why) == ("failed", why) and record.ended_s


def test_down_removes_the_set_with_tokens_and_code(api, capsys):
    started(capsys)
    assert len(api.objects) == 3
    code, _, _ = run(capsys, "down", "try")
    assert code == 0 and not api.objects
    assert run_record.load_record("try").state == "stopped"
    assert "JobSet try: not in the cluster" in status(capsys)
    assert run(capsys, "down", "try")[0] == 0, "once more is no error"


def test_logs_are_those_of_the_newest_head(api, capfd):
    started(capfd)
    play(api, pods=3, conditions=[ended("Completed")])
    assert desk_driver.main("logs", "try") == 0
    out = capfd.readouterr().out
    assert "line of pod 2" in out and "line of pod 1" not in out and "JobSet try: Completed" in out
    assert kubernetes.head_pod(run_record.load_record("try")) == "pod/try-node-0-0-2"


def test_the_dashboard_is_reached_through_the_head(api, tmp_path, capsys, monkeypatch):
    started(capsys)
    with pytest.raises(ConfigError, match="no pod of try is running"):
        dashboard_tunnel.open_tunnel("try")
    play(api)
    published = json.dumps({"url": "http://127.0.0.1:8266", "token": "t"})
    real = shutil.which("kubectl")
    body = f'case "$*" in *exec*) echo \'{published}\' ;; *port-forward*) ;; *) exec {real} "$@" ;; esac'
    stand_in(tmp_path, monkeypatch, "kubectl", body)
    assert dashboard_tunnel.open_tunnel("try") == 0
    calls = (tmp_path / "calls").read_text()
    assert 'exec pod/try-node-0-0-0 -- sh -c cat "$HOME"/.cache/spotrl/try.json' in calls
    assert "port-forward pod/try-node-0-0-0 " in calls and ":8266\n" in calls
    assert "token in" in capsys.readouterr().out
    out = run(capsys, *CHECK, "--dry-run", "--takeover", "--", "--as=somebody")[1]
    assert "kubectl --as=somebody create -f " in out and "kubectl --as=somebody apply --server-side" in out


def test_a_training_run_is_given_its_buckets_tokens(monkeypatch):
    bucket = ["storage.bucket=s3://mine"]
    record = run_record.RunRecord(run_id="r", recipe=ONE, target="kubernetes", overrides=bucket)
    for name in script.SECRETS:
        monkeypatch.setenv(name, name.lower())
    secret = kubernetes_driver.given_objects(record, "r", "uid")[0]["stringData"]
    wanted = {"HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}
    assert {name for name in secret if name in script.SECRETS} == wanted
