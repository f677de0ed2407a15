"""How often the model solves each training row: `python -m trainer.loops.pass_rate --config run.yaml`.

Nothing is trained.

Rows are asked `evaluation.pass_rate_samples` times each, at the run's temperature. `pass_rates.jsonl` in the
run's directory gets a line per row: id, pass rate, its shortest correct completion (empty if there is none;
of an episode of several turns its last reply, and what came before it as `dialog`), and of every completion
the boxed answer and its accuracy. `data filter --rates` keeps rows by it, `data
worked` learns from its completions. A run that was stopped goes on behind the last whole block of rows; with
`checkpoint.remote` the file is pushed there too. With `evaluation.benchmarks` the rows are scored at the end:
`benchmarks.json` and `benchmarks.md`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.algorithm.seeding import seed_of
from trainer.algorithm.traces import Outcome, Prompt, Trace
from trainer.config import ConfigError, RunConfig
from trainer.config.run_folder import write_whole
from trainer.data.schema import question_text
from trainer.hardware import model_shapes
from trainer.loops.process import main
from trainer.observe import scores
from trainer.rewards.grading.stated_answers import FORMS
from trainer.run.session import Session
from trainer.sampling.sampler import SampledGroups, SamplingRequest
from trainer.turns.environments import environment_of

FILE = "pass_rates.jsonl"
AHEAD = 32
"""Blocks that rollout workers are asked for before the first of them is graded."""


def measure_pass_rates(config: RunConfig, run: Session) -> None:
    """Asks block after block of rows. Seeds follow from run seed and row, so a stopped run goes on as it
    would have."""
    n = config.evaluation.pass_rate_samples
    if n < 1:
        raise ConfigError(
            "evaluation.pass_rate_samples is 0: give the number of completions per row, such as 8"
        )
    environment = environment_of(config.turns)
    if config.evaluation.benchmarks and environment is not None and environment.scores:
        raise ConfigError(
            f"turns.environment {config.turns.environment} scores episodes itself, and benchmarks are graded"
            " by their answers: leave its `score` out, or set turns.environment to off"
        )
    phases, path = run.phases, Path(config.run.dir) / FILE
    run.resume()
    run.load_model()
    size, evaluation = config.rows_per_step, config.evaluation
    all_rows = run.train_rows
    blocks = [all_rows[start : start + size] for start in range(0, len(all_rows), size)]
    rates = [json.loads(line)["pass_rate"] for line in _whole_lines(run, path)]
    todo = []
    for number, rows in enumerate(blocks, 1):
        if len(rates) < min(number * size, len(all_rows)):
            todo.append((number, rows))
    for rows, traces in _sampled(config, run, todo, len(blocks)):
        with phases("grade"):
            outcomes = run.score(traces)
        ids = {row: run.train_set[row].id for row in rows}
        records = row_records(traces, outcomes, ids, config.rewards.answer)
        if evaluation.benchmarks:
            _spell_alike(run, rows, records)
        with open(path, "a", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                rates.append(record["pass_rate"])
        _send(run, path)
        print(f"{len(rates)} of {len(all_rows)} rows: {_summary(rates)}", flush=True)
    if evaluation.benchmarks:
        _score(config, run, path)
    run.sampler.close()
    phases.finish()
    print(f"{path}: {len(rates)} rows, {run.left_out} left out; {_summary(rates)}", flush=True)


def _sampled(
    config: RunConfig, run: Session, todo: Sequence[tuple[int, Sequence[int]]], total: int
) -> Iterator[tuple[Sequence[int], list[Trace]]]:
    """Every block with its traces, in order. Rollout workers have further blocks to go on with meanwhile."""
    ahead = AHEAD if run.sampler.overlaps_learning else 0
    pending: deque[tuple[int, Sequence[int], SampledGroups]] = deque()
    left = deque(todo)
    while left or pending:
        run.phases.begin(pending[0][0] if pending else left[0][0], total)
        with run.phases("rollout"):
            while left and len(pending) <= ahead:
                number, rows = left.popleft()
                pending.append((number, rows, run.sampler.sample(_ask(config, run, number, rows))))
            _, rows, groups = pending.popleft()
            traces = groups.all()
        yield rows, traces


def _ask(config: RunConfig, run: Session, number: int, rows: Sequence[int]) -> SamplingRequest:
    """What the engines are asked for in block `number`."""
    evaluation = config.evaluation
    prompts = []
    for row in rows:
        prompts.append(Prompt(group=row, row=row, seed=seed_of(config.run.seed, "pass rate", row)))
    return SamplingRequest(
        kind="eval",
        step=number,
        version=0,
        prompts=prompts,
        split=config.train_split,
        prompt_tokens=run.rows.prompt_tokens(config.train_split),
        samples_per_prompt=evaluation.pass_rate_samples,
        temperature=evaluation.temperature if evaluation.benchmarks else config.rollout.temperature,
        top_p=evaluation.top_p if evaluation.benchmarks else 1.0,
        max_tokens=config.rollout.max_tokens,
    )


def _score(config: RunConfig, run: Session, path: Path) -> None:
    """Writes the scores of all rows, those included that were too long to be asked."""
    n, sources = config.evaluation.pass_rate_samples, run.train_set.column("source")
    problems = [scores.ScoredProblem(source, [(None, 0.0)] * n, asked=False) for source in sources]
    for row, line in zip(run.train_rows, path.read_text(encoding="utf-8").splitlines(), strict=True):
        record = json.loads(line)
        problems[row] = scores.ScoredProblem(
            sources[row], record["answers"], record["tokens"], record["truncated"]
        )
    judge = config.rewards.judge_model if config.rewards.judge_url else ""
    figures = scores.score_benchmarks(problems, model_shapes.known_as(config.model.path))
    scored = {
        "model": config.model.path,
        "samples": n,
        "temperature": config.evaluation.temperature,
        "top_p": config.evaluation.top_p,
        "judge": judge,
        "system_prompt": config.data.system_prompt,
        "answer": config.rewards.answer,
        "benchmarks": figures,
    }
    table = scores.scores_table(figures, judge, config.data.system_prompt)
    for name, text in (("benchmarks.json", json.dumps(scored, indent=1)), ("benchmarks.md", table)):
        write_whole(path.with_name(name), f"{text}\n".encode())
        _send(run, path.with_name(name))
    print(table, flush=True)


def _send(run: Session, path: Path) -> None:
    """Puts a file into the run's bucket, if it has one."""
    if run.checkpoints.storage:
        run.checkpoints.storage.put(path, path.name)


def row_records(
    traces: Sequence[Trace], outcomes: Sequence[Outcome], ids: dict[int, str], form: str = "block"
) -> list[dict[str, Any]]:
    """One line per row of `ids`, in their order. form: `rewards.answer`."""
    graded: dict[int, list[tuple[Trace, Outcome]]] = {row: [] for row in ids}
    for trace, outcome in zip(traces, outcomes, strict=True):
        graded[trace.row].append((trace, outcome))
    lines = []
    for row, pairs in graded.items():
        right = [trace for trace, outcome in pairs if outcome.verdict == "correct" and trace.finished]
        shortest = min(right, key=lambda trace: len(trace.text), default=None)
        record: dict[str, Any] = {"dialog": list(shortest.dialog)} if shortest and shortest.dialog else {}
        ended = [trace.finished for trace, _ in pairs]
        answers = [(_voted(trace.text, form), outcome.accuracy) for trace, outcome in pairs]
        record |= {
            "id": ids[row],
            "pass_rate": sum(accuracy for _, accuracy in answers) / len(pairs),
            "samples": len(pairs),
            "completion": shortest.text if shortest else "",
            "answers": answers,
            "tokens": sum(len(trace.completion) for trace, _ in pairs),
            "truncated": ended.count(False),
        }
        lines.append(record)
    return lines


def _spell_alike(run: Session, rows: Sequence[int], records: Sequence[dict[str, Any]]) -> None:
    """Spells answers of equal value alike, for the majority vote."""
    for row, record in zip(rows, records, strict=True):
        problem = run.train_set[row]
        record["answers"] = run.grader.scorer.by_value(
            record["answers"], problem.answer_type, question_text(problem.messages)
        )


def _voted(text: str, form: str) -> str | None:
    """The answer that counts, unless there are several."""
    answer, hedged = FORMS[form].answer(text)
    return None if hedged else answer


def _whole_lines(run: Session, path: Path) -> list[str]:
    """The lines of whole blocks that an earlier start wrote; anything behind them is cut off."""
    if run.checkpoints.storage and not path.exists() and run.checkpoints.storage.exists(FILE):
        run.checkpoints.storage.get(FILE, path)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    whole: list[str] = []
    for line, row in zip(lines, run.train_rows, strict=False):
        try:
            measured = json.loads(line)["id"]
        except (ValueError, KeyError, TypeError):
            break  # torn by a kill
        if measured != run.train_set[row].id:
            raise ConfigError(f"{path} was measured on other rows: remove it, or give the run another id")
        whole.append(line)
    if len(whole) < len(run.train_rows):
        whole = whole[: len(whole) // run.config.rows_per_step * run.config.rows_per_step]
    if path.exists():
        write_whole(path, "".join(f"{line}\n" for line in whole).encode())
    return whole


def _summary(rates: Sequence[float]) -> str:
    never, always = rates.count(0), rates.count(1)
    mean = sum(rates) / max(1, len(rates))
    return (
        f"solved {mean:.1%} of the time, {never} never, {always} always, {len(rates) - never - always}"
        " between"
    )


if __name__ == "__main__":
    main(measure_pass_rates, lambda config, rows: 1)
