"""The image that holds the environment: its commands with programs that are played, and what the plan makes
of it. A real registry is in tests/lab/test_registry.py."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from desk import elsewhere as elsewhere
from desk import run, stand_in

from recipes.commands import cli
from recipes.drivers import image_build
from recipes.plan import cost, start_time
from recipes.presets import get
from recipes.recipe.spec import override
from recipes.records import image_record
from recipes.records.image_record import Image
from recipes.records.run_record import RunRecord
from tests.recipes.rendered import render
from trainer.config import ConfigError

ROOT = Path(__file__).parents[2]
SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
NAME = "registry.example.org/me/spotrl"
PIN = "sha256:" + "ab" * 32
TOLD = {"Descriptor": {"digest": PIN}, "SchemaV2Manifest": {"layers": [{"size": 8e9}, {"size": 7e9}]}}


@pytest.fixture(autouse=True)
def checkout(tmp_path, monkeypatch):
    """The files of an image in a folder of the test's own, where no program of this machine is found."""
    folder = tmp_path / "checkout"
    for name in image_record.FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (tmp_path / "bin").mkdir()
    for name in ("bash", "cat", "touch", "test"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(cli, "ROOT", folder)
    monkeypatch.chdir(folder)
    start_time.start_seconds.cache_clear()
    yield folder
    start_time.start_seconds.cache_clear()


def docker(tmp_path, monkeypatch, body="", told=TOLD):
    """A docker whose registry has an image once it was pushed."""
    (tmp_path / "told").write_text(json.dumps(told))
    stand_in(
        tmp_path,
        monkeypatch,
        "docker",
        f"""{body}
case "$1" in
  manifest)
    test -e {tmp_path}/pushed || {{ echo "no such manifest: it" >&2; exit 1; }}
    cat {tmp_path}/told ;;
  push) touch {tmp_path}/pushed ;;
esac""",
    )
    return lambda: [line.split()[1] for line in (tmp_path / "calls").read_text().splitlines()]


def test_what_is_in_the_registry_is_not_built_again(tmp_path, monkeypatch, capsys):
    calls = docker(tmp_path, monkeypatch)
    code, out, _ = run(capsys, "image", "--push", NAME)
    assert code == 0 and calls() == ["info", "manifest", "build", "push", "manifest"]
    assert f"--set cluster.image={NAME}@{PIN}" in out and "15.0 GB to pull" in out
    (tmp_path / "calls").unlink()
    code, out, _ = run(capsys, "image", "--push", NAME)
    assert code == 0 and calls() == ["info", "manifest"] and "nothing is built" in out
    (known,) = image_record.known_images()
    assert known == Image(f"{NAME}@{PIN}", f"gpu-{image_record.environment_digest()}", 15e9)


def test_the_tag_follows_all_that_goes_into_the_image(checkout):
    """And all that goes into it is what the Dockerfile copies, so that no tag lies."""
    text = (ROOT / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (\S+) \S+$", text, re.M)
    assert {*copied, "Dockerfile", ".dockerignore"} == set(image_record.FILES)
    assert "ADD" not in re.findall(r"^([A-Z]+) ", text, re.M) and "bash trainer/shell/setup.sh gpu" in text
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored == ["*", *(f"!{name}" for name in copied)]
    tags = {image_build.image_name(NAME)}
    for name in image_record.FILES:
        (checkout / name).write_text((checkout / name).read_text() + "# changed\n")
        tags.add(image_build.image_name(NAME))
    assert len(tags) == 6


@pytest.mark.parametrize(
    ("push", "named"),
    [
        (NAME, f"{NAME}:gpu-"),
        (f"{NAME}:v1.2", f"{NAME}:v1.2-"),
        ("localhost:5000/spotrl", "localhost:5000/spotrl:gpu-"),
        ("me/spotrl", "me/spotrl:gpu-"),
    ],
)
def test_names(push, named):
    assert image_build.image_name(push) == named + image_record.environment_digest()


@pytest.mark.parametrize("push", ["spotrl", "Me/spotrl", f"{NAME}@{PIN}", "a/b:c:d", "-v/b", "me/spotrl;x"])
def test_names_that_are_none(push):
    with pytest.raises(ConfigError, match="write REGISTRY/NAME or REGISTRY/NAME:TAG in lower case"):
        image_build.image_name(push)


def test_without_a_program_the_commands_for_another_machine_are_named(tmp_path, monkeypatch, capsys):
    reference = image_build.image_name(NAME)
    on_a_ci = f"`docker build -t {reference} .` and `docker push {reference}`, then --set cluster.image="
    code, _, err = run(capsys, "image", "--push", NAME)
    assert code == 2 and "no docker, podman or buildah is here" in err and on_a_ci in err
    stand_in(tmp_path, monkeypatch, "buildah", "")
    assert "buildah is here without skopeo" in run(capsys, "image", "--push", NAME)[2]
    (tmp_path / "bin/buildah").unlink()
    stand_in(tmp_path, monkeypatch, "docker", "exit 1")
    assert "docker's daemon does not answer: start it" in run(capsys, "image", "--push", NAME)[2]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            'test "$1" != build || { echo "write /x: no space left on device"; exit 1; }',
            "some 60 GB where images",
        ),
        (
            'test "$1" != push || { echo "denied: requested access"; exit 1; }',
            "does not let you in: `docker login",
        ),
        (
            'test "$1" != manifest || { echo "unauthorized: log in" >&2; exit 1; }',
            "`docker login registry.example",
        ),
        (
            'test "$1" != build || { echo "step 3 failed: exit 7" >&2; exit 7; }',
            "failed: step 3 failed: exit 7",
        ),
        ('test "$1" != push || exit 0', "was pushed and the registry does not have it"),
    ],
)
def test_a_failure_says_what_to_change(body, said, tmp_path, monkeypatch, capsys):
    docker(tmp_path, monkeypatch, body)
    code, _, err = run(capsys, "image", "--push", NAME)
    assert code == 2 and said in err and "Traceback" not in err and not image_record.known_images()


def test_an_image_for_several_kinds_of_machines(tmp_path, monkeypatch, capsys):
    """docker then prints one entry for each, and others for what attests the build."""

    def entry(kind, digest):
        return {"Descriptor": {"digest": digest, "platform": {"architecture": kind}}}

    told = [
        entry("unknown", "sha256:1"),
        entry("arm64", "sha256:2"),
        entry("amd64", PIN) | {"OCIManifest": {}},
    ]
    docker(tmp_path, monkeypatch, told=told)
    assert f"cluster.image={NAME}@{PIN}" in run(capsys, "image", "--push", NAME)[1]


def test_a_dry_run_shows_the_commands_and_calls_none(tmp_path, monkeypatch, capsys):
    code, out, _ = run(capsys, "image", "--push", f"{NAME}:v1", "--dry-run")
    reference = image_build.image_name(f"{NAME}:v1")
    assert code == 0 and out.splitlines() == [
        f"docker manifest inspect --verbose {reference}",
        f"docker build --tag {reference} .",
        f"docker push {reference}",
    ]
    for name in ("podman", "skopeo"):
        stand_in(tmp_path, monkeypatch, name, "")
    out = run(capsys, "image", "--push", "127.0.0.1:5000/spotrl", "--dry-run")[1]
    assert "podman push --tls-verify=false 127.0.0.1:5000/spotrl:gpu-" in out
    assert not (tmp_path / "calls").exists() and not image_record.RECORD.exists()


def offer(tmp_path, *changes):
    offers = cost.offers(override(get(SEVEN), [*changes]), tmp_path, ["skypilot-gcp"])
    return next(one for one in offers if one.spot)


def test_the_plan_knows_an_image_that_holds_the_environment(checkout, tmp_path):
    before = offer(tmp_path)
    held = Image(f"{NAME}@{PIN}", f"gpu-{image_record.environment_digest()}", 20_000_000_000)
    image_record.remember_image(held)
    with_image = offer(tmp_path, f"cluster.image={held.reference}")
    saved = start_time.ENVIRONMENT_S - 2 * start_time.IMAGE_S
    assert before.start_s - with_image.start_s == saved
    assert before.restart_s - with_image.restart_s == pytest.approx(saved)
    assert "image 120 +" in str(with_image.restart) and "without the environment in the image" in str(
        with_image.restart
    )
    assert offer(tmp_path, f"cluster.image={NAME}@sha256:{'0' * 64}").start_s == before.start_s
    # a tag that a CI has pushed says what it holds
    assert offer(tmp_path, f"cluster.image={NAME}:{held.tag}").start_s == before.start_s - 210
    recipe = override(get(SEVEN), [f"cluster.image={held.reference}"])
    assert {one.start_s for one in cost.offers(recipe)} == {one.start_s for one in cost.offers(get(SEVEN))}
    (checkout / "requirements/gpu.txt").write_text("# another\n")
    assert offer(tmp_path, f"cluster.image={held.reference}").start_s == before.start_s


def test_launches_with_and_without_the_image_are_measured_apart(tmp_path):
    held = Image(f"{NAME}@{PIN}", f"gpu-{image_record.environment_digest()}")
    image_record.remember_image(held)
    given = {"a": (600.0, []), "b": (200.0, [f"cluster.image={held.reference}"])}
    for name, (took, overrides) in given.items():
        record = RunRecord(run_id=name, recipe=SEVEN, target="skypilot-gcp", started_s=1000.0)
        replace(record, overrides=overrides).save()
        row = {"step": 1, "time/unix_s": 1000.0 + took + 30.0, "time/step_s": 30.0}
        (tmp_path / "runs" / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert start_time.start_seconds("skypilot-gcp") == (600.0, 1)
    assert start_time.start_seconds("skypilot-gcp", in_image=True) == (200.0, 1)


def test_the_plan_says_whose_environment_an_image_holds(checkout, capsys):
    image_record.remember_image(Image(f"{NAME}@{PIN}", f"gpu-{image_record.environment_digest()}"))
    asked = ["plan", SEVEN, "--all", "--target", "skypilot-gcp", "--set", f"cluster.image={NAME}@{PIN}"]
    out = " ".join(run(capsys, *asked)[1].split())
    assert "launch to first step: 270 s assumed" in out and "machine 90 + image 60 +" in out
    (checkout / "trainer/shell/setup.sh").write_text("# another\n")
    out = " ".join(run(capsys, *asked)[1].split())
    assert "480 s assumed" in out and "cluster.image holds another environment than this checkout's" in out


@pytest.mark.parametrize("target", ["skypilot-runpod", "skypilot-kubernetes", "dstack-gcp"])
def test_a_rendered_file_takes_the_image_and_asks_setup_first(target):
    """setup.sh links the environment of an image that is of the same commit, and installs nothing."""
    (text, *_) = render(override(get(SEVEN), [f"cluster.image={NAME}@{PIN}"]), target).values()
    assert f"{NAME}@{PIN}" in text and "bash trainer/shell/setup.sh gpu" in text
