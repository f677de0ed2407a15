"""Guards on made-up metrics: each trips on its own sign, warns first and ends the run only where
configured."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loops.drill import configure
from trainer import config as c
from trainer.config import Guards as Limits
from trainer.config.watching import GUARDS
from trainer.observe.guards import GuardWatch
from trainer.system.exit_codes import EXIT_CONFIG

ROOT = Path(__file__).parents[2]
GOOD = {"loss/total": 0.01, "grad/norm": 0.5, "kl/mean": 0.02, "entropy/mean": 1.2, "sft/loss": 0.8}
GOOD |= {"tokens/response_mean": 300.0, "tokens/truncated_fraction": 0.1, "group/zero_std_fraction": 0.3}
GOOD |= {"mismatch/logprob_abs_mean": 0.01, "perf/disk_free_gib": 500.0, "perf/host_memory_fraction": 0.4}


def watch(scored_by="", **limits):
    """The guards of a run whose engine may differ from the policy as far as it likes."""
    settings = c.RunConfig(guards=Limits(**limits), rewards=c.Rewards(function=scored_by))
    guards = GuardWatch(settings)
    guards._engine_tolerance = math.inf
    return guards


def run(*steps: dict[str, float], **limits):
    guards = watch(**limits)
    for step in range(12):
        assert guards.look(step, GOOD) == []
    return [guards.look(12 + i, GOOD | step) for i, step in enumerate(steps)]


@pytest.mark.parametrize(
    ("stats", "guard", "text"),
    [
        ({"loss/total": math.nan}, "nonfinite", "loss/total not finite"),
        ({"grad/norm": math.inf}, "nonfinite", "grad/norm not finite"),
        ({"grad/norm": 6.0}, "spike", "gradient norm 6, usually 0.5"),
        ({"optim/skipped_updates": 2.0}, "skipped", "updates were skipped, gradients not finite: 2"),
        ({"kl/mean": 1.5}, "kl", "the policy has left the reference: KL 1.5 (limit 1)"),
        ({"tokens/truncated_fraction": 0.6}, "truncated", "cut at rollout.max_tokens: share 0.6"),
        (
            {"turns/failed_fraction": 0.3},
            "tools",
            "tools fail instead of answering: share of observations 0.3",
        ),
        ({"group/zero_std_fraction": 0.95}, "variance", "groups without variance teach nothing: share 0.95"),
        ({"entropy/mean": 0.05}, "entropy", "entropy collapsed to 0.05 from 1.2 at the start"),
        ({"mismatch/logprob_abs_mean": 0.2}, "mismatch", "engine and policy drift apart: 0.2 nats"),
        ({"perf/disk_free_gib": 1.0}, "disk", "the disk fills up: GiB free 1"),
        ({"perf/host_memory_fraction": 0.97}, "memory", "host memory fills up: share used 0.97"),
        ({"perf/host_memory_fraction": 0.65}, "memory", "host memory grows: 65% in use, 40% at the start"),
        ({"sft/loss": 1.7}, "spike", "loss 1.7, usually 0.8"),
        ({"tokens/response_mean": 20.0}, "length", "completions shrank to 20 from 300 at the start"),
        ({"tokens/response_mean": 6000.0}, "length", "completions grew to 6e+03 from 300 at the start"),
        ({"entropy/mean": 10.8}, "entropy", "entropy grew to 10.8 from 1.2 at the start: the policy speaks"),
        ({"grad/norm": 0.0}, "gradient", "exactly 0 although rewards differ"),
    ],
)
def test_each_sign_trips_its_guard_only(stats, guard, text):
    ((alarm,),) = run(stats, end="")
    assert (
        alarm.guard == guard and text in alarm.text and alarm.text.startswith("step 12: ") and not alarm.end
    )


def test_a_gradient_that_is_large_from_the_first_step_is_seen():
    guards = watch()
    alarms = [guards.look(step, GOOD | {"grad/norm": 1e6}) for step in range(1, 13)]
    assert {alarm.guard for of_step in alarms for alarm in of_step} == {"gradient"}
    assert "the gradient norm is 1e+06 (limit 1e+03)" in alarms[0][0].text


UNGRADED = "90% of completions could not be graded: look at the grader"
FLAT = {"group/zero_std_fraction": 1.0, "reward/std": 0.0, "reward/mean": 1.0}
FLAT |= {"tokens/truncated_fraction": 0.6}
OWN = "mine.py:score"


@pytest.mark.parametrize(
    ("stats", "scored_by", "why"),
    [
        ({"grad/norm": 0.0}, "", "most were cut at rollout.max_tokens"),
        ({}, OWN, f"all rewards of the step were 1.000, given by rewards.function {OWN}"),
        ({"reward/std": 0.1}, "", "most were cut at rollout.max_tokens"),
        (
            {"reward/std": 0.1, "reward/accuracy": 1.0, "tokens/truncated_fraction": 0.0},
            OWN,
            f"rewards.function {OWN} gave 1.000 to every completion of the step",
        ),
        ({"reward/error_rate": 0.9, "reward/accuracy": 0.0}, "", UNGRADED),
        ({"reward/timeout_rate": 0.9, "reward/accuracy": 0.0}, "", UNGRADED),
    ],
)
def test_equal_rewards_are_named_with_what_gave_them(stats, scored_by, why):
    alarms = watch(scored_by).look(3, GOOD | FLAT | stats)
    (text,) = [alarm.text for alarm in alarms if alarm.guard == "variance"]
    assert text.startswith(f"step 3: groups without variance teach nothing: share 1 (limit 0.9): {why}")
    assert {alarm.guard for alarm in alarms} <= {"variance", "truncated"}, "no gradient is no fault then"


def test_every_guard_has_a_name_that_guards_end_may_use():
    assert tuple(watch()._trips(1, GOOD)) == GUARDS
    documented = c.Guards.__doc__, (ROOT / "trainer/config/watching.py").read_text()
    assert all(f"{name}" in documented[1] for name in GUARDS)


@pytest.mark.parametrize("end", ["nonfinte", "nonfinite,skiped", "nonfinite skipped", "KL", "all"])
def test_a_name_in_guards_end_that_no_guard_has_is_refused(end):
    with pytest.raises(c.ConfigError, match=r"guards.end: '.*' is no guard"):
        c.validate(c.RunConfig(guards=Limits(end=end)))
    c.validate(c.RunConfig(guards=Limits(end="")))


def test_a_guard_warns_first_and_ends_after_its_patience():
    bad = {"kl/mean": 2.0}
    found = run(bad, bad, {}, bad, bad, bad, end="kl, spike", patience=3)
    assert [[a.end for a in alarms] for alarms in found] == [[False], [False], [], [False], [False], [True]]


def test_nothing_is_known_of_usual_values_in_the_first_steps():
    guards = watch()
    for step, norm in enumerate((0.1, 50.0, 0.2, 70.0)):
        assert guards.look(step, GOOD | {"grad/norm": norm}) == []


@pytest.mark.parametrize("at", [3, 4, 5, 9])
def test_a_collapse_in_the_first_steps_is_seen_and_stays_seen(at):
    guards = watch()
    for step in range(1, at):
        assert guards.look(step, GOOD) == []
    for step in range(at, at + 20):
        tripped = {a.guard for a in guards.look(step, GOOD | {"entropy/mean": 0.05})}
        streak = step - at + 1
        assert tripped == ({"entropy"} if streak & (streak - 1) == 0 else set()), step


def test_what_is_usual_lives_with_the_run():
    """Steps of an earlier process count, but for what belongs to its machine."""
    full = {"perf/host_memory_fraction": 0.1}
    guards = watch()
    guards.remember({"step": step} | GOOD | full for step in range(1, 9))
    found = guards.look(9, GOOD | {"entropy/mean": 0.05, "mismatch/logprob_abs_mean": 0.2})
    assert [a.guard for a in found] == ["entropy", "mismatch"]
    assert "from 1.2 at the start" in found[0].text, "and 40% of this machine's memory is no leak"


def test_an_update_that_was_not_made_collapses_nothing():
    """All completions were cut and masked: the step has no entropy, no KL and no gradient."""
    of_updates = ("loss/total", "grad/norm", "kl/mean", "entropy/mean", "mismatch/logprob_abs_mean")
    empty = {name: value for name, value in GOOD.items() if name not in of_updates}
    assert run(empty | {"optim/empty_updates": 1.0, "tokens/truncated_fraction": 0.1}) == [[]]


def test_the_engine_has_an_absolute_limit_at_every_step_by_dtype():
    """A gap that grew too slowly for the relative guard, or was there from the first step on."""
    cases = ("fp32", 9e-4, False), ("fp32", 2e-3, True), ("bf16", 2e-2, False), ("bf16", 0.06, True)
    for dtype, gap, trips in cases:
        settings = c.RunConfig(model=c.Model(dtype=dtype))
        guards = GuardWatch(settings)
        alarms = [guards.look(step, GOOD | {"mismatch/logprob_abs_mean": gap}) for step in (1, 2, 3)]
        assert [bool(found) for found in alarms] == [trips, trips, trips], (dtype, gap)
        assert not trips or "the engine does not hold the policy's weights" in alarms[0][0].text
        assert [any(a.end for a in found) for found in alarms] == [False, False, trips]


def test_a_very_large_reward_and_unsound_logprobs_are_named_from_the_first_step_on():
    guards = watch()
    causes = {"reward": "1e+29 by rewards.function f.py:f for row 3", "engine": "row 7, completion 'x'"}
    found = guards.look(1, GOOD | {"reward/largest": 1e29, "rollout/not_finite": 2.0}, causes=causes)
    assert [a.guard for a in found] == ["reward", "engine"]
    assert "1e+29 (limit 1e+06): 1e+29 by rewards.function f.py:f for row 3" in found[0].text
    assert "2 completions have engine logprobs that are not finite and were left out: row 7" in found[1].text
    assert not guards.look(2, GOOD | {"reward/largest": 2.0}, causes=causes)


def test_metrics_of_other_methods_are_not_missed():
    assert watch().look(1, {"sft/loss": 2.0}) == []


def test_by_default_updates_that_are_skipped_in_every_step_end_the_run():
    """A step's other updates may be sound: its loss, which leaves the skipped ones out, shows nothing."""
    guards = watch()
    alarms = [guards.look(step, GOOD | {"optim/skipped_updates": 1.0}) for step in range(1, 4)]
    assert [any(alarm.end for alarm in step) for step in alarms] == [False, False, True]


@pytest.mark.slow
def test_a_collapse_in_a_running_job_warns_at_its_first_step_and_ends_it_where_configured(tmp_path):
    """The real process, session, metrics and checkpoints, around ranks that pretend."""
    config = configure(tmp_path, 40, 2, standin=True)
    config = dataclasses.replace(config, guards=Limits(end="entropy", patience=3))
    (tmp_path / "run.yaml").write_text(c.dump(config))
    command = [sys.executable, "-m", "tests.loops.standin", "--config", str(tmp_path / "run.yaml")]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTRL_", "RAY_"))}
    env |= {"STANDIN_COLLAPSES": "14", "STANDIN_STEP_S": "0.01", "SPOTRL_METADATA": "off"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=400)
    said = (done.stdout + done.stderr).splitlines()
    assert done.returncode == EXIT_CONFIG, said
    collapse = "entropy collapsed to 0.02 from 1.2 at the start"
    assert [line for line in said if line.startswith(f"warning: step 14: {collapse}")], said
    assert [
        line for line in said if "warning: step 14: groups without variance teach nothing: share 1" in line
    ]
    last = [line for line in said if f"step 16: {collapse}" in line and "guards.end names this guard" in line]
    assert len(last) == 1 and not [line for line in said if line.startswith("step 17")]


def test_a_run_outside_its_bands_trips_a_guard_that_may_end_it():
    band = c.Band(metric="reward/mean", steps=(1, 50), low=(0.4, 0.9), source="three seeds")
    slow = c.Band(metric="time/step_s", steps=(1, 50), high=(1.0, 1.0), source="a page")
    limits = c.Guards(end="expected", patience=2)
    guards = GuardWatch(c.RunConfig(guards=limits, expected=c.Expected(bands=(slow, band))))
    assert not guards.look(1, {"reward/mean": 0.5, "time/step_s": 9.0})
    (first,) = guards.look(2, {"reward/mean": 0.1})
    assert first.guard == "expected" and "reward/mean left its band" in first.text and not first.end
    (second,) = guards.look(3, {"kl/mean": 0.0})
    assert second.end
