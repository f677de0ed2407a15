"""Alerts of a run, told to a webhook on loopback and to a command."""

import json
import sys
import threading
import time

import pytest
from desk import elsewhere as elsewhere
from desk import run

from recipes.drivers import bucket_access
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from tests.observe.written_run import write_run
from tests.servers import Reply, Request, answering
from trainer.checkpoint.attempt import Attempts
from trainer.config.run_folder import METRICS, PROGRESS
from trainer.observe.stream import Stream
from trainer.storage.storage import Storage


class Hook:
    """A webhook that keeps what it is sent, and answers as a test says."""

    def __init__(self):
        self.posts = []
        self.answer = 200
        self.address = ""

    def reply(self, request: Request) -> Reply:
        self.posts.append((request.headers["Content-Type"], json.loads(request.body)))
        return self.answer, b"", {}


@pytest.fixture
def hook():
    hook = Hook()
    with answering(hook.reply) as url:
        hook.address = f"{url}/services/T0/B0/x"
        yield hook


def texts(hook):
    assert {kind for kind, _ in hook.posts} <= {"application/json"}
    return [body["text"] for _, body in hook.posts]


def progress(run_id, **values):
    path = run_record.RUNS / run_id / PROGRESS
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_run_that_ends_for_good_is_told_once_to_a_webhook_and_a_command(hook, capfd, tmp_path, monkeypatch):
    write_run(run_record.RUNS / "mine", 6)
    progress("mine", status="failed", message="out of memory at step 6")
    monkeypatch.setenv("SPOTRL_ALERT_WEBHOOK", hook.address)
    line = f'echo "$RUN_ID|$ALERT|$ALERT_TEXT" >> {tmp_path}/told'
    for _ in range(2):
        code, out, err = run(capfd, "alert", "mine", "--once", "--command", line)
        assert code == 0, err
    assert texts(hook) == ["mine: failed: out of memory at step 6"]
    assert (tmp_path / "told").read_text() == "mine|ended|failed: out of memory at step 6\n"
    assert hook.address not in out + err


def test_what_was_not_told_is_told_at_the_next_look(hook, capfd):
    write_run(run_record.RUNS / "mine", 6)
    progress("mine", status="finished", message="")
    hook.answer = 503
    given = ["alert", "mine", "--once", "--webhook", hook.address]
    code, _, err = run(capfd, *given)
    assert code == 1 and "the webhook answered 503" in err and hook.address not in err
    hook.answer = 200
    assert run(capfd, *given)[0] == 0 and run(capfd, *given)[0] == 0
    assert texts(hook) == ["mine: finished", "mine: finished"]


def test_silence_guards_and_limits_leave_the_expectation(hook, capfd):
    folder = run_record.RUNS / "mine"
    write_run(folder, 6)
    long_ago = time.time() - 7200
    lines = [
        json.loads(line) | {"time/unix_s": long_ago} for line in (folder / METRICS).read_text().splitlines()
    ]
    lines[-1]["kl/mean"] = 99.0
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    progress("mine", status="running", phase_since_unix_s=long_ago)
    began = time.time() - 4 * 3600
    most = {"planned_most_hours": 3.0, "planned_most_usd": 100.0}
    RunRecord(run_id="mine", recipe="demo", target="slurm", started_s=began, usd_per_hour=10.0, **most).save()
    assert run(capfd, "alert", "mine", "--once", "--webhook", hook.address)[0] == 0
    told = texts(hook)
    assert any("the policy has left the reference: KL" in text for text in told)
    assert "mine: 4.0 hours, and nine in ten such runs end within 3.0" in told
    assert any(text.startswith("mine: silent for 120 minutes") for text in told)
    assert len(told) == len(set(told)) and not any("$" in text for text in told), "$40 of 100 is as expected"


def test_the_bucket_is_watched_until_the_run_ends(hook, capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_access, "find_python", lambda: sys.executable)
    url, machine = f"file://{tmp_path}/bucket", tmp_path / "machine"
    machine.mkdir()
    attempts = Attempts(Storage(f"{url}/far/attempts"))
    attempt = attempts.take(0, "launch")
    stream = Stream(machine, Storage(f"{url}/far"), attempt.name, 0.2, lambda: False)
    write_run(machine, 6)
    text = (machine / PROGRESS).read_text()
    (machine / PROGRESS).write_text(json.dumps(json.loads(text) | {"status": "running"}))

    while not Storage(f"{url}/far").list("stream"):  # before the first push there is nothing to watch
        time.sleep(0.05)

    def end():
        time.sleep(4.0)
        (machine / PROGRESS).write_text(json.dumps(json.loads(text) | {"status": "finished"}))
        stream.close()
        attempts.close(attempt, 0, "", 6)

    ending = threading.Thread(target=end)
    ending.start()
    words = ["alert", "far", "--bucket", url, "--webhook", hook.address, "--every", "0.5"]
    code, _, err = run(capfd, *words)
    ending.join()
    assert code == 0, err
    assert [text for text in texts(hook) if "guard" not in text] == ["far: finished"]


def test_nobody_to_tell_is_refused(capfd):
    write_run(run_record.RUNS / "mine", 2)
    code, _, err = run(capfd, "alert", "mine", "--once")
    assert code == 2 and "export SPOTRL_ALERT_WEBHOOK, or give --command" in err
