"""What may hold a secret stays on the desk: one list, which every way off it obeys."""

import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from desk import elsewhere as elsewhere

from recipes.drivers import kubernetes_driver, launch_checks
from recipes.platforms import kubernetes, ssh
from recipes.presets import get, resolve
from recipes.records import manifest
from recipes.records.run_record import RunRecord
from tests.recipes.rendered import render
from trainer.config import ConfigError
from trainer.config.never_sent import is_secret, secret_patterns
from trainer.storage import transfer

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / ".venvs/launch/bin/python"
SECRETS = (
    "tokens.env", ".env", ".env.local", "prod.env", ".envrc", "server.pem", "id_rsa", "keys/id_ed25519.bak",
    "kubeconfig", "team-kubeconfig.yaml", ".kube/config", ".netrc", ".aws/credentials", ".aws/config",
    "sa.json", "service-account.json", "spotrl-431-0a1b2c3d4e5f.json", "gcp-service_account-prod.json",
    "application_default_credentials.json", ".config/gcloud/legacy", "wandb.netrc.env", ".huggingface/token",
    "token", "hf_token", "recipes/secrets.yaml", "secrets/any", ".git-credentials", "kaggle.json",
    "trainer/deep/.ssh/known", "rootkey.csv", "me_accessKeys.csv", "tls.key", ".docker/config.json", ".sky/k",
    "rclone.conf", "openai_api_key.txt", "client_secret_9.json", "tokens.env.bak", "tokens.env~",
)  # fmt: skip
KEPT = ("launch.py", "tokenizer.json", "trainer/tokens.py", "recipes/monkey.json", "keys/read.py")
VALUE = "wJalrXUtnFEMI-a-secret-of-this-launch"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository with the two lists of this one, whose working tree is full of secrets."""
    for name in (".gitignore", ".skyignore", ".dstackignore", "trainer/config/never_sent.txt"):
        (tmp_path / "repo" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "repo" / name)
    monkeypatch.chdir(tmp_path / "repo")
    git("init", "-q")
    Path("known.py").write_text("x = 1\n")
    git("add", "-A")
    git("commit", "-qm", "begin")
    for name in (*SECRETS, *KEPT):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"{name}\n")
    return tmp_path


def git(*arguments):
    who = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run(["git", *who, *arguments], check=True)


def record(recipe="preflight"):
    return RunRecord(run_id="try", recipe=recipe, target="kubernetes")


def assert_kept_here(names, hidden=True):
    found = {name.removeprefix("./") for name in names}
    assert not found & set(SECRETS)
    assert set(KEPT) <= found or not hidden


def test_the_lists_of_git_and_dstack_repeat_the_one(tree):
    for name in (".gitignore", ".skyignore", ".dstackignore"):
        lines = (ROOT / name).read_text().lower().splitlines()
        assert not [pattern for pattern in secret_patterns() if pattern not in lines], name
    git_lines, sky_lines = (
        set((ROOT / name).read_text().splitlines()) for name in (".gitignore", ".skyignore")
    )
    assert {".git"} | git_lines <= sky_lines, "SkyPilot reads one of the two alone"
    assert all(is_secret(name) and is_secret(name.upper()) for name in SECRETS)
    assert not any(map(is_secret, KEPT))


def test_nothing_of_this_repository_is_on_the_list():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert names and not [name for name in names.splitlines() if is_secret(name)]


def test_git_and_the_manifest_do_not_see_them(tree):
    assert_kept_here(manifest.untracked_files())
    Path("known.py").write_text("x = 2\n")
    path = manifest.write_launch(resolve("preflight", []), record())
    half = json.loads(path.read_text())["launch"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert_kept_here(half["untracked"])
    assert "x = 2" in half["diff"] and "monkey" not in half["diff"]
    assert manifest.source_of(half["commit"], half["diff"], half["untracked"]) == manifest.source_id()


def test_a_tracked_secret_is_not_in_the_diff(tree):
    git("add", "-f", "tokens.env")
    assert "tokens.env" not in manifest.tracked_diff()


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN OPENSSH PRIVATE KEY-----\n",
        '{"private_key": "-----BEGIN a key that is long"}',
        "export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEYab\n",
        "hf_" + "a1" * 17,
        "machine api.wandb.ai login user password 0123456789abcdef\n",
        "    client-key-data: " + "LS0t" * 9,
        "https://me:ghp-secret-word@git.example.com/x.git",
        f"KEY = '{VALUE}'",
    ],
)
def test_a_secret_under_another_name_stops_a_launch_that_would_copy_it(tree, text):
    Path("notes.txt").write_text(text)
    for target in ("skypilot-gcp", "dstack-gcp", "kubernetes", "ssh"):
        with pytest.raises(ConfigError, match=r"notes.txt holds .* move it out of") as failure:
            launch_checks.check_sent_tree(target, {"AWS_SECRET_ACCESS_KEY": VALUE})
        assert text.strip() not in str(failure.value) and VALUE not in str(failure.value)
    launch_checks.check_sent_tree("slurm", {"AWS_SECRET_ACCESS_KEY": VALUE})


def test_a_secrets_name_in_a_hidden_folder_stops_a_launch_that_would_copy_it(tree):
    """git ignores it there, too, unless it was added by force; SkyPilot's patterns do not look there."""
    Path(".work").mkdir()
    Path(".work/tokens.env").write_text("TOKEN=1\n")
    git("add", "-f", ".work/tokens.env")
    git("commit", "-qm", "a mistake")
    Path(".work/tokens.env").write_text("TOKEN=2\n")
    with pytest.raises(ConfigError, match=r"\.work/tokens\.env has a secret's name in a hidden folder"):
        launch_checks.check_sent_tree("skypilot-gcp", {})


def test_kubernetes_packs_none_of_them(tree):
    with tarfile.open(
        fileobj=io.BytesIO(kubernetes_driver.packed_tree(Path.cwd(), get("preflight")))
    ) as archive:
        assert_kept_here(archive.getnames())
    head = next(iter(render(get("preflight"), "kubernetes").values())).splitlines()
    tar = next(line for line in head if "tar -cf" in line).removeprefix("#   ")
    subprocess.run(["bash", "-euc", tar], check=True)
    with tarfile.open("code.tar.gz") as archive:
        assert_kept_here(archive.getnames())
    assert "HOME" in kubernetes.TOKENS and any(kubernetes.TOKENS in line for line in head)


@pytest.mark.skipif(not shutil.which("rsync"), reason="no rsync")
def test_ssh_copies_none_of_them(tree):
    recipe = resolve("preflight", ["site.hosts=[me@one]"])
    command = ssh.copy_command(recipe, "me@one")
    options = [word for word in command if word.startswith("--exclude")]
    subprocess.run(["rsync", "-az", "--delete", *options, "./", f"{tree}/there/"], check=True)
    assert_kept_here(str(path.relative_to(tree / "there")) for path in (tree / "there").rglob("*"))


def test_a_folder_that_is_uploaded_leaves_them_behind(tree, capfd):
    shutil.rmtree(".git")
    transfer.upload(Path.cwd(), f"file://{tree}/bucket/models/mine", resume=True)
    there = tree / "bucket/models/mine"
    assert_kept_here(str(path.relative_to(there)) for path in there.rglob("*"))
    assert "tokens.env is not sent: its name is that of a secret" in capfd.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(not LAUNCH.exists(), reason="no .venvs/launch")
def test_skypilot_and_dstack_copy_none_of_them(tree):
    """By their own code, also what git tracks."""
    git("add", "-f", "tokens.env")
    code = (
        "import sys, os, json; from sky.data.storage_utils import zip_files_and_folders as sky;"
        "from dstack._internal.utils.files import create_file_archive as dstack;"
        "sky(['.'], sys.argv[1], relative_to_items=True); dstack(os.getcwd(), open(sys.argv[2], 'w+b'))"
    )
    files = [str(tree / "sky.zip"), str(tree / "dstack.tar")]
    subprocess.run([LAUNCH, "-c", code, *files], check=True, env=os.environ | {"HOME": str(tree)})
    shutil.unpack_archive(files[0], tree / "sky")
    assert_kept_here(str(path.relative_to(tree / "sky")) for path in (tree / "sky").rglob("*"))
    assert not (tree / "sky/.git").exists()
    shutil.unpack_archive(files[1], tree / "dstack")
    sent = [str(path.relative_to(tree / "dstack/repo")) for path in (tree / "dstack/repo").rglob("*")]
    assert_kept_here(sent, hidden=False)
    assert "tokenizer.json" in sent
