"""What a worker sent is refused for everything that sampling cannot give, each with its sentence."""

from __future__ import annotations

import io
import re
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from trainer.algorithm.traces import ImageRef, Prompt, Trace, completed_trace
from trainer.fleet.fleet_records import RolloutUnit
from trainer.fleet.sample_intake import UNREADABLE, AskedUnit, pack_samples, samples_refusal, unpack_samples

PROMPTS = {3: [5, 6, 7], 8: [5, 9]}
IMAGES = {3: 1, 8: 0}
END, OTHER_END = 2, 1
BANNED = 90
EXPECTED = AskedUnit(
    vocabulary=100,
    ends={END, OTHER_END},
    banned={BANNED, 91},
    row=lambda split, row: (PROMPTS[row], IMAGES[row]),
)
UNIT = RolloutUnit(
    name="000004",
    step=7,
    version=6,
    lineage="ab" * 32,
    split="train",
    prompts=(Prompt(0, 3, 111), Prompt(1, 8, 222)),
    samples_per_prompt=2,
    temperature=1.0,
    top_p=1.0,
    max_tokens=6,
)


def trace(group: int, index: int, ids: list[int], end: Any) -> Trace:
    row = UNIT.prompts[group].row
    return completed_trace(
        PROMPTS[row],
        ids,
        group=group,
        row=row,
        index=index,
        logprobs=[-0.5] * len(ids),
        images=tuple(ImageRef(row, number) for number in range(IMAGES[row])),
        version=6,
        end=end,
    )


def good() -> list[Trace]:
    return [
        trace(0, 0, [10, 11, END], "stop"),
        trace(0, 1, [10, 11, 12, 13, 14, 15], "length"),
        trace(1, 0, [OTHER_END], "stop"),
        trace(1, 1, [20, 21, 22, 23, 24, END], "stop"),
    ]


def why(traces: list[Trace], unit: RolloutUnit = UNIT, turn: int = 1, worker: str = "w0") -> str:
    return samples_refusal(
        UNIT, (1, "w0"), *unpack_samples(pack_samples(unit, turn, worker, traces)), EXPECTED
    )


def first(**changes: Any) -> list[Trace]:
    """The good unit with something else of its first completion."""
    return [replace(good()[0], **changes), *good()[1:]]


def ids(number: int, tokens: list[int], end: Any = "stop") -> list[Trace]:
    """The good unit with other tokens of one completion."""
    traces = good()
    traces[number] = trace(traces[number].group, traces[number].index, tokens, end)
    return traces


def logprobs(values: list[float] | None) -> list[Trace]:
    return first(logprobs=None if values is None else np.array(values, np.float32))


def other_prompt() -> list[Trace]:
    """The good unit with another token in the prompt of its first group."""
    traces = []
    for one in good():
        prompt = [5, 6, 8] if one.group == 0 else one.prompt
        traces.append(replace(one, tokens=np.append(prompt, one.completion).astype(np.int32)))
    return traces


def test_a_good_unit_is_taken_and_nothing_is_lost_on_its_way():
    assert why(good()) == ""
    again = unpack_samples(pack_samples(UNIT, 1, "w0", good()))[1]
    for before, after in zip(good(), again, strict=True):
        for name in ("tokens", "learned", "logprobs"):
            assert np.array_equal(getattr(before, name), getattr(after, name))
        for name in ("group", "row", "index", "shared", "images", "versions", "end"):
            assert getattr(before, name) == getattr(after, name)
    assert msgspec.json.decode(msgspec.json.encode(UNIT), type=RolloutUnit) == UNIT


MUTATIONS: dict[str, tuple[Callable[[], str], str]] = {
    "another name": (lambda: why(good(), replace(UNIT, name="000005")), "its name is '000005'"),
    "another step": (lambda: why(good(), replace(UNIT, step=8)), "its step is 8"),
    "another version": (lambda: why(good(), replace(UNIT, version=5)), "its version is 5"),
    "another lineage": (lambda: why(good(), replace(UNIT, lineage="cd" * 32)), "its lineage"),
    "another split": (lambda: why(good(), replace(UNIT, split="evaluation")), "its split"),
    "another seed": (
        lambda: why(good(), replace(UNIT, prompts=(Prompt(0, 3, 112), Prompt(1, 8, 222)))),
        "its prompts",
    ),
    "another temperature": (lambda: why(good(), replace(UNIT, temperature=0.9)), "its temperature is 0.9"),
    "another limit": (lambda: why(good(), replace(UNIT, max_tokens=7)), "its max_tokens is 7"),
    "another group size": (lambda: why(good(), replace(UNIT, samples_per_prompt=3)), "samples_per_prompt"),
    "another turn": (lambda: why(good(), turn=2), "it is of turn 2"),
    "another worker": (lambda: why(good(), worker="w1"), "worker w1"),
    "one missing": (lambda: why(good()[:-1]), r"it lacks a completion: group and index \(1, 1\)"),
    "one too many": (lambda: why([*good(), replace(good()[0], index=2)]), "was not asked for"),
    "one twice": (lambda: why([*good(), good()[0]]), "a completion twice"),
    "another row": (lambda: why(first(row=8)), "it is of row 8, not of 3"),
    "a newer version": (lambda: why(first(segments=((3, 6), (4, 7)))), "its versions by first token"),
    "an older version": (lambda: why(first(segments=((3, 5),))), "not 6 for all of it"),
    "another prompt": (lambda: why(other_prompt()), "its prompt has other tokens"),
    "an image less": (lambda: why(first(images=())), "its images are not those"),
    "another image": (lambda: why(first(images=(ImageRef(8, 0),))), "its images are not those"),
    "a token not learned": (
        lambda: why(first(learned=np.array([3, 4], np.int32), logprobs=np.full(2, -1, np.float32))),
        "what is learned is not the whole completion",
    ),
    "empty": (lambda: why(ids(0, [])), "it is empty"),
    "too long": (lambda: why(ids(1, [10] * 7, "length")), "it has 7 tokens, and 6 were allowed"),
    "a token below 0": (lambda: why(ids(0, [-1, END])), "outside the vocabulary"),
    "a token above the vocabulary": (lambda: why(ids(0, [100, END])), "outside the vocabulary of 100"),
    "a banned token": (lambda: why(ids(0, [BANNED, END])), "token 90, which is never sampled"),
    "on behind its end": (lambda: why(ids(0, [10, OTHER_END, END])), "behind the end token 1"),
    "stopped without an end": (lambda: why(ids(0, [10, 11])), "said to have stopped, and ends on token 11"),
    "cut early": (lambda: why(ids(0, [10, 11], "length")), "said to be cut, after 2 of 6"),
    "cut on an end": (lambda: why(ids(1, [10] * 5 + [END], "length")), "cut, and ends on an end token"),
    "an error": (lambda: why(ids(0, [10, END], "error")), "it ended by 'error'"),
    "no logprobs": (lambda: why(logprobs(None)), "no log-probabilities"),
    "a probability above 1": (lambda: why(logprobs([-1, 0.1, -1])), "is 0.1, above 0"),
    "an impossible logprob": (lambda: why(logprobs([-1, -1e5, -1])), "no sampled token has"),
    "half tokens": (
        lambda: why(first(tokens=np.array([5, 6, 7, 10.5, 11, END]))),
        "its tokens are float64 in 1 dimensions",
    ),
    "complex logprobs": (lambda: why(first(logprobs=np.full(3, -1 + 1j, np.complex64))), "complex64"),
    "NaN everywhere": (lambda: why(logprobs([float("nan")] * 3)), "not finite"),
    "NaN once": (lambda: why(logprobs([-1, float("nan"), -1])), "not finite"),
    "minus infinity": (lambda: why(logprobs([-1, float("-inf"), -1])), "not finite"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_sampling_cannot_give_is_refused(name):
    mutated, sentence = MUTATIONS[name]
    said = mutated()
    assert re.search(sentence, said), said


def test_a_unit_with_a_field_that_this_code_does_not_know_is_refused():
    about, traces = unpack_samples(pack_samples(UNIT, 1, "w0", good()))
    other = msgspec.structs.replace(about, unit=about.unit | {"min_p": 0.9})
    assert "other fields" in samples_refusal(UNIT, (1, "w0"), other, traces, EXPECTED)


@pytest.mark.parametrize("column", ["token_ids", "tokens", "logprobs", "learned", "prompt_tokens", "end"])
def test_columns_that_do_not_fit_together_are_no_unit(column):
    with np.load(io.BytesIO(pack_samples(UNIT, 1, "w0", good()))) as archive:
        arrays = dict(archive)
    arrays[column] = arrays[column][:-1]
    out = io.BytesIO()
    np.savez(out, **arrays)
    with pytest.raises(UNREADABLE):
        unpack_samples(out.getvalue())


def test_a_unit_whose_tokens_were_all_certain_was_not_sampled():
    long = replace(UNIT, max_tokens=40)
    surely = [
        replace(one, tokens=np.append(one.prompt, np.full(40, 10)).astype(np.int32), end="length")
        for one in good()
    ]
    surely = [
        replace(
            one,
            learned=np.arange(one.shared, len(one.tokens), dtype=np.int32),
            logprobs=np.zeros(40, np.float32),
        )
        for one in surely
    ]
    greedy = replace(long, split="evaluation", temperature=0.0)
    for unit, refusal in ((long, "every log-probability is 0, as if nothing had been sampled"), (greedy, "")):
        sampled = unpack_samples(pack_samples(unit, 1, "w0", surely))
        assert samples_refusal(unit, (1, "w0"), *sampled, EXPECTED) == refusal


def bomb(**changes: Any) -> bytes:
    """The good unit's archive with some of its arrays replaced, packed as zip allows."""
    out = io.BytesIO()
    with np.load(io.BytesIO(pack_samples(UNIT, 1, "w0", good()))) as archive:
        np.savez_compressed(out, **(dict(archive) | changes))
    return out.getvalue()


def lying_header() -> bytes:
    """An archive whose first array says that it has a trillion numbers."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive, archive.open("about.npy", "w") as member:
        np.lib.format.write_array_header_1_0(
            member, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
        )
    return out.getvalue()


@pytest.mark.parametrize(
    "body",
    [lambda: bomb(token_ids=np.zeros(1 << 24, np.int32)), lying_header, lambda: b"PK\x05\x06" + bytes(18)],
)
def test_an_archive_that_would_take_more_memory_than_it_has_bytes_is_unreadable(body):
    tracemalloc.start()
    with pytest.raises(UNREADABLE):
        unpack_samples(body())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 << 20


def test_the_largest_archive_that_a_unit_may_be_holds_the_unit():
    assert len(pack_samples(UNIT, 1, "w0", good())) < EXPECTED.most_bytes(UNIT) < 8 << 20
