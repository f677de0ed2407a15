"""`launch.py image` against a real registry on this machine, with buildah, which needs no daemon.

The image is FROM scratch: base images come from the internet, which no test reaches.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import closing

import pytest

from recipes.commands import cli
from recipes.drivers import image_build
from recipes.plan import start_time
from recipes.records import image_record

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(
        not all(map(shutil.which, ("buildah", "skopeo", "docker-registry"))),
        reason="apt-get install -y buildah skopeo docker-registry",
    ),
]


def registry(folder, closes: str = "") -> tuple[subprocess.Popen, str]:
    """A registry on a free port of the loopback, and its address."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    folder.mkdir()
    (folder / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f"http: {{addr: '{address}'}}\n{closes}"
    )
    # It would take skopeo's variables for settings of its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REGISTRY_")}
    process = subprocess.Popen(["docker-registry", "serve", folder / "config.yml"], env=environment)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with closing(socket.socket()) as one:
            host, _, port = address.partition(":")
            if one.connect_ex((host, int(port))) == 0:
                return process, address
        time.sleep(0.1)
    process.kill()
    raise AssertionError("the registry did not start")


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A checkout whose image is two small files, and a store of images of its own."""
    folder = tmp_path / "checkout"
    for name in ("requirements", "trainer/shell"):
        (folder / name).mkdir(parents=True)
    (folder / "Dockerfile").write_text(
        "FROM scratch\nCOPY requirements/gpu.txt trainer/shell/setup.sh /opt/spotrl/\n"
    )
    (folder / ".dockerignore").write_text("*\n!requirements/gpu.txt\n!trainer/shell/setup.sh\n")
    (folder / "requirements/gpu.txt").write_text("# nothing\n")
    (folder / "trainer/shell/setup.sh").write_text("exit 0\n")
    (folder / "trainer/shell/installed.py").write_text("")
    store = tmp_path / "storage.conf"
    store.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/store"\nrunroot = "{tmp_path}/run"\n'
    )
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(store))
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    (tmp_path / "auth.json").write_text("{}")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cli, "ROOT", folder)
    monkeypatch.setattr(image_build, "_answers", lambda: False)
    monkeypatch.chdir(folder)
    return folder


def test_an_environment_is_built_and_pushed_once(desk, tmp_path, capfd):
    process, address = registry(tmp_path / "registry")
    name = f"{address}/me/spotrl"
    try:
        assert cli.main(["image", "--push", name]) == 0
        said = capfd.readouterr().out
        tag = f"gpu-{image_record.environment_digest()}"
        with urllib.request.urlopen(f"http://{address}/v2/me/spotrl/tags/list") as answer:
            assert json.load(answer)["tags"] == [tag]
        reference = said.strip().rpartition("--set cluster.image=")[2]
        request = urllib.request.Request(
            f"http://{address}/v2/me/spotrl/manifests/{reference.partition('@')[2]}",
            headers={"Accept": "application/vnd.oci.image.manifest.v1+json"},
        )
        with urllib.request.urlopen(request) as answer:
            layers = json.load(answer)["layers"]
        assert reference.startswith(f"{name}@sha256:") and "buildah build" in said

        shutil.rmtree(desk / ".cache")  # another desk, say
        assert cli.main(["image", "--push", name]) == 0
        again = capfd.readouterr().out
        assert "nothing is built" in again and "buildah build" not in again
        assert again.strip().endswith(reference)
        (known,) = image_record.known_images()
        assert known.current and known.pulled_bytes == sum(layer["size"] for layer in layers) > 0
        assert start_time.pull_seconds(reference) is not None
        if shutil.which("docker"):  # its client asks a registry without a daemon
            tagged = f"{name}:{tag}"
            assert (
                image_build.image_in_registry(image_build.builder_commands("docker", tagged), tagged) == known
            )
            assert (
                image_build.image_in_registry(
                    image_build.builder_commands("docker", f"{name}:no"), f"{name}:no"
                )
                is None
            )

        (desk / "requirements/gpu.txt").write_text("# another\n")
        assert start_time.pull_seconds(reference) is None
        assert cli.main(["image", "--push", f"{name}:v1"]) == 0
        assert "buildah build" in capfd.readouterr().out
        with urllib.request.urlopen(f"http://{address}/v2/me/spotrl/tags/list") as answer:
            assert sorted(json.load(answer)["tags"]) == sorted(
                [tag, f"v1-{image_record.environment_digest()}"]
            )
    finally:
        process.terminate()
        process.wait()


PASSWORDS = "me:$2b$04$OGz5ZqEjhKAiKnV.HYaezOIq9D7oGmL1/N96tOpYjaDOzUvyUjZea\n"
"""`lab`, as htpasswd writes it."""


def test_a_registry_that_wants_a_login(desk, tmp_path, capfd):
    (tmp_path / "passwords").write_text(PASSWORDS)
    closes = f"auth: {{htpasswd: {{realm: lab, path: {tmp_path}/passwords}}}}\n"
    process, address = registry(tmp_path / "closed", closes)
    try:
        push = ["image", "--push", f"{address}/me/spotrl"]
        assert cli.main(push) == 2
        assert f"{address} does not let you in: `buildah login {address}`" in capfd.readouterr().err
        login = ["buildah", "login", "--tls-verify=false", "-u", "me", "-p", "lab", address]
        subprocess.run(login, check=True, capture_output=True)
        assert cli.main(push) == 0
        assert f"--set cluster.image={address}/me/spotrl@sha256:" in capfd.readouterr().out
    finally:
        process.terminate()
        process.wait()
