"""The ssh driver with stand-ins for ssh, scp and rsync that run on this machine, one folder per host."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from recipes.drivers import ssh_driver
from recipes.platforms.script import SECRETS
from recipes.records import run_record
from recipes.records.run_record import RunRecord
from tests.recipes.rendered import render

ROOT = Path(__file__).parents[2]

SSH = """#!/bin/bash
echo "ssh $*" >> {calls}
while [[ "$1" == -* ]]; do shift 2; done
[ "$1" = user@dead ] && {{ echo "ssh: connect to host dead port 22: No route to host" >&2; exit 255; }}
cd {hosts}/$1 && shift && bash -c "$1"  # like sshd, it reaps what it started
"""
SCP = """#!/bin/bash
echo "scp $*" >> {calls}
target=${{@: -1}} source=${{@: -2:1}}
cp "$source" "{hosts}/${{target%%:*}}/${{target#*:}}"
"""
RSYNC = """#!/bin/bash
echo "rsync $*" >> {calls}
target=${{@: -1}} host=${{target%%:*}}
[ "$host" = user@dead ] && {{ echo "rsync: connection unexpectedly closed" >&2; exit 12; }}
root={hosts}/$host/${{target#*:}}
mkdir -p "$root/.cache" "$root/trainer/shell" "$root/.venvs/gpu/bin"
: > "$root/trainer/shell/setup.sh"
: > "$root/trainer/shell/driver.sh"
cp {checkout}/trainer/shell/{{bucket,task}}.sh "$root/trainer/shell/"
cp {python} "$root/.venvs/gpu/bin/python"
"""
PYTHON = """#!/bin/bash
[ "$2" = trainer.node ] || exit 0
place="rank $SPOTRL_NODE_RANK of $SPOTRL_NODES peers $SPOTRL_PEERS"
echo "$place run $RUN_ID bucket $BUCKET token ${{HF_TOKEN:-none}}"
case "$SPOTRL_NODE_RANK" in 0) {head} ;; *) {worker} ;; esac
"""


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """A function that prepares two hosts whose nodes run the given shell commands, and returns the launch's
    record."""
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "top 'secret'")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("WORK", str(tmp_path / "work"))
    runs = tmp_path / "runs"
    for module in (run_record, ssh_driver):
        monkeypatch.setattr(module, "RUNS", runs)
    (tmp_path / "bin").mkdir()

    def prepare(head="exit 0", worker="exit 0", second="user@two:2201/10.0.0.2"):
        values = {
            "calls": tmp_path / "calls",
            "hosts": tmp_path / "hosts",
            "python": tmp_path / "python",
            "checkout": ROOT,
        }
        (tmp_path / "python").write_text(PYTHON.format(head=head, worker=worker))
        (tmp_path / "python").chmod(0o755)
        for name, text in (("ssh", SSH), ("scp", SCP), ("rsync", RSYNC)):
            (tmp_path / "bin" / name).write_text(text.format(**values))
            (tmp_path / "bin" / name).chmod(0o755)
        hosts = ["user@one", second]
        for host in hosts:
            (tmp_path / "hosts" / host.partition(":")[0]).mkdir(parents=True, exist_ok=True)
        overrides = [f"site.hosts=[{','.join(hosts)}]"]
        record = RunRecord(
            run_id="mine", recipe="preflight", target="ssh", overrides=overrides, bucket="s3://mine"
        )
        record.save()
        task = runs / "mine/task"
        task.mkdir(parents=True)
        for name, text in render(ssh_driver.resolve("preflight", overrides), "ssh").items():
            (task / name).write_text(text)
        return record

    return prepare


def test_every_node_runs_with_its_place_and_the_tokens(machines, capsys, tmp_path):
    assert ssh_driver.up(machines()) == 0
    lines = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        assert (
            f"[{rank}] rank {rank} of 2 peers one 10.0.0.2 run mine bucket s3://mine token top 'secret'"
            in lines
        )
    calls = (tmp_path / "calls").read_text()
    assert "secret" not in calls and "-p 2201" in calls and "-P 2201" in calls
    assert "rank 0 of 2" in (tmp_path / "runs/mine/launch.log").read_text()


def test_the_exit_code_is_that_of_the_node_that_failed(machines, capsys):
    assert ssh_driver.up(machines(head="exit 33", worker="exit 33")) == 33
    assert "node 0 (user@one) ended with 33" in capsys.readouterr().out


def test_a_node_that_stays_behind_is_ended(machines, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(ssh_driver, "GRACE_S", 0.5)
    started = time.monotonic()
    code = ssh_driver.up(machines(head="exit 34", worker=f"echo $$ > {tmp_path}/pid; sleep 300"))
    assert code == 34 and time.monotonic() - started < 30
    assert "ending user@two:2201/10.0.0.2: still running" in capsys.readouterr().out
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_unreachable_machine_is_named_and_nothing_is_started(machines, capsys, tmp_path):
    assert ssh_driver.up(machines(second="user@dead")) == 2
    err = capsys.readouterr().err
    assert "copy to user@dead failed (12): rsync: connection unexpectedly closed" in err
    assert "rank" not in (tmp_path / "calls").read_text()


def test_down_ends_exactly_this_run(machines, capsys, tmp_path):
    record = machines(
        head=f"echo $$ > {tmp_path}/head; sleep 300", worker=f"echo $$ > {tmp_path}/worker; sleep 300"
    )
    result = []
    thread = threading.Thread(target=lambda: result.append(ssh_driver.up(record)))
    thread.start()
    deadline = time.monotonic() + 60
    while not all((tmp_path / name).exists() for name in ("head", "worker")) and time.monotonic() < deadline:
        time.sleep(0.1)
    ssh_driver.status(record)
    assert ssh_driver.down(record) == 0
    thread.join(60)
    assert result and result[0] != 0
    assert "user@one: running" in capsys.readouterr().out
    for name in ("head", "worker"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)


def test_a_detached_run_goes_on_alone_and_is_not_started_twice(machines, capsys, tmp_path):
    record = machines(head="sleep 300", worker="sleep 300")
    assert ssh_driver.start(record) == 0
    assert "`python3 launch.py logs mine` follows it" in capsys.readouterr().out
    assert ssh_driver.up(record) == 2
    assert "[0] error: mine is still running here" in capsys.readouterr().out
    ssh_driver.status(record)
    assert ssh_driver.down(record) == 0
    ssh_driver.status(record)
    states = [
        line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("user@")
    ]
    assert states == ["running", "running", "ended", "ended"]


def test_ctrl_c_lets_the_nodes_save_and_shows_their_last_words(machines, capsys, tmp_path):
    save = f"trap 'sleep 1; echo saved; exit 33' TERM; touch {tmp_path}/$SPOTRL_NODE_RANK; sleep 300 & wait"
    record = machines(head=save, worker=save)

    def press():
        deadline = time.monotonic() + 60
        while not all((tmp_path / rank).exists() for rank in "01") and time.monotonic() < deadline:
            time.sleep(0.1)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=press).start()
    assert ssh_driver.up(record) == 130
    lines = capsys.readouterr().out.splitlines()
    assert "[0] saved" in lines and "[1] saved" in lines
