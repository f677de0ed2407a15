"""What benchmarks/carried_learning.py says of its runs, by hand."""

from __future__ import annotations

from benchmarks.carried_learning import beside_off, longest_piece
from trainer.algorithm.traces import completed_trace, continue_trace


def test_decode_iterations_are_those_of_the_version_s_longest_piece():
    begun = completed_trace([7], [1, 2, 3], group=0, row=0, logprobs=[0.0] * 3, version=0, end="cut")
    rest = completed_trace(begun.tokens, [4, 5], group=0, row=0, logprobs=[0.0] * 2, version=1)
    other = completed_trace([7], [1], group=1, row=0, logprobs=[0.0], version=1)
    traces = [continue_trace(begun, rest), other]
    assert [longest_piece(traces, version) for version in (0, 1, 2)] == [3, 2, 0]


def test_a_run_is_held_against_the_one_without_after_as_many_iterations():
    """Half of the iterations of the run without are between its two evaluations."""
    off = {"task": "demo", "seed": 1, "staleness": 0}
    off |= {"accuracy": {0: 0.2, 10: 0.6}, "decode_iterations": {0: 0, 10: 100}}
    cut = {"task": "demo", "seed": 1, "staleness": 3}
    cut |= {"accuracy": {0: 0.2, 10: 0.5}, "decode_iterations": {0: 0, 10: 50}}
    other = cut | {"seed": 2}
    beside_off([off, cut, other])
    assert (off["off_after_as_many_iterations"], off["iterations_of_off"]) == (0.6, 1.0)
    assert (cut["off_after_as_many_iterations"], cut["iterations_of_off"]) == (0.4, 0.5)
    assert "iterations_of_off" not in other
