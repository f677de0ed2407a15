"""What older weights and what kernels do to the ratios, told apart; against numbers worked out by hand."""

import math

import numpy as np
import pytest

from trainer.algorithm.staleness import RATIOS, kernel_mismatch, told_apart, versions_behind
from trainer.algorithm.traces import completed


def trace(logprobs, version=0):
    ids = list(range(len(logprobs)))
    return completed([7], ids, group=0, row=0, logprobs=logprobs, version=version)


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
    assert told_apart(stats, {"mismatch/kl": 1e-9}) == {
        "staleness/kl": 0.5,
        "staleness/corrected_fraction": 0.1,
        "kl/mean": 2.0,
        "mismatch/kl": 1e-9,
    }
    assert told_apart(stats, {}).keys() == {"staleness/kl", "staleness/corrected_fraction", "kl/mean"}
    assert all(new == name.replace("mismatch", "staleness") for name, new in RATIOS.items())
