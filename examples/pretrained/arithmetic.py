"""Questions of arithmetic for a small pretrained model: sums, differences and products as rows.

    python -m examples.pretrained.arithmetic --out DATA/arithmetic

A row asks for the equation. The grader reads `12 + 34 = 46` as a chain and accepts it for 46 only
if it holds.

Untrained, the model next to never replies so to a bare question, and rewards that are all 0 teach
nothing. After one answered question a third of its replies are right; so every row has one.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from data_prep.write.shards import write_dataset
from trainer.data.schema import Manifest, Row, row_id

SYSTEM_PROMPT = "Reply with the equation only."


def _add(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(2, 50), draw.randint(2, 50)
    return f"{a} + {b}", a + b


def _subtract(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(2, 50), draw.randint(2, 50)
    return f"{max(a, b)} - {min(a, b)}", abs(a - b)


def _multiply(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randint(2, 12), draw.randint(2, 19)
    return f"{a} * {b}", a * b


FAMILIES: dict[str, Callable[[random.Random], tuple[str, int]]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
}


def questions(families: list[str], seed: int) -> Iterator[Row]:
    """Different questions without end, one family after the other in turn.

    A family that has no new question is left out; the iterator ends with the last.
    """
    draw, asked = random.Random(seed), set()
    left = list(families)
    while left:
        for family in tuple(left):
            for _ in range(1000):
                text, answer = FAMILIES[family](draw)
                # 2 * 7 and 7 * 2 are one question
                operands = tuple(sorted(text.split()))
                if operands not in asked:
                    break
            else:
                left.remove(family)
                continue
            asked.add(operands)
            yield _row(family, text, answer)


def _row(family: str, text: str, answer: int) -> Row:
    source = f"arithmetic/{family}"
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}]
    return Row(
        id=row_id(source, messages, []),
        source=source,
        messages=messages,
        images=[],
        answer=str(answer),
        answer_type="number",
        solution=f"{text} = {answer}",
    )


def with_example(row: Row, example: Row) -> Row:
    """A row that is asked after an answered question."""
    system, question = row.messages
    shown = [example.messages[-1], {"role": "assistant", "content": example.solution}]
    messages = [system, *shown, question]
    return replace(row, id=row_id(row.source, messages, []), messages=messages)


def prepare(out: str | Path, rows: int, test_rows: int, families: list[str], seed: int) -> Manifest:
    """Writes the splits `train` and `test`, which share no question."""
    stream = questions(families, seed)
    examples = {family: next(row for row in stream if row.source.endswith(family)) for family in families}
    asked = (with_example(row, examples[row.source.rpartition("/")[2]]) for row in stream)
    test = list(islice(asked, test_rows))
    train = list(islice(asked, rows))
    settings = {"families": families, "seed": seed}
    return write_dataset(out, "arithmetic", {"train": train, "test": test}, settings)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="directory of the prepared data set")
    parser.add_argument("--rows", type=int, default=94, help="training rows (%(default)s)")
    parser.add_argument("--test-rows", type=int, default=48, help="test rows (%(default)s)")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["multiply"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    prepare(options.out, options.rows, options.test_rows, options.families, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
