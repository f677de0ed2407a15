"""A desk with SkyPilot, a RunPod stand-in and an S3 server, in namespaces of this machine: `sky` runs there
unpatched.

What a pod finds in its image is what SkyPilot would install on it, the locked environment of the tests, and
the demo's model; nothing is fetched while the lab runs. Nothing of it outlives the lab.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import checkout
import hosts

from tests.servers import KEY, SECRET

LAUNCH = hosts.ROOT / ".venvs/launch/bin"
DESK = "10.77.0.1"
API, STORE = f"{DESK}:18080", f"{DESK}:9000"
CACHE = hosts.ROOT / ".cache/lab"
ZONES = {"US": ("US-KS-2", "US-CA-2"), "CA": ("CA-MTL-1",)}
COLUMNS = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Region,SpotPrice,Price,"
    "AvailabilityZone,GpuInfo"
)
A100 = (
    "{'Gpus': [{'Name': 'A100-80GB', 'Manufacturer': 'NVIDIA', 'Count': 1.0, 'MemoryInfo': {'SizeInMiB':"
    " 81920}}]}"
)
CONFIG = """\
allowed_clouds: [runpod]
jobs:
  controller:
    consolidation_mode: true
"""
RUNTIME = ("setuptools<70", "click<8.3.0", "ray[default]==2.9.3", "pydantic-core==2.41.1", "uv")
"""What SkyPilot puts on every machine besides itself (sky/skylet/constants.py)."""

SMALL = """rollout.prompts_per_step=4 rollout.samples_per_prompt=4 rollout.max_tokens=16
evaluation.every_steps=0 checkpoint.every_steps=1 checkpoint.export_hf=never rewards.workers=1"""
SPOT = """setup=cpu cluster.gpus_per_node=1 cluster.gpu=A100-80GB cluster.spot=prefer
cluster.memory_gib=16"""
"""RunPod's spot market has GPUs only, and this machine has none: the recipe rents one and leaves it alone."""
BUCKET = "s3://bucket/runs"


def options(*assignments: str) -> list[str]:
    """Words of the command line that set these options, which blanks separate."""
    return [part for assignment in " ".join(assignments).split() for part in ("--set", assignment)]


def missing() -> str:
    """Why there can be no such lab here; empty if there can."""
    if why := hosts.missing():
        return why
    tools = ("sshd", "ssh", "rsync", "curl", "patch", "openssl")
    absent = [tool for tool in tools if not shutil.which(tool, path=hosts.PATH)]
    if absent:
        return f"not installed: {', '.join(absent)} (openssh-server, rsync, curl, patch, openssl)"
    return "" if (LAUNCH / "sky").exists() else "no .venvs/launch: bash trainer/shell/setup.sh launch"


def image() -> Path:
    """A pod's files: made once, with the package index; 573 MB."""
    folder = CACHE / f"runpod-{sys.version_info.major}.{sys.version_info.minor}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        home, scratch = part / "root", part / "tmp"
        scratch.mkdir(parents=True)
        build = "from sky.backends import wheel_utils; print(*wheel_utils.build_sky_wheel())"
        env = os.environ | {"HOME": str(scratch), "TMPDIR": str(scratch), "PIP_NO_BUILD_ISOLATION": "0"}
        said = subprocess.run(
            [LAUNCH / "python", "-c", build], env=env, capture_output=True, text=True, check=True
        )
        (wheel,) = Path(said.stdout.split()[-2]).glob("*.whl")
        python = home / "skypilot-runtime/bin/python"
        uv = ["uv", "--quiet"]
        venv = [*uv, "venv", "--relocatable", "--seed", "--python", os.path.realpath(sys.executable)]
        subprocess.run([*venv, python.parent.parent], check=True)
        install = [*uv, "pip", "install", "--python", python, f"{wheel}[runpod,remote]", *RUNTIME]
        subprocess.run(install, check=True)
        (part / "workspace").mkdir()
        (home / ".local/bin").mkdir(parents=True)
        (home / ".local/bin/uv").symlink_to("../../skypilot-runtime/bin/uv")
        (home / ".sky/wheels").mkdir(parents=True)
        (home / ".sky/wheels/current_sky_wheel_hash").write_text(said.stdout.split()[-1] + "\n")
        shutil.rmtree(scratch)
        part.rename(folder)
    return folder


class Desk:
    """The person's machine, where `sky` is installed. Use as a context manager."""

    def __init__(self, scratch: Path):
        self.scratch, self.home = scratch, scratch / "home"
        self.repository = scratch / "repository"
        self.buckets = scratch / "buckets"
        self.pods = scratch / "pods"
        for folder in (self.home / ".runpod", self.home / ".sky", self.buckets / "bucket", self.pods):
            folder.mkdir(parents=True)
        (scratch / "hosts").write_text("127.0.0.1 localhost desk\n")
        self.host = hosts.Host("desk", DESK, scratch / "desk", scratch / "hosts")
        self._network()
        self._certificate()
        self._image()
        hosts.copy_repository(self.repository)
        checkout.environment(self.repository, "desk")
        (self.home / ".runpod/config.toml").write_text('[default]\napi_key = "stand-in"\n')
        (self.home / ".sky/config.yaml").write_text(CONFIG)
        self._catalog()
        self.env = {
            "HOME": str(self.home),
            "PATH": f"{LAUNCH}:{hosts.PATH}",
            "LANG": "C.UTF-8",
            "USER": "root",
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SKYPILOT_POD_MEMORY_GB_LIMIT": "6",
            "PIP_NO_BUILD_ISOLATION": "0",
            "RUNPOD_API_BASE_URL": f"http://{API}",
            "SSL_CERT_FILE": str(scratch / "certificate"),
            "REQUESTS_CA_BUNDLE": str(scratch / "certificate"),
            "AWS_ENDPOINT_URL": f"http://{STORE}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def _network(self) -> None:
        """The bridge of the pods, and the addresses that SkyPilot tries; no way out."""
        commands = ("link add br0 type bridge", f"addr add {DESK}/24 dev br0", "link set br0 up")
        for command in (*commands, "addr add 8.8.8.8/32 dev lo", "addr add 1.1.1.1/32 dev lo"):
            self.host.ip(command)

    def _certificate(self) -> None:
        key, certificate = self.scratch / "key", self.scratch / "certificate"
        request = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=lab"
        request += " -addext subjectAltName=IP:8.8.8.8,IP:1.1.1.1"
        hosts.run(*request.split(), "-keyout", str(key), "-out", str(certificate))
        (self.scratch / "both").write_text(key.read_text() + certificate.read_text())

    def _image(self) -> None:
        """What lies over the cached image: the environment of the tests, where setup.sh makes one; room for
        models."""
        self.image = self.scratch / "image"
        (self.image / "workspace/models").mkdir(parents=True)
        checkout.make(self.image / "root/sky_workdir", copy=True)
        (self.image / "root/.profile").write_text(". ~/.bashrc\n")  # SkyPilot puts an alias for sudo there
        (self.image / "root/.bashrc").touch()

    def _catalog(self) -> None:
        """RunPod's rows: one A100, on demand and spot, and CPU pods, in three data centers."""
        rows = [COLUMNS]
        for region, zones in ZONES.items():
            for zone in zones:
                rows.append(f'1x_A100-80GB_SECURE,A100-80GB,1.0,8.0,117.0,{region},0.82,1.39,{zone},"{A100}"')
                rows += [
                    f"cpu3g-{n}-{4 * n},,,{n}.0,{4 * n}.0,{region},,{0.04 * n:.2f},{zone}," for n in (2, 4, 8)
                ]
        folder = self.home / ".sky/catalogs/v8"
        for name in ("runpod", "common"):
            (folder / name).mkdir(parents=True)
        (folder / "runpod/vms.csv").write_text("\n".join(rows) + "\n")
        (folder / "common/accelerators.csv").write_text("AcceleratorName,Clouds\nA100-80GB,\"['RunPod']\"\n")

    def __enter__(self) -> Desk:
        standin = [sys.executable, str(Path(__file__).with_name("runpod_standin.py")), str(self.pods)]
        standin += [f"{self.image}:{image()}", API, str(self.scratch / "both"), sys.prefix, sys.base_prefix]
        rclone = shutil.which("rclone") or str(Path(sys.executable).with_name("rclone"))
        serve = [rclone, "serve", "s3", str(self.buckets), "--addr", STORE, "--auth-key", f"{KEY},{SECRET}"]
        try:
            self.host.start(standin, self.scratch / "standin.log")
            self.host.start([*serve, "--config", os.devnull], self.scratch / "store.log")
            urls = f"http://{API}/lab", f"http://{STORE}/"
            self.until(lambda: all(map(self._answers, urls)), 60, "servers")
            for last in (False, True):  # on a busy machine it gives up before its server is ready
                if self.call("sky", "api", "start", check=last).returncode == 0:
                    break
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.host.kill()

    def _answers(self, url: str) -> bool:
        command = [*self.host.enter, "curl", "-s", "-o", os.devnull, url]
        return subprocess.run(command, capture_output=True).returncode == 0

    def command(self, *arguments: str) -> list[str]:
        """`arguments` in the repository on the desk."""
        settings = [f"{name}={value}" for name, value in self.env.items()]
        return [*self.host.enter, "env", "-i", "-C", str(self.repository), *settings, *arguments]

    def call(
        self, *arguments: str, check: bool = True, timeout_s: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command there to its end; output and errors together."""
        done = subprocess.run(
            self.command(*arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        with (self.scratch / "desk.log").open("a") as log:
            log.write(f"$ {' '.join(arguments)}\n{done.stdout}\n[{done.returncode}]\n")
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.returncode}\n{done.stdout[-4000:]}")
        return done

    def launch(
        self, *arguments: str, check: bool = True, timeout_s: float = 600
    ) -> subprocess.CompletedProcess[str]:
        return self.call(sys.executable, "launch.py", *arguments, check=check, timeout_s=timeout_s)

    def provider(self, path: str = "", **body: object) -> dict:
        data = ["-d", json.dumps(body)] if body else []
        return json.loads(self.host.run("curl", "-sf", *data, f"http://{API}/lab{path}"))

    @property
    def rented(self) -> list[dict]:
        """Pods that cost money now."""
        return self.provider()["pods"]

    def commits(self, run_id: str) -> list[int]:
        """Steps whose checkpoints are committed in the bucket."""
        found = self.buckets.glob(f"**/{run_id}/**/step-*/**/manifest.json")
        return sorted(int(re.search(r"/step-(\d{8})/", str(path))[1]) for path in found)

    def until(self, true: Callable[[], object], timeout_s: float, what: str, every_s: float = 0.5) -> None:
        """Waits until something is so. Raises TimeoutError with the end of the logs."""

        def tails() -> str:
            logs = self.scratch.glob("*.log")
            return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-2000:]}" for path in logs)

        hosts.until(true, timeout_s, what, tails, every_s)
