"""A worker samples a probe before anything else: who is not the policy is turned away, with the reason, and
ends itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from tests.fleet.test_dispatch import head as head
from tests.fleet.test_verify import UNIT, good
from tests.fleet.test_worker_ends import Run, sampled
from tests.waiting import until
from trainer.checkpoint.attempt import Attempt
from trainer.fleet import head_thread
from trainer.fleet.dispatch import NoWorkers
from trainer.fleet.fleet_records import GivenUnit
from trainer.fleet.fleet_sampler import AdmissionTest
from trainer.fleet.objects import samples_key
from trainer.fleet.sample_intake import pack_samples
from trainer.fleet.worker_heartbeat import read_heartbeat
from trainer.system.errors import StorageError
from trainer.system.exit_codes import EXIT_CONFIG

PROBE = replace(UNIT, name="probe")


def policy(traces):
    """A learner that holds what `good` was sampled with."""
    return [trace.logprobs for trace in good()]


def test_the_policy_is_admitted_and_another_model_is_not():
    admission = AdmissionTest(lambda version: pytest.fail("not asked"), policy, 0.02)
    assert admission.refusal(good(), "NVIDIA L40S") == ""
    near, far = [], []
    for trace in good():
        near.append(replace(trace, logprobs=trace.logprobs - np.float32(0.015)))
        far.append(replace(trace, logprobs=trace.logprobs - np.float32(0.5)))
    assert admission.refusal(near, "NVIDIA L40S") == "", "other kernels, within the limit"
    why = admission.refusal(far, "NVIDIA L40S")
    assert "(NVIDIA L40S)" in why and "5.00e-01 nats per token (limit 2e-02" in why
    broken = [replace(trace, logprobs=trace.logprobs * np.nan) for trace in good()]
    assert "differ by nan" in admission.refusal(broken, "cpu")


def test_a_worker_gets_no_unit_before_its_probe_is_scored(head):
    one, worker = head.joined("w0", probe=PROBE)
    one.add_units([UNIT])
    mailed, *more = worker.mail().mail
    assert mailed.unit == replace(PROBE, name="probe-000001") and not more
    worker.send()
    until(lambda: one.probing() == {"w0"} and not worker.following.look().mail)
    ((name, device, traces),) = one.probed()
    assert (name, device, len(traces)) == ("w0", "cpu", 4)
    one.admit("w0")
    assert worker.mail().mail[0].unit == UNIT and one.probing() == set()
    worker.send()
    assert len(one.wait_for(UNIT)) == 4 and (one.counts.units, one.counts.late) == (1, 0)


def test_the_trainer_scores_probes_while_it_waits(head):
    one, worker = head.joined("w0", probe=PROBE)
    one.add_units([UNIT])
    worker.send()
    seen = []

    def meanwhile() -> None:
        for name, _, _ in one.probed():
            seen.append(name)
            one.admit(name)
            until(lambda: worker.mail().mail[0].unit == UNIT)  # its mail has the probe until then
            worker.send()

    assert len(one.wait_for(UNIT, meanwhile)) == 4 and seen == ["w0"]


def test_a_probe_of_weights_that_the_learner_has_no_more_is_made_again(head):
    one, worker = head.joined("w0", probe=PROBE)
    worker.mail()
    newer = replace(PROBE, version=7)
    one.announce(version=7)
    one.probe_with(newer)
    until(lambda: worker.mail().mail[0].unit == replace(newer, name="probe-000002"))
    assert one.probed() == []
    versions = [replace(trace, segments=((trace.shared, 7),)) for trace in good()]
    worker.send(versions)
    until(lambda: one.probed())


def test_a_worker_that_was_lost_before_it_was_admitted_gets_a_probe_when_it_returns(head):
    one, worker = head.joined("w0", probe=PROBE, lost_s=0.3)
    one.add_units([UNIT])
    worker.send()
    until(lambda: one.probing() == {"w0"} and one._probes._sampled)
    until(lambda: one.scheduler.lost == 1 and not one._probes._given)
    worker.join(one.attempt.name)
    until(lambda: [mailed.unit.name for mailed in worker.mail().mail] == ["probe-000002"])
    assert [name for name, _, _ in one.probed()] == ["w0"]
    one.admit("w0")  # for its first probe, while it has the second
    until(lambda: worker.mail().mail[0].unit == UNIT)
    worker.send()
    assert len(one.wait_for(UNIT)) == 4


def test_another_process_of_the_same_name_is_probed_too(head):
    one, worker = head.joined("w0", probe=PROBE)
    worker.mail()
    one.admit("w0")
    one.add_units([UNIT])
    until(lambda: worker.mail().mail[0].unit == UNIT)
    other = head.worker("w0")
    other.heartbeat._newest = structs.replace(other.heartbeat._newest, device="another GPU", serial=100)
    other.join(one.attempt.name)
    until(lambda: [mailed.unit.name for mailed in other.mail().mail] == ["probe-000002"])
    assert one.probing() == {"w0"}


def test_samples_of_a_worker_that_is_not_admitted_train_nothing(head):
    one, worker = head.joined("w0", probe=PROBE)
    one.add_units([UNIT])
    worker.mail()
    given = GivenUnit(UNIT.name, 1)
    worker.objects.put(samples_key(one.attempt.name, UNIT.name, 1, "w0"), pack_samples(UNIT, 1, "w0", good()))
    worker.heartbeat.add_sent(one.attempt.name, given, 4.0)
    until(lambda: one.counts.late == 1)
    assert not one.has_samples([UNIT]) and one.counts.units == 0


def test_who_is_turned_away_while_the_store_is_away_is_told_by_the_next_word_of_the_head(head, monkeypatch):
    monkeypatch.setattr(head_thread, "HEARTBEAT_S", 0.05)
    one, worker = head.joined("w0", probe=PROBE)
    worker.mail()

    def away(self: Attempt) -> None:
        raise StorageError("the store is away")

    with monkeypatch.context() as store:
        store.setattr(Attempt, "check", away)
        one.turn_away("w0", "its weights are others")
        until(lambda: any("the store is away" in line for line in one.said))
    until(lambda: worker.following.look() and worker.following.turned_away == "its weights are others")


def test_who_is_turned_away_is_told_gets_nothing_and_its_place_is_free(head):
    one = head(wait_s=0.5)
    one.probe_with(PROBE)
    liar, honest = head.worker("w0"), head.worker("w1")
    liar.join(one.attempt.name)
    liar.mail()
    one.turn_away("w0", "its weights are others")
    until(lambda: liar.following.look() and liar.following.turned_away == "its weights are others")
    liar.join(one.attempt.name)
    with pytest.raises(NoWorkers):
        one.add_units([UNIT])
        one.wait_for(UNIT)
    (row,) = one.rows()
    assert (row["lives"], row["why"]) == (False, "its weights are others")
    assert one.counts.turned_away == 1
    honest.join(one.attempt.name)
    honest.mail()
    assert honest.following.turned_away == ""


def test_a_probe_that_is_not_what_was_asked_turns_its_worker_away(head):
    one, worker = head.joined("w0", probe=PROBE)
    worker.send(good()[:-1])
    until(lambda: worker.following.look() and worker.following.turned_away)
    assert "its probe is refused: it lacks a completion" in worker.following.turned_away


def test_a_worker_that_is_turned_away_ends_for_good(tmp_path, monkeypatch):
    """With the code that its machine does not start it again after."""
    run = Run(tmp_path, monkeypatch)
    one = run.head()
    run.serve()
    assert sampled(one)
    one.turn_away("w0", "other kernels")
    run.thread.join(10.0)
    assert run.code == EXIT_CONFIG
    assert read_heartbeat(run.objects, "w0").goodbye == "other kernels"
    one.close("away", "the test has ended")
