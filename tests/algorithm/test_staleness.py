"""What older weights and what kernels do to the ratios, told apart; against numbers worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from trainer.algorithm.staleness import (
    RATIOS,
    kernel_mismatch,
    mismatch_by_age,
    separate_mismatch,
    slots_used,
    versions_behind,
)
from trainer.algorithm.traces import completed_trace


def trace(logprobs, version=0):
    ids = list(range(len(logprobs)))
    return completed_trace([7], ids, group=0, row=0, logprobs=logprobs, version=version)


def test_versions_behind():
    traces = [trace([-1.0], 3), trace([-1.0], 3), trace([-1.0], 5), trace([-1.0], 1)]
    assert versions_behind(traces, 6) == {"rollout/staleness_mean": 2.0, "rollout/staleness_max": 4.0}
    assert versions_behind(traces[2:3], 6) == {"rollout/staleness_mean": 0.0, "rollout/staleness_max": 0.0}


def test_kernels_are_measured_over_tokens_not_over_completions():
    found = kernel_mismatch(
        [trace([-1.0, -2.0, -3.0]), trace([-0.5])], [np.array([-1.0, -2.0, -2.9]), [-0.6]]
    )
    assert found == pytest.approx(
        {
            "mismatch/logprob_abs_mean": 0.05,
            "mismatch/logprob_abs_max": 0.1,
            "mismatch/kl": (math.exp(0.1) - 1.1 + math.exp(-0.1) - 0.9) / 4,
            "mismatch/kl_reverse": (1.0 - 0.9 * math.exp(0.1) + 1.0 - 1.1 * math.exp(-0.1)) / 4,
            "mismatch/ratio_mean": (2 + math.exp(0.1) + math.exp(-0.1)) / 4,
            "mismatch/ratio_max": math.exp(0.1),
            "mismatch/ess": (2 + math.exp(0.1) + math.exp(-0.1)) ** 2
            / 4
            / (2 + math.exp(0.2) + math.exp(-0.2)),
        },
        rel=1e-5,
    )


def test_what_is_not_finite_in_the_engine_is_left_out():
    found = kernel_mismatch([trace([-1.0, math.nan])], [np.array([-1.25, -9.0])])
    assert found["mismatch/logprob_abs_mean"] == found["mismatch/logprob_abs_max"] == 0.25
    assert kernel_mismatch([trace([-math.inf])], [np.array([-1.0])]) == {}


def test_the_update_s_own_figures_are_those_of_both():
    stats = {"mismatch/kl": 0.5, "mismatch/corrected_fraction": 0.1, "kl/mean": 2.0}
    assert separate_mismatch(stats, {"mismatch/kl": 1e-9}) == {
        "staleness/kl": 0.5,
        "staleness/corrected_fraction": 0.1,
        "kl/mean": 2.0,
        "mismatch/kl": 1e-9,
    }
    assert separate_mismatch(stats, {}).keys() == {"staleness/kl", "staleness/corrected_fraction", "kl/mean"}
    assert all(new == name.replace("mismatch", "staleness") for name, new in RATIOS.items())


def test_ratios_by_the_age_of_the_weights_by_hand():
    """Three tokens of version 3 and two of version 5, and one of version 5 in another completion."""
    several = replace(trace([-1.0] * 5), segments=((1, 3), (4, 5)))
    policy = [np.array([-1.0, -1.0 + math.log(2), -1.0 + math.log(4), -1.0, -1.0 + math.log(0.5)]), [-1.0]]
    found = mismatch_by_age([several, trace([-1.0], 5)], policy, 5, 0.6, 3.0)
    assert found == pytest.approx(
        {
            "staleness/age_0_tokens": 3 / 6,
            "staleness/age_0_ratio_mean": (1 + 0.5 + 1) / 3,
            "staleness/age_0_ratio_max": 1.0,
            "staleness/age_0_corrected_fraction": 1 / 3,
            "staleness/age_2_tokens": 3 / 6,
            "staleness/age_2_ratio_mean": (1 + 2 + 4) / 3,
            "staleness/age_2_ratio_max": 4.0,
            "staleness/age_2_corrected_fraction": 1 / 3,
        },
        rel=1e-6,
    )


def test_slots_by_hand():
    several = replace(trace([-1.0] * 5), segments=((1, 3), (4, 5)))
    traces = [several, trace([-1.0] * 4, 5), trace([-1.0] * 3, 3)]
    assert slots_used(traces, 5) == (2 + 4) / (2 * 4)
    assert slots_used(traces, 3) == (3 + 3) / (2 * 3)
    assert slots_used(traces, 4) == 0.0
    assert slots_used(traces) == (5 + 4 + 3) / (3 * 5)
