"""Notices: signals to real processes, the flag file, metadata servers on loopback; and the save interval."""

import math
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.servers import Reply, Request, answering
from tests.waiting import until
from trainer.hardware.save_interval import save_interval_s
from trainer.node.watch import preemption as preempt
from trainer.node.watch.preemption import MetadataServer, PreemptionNotice
from trainer.system.exit_codes import EXIT_PREEMPTED


class Stand:
    """A metadata server on loopback that answers by path."""

    def __init__(self):
        self.answers: dict[str, str | int] = {}
        self.asked: list[tuple[str, str, dict]] = []
        self.url = ""

    def answer(self, request: Request) -> Reply:
        self.asked.append((request.method, request.path, dict(request.headers)))
        answer = self.answers.get(request.path, 404)
        return (answer, b"", {}) if isinstance(answer, int) else (200, answer.encode(), {})


@pytest.fixture
def stand():
    stand = Stand()
    with answering(stand.answer) as stand.url:
        yield stand


def test_gcp_metadata_server(stand):
    server = MetadataServer("gcp", stand.url)
    stand.answers["/computeMetadata/v1/instance/preempted"] = "FALSE"
    assert server.ask() is None
    assert stand.asked[0][2]["Metadata-Flavor"] == "Google"
    stand.answers["/computeMetadata/v1/instance/preempted"] = "TRUE"
    assert server.ask() == "gcp: instance preempted"


def test_aws_metadata_server_with_and_without_tokens(stand):
    server = MetadataServer("aws", stand.url)
    assert server.ask() is None
    stand.answers["/latest/api/token"] = "abc"
    stand.answers["/latest/meta-data/spot/instance-action"] = '{"action": "terminate", "time": "2026-01-01"}'
    assert server.ask() == "aws: spot instance will terminate"
    assert stand.asked[-2][0] == "PUT"
    assert {k.lower(): v for k, v in stand.asked[-1][2].items()}["x-aws-ec2-metadata-token"] == "abc"


def test_notice_from_the_metadata_server(stand, tmp_path):
    env = {"GCE_METADATA_HOST": stand.url.removeprefix("http://")}
    env[preempt.FLAG_VARIABLE] = str(tmp_path / "flag")
    seen = []
    # away for a moment: no notice, and no crash
    stand.answers["/computeMetadata/v1/instance/preempted"] = 503
    notice = PreemptionNotice(signals=False, on_notice=seen.append, poll_s=0.05, env=env)
    time.sleep(0.2)
    assert notice.poll() is None
    assert notice.remaining_s() == math.inf
    stand.answers["/computeMetadata/v1/instance/preempted"] = "TRUE"
    until(notice.poll)
    until(lambda: seen == ["gcp: instance preempted"])
    assert 25 < notice.remaining_s() <= 30
    notice.close()


@pytest.mark.parametrize("set_back_s", [0, 3600])
def test_a_notice_through_the_flag_file_is_seen_whatever_the_clock_says(tmp_path, set_back_s):
    """The clock of the node may be set back after the start: the file is then older than the process."""
    flag = tmp_path / "flag"
    preempt.announce_notice("left over from an earlier run", flag)
    os.utime(flag, (1, 1))
    notice = PreemptionNotice(signals=False, env={preempt.FLAG_VARIABLE: str(flag), "SPOTRL_NOTICE_S": "5"})
    assert notice.poll() is None
    preempt.announce_notice("SIGTERM on node 3", flag)
    written = time.time() - set_back_s
    os.utime(flag, (written, written))
    assert notice.poll() == "SIGTERM on node 3"
    assert 4 < notice.remaining_s() <= 5
    notice.close()


@pytest.mark.parametrize(
    ("env", "provider", "seconds"),
    [
        ({"RUNPOD_POD_ID": "x", "KUBERNETES_SERVICE_HOST": "y"}, "runpod", 5),
        ({"KUBERNETES_SERVICE_HOST": "y"}, "kubernetes", 30),
        ({"KUBERNETES_SERVICE_HOST": "y", "SPOTRL_NOTICE_S": "120"}, "kubernetes", 120),
        ({"SLURM_JOB_ID": "1"}, "slurm", 30),
    ],
)
def test_provider_from_the_environment(env, provider, seconds, tmp_path):
    assert preempt.provider(env, tmp_path) == provider
    assert preempt.notice_s(env) == seconds


def test_provider_from_the_machine(tmp_path):
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    assert preempt.provider({"KUBERNETES_SERVICE_HOST": "y"}, tmp_path) == "gcp"
    (tmp_path / "product_name").write_text("m5.large\n")
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert preempt.provider({}, tmp_path) == "aws"
    assert preempt.metadata_server({"SPOTRL_METADATA": "off", "GCE_METADATA_HOST": "x"}) is None
    assert preempt.metadata_server({}) is None


LOOP = """
import sys, time
from trainer.node.watch.preemption import PreemptionNotice
def flush(reason):
    print("flushed", reason, flush=True)
notice = PreemptionNotice(on_notice=flush, exit_at_deadline=True)
print("ready", flush=True)
for _ in range(600):
    time.sleep({phase_s})       # a phase
    if notice.poll():
        print("stopping:", notice.poll(), flush=True)
        sys.exit(notice.exit_code)
"""


def start_loop(tmp_path, phase_s, **env):
    extra = {preempt.FLAG_VARIABLE: str(tmp_path / "flag"), "SPOTRL_METADATA": "off", **env}
    command = [sys.executable, "-c", LOOP.format(phase_s=phase_s)]
    process = subprocess.Popen(command, env=os.environ | extra, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 33), (signal.SIGINT, 130)])
def test_signals_end_the_run_between_phases(tmp_path, number, code):
    process = start_loop(tmp_path, 0.05)
    process.send_signal(number)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == code
    assert "stopping:" in out
    assert "flushed" in out


def test_a_phase_longer_than_the_notice_still_exits_in_time_with_the_right_code(tmp_path):
    process = start_loop(tmp_path, 60, SPOTRL_NOTICE_S="2")
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == EXIT_PREEMPTED
    assert time.monotonic() - begun < 2
    assert out == "flushed SIGTERM\n"


def test_a_second_ctrl_c_insists(tmp_path):
    process = start_loop(tmp_path, 60)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode not in (0, None)


def test_save_interval_by_hand():
    # Young: sqrt(2 * 60 * 86400) = 3219.9; x = 60 / 172800, sqrt(x) = 0.018634
    expected = 3219.9379 * (1 + 0.0186339 / 3 + 0.000347222 / 9) - 60
    assert save_interval_s(60, 86400) == pytest.approx(expected, rel=1e-6)
    assert save_interval_s(0, 3600) == 0
    assert save_interval_s(9000, 3600) == 3600


def test_save_interval_loses_least_time():
    """Against the exact expectation for exponential failures (Daly, eq. 13, without restart time)."""
    stall, mtbf = 30.0, 3600.0

    def cost(interval: float) -> float:
        return math.expm1((interval + stall) / mtbf) / interval

    best = min(range(50, 3000), key=cost)
    assert cost(save_interval_s(stall, mtbf)) <= cost(best) * 1.0002
    assert cost(save_interval_s(stall, mtbf)) <= cost(math.sqrt(2 * stall * mtbf))
