"""The grader against the graders in use: right verdicts on the table of cases, and verdicts per second.

    python -m benchmarks.rewards [--rounds 5] [--answers 1024]       writes benchmarks/rewards.json

Accuracy: the tables `cases.tsv`, `held_out.tsv` (written after the grader and not fitted to) and
`held_out_kinds.tsv` (written before answers were read as kinds) of tests/rewards, each answer in the
think/answer format, against math-verify as it comes (`parse` of the whole text, `verify(reference,
answer)`), TRL's `accuracy_reward` and the original server's settings.

Throughput, medians of paired rounds on the same answers, in process on one core: `Rewards` with one worker
against math-verify alone, both on whole answers.
No answer is graded twice, so caching verdicts has no effect.

Besides: when a verdict comes on what never ends, what the search for unearned rewards finds, and the time of
a reply that needs no evaluation.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLES = {"cases": "cases.tsv", "held out": "held_out.tsv", "held out by kinds": "held_out_kinds.tsv"}
RESULT = Path(__file__).with_suffix(".json")
STAND_IN = Path(__file__).with_name("rewards_stand_in.py")

Answers = list[tuple[str, str]]
"""(whole text of the answer, reference)."""


def wrap(thought: str, content: str) -> str:
    return f"<think> {thought} </think>\n<answer> $\\boxed{{{content}}}$ </answer>"


# --- accuracy -----------------------------------------------------------------------------------------------


def by_this_grader(text: str, reference: str, question: str = "") -> bool:
    from trainer.rewards.grading import grader

    return grader.grade(text, reference, grader.classify(reference, question), question) == "correct"


def by_math_verify(text: str, reference: str) -> bool:
    from math_verify import parse, verify

    return verify(parse(f"${reference}$"), parse(text))


def by_trl(text: str, reference: str) -> bool:
    from trl.rewards import accuracy_reward

    return accuracy_reward([[{"content": text}]], [f"${reference}$"])[0] == 1.0


def by_original(text: str, reference: str) -> bool:
    from benchmarks.rewards_stand_in import verify_math

    return verify_math(text, f"${reference}$") == 1.0


def accuracy(table_file: str) -> dict[str, dict[str, float]]:
    lines = (ROOT / "tests" / "rewards" / table_file).read_text().splitlines()[1:]
    cases = [(*line.split("\t")[table_file == "cases.tsv" :], "")[:4] for line in lines]
    table = {}
    for name, grade in (
        ("this grader", by_this_grader),
        ("math-verify, defaults", by_math_verify),
        ("TRL accuracy_reward", by_trl),
        ("original server's settings", by_original),
    ):
        started = time.process_time()
        said = [
            grade(wrap("Let me see.", answer), reference, *([question] if grade is by_this_grader else []))
            for reference, answer, _, question in cases
        ]
        cpu_s = time.process_time() - started
        truth = [equal == "1" for _, _, equal, _ in cases]
        right = sum(s == t for s, t in zip(said, truth, strict=True))
        table[name] = {
            "cases": len(cases),
            "right": right,
            "cpu_ms_per_case": round(1000 * cpu_s / len(cases), 2),
            "right_percent": round(100 * right / len(cases), 1),
            "false_positives": sum(s and not t for s, t in zip(said, truth, strict=True)),
            "false_negatives": sum(t and not s for s, t in zip(said, truth, strict=True)),
        }
    return table


# --- answers to grade ---------------------------------------------------------------------------------------


def typical_mix(count: int, rng: random.Random) -> Answers:
    """45% option letters, 50% numbers, 5% expressions (see `expression`); 4 of 10 wrong; 100 to 250 words of
    thought.

    The training set was filtered to letters and numbers, so its share of expressions is rather lower. Half of
    the right expressions are written as the reference answer is.
    """
    answers = []
    for i in range(count):
        right = rng.random() < 0.6
        if i % 20 == 0:
            text, reference = expression(rng, right)
            answers.append(
                (wrap(thought(rng), reference), reference)
                if right and rng.random() < 0.5
                else (text, reference)
            )
        elif i % 20 < 10:
            reference = rng.choice("ABCDE")
            letter = reference if right else rng.choice([c for c in "ABCDE" if c != reference])
            spelling = rng.choice(["{}", "{}", "{}", "{}.", "({})", "\\text{{{}}}"]).format(letter)
            answers.append((wrap(thought(rng), spelling), reference))
        else:
            value = rng.randint(1, 9999) / rng.choice([1, 1, 1, 10, 100])
            number = value if right else value + rng.randint(1, 9)
            spelling = rng.choice(["{}", "{}", "{}", "{}^\\circ", "{} \\text{{ cm}}"]).format(f"{number:g}")
            answers.append((wrap(thought(rng), spelling), f"{value:g}"))
    rng.shuffle(answers)
    return answers


def expressions_only(count: int, rng: random.Random) -> Answers:
    """Nothing but expressions, each of which must be evaluated: the grader's worst case."""
    return [expression(rng, rng.random() < 0.6, hard=True) for _ in range(count)]


def expression(rng: random.Random, right: bool, hard: bool = False) -> tuple[str, str]:
    """A reference expression, and an answer that writes it otherwise; `hard` ones (or 1 in 20) must be
    evaluated."""
    a = rng.randint(2, 99)
    b = rng.randint(2, 99)
    c = rng.randint(2, 9)
    if hard or rng.random() < 0.05:
        kinds = [
            (f"\\log_{{{c}}} x + {a}", f"{a} + \\log_{{{c}}} x"),
            (f"\\frac{{{c}!}}{{{a}}}", f"{c}! / {a}"),
        ]
    else:
        kinds = [
            (f"{a}\\sqrt{{{b}}}", f"\\sqrt{{{b}}} \\cdot {a}"),
            (f"{a}x + {b}", f"{b} + {a}x"),
            (f"\\frac{{{a}\\pi}}{{{c}}}", f"{a}\\pi / {c}"),
            (f"(x + {a})(x - {b})", f"(x - {b})(x + {a})"),
            (f"x > {a}", f"({a}, \\infty)"),
            (f"\\sin({a}x) + {b}", f"{b} + \\sin({a}x)"),
        ]
    reference, same = rng.choice(kinds)
    return wrap(thought(rng), same if right else same.replace(str(a), str(a + 1))), reference


WORDS = (
    "the angle between two lines is equal so we look at the chart and count bars that are higher than the"
    " value of the first one then we add the lengths of the sides and divide by the height to get the area of"
    " the triangle which"
)


def thought(rng: random.Random) -> str:
    words: list[str] = [rng.choice(WORDS.split()) for _ in range(rng.randint(100, 250))]
    for _ in range(rng.randint(1, 4)):
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        words.insert(
            rng.randrange(len(words)), rng.choice([f"${a} + {b} = {a + b}$", f"$x = {a}$", f"{a} cm"])
        )
    return " ".join(words)


def needs_evaluation(make: Callable[[int, random.Random], Answers]) -> float:
    """Percent of such answers that are not decided by their form."""
    from trainer.rewards.grading import grader
    from trainer.rewards.grading.extraction import final_answer

    answers = make(8192, random.Random(0))
    left = [
        grader.decide_fast(final_answer(text)[0] or "", reference, grader.classify(reference))
        for text, reference in answers
    ]
    return round(100 * left.count(None) / len(left), 2)


# --- throughput ---------------------------------------------------------------------------------------------


def per_second(run: Callable[[Answers], None], answers: Answers) -> float:
    started = time.perf_counter()
    run(answers)
    return len(answers) / (time.perf_counter() - started)


def paired(
    names: tuple[str, str], runs: tuple[Callable, Callable], make: Callable, counts, rounds: int
) -> dict:
    """Rounds of both on fresh answers, the order turned every round; medians of the rates and of their
    ratio."""
    rates: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 1):
        answers = make(max(counts), random.Random(i))
        for k in (0, 1) if i % 2 else (1, 0):
            rate = per_second(runs[k], answers[: counts[k]])
            if i:  # the first round warms both
                rates[names[k]].append(rate)
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    return {
        "verdicts_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "ratio": round(statistics.median(ratios), 1),
        "ratios": [round(r, 1) for r in ratios],
    }


def in_process(rounds: int, count: int, make: Callable, ours_count: int) -> dict:
    from math_verify import parse, verify

    from trainer import config
    from trainer.rewards.grading import grader
    from trainer.rewards.scorer import Scorer

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})

    def alone(answers: Answers) -> None:
        for text, reference in answers:
            verify(parse(f"${reference}$"), parse(text))

    with Scorer(config.Rewards(workers=1, max_timeout_rate=1.0, max_error_rate=1.0)) as scorer:

        def ours(answers: Answers) -> None:
            references = [g for _, g in answers]
            scorer.score([t for t, _ in answers], references, [grader.classify(g) for g in references])

        try:
            names = "this grader, one worker", "math-verify alone"
            return paired(names, (ours, alone), make, (ours_count, count), rounds)
        finally:
            os.sched_setaffinity(0, cores)


SPINS = """
import time
def reward(text):
    with open(text, "w") as file:
        file.write(f"{time.monotonic()} {time.process_time()}")
    while True:
        pass
"""


def deadline(calls: int = 10, deadline_s: float = 1.0) -> dict:
    """When the verdict on a function that never returns comes, in deadlines since its call: by the clock,
    and by the CPU time that its process had until it was killed, which other load does not lengthen."""
    from trainer import config
    from trainer.rewards.scorer import Scorer

    by_clock = []
    by_cpu = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spins.py"
        path.write_text(SPINS)
        function = f"{path}:reward"
        rewards = config.Rewards(
            function=function, workers=1, deadline_s=deadline_s, max_timeout_rate=1.0, max_error_rate=1.0
        )
        with Scorer(rewards) as scorer:
            for call in range(calls):
                note = Path(folder) / str(call)
                before_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
                (outcome,) = scorer.score([str(note)], ["1"], ["number"])
                ended_s = time.monotonic()
                assert outcome.verdict == "timeout"
                called_s, had_s = map(float, note.read_text().split())
                used_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before_s - had_s
                by_clock.append((ended_s - called_s) / deadline_s)
                by_cpu.append(used_s / deadline_s)
    return {
        "calls": calls,
        "latest_verdict_by_clock": round(max(by_clock), 2),
        "latest_verdict_by_cpu": round(max(by_cpu), 2),
    }


def searched() -> dict:
    """How many of the ordinary questions of tests/rewards/questions.tsv pay for a reply that is no answer."""
    from trainer import config
    from trainer.rewards.grading.grader import classify
    from trainer.rewards.scorer import Scorer
    from trainer.rewards.search import TriedRow, find_payments

    rows = []
    for line in (ROOT / "tests" / "rewards" / "questions.tsv").read_text().splitlines()[1:]:
        reference, question = line.split("\t")
        rows.append(TriedRow(str(len(rows)), question, reference, classify(reference, question)))
    with Scorer(config.Rewards(workers=1, max_timeout_rate=1.0, max_error_rate=1.0)) as scorer:
        paid = {(payment.trick, payment.row.id) for payment in find_payments(scorer, rows)}
    tricks = ("span", "constant", "template", "edit")
    return {"rows": len(rows)} | {f"pay for a {trick}": sum(t == trick for t, _ in paid) for trick in tricks}


def at_once(count: int = 4000) -> dict:
    """Microseconds of CPU that a new reply of the typical mix takes where nothing is evaluated."""
    from trainer.rewards.grading import grader
    from trainer.rewards.grading.stated_answers import FORMS

    taken = []
    for text, reference in typical_mix(count, random.Random(5)):
        answer_type = grader.classify(reference)
        started = time.thread_time_ns()
        content, _ = FORMS["block"].answer(text)
        grader.decide_fast(content or "", reference, answer_type)
        taken.append((time.thread_time_ns() - started) / 1000)
    return {"p50_us": round(statistics.median(taken), 1), "p95_us": round(sorted(taken)[count * 19 // 20], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answers", type=int, default=1024, help="answers per round for the slower side")
    parser.add_argument(
        "--only", default="", help="sections whose name holds this; the others are kept as they are"
    )
    options = parser.parse_args()
    for name in ("math_verify.parser", "math_verify.grader", "latex2sympy2_extended.math_normalization"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    rounds, count = options.rounds, options.answers
    sections: dict[str, Callable[[], dict]] = {
        "deadline": deadline,
        "search of 60 questions": searched,
        "decided at once, typical mix": at_once,
        "accuracy": lambda: {name: accuracy(file) for name, file in TABLES.items()},
        "one core, typical mix": lambda: in_process(rounds, count // 2, typical_mix, 4 * count),
        "one core, expressions only": lambda: in_process(rounds, count // 4, expressions_only, count // 4),
    }
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result["machine"] = {
        "cores": len(os.sched_getaffinity(0)),
        "load_average_at_start": round(os.getloadavg()[0], 1),
    }
    result["versions"] = {p: version(p) for p in ("math-verify", "trl", "sympy")}
    result["needs evaluation, percent"] = {
        "typical mix": needs_evaluation(typical_mix),
        "expressions only": needs_evaluation(expressions_only),
    }
    for name, measure in sections.items():
        if options.only in name:
            result[name] = measure()
            print(name, json.dumps(result[name], indent=1), flush=True)
            RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
