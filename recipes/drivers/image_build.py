"""`image`: builds the Dockerfile with the locked environment and pushes it to a registry of yours, once for
each environment.

The tag is a digest of all that goes into the image, so a registry that has the tag has the image.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections import deque
from dataclasses import dataclass
from typing import Any

from recipes.records import image_record
from recipes.records.image_record import Image
from trainer.config import ConfigError

FORM = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9.-]*(:\d+)?(/[a-z0-9][a-z0-9._-]*)+)(:(?P<tag>\w[\w.-]{0,100}))?", re.ASCII
)
PREFIX = "gpu"
"""The tag without a digest, where none is given: the environment's name."""
ABSENT = ("no such manifest", "manifest unknown", "name unknown", "not found", "repository name not known")
REFUSED = ("unauthorized", "authentication required", "denied", "forbidden", "no basic auth credentials")
FULL = "no space left on device"
NO_DAEMON = "cannot connect to the docker daemon"
LAST_LINES = 40
"""Lines of a program's output that are searched for the reason of a failure."""


@dataclass(frozen=True, kw_only=True)
class Builder:
    """The commands of the program that builds here."""

    ask: list[str]
    """Prints the manifest of the tag, and fails where the registry has none."""
    build: list[str]
    push: list[str]
    login: str


def push_image(push: str, dry_run: bool) -> int:
    """Pushes the image of this checkout's environment to `push`, REGISTRY/NAME[:TAG], unless it is there, and
    says how to use it."""
    reference = image_name(push)
    name, missing = find_builder()
    builder = builder_commands(name, reference)
    if dry_run:
        for command in (builder.ask, builder.build, builder.push):
            print(shlex.join(command))
        return 0
    if missing:
        raise ConfigError(
            f"{missing}; or build this commit on a machine that has docker, such as one of a CI: "
            f"`docker build -t {reference} .` and `docker push {reference}`, "
            f"then --set cluster.image={reference}"
        )
    found = image_in_registry(builder, reference)
    if found:
        print(f"{reference} is in the registry: nothing is built")
    else:
        _run(builder.build, builder, reference)
        _run(builder.push, builder, reference)
        found = image_in_registry(builder, reference)
        if found is None:
            raise ConfigError(f"{reference} was pushed and the registry does not have it: try again")
    image_record.remember_image(found)
    size = f", {found.pulled_bytes / 1e9:.1f} GB to pull" if found.pulled_bytes else ""
    print(f"{found.reference} holds the environment of this checkout{size}")
    print(f"use it with: --set cluster.image={found.reference}")
    return 0


def image_name(push: str) -> str:
    """NAME:TAG-DIGEST of what was asked for. Raises ConfigError."""
    match = FORM.fullmatch(push)
    if not match:
        raise ConfigError(
            f"--push {push}: write REGISTRY/NAME or REGISTRY/NAME:TAG in lower case, without a digest"
        )
    return f"{match['name']}:{match['tag'] or PREFIX}-{image_record.environment_digest()}"


def find_builder() -> tuple[str, str]:
    """The program that builds images here, and what is missing for it to work; "" if nothing is."""
    found = [name for name in ("docker", "podman", "buildah") if shutil.which(name)]
    if "docker" in found and _answers():
        return "docker", ""
    others = [name for name in found if name != "docker"]
    if others and shutil.which("skopeo"):
        return others[0], ""
    if others:
        return others[0], f"{others[0]} is here without skopeo, which asks the registry: install skopeo"
    if found:
        return (
            "docker",
            "docker's daemon does not answer: start it, or install buildah and skopeo, which need none",
        )
    return "docker", "no docker, podman or buildah is here: install one (podman and buildah with skopeo)"


def _answers() -> bool:
    """Whether docker has a daemon."""
    return subprocess.run(["docker", "info"], capture_output=True).returncode == 0


def builder_commands(name: str, reference: str) -> Builder:
    """What the program is called with."""
    registry = reference.partition("/")[0]
    host = registry.partition(":")[0]
    plain = host == "localhost" or host.startswith("127.")  # a registry on this machine has no certificate
    if name == "docker":
        insecure = ["--insecure"] if plain else []
        return Builder(
            ask=["docker", "manifest", "inspect", "--verbose", *insecure, reference],
            build=["docker", "build", "--tag", reference, "."],
            push=["docker", "push", reference],
            login=f"docker login {registry}",
        )
    no_tls = ["--tls-verify=false"] if plain else []
    return Builder(
        ask=["skopeo", "inspect", "--raw", *no_tls, f"docker://{reference}"],
        build=[name, "build", "--tag", reference, "."],
        push=[name, "push", *no_tls, reference],
        login=f"{name} login {registry}",
    )


def image_in_registry(builder: Builder, reference: str) -> Image | None:
    """The image that the registry has under the tag, by its digest; None where it has none. Raises
    ConfigError where it does not say."""
    done = subprocess.run(builder.ask, capture_output=True)
    printed = done.stderr.decode(errors="replace")
    if done.returncode:
        if any(word in printed.lower() for word in ABSENT):
            return None
        raise _failed(builder.ask, printed, builder, reference)
    name, _, tag = reference.rpartition(":")
    manifest, pinned = _manifest(done.stdout)
    layers = manifest.get("layers", [])
    return Image(f"{name}@{pinned}", tag, sum(layer["size"] for layer in layers))


def _manifest(text: bytes) -> tuple[dict[str, Any], str]:
    """(Manifest, its digest) of what `ask` printed: docker's own form, or the registry's very bytes."""
    inspected = json.loads(text)
    if isinstance(inspected, list):  # docker, of an image for several kinds of machines
        kinds = {one["Descriptor"].get("platform", {}).get("architecture"): one for one in inspected}
        inspected = kinds.get("amd64") or inspected[0]
    if "Descriptor" in inspected:
        manifest = inspected.get("SchemaV2Manifest") or inspected.get("OCIManifest") or {}
        return manifest, inspected["Descriptor"]["digest"]
    return inspected, f"sha256:{hashlib.sha256(text).hexdigest()}"


def _run(command: list[str], builder: Builder, reference: str) -> None:
    """Runs a command whose output is shown. Raises ConfigError where it fails."""
    print(shlex.join(command), flush=True)
    # An attestation makes an index of the image, whose digest not every platform can pull.
    environment = os.environ | {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        errors="replace",
    ) as running:
        assert running.stdout
        for line in running.stdout:
            print(line, end="", flush=True)
            last.append(line)
    if running.returncode:
        raise _failed(command, "".join(last), builder, reference)


def _failed(command: list[str], printed: str, builder: Builder, reference: str) -> ConfigError:
    """Why a command failed, with what to change."""
    text = printed.lower()
    registry = reference.partition("/")[0]
    if FULL in text:
        cure = (
            "no space is left: the image needs some 60 GB where images are kept; free some "
            f"(`{command[0]} system prune`), or build on another machine"
        )
    elif NO_DAEMON in text:
        cure = "docker's daemon does not answer: start it"
    elif any(word in text for word in REFUSED):
        cure = f"{registry} does not let you in: `{builder.login}`, with an account that may push {reference}"
    else:
        cure = printed.strip().splitlines()[-1] if printed.strip() else "no word of why"
    return ConfigError(f"`{shlex.join(command)}` failed: {cure}")
