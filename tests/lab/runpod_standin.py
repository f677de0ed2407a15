"""RunPod on this machine: the part of its GraphQL API that SkyPilot 0.14.1 calls, with pods that are
namespaces.

A pod has mount, pid, network, host-name and IPC namespaces, an address of its own on the lab's bridge, a file
system over this machine's that is gone with it, and runs the `dockerArgs` that it was rented with: SkyPilot's
own script, which starts sshd. Run by runpod_lab.py inside a network namespace, so that no packet can leave
the machine.

    POST /lab/preempt {"pod": ID}                      what a spot market does, without a word before
    POST /lab/stock {"without": [DATA_CENTER, ...]}    data centers that have no machines from now on
    GET  /lab                                          pods, and what was asked for so far
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import signal
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import hosts

GPUS = {"NVIDIA A100 80GB PCIe": ("A100 PCIe", 80, 1.39, 0.82)}
"""id -> name, GiB, dollars per hour on demand and spot."""
NO_STOCK = (
    "There are no longer any instances available with the requested specifications. "
    "Please refresh and try again."
)
NETWORK_PROBES = ("8.8.8.8", "1.1.1.1")
"""Where SkyPilot's controller looks before it believes that a machine is lost; the lab gives itself these
addresses."""
BOOT_S = 2.0
"""A pod has no address before."""
PRIVATE = ("etc", "var", "root", "workspace")
"""Folders that a pod writes to; below them lies the image's, or this machine's."""
ROOT_FILES = """\
set -e
mount -t tmpfs -o size=1g,mode=755 tmpfs {root}
cd {root}
mkdir -p usr opt dev proc sys tmp run home etc var root workspace
for name in bin sbin lib lib64; do [ ! -e /$name ] || ln -s usr/$name $name; done
for name in usr opt sys; do mount --rbind -o ro /$name $name; done
{overlays}
mount --bind {folder}/tmp tmp
{binds}
mount --rbind /dev dev
mount -t tmpfs -o size=4g tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
mount -t proc proc proc
rm -rf var/cache/apt/archives var/lib/apt/lists && : > etc/resolv.conf
printf '127.0.0.1 localhost\\n{address} {name}\\n' > etc/hosts
"""


@dataclass
class Pod:
    id: str
    host: hosts.Host
    asked: dict[str, str]
    """Fields of the mutation that rented it."""
    spot: bool
    since: float = field(default_factory=time.time)

    @property
    def view(self) -> dict:
        """What the API says of it."""
        booted = self.host.alive and time.time() - self.since > BOOT_S
        address = {"ip": self.host.address, "isIpPublic": True, "type": "tcp"}
        ports = []
        for port in self.asked["ports"].split(","):
            number = int(port.partition("/")[0])
            ports.append(address | {"privatePort": number, "publicPort": number})
        ports.append(address | {"privatePort": 22, "publicPort": 22, "isIpPublic": False, "type": "http"})
        cpus = re.search(r"-(\d+)-\d+$", self.asked.get("instanceId", ""))
        return {
            "id": self.id,
            "name": self.asked["name"],
            "desiredStatus": "RUNNING" if self.host.alive else "EXITED",
            "imageName": self.asked["imageName"],
            "vcpuCount": int(cpus[1]) if cpus else 8,
            "gpuCount": int(self.asked.get("gpuCount", 0)),
            "dataCenterId": self.asked.get("dataCenterId", ""),
            "spot": self.spot,
            "networkVolumeId": None,
            "containerRegistryAuthId": None,
            "machineId": f"m-{self.id}",
            "ports": self.asked["ports"],
            "runtime": {"ports": ports} if booted else None,
            "machine": {"gpuDisplayName": self.asked.get("gpuTypeId", "")},
        }


class RunPod:
    """The provider: pods, and the log of what was asked."""

    def __init__(self, folder: Path, layers: list[Path], visible: list[Path], address: str):
        self.folder = folder
        self.layers = layers
        self.visible = visible
        self.api, self.subnet = f"http://{address}", address.rpartition(".")[0]
        self.pods: dict[str, Pod] = {}
        self.without: set[str] = set()
        self.calls: list[str] = []
        self.key = ""
        self._rented = 0
        self._hands = ThreadPoolExecutor(1)  # hosts live as long as the thread that made them

    def rent(self, asked: dict[str, str], spot: bool) -> Pod:
        """Starts a pod. Raises LookupError where the data center has none left."""
        if asked.get("dataCenterId") in self.without:
            raise LookupError(NO_STOCK)
        return self._hands.submit(self._rent, asked, spot).result()

    def _rent(self, asked: dict[str, str], spot: bool) -> Pod:
        self._rented += 1
        number, name = 10 + self._rented, secrets.token_hex(7)
        folder = self.folder / name
        for part in ("root", "tmp", *(f"{p}.{kind}" for p in PRIVATE for kind in ("upper", "work"))):
            (folder / part).mkdir(parents=True)
        (folder / "tmp").chmod(0o1777)
        empty = folder / "hosts"
        empty.write_text("127.0.0.1 localhost\n")
        host = hosts.Host(name, f"{self.subnet}.{number}", folder, empty)
        plug = f"pod{number}"
        hosts.run("ip", *f"link add {plug} type veth peer name eth0 netns {host.pid}".split())
        hosts.run("ip", *f"link set {plug} master br0 up".split())
        host.ip(f"addr add {host.address}/24 dev eth0")
        host.ip("link set eth0 up")
        host.ip(f"route add default via {self.subnet}.1")
        host.run("sh", "-c", self._files(folder, host))
        self._boot(host, folder, asked["dockerArgs"])
        pod = self.pods[name] = Pod(name, host, asked, spot)
        return pod

    def _files(self, folder: Path, host: hosts.Host) -> str:
        lower = {"etc": "/etc", "var": "/var"}
        for name in ("root", "workspace"):
            lower[name] = ":".join(str(layer / name) for layer in self.layers)
        overlays = [
            "mount -t overlay overlay -o"
            f" lowerdir={low},upperdir={folder}/{n}.upper,workdir={folder}/{n}.work {n}"
            for n, low in lower.items()
        ]
        binds = [f"mkdir -p .{path} && mount --bind -o ro {path} .{path}" for path in self.visible]
        return ROOT_FILES.format(
            root=folder / "root",
            folder=folder,
            address=host.address,
            name=host.name,
            overlays="\n".join(overlays),
            binds="\n".join(binds),
        )

    def _boot(self, host: hosts.Host, folder: Path, arguments: str) -> None:
        env = {
            "HOME": "/root",
            "USER": "root",
            "PATH": hosts.PATH,
            "LANG": "C.UTF-8",
            "RUNPOD_POD_ID": host.name,
        }
        env |= {"RUNPOD_API_BASE_URL": self.api, "UV_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        env |= hosts.SHARED
        command = [*host.enter, "chroot", str(folder / "root"), "/bin/sh", "-c", f"cd /root && {arguments}"]
        null = subprocess.DEVNULL
        with (folder / "console.log").open("wb") as log:
            subprocess.Popen(command, env=env, stdin=null, stdout=log, stderr=log, start_new_session=True)

    def end(self, name: str) -> None:
        """Ends a pod at once."""
        self.pods.pop(name).host.kill()

    def answer(self, query: str) -> dict:
        """The data of a GraphQL query. Raises LookupError, which becomes an error of the API."""
        match = re.search(
            r"\b(podRentInterruptable|podFindAndDeployOnDemand|deployCpuPod|podTerminate|podTemplates|"
            r"updateUserSettings|networkVolumes|gpuTypes|pods)\b",
            query,
        )
        what = match[1] if match else ""
        if what != "pods":
            self.calls.append(what)
        match what:
            case "pods":
                return {"myself": {"pods": [pod.view for pod in list(self.pods.values())]}}
            case "podTemplates":
                return {"myself": {"podTemplates": []}}
            case "networkVolumes":
                return {"myself": {"id": "me", "pubKey": self.key, "networkVolumes": []}}
            case "updateUserSettings":
                self.key = fields(query)["pubKey"]
                return {what: {"id": "me", "pubKey": self.key}}
            case "gpuTypes":
                return {what: [gpu(i) for i in GPUS if f'"{i}"' in query]}
            case "podTerminate":
                self.end(fields(query)["podId"])
                return {what: None}
            case "podRentInterruptable" | "podFindAndDeployOnDemand" | "deployCpuPod":
                pod = self.rent(fields(query), spot=what == "podRentInterruptable")
                return {what: pod.view | {"env": [], "machine": {"podHostId": f"{pod.id}-host"}}}
        raise LookupError(f"the stand-in does not know this query: {query[:300]}")


def fields(query: str) -> dict[str, str]:
    """Arguments of a mutation's input."""
    found = re.findall(r'(\w+): ("(?:[^"\\]|\\.)*"|[\w.+-]+)', query[query.index("input:") :])
    return {key: value.strip('"') for key, value in found}


def gpu(name: str) -> dict:
    """A GPU type as the API describes it."""
    display, memory, usd, spot = GPUS[name]
    lowest = {"minimumBidPrice": spot, "uninterruptablePrice": usd, "minVcpu": 8, "minMemory": 50}
    about = {"id": name, "displayName": display, "manufacturer": "Nvidia", "memoryInGb": memory}
    about |= {"maxGpuCount": 8, "secureCloud": True, "communityCloud": True, "lowestPrice": lowest}
    about |= dict.fromkeys(("securePrice", "communityPrice"), usd)
    return about | dict.fromkeys(("secureSpotPrice", "communitySpotPrice"), spot)


class Handler(BaseHTTPRequestHandler):
    provider: RunPod

    def log_message(self, format: str, *args: object) -> None:
        """Not to the console."""

    def do_GET(self) -> None:
        pods = [pod.view for pod in list(self.provider.pods.values())]
        self._reply({"pods": pods, "calls": self.provider.calls})

    def do_POST(self) -> None:
        """A GraphQL query, or a command of the lab."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/lab/preempt":
            self.provider.end(body["pod"])
            return self._reply({})
        if self.path == "/lab/stock":
            self.provider.without = set(body["without"])
            return self._reply({})
        if not self.headers.get("Authorization", "").startswith("Bearer "):
            return self._reply({"errors": [{"message": "Unauthorized"}]}, 401)
        try:
            self._reply({"data": self.provider.answer(body["query"])})
        except (LookupError, RuntimeError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self._reply({"errors": [{"message": str(error)}]})

    def _reply(self, data: dict, code: int = 200) -> None:
        text = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class Probe(Handler):
    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("layers", help="folders of an image, the upper ones first, separated by colons")
    parser.add_argument("address", help="address:port to listen on; pods get addresses of the same /24")
    parser.add_argument(
        "certificate", type=Path, help="of the addresses that SkyPilot asks whether there is a network"
    )
    parser.add_argument(
        "visible", nargs="*", type=Path, help="folders of this machine that pods see, read-only"
    )
    a = parser.parse_args()
    address, _, port = a.address.partition(":")
    Handler.provider = RunPod(a.folder, [Path(layer) for layer in a.layers.split(":")], a.visible, a.address)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for probe in NETWORK_PROBES:
        server = ThreadingHTTPServer((probe, 443), Probe)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(a.certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    ThreadingHTTPServer((address, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
