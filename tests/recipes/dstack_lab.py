"""A real dstack server without a cloud: `.venvs/launch/bin/python tests/recipes/dstack_lab.py FOLDER PYTHON <
files`.

Run it inside a network namespace (`unshare -n`): the server sees a price catalog from files and a RunPod
backend whose key nobody checks, creates every fleet and plans every task of the JSON that it is given, and
prints what it offers as JSON. Then launch.py, run by PYTHON, is tried on it.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
import uuid
import zipfile
from pathlib import Path

PORT = 3999
SILENCE_S = 300
"""Seconds without a sign of life after which something is taken for hung."""
TOKEN = "00000000-stand-in"
HEADER = (
    "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags,"
    "cpu_arch,provider_data"
)
PROVIDERS = ("aws", "azure", "verda", "gcp", "lambdalabs", "nebius", "oci", "runpod", "cloudrift")


def rows():
    """RunPod pods of 1 to 8 GPUs, Instant Clusters of 2 to 8 pods, and a spot pod that must never be
    offered."""
    for name, gpu, usd in (("NVIDIA A100-SXM4-80GB", "A100", 1.79), ("NVIDIA H100 80GB HBM3", "H100", 3.99)):
        for count in (1, 2, 4, 8):
            size = f"{16 * count},{125 * count},{count},{gpu},80"
            yield f'{name},US-KS-2,{usd * count:.2f},{size},False,,nvidia,,x86,"{{""pod_counts"": [1]}}"'
        size = f"128,1500,8,{gpu},80"
        counts = list(range(2, 9))
        yield (
            f'{name},US-KS-2,{usd * 8:.2f},{size},False,,nvidia,runpod-cluster,x86,"{{""pod_counts"":'
            f' {counts}}}"'
        )


def write_catalog(folder: Path) -> None:
    """gpuhunt's file layout: {provider}/version and {provider}/{version}/catalog.zip."""
    for provider in PROVIDERS:
        (folder / provider / "1").mkdir(parents=True)
        (folder / provider / "version").write_text("1")
        lines = [HEADER, *(rows() if provider == "runpod" else ())]
        with zipfile.ZipFile(folder / provider / "1/catalog.zip", "w") as archive:
            archive.writestr(f"{provider}.csv", "\n".join(lines) + "\n")


def start(folder: Path) -> tuple[subprocess.Popen, float]:
    """The server, and the seconds until it answered."""
    env = os.environ | {
        "HOME": str(folder),
        "DSTACK_SERVER_DIR": str(folder / "server"),
        "DSTACK_SERVER_ADMIN_TOKEN": TOKEN,
        "DSTACK_DEFAULT_CREDS_DISABLED": "1",
        "GPUHUNT_CATALOG_URL": f"file://{folder}/catalog",
    }
    (folder / "server").mkdir()
    program = Path(sys.executable).with_name("dstack")
    log = (folder / "server.log").open("w")
    started = time.monotonic()
    command = [str(program), "server", "--port", str(PORT)]
    server = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder)
    seen, heard = 0, started
    # a busy machine is slow, and its server's log grows all the same
    while time.monotonic() - heard < SILENCE_S:
        size = (folder / "server.log").stat().st_size
        seen, heard = (size, time.monotonic()) if size != seen else (seen, heard)
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{PORT}/api/server/get_info", method="POST")
            urllib.request.urlopen(request, timeout=5)
            return server, time.monotonic() - started
        except OSError:
            time.sleep(0.5)
            if server.poll() is not None:
                break
    raise SystemExit("dstack server did not start:\n" + (folder / "server.log").read_text()[-2000:])


def add_backend(folder: Path) -> None:
    """A RunPod backend, as the server stores it after it has checked the key with RunPod."""
    from dstack._internal.server.services.encryption import encrypt

    database = sqlite3.connect(folder / "server/data/sqlite.db", timeout=30)
    project = database.execute("select id from projects where name = 'main'").fetchone()[0]
    auth = encrypt('{"type": "api_key", "api_key": "stand-in"}')
    values = (uuid.uuid4().hex, project, "RUNPOD", '{"type": "runpod", "regions": null}', auth)
    database.execute(
        "insert into backends (id, project_id, type, config, auth) values (?, ?, ?, ?, ?)", values
    )
    database.commit()
    database.close()


def plans(files: dict[str, str]) -> dict:
    """What the server says to every task; fleets are made first, as the head of each file tells."""
    import yaml
    from dstack._internal.core.models.configurations import parse_apply_configuration
    from dstack._internal.core.models.fleets import ApplyFleetPlanInput, FleetSpec
    from dstack._internal.core.models.profiles import Profile
    from dstack._internal.core.models.repos.virtual import VirtualRunRepoData
    from dstack._internal.core.models.runs import RunSpec
    from dstack.api.server import APIClient

    client = APIClient(f"http://127.0.0.1:{PORT}", TOKEN)
    out = {}
    for name, text in sorted(files.items(), key=lambda item: not item[0].endswith(".fleet.yaml")):
        configuration = parse_apply_configuration(
            yaml.safe_load(text.replace("\n- RUN_ID\n- BUCKET\n", "\n- RUN_ID=r\n- BUCKET=s3://mine\n"))
        )
        started = time.monotonic()
        try:
            if name.endswith(".fleet.yaml"):
                spec = FleetSpec(
                    configuration=configuration, configuration_path=name, profile=Profile(name="default")
                )
                client.fleets.apply_plan("main", ApplyFleetPlanInput(spec=spec))
                out[name] = {"fleet": configuration.name}
                continue
            spec = RunSpec(
                run_name=configuration.name,
                repo_id="spotrl",
                repo_data=VirtualRunRepoData(),
                configuration=configuration,
                configuration_path=name,
                ssh_key_pub="ssh-ed25519 AAAA stand-in",
            )
            plan = client.runs.get_plan("main", spec).job_plans[0]
            out[name] = {
                "offers": plan.total_offers,
                "price": plan.offers[0].price if plan.offers else None,
                "spot": any(offer.instance.resources.spot for offer in plan.offers),
                "gpus": sorted(
                    {
                        offer.instance.resources.gpus[0].name
                        for offer in plan.offers
                        if offer.instance.resources.gpus
                    }
                ),
                "seconds": round(time.monotonic() - started, 3),
            }
        except Exception as error:
            out[name] = {"error": str(error)}
    return out


def by_hand(folder: Path, python: str) -> dict:
    """What launch.py says to a person with this server; the task waits for a RunPod that is not there."""
    home = folder / "home"
    root = Path(__file__).parents[2]
    repository = folder / "repository"
    (home / ".dstack").mkdir(parents=True)
    project = {"name": "main", "url": f"http://127.0.0.1:{PORT}", "token": TOKEN, "default": True}
    (home / ".dstack/config.yml").write_text(json.dumps({"projects": [project]}))
    left_out = shutil.ignore_patterns(".git", ".venvs", ".cache", "runs", "__pycache__")
    shutil.copytree(root, repository, ignore=left_out)
    env = {"HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "150"}
    # The bucket is tried first, by the environment `desk`: a server on loopback, and the tests' own Python.
    (repository / ".venvs/desk/bin").mkdir(parents=True)
    (repository / ".venvs/desk/bin/python").write_text(f'#!/bin/bash\nexec {python} "$@"\n')
    (repository / ".venvs/desk/bin/python").chmod(0o755)
    (repository / ".venvs/desk/.stamp").touch()
    os.environ["PATH"] += f":{Path(python).parent}"
    sys.path.append(str(root / "tests"))
    import servers  # ty: ignore[unresolved-import]

    with servers.rclone(folder / "store") as store:
        return _by_hand(env | store.env, repository, python)


def _by_hand(env: dict[str, str], repository: Path, python: str) -> dict:

    def said(*command: str) -> list:
        done = subprocess.run(
            command, env=env, cwd=repository, capture_output=True, text=True, timeout=SILENCE_S
        )
        return [done.returncode, done.stdout + done.stderr]

    launch, recipe = [python, "launch.py"], "grpo-qwen2.5-vl-3b-mathv60k"
    up = [
        *launch,
        "up",
        recipe,
        "--target",
        "dstack-runpod",
        "--bucket",
        "s3://bucket/b",
        "--run-id",
        "mine",
        "--detach",
    ]
    out = {"no secrets": said(*up)}
    for name in ("aws_access_key_id", "aws_secret_access_key"):
        said("dstack", "secret", "set", name, "stand-in")
    out |= {"up": said(*up), "status": said(*launch, "status", "mine"), "logs": said(*launch, "logs", "mine")}
    return out | {"down": said(*launch, "down", "mine"), "after": said(*launch, "status", "mine")}


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    write_catalog(folder / "catalog")
    server, seconds = start(folder)
    try:
        add_backend(folder)
        answer = {"start_s": round(seconds, 1), "plans": plans(json.load(sys.stdin))}
        print(json.dumps(answer | {"by hand": by_hand(folder, sys.argv[2])}))
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


if __name__ == "__main__":
    main()
