"""A bucket that somebody else wrote, through every command that reads one: nothing of it is run, no page and
no other run is lost, and nobody reads a traceback."""

import json
import random
import subprocess
import sys

import pytest
from desk import elsewhere as elsewhere
from desk import run

from recipes.drivers import bucket_access
from recipes.records import manifest as manifests
from recipes.records.run_record import RunRecord
from tests.observe.written_run import sample, values
from trainer.checkpoint.attempt import Attempts
from trainer.config import RunConfig, override
from trainer.observe.metrics import Metrics
from trainer.observe.phases import Phases
from trainer.observe.stream import Stream
from trainer.storage.storage import Storage
from trainer.system.exit_codes import EXIT_OK

PLAIN = override(RunConfig(), ["logging.tensorboard=false"])
SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"


def write_run(bucket, run_id, folder):
    """A run that has ended, as its machine and its desk left it in the bucket."""
    folder.mkdir()
    url = f"{bucket}/{run_id}"
    attempts = Attempts(Storage(f"{url}/attempts"))
    attempt = attempts.take(0, "launch")
    metrics, phases = Metrics(folder, PLAIN), Phases(folder, total_steps=3)
    for step in (1, 2, 3):
        phases.begin(step)
        metrics.log(step, values(step, 3, random.Random(step)))
        metrics.samples(step, [sample(step, k, random.Random(k)) for k in range(2)])
    phases.finish("finished")
    (folder / "launch.log").write_text("step 3\n")
    stream = Stream(folder, Storage(url), attempt.name, 3600.0, lambda: False)
    stream.push()
    attempts.close(attempt, EXIT_OK, "", 3)
    record = RunRecord(run_id=run_id, recipe=SEVEN, target="slurm", cluster="77", bucket=bucket, desk="far")
    told = {"record": json.loads(json.dumps(manifests.dataclasses.asdict(record)))}
    Storage(url).put_bytes("manifest.json", json.dumps({"run_id": run_id, "launch": told}).encode())
    return attempt.name


NUMBERS = b'{"step": 1e400, "reward/mean": -Infinity, "unix_s": "x", "status": 7, "phase": [], "pid": "7"}\n'
TYPES = b'{"step": "1", "reward/mean": [], "images": 7, "unix_s": null, "nodes": 3, "status": {}}\n'
ESCAPES = b'{"step": 2, "status": "\\u001b]0;owned\\u0007", "message": "\\u001b[2J", "text": "\\u001b[31m"}\n'
PATHS = b'{"step": 2, "images": ["../../../secret", "/etc/hostname", "samples/../../secret"]}\n'
NOTHING = (b"", b"{", b"null", b"[]\n", b"\xff\xfe\x00", b"[" * 100_000, b'"' + b"a" * 100_000)
SHELL = b'{"run_id": "x;touch MARK", "recipe": "$(touch MARK)", "launch": "`touch MARK`", "host": "a\\nb"}\n'
YAML = b"!!python/object/apply:os.system ['touch MARK']\n"
BOMB = b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nmodel: {path: *c}\n"

STREAM = "stream/ATTEMPT/"
PLACES = {
    "attempts/00000001.json": (*NOTHING, SHELL, TYPES),
    "attempts/00000002.json": (*NOTHING[:3], SHELL),
    "attempts/99999999.json": (b"{}",),
    "attempts/0000000\u00b2.json": (b"{}",),
    "attempts/00000001.end.json": (*NOTHING[:3], b'{"name": "1-aaaaaa", "code": 1e18}'),
    "attempts/final.json": (*NOTHING[:3], b'{"code": 2, "why": "\\u001b[2J", "launch": "launch"}'),
    "attempts/machines.json": NOTHING[:2],
    STREAM + "progress.json": (*NOTHING, NUMBERS, TYPES, ESCAPES),
    STREAM + "metrics.jsonl/00000000": (*NOTHING[:4], NUMBERS, TYPES, ESCAPES),
    STREAM + "samples.jsonl/00000000": (*NOTHING[:4], PATHS, TYPES, ESCAPES),
    STREAM + "nodes.jsonl/00000000": (NUMBERS, TYPES, ESCAPES),
    STREAM + "attempts.jsonl": (NUMBERS, TYPES),
    STREAM + "config.yaml": (b"", YAML, BOMB, b"run: [\n", b"a" * 100_000, b"\x00\xff"),
    STREAM + "launch.log/00000000": (b"\x1b]0;owned\x07error: \x1b[2Jx\n",),
    STREAM + "../../../above": (b"x",),
    "manifest.json": (*NOTHING, SHELL, b'{"launch": {"record": {"run_id": "far"}}}'),
}
KINDS = [(place, data) for place, contents in PLACES.items() for data in contents]
NAMES = [f"{place}-{number}" for number, (place, _) in enumerate(KINDS)]

LOOKS = (["runs"], ["status", "far"], ["report", "far"])
OTHERS = (
    ["logs", "far", "--stored"],
    ["compare", "far", "good"],
    ["pull", "far"],
    ["resume", "far", "--dry-run"],
    ["down", "far", "--dry-run"],
    ["serve", "far", "--target", "slurm", "--dry-run"],
    ["evaluate", "far", "--benchmarks", "gsm8k", "--target", "slurm", "--dry-run"],
    ["publish", "far", "--to", "FOLDER/published"],
    ["alert", "far", "--once", "--command", "true"],
)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_access, "find_python", lambda: sys.executable)
    (tmp_path / "secret").write_text("the reader's own")
    url = f"file://{tmp_path}/bucket"
    write_run(url, "good", tmp_path / "machine-good")
    write_run(url, "far", tmp_path / "machine-far")
    return url


def spoil(tmp_path, place, data):
    """Replaces an object of the run `far`, or adds it."""
    folder = tmp_path / "bucket/far"
    (attempt,) = (folder / "stream").iterdir()
    path = folder / place.replace("ATTEMPT", attempt.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.replace(b"MARK", str(tmp_path / "ran").encode()))


def check_commands(commands, bucket, tmp_path, capfd):
    for command in commands:
        words = [word.replace("FOLDER", str(tmp_path)) for word in command]
        try:
            code, out, err = run(capfd, *words, "--bucket", bucket)
        except SystemExit as refused:  # the program that read the bucket has said why
            code, (out, err) = refused.code, capfd.readouterr()
        what = f"{words}: {out}{err}"
        assert isinstance(code, int) and "Traceback" not in out + err, what
        assert "\x1b]" not in out + err and "\x1b[2J" not in out + err, what
        parted = code == 1 and words[0] == "compare"  # as it says in its lines
        assert code == 0 or parted or err.strip(), f"{what}: it says why"
        assert words != ["runs"] or "good" in out, what
    assert not (tmp_path / "ran").exists() and not (tmp_path / "bucket/above").is_dir()
    for page in (tmp_path / "runs").rglob("report*.html"):
        assert "the reader's own" not in page.read_text()


@pytest.mark.parametrize(("place", "data"), KINDS[::4], ids=NAMES[::4])
def test_runs_status_and_report_of_it(place, data, bucket, tmp_path, capfd):
    spoil(tmp_path, place, data)
    check_commands(LOOKS, bucket, tmp_path, capfd)


@pytest.mark.long
@pytest.mark.parametrize(("place", "data"), KINDS, ids=NAMES)
def test_every_command(place, data, bucket, tmp_path, capfd):
    spoil(tmp_path, place, data)
    check_commands((*LOOKS, *OTHERS), bucket, tmp_path, capfd)


@pytest.mark.parametrize("command", OTHERS, ids=lambda words: words[0])
def test_a_few_kinds_through_every_command(command, bucket, tmp_path, capfd):
    for place, data in (
        (STREAM + "config.yaml", YAML),
        ("manifest.json", SHELL),
        ("attempts/00000001.json", TYPES),
    ):
        spoil(tmp_path, place, data)
    check_commands([command], bucket, tmp_path, capfd)


def test_an_object_of_gigabytes_is_not_read(bucket, tmp_path, capfd):
    spoil(tmp_path, STREAM + "metrics.jsonl/00000000", b"")
    (attempt,) = (tmp_path / "bucket/far/stream").iterdir()
    for path in (attempt / "metrics.jsonl/00000000", tmp_path / "bucket/far/attempts/00000001.json"):
        with path.open("r+b") as file:
            file.truncate(1 << 33)
    check_commands(LOOKS, bucket, tmp_path, capfd)
    assert subprocess.run(["du", "-sk", str(tmp_path / "runs")], capture_output=True).stdout < b"100000"
