"""Generated problems: every answer against a solver that reads the marks alone, and the set they are prepared
into."""

from __future__ import annotations

import hashlib
import io
import math
import random
import re
import shlex
from collections import Counter
from dataclasses import replace

import pytest
from PIL import Image

from data_prep import commands
from data_prep.generate.generated_source import FAMILIES, LARGE, Generated, held_out, problem
from data_prep.generate.scene import BLACK, COLORS, LARGEST, SMALLEST, Problem, Scene
from data_prep.ingest.archive import Refused
from data_prep.ingest.wanted import Wanted
from trainer.data.dataset import Dataset
from trainer.rewards.grading.grader import classify, decide, reference_error

NAME_OF = {color: name for name, color in COLORS.items()}


def texts(scene: Scene) -> list[tuple[float, float, str]]:
    return [(*m.points[0], m.text) for m in scene.marks if m.kind == "text"]


def solve_counting(scene: Scene, question: str) -> str:
    seen = Counter()
    for mark in scene.marks:
        shape = (
            "circle" if mark.kind == "ellipse" else {3: "triangle", 4: "square", 10: "star"}[len(mark.points)]
        )
        seen[shape, NAME_OF[mark.color]] += 1
    shapes = {m.rstrip("s") for m in re.findall(r"circles?|squares?|triangles?|stars?", question)}
    colors = [c for c in re.findall(r"[a-z]+", question) if c in COLORS]
    if "more" in question:
        one, other = (sum(n for (_, c), n in seen.items() if c == color) for color in colors)
        return str(one - other)
    if "or both" in question:
        return str(sum(n for (s, c), n in seen.items() if s in shapes or c in colors))
    return str(
        sum(n for (s, c), n in seen.items() if (not shapes or s in shapes) and (not colors or c in colors))
    )


def solve_geometry(scene: Scene, question: str) -> str:
    """Measures the figure in pixels and scales it by what is written; all that is written must agree."""
    (figure,) = [m for m in scene.marks if m.kind == "polygon"]
    p = figure.points
    written = texts(scene)
    if "degrees" in question:
        found = {}
        for i, corner in enumerate(p):
            one, other = (math.atan2(q[1] - corner[1], q[0] - corner[0]) for q in (p[i - 1], p[(i + 1) % 3]))
            angle = abs((math.degrees(one - other) + 180) % 360 - 180)
            label = min(written, key=lambda t: math.dist(t[:2], corner))[2]
            found[label] = round(angle)
            assert abs(angle - found[label]) < 1e-6 and label in ("x", f"{found[label]}°")
        assert len(found) == 3 or len(written) == 3
        return str(found["x"])
    sides = [(p[i], p[(i + 1) % len(p)]) for i in range(len(p))]
    lengths = [math.dist(*side) for side in sides]
    labels = {}
    for x, y, text in written:
        labels[text, x, y] = min(
            range(len(p)),
            key=lambda i: math.dist(
                (x, y), ((sides[i][0][0] + sides[i][1][0]) / 2, (sides[i][0][1] + sides[i][1][1]) / 2)
            ),
        )
    assert len(set(labels.values())) == len(written)
    scales = [int(text) / lengths[i] for (text, _, _), i in labels.items() if text != "x"]
    assert max(scales) - min(scales) < 1e-9
    scale = scales[0]
    if "perimeter" in question:
        return str(round(sum(lengths) * scale))
    if "area" in question:
        area = abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in sides)) / 2 * scale**2
        assert abs(2 * area - round(2 * area)) < 1e-6
        return str(round(area)) if round(2 * area) % 2 == 0 else f"{round(2 * area) / 2}"
    (i,) = [i for (text, _, _), i in labels.items() if text == "x"]
    square = round((lengths[i] * scale) ** 2)
    if math.isqrt(square) ** 2 == square:
        return str(math.isqrt(square))
    outside = 1
    for k in range(2, 60):
        while square % (k * k) == 0:
            square, outside = square // (k * k), outside * k
    return f"{outside}\\sqrt{{{square}}}" if outside > 1 else f"\\sqrt{{{square}}}"


def solve_details(scene: Scene, question: str) -> str:
    """Finds the frames that are asked for, and what is drawn within each."""
    values = []
    for color, shape in re.findall(r"(\w+) (circle|square|triangle)", question):
        held = []
        for mark in scene.marks:
            kind = {"ellipse": "circle", "polygon": {3: "triangle", 4: "square"}.get(len(mark.points))}
            if NAME_OF.get(mark.color) == color and kind.get(mark.kind) == shape:
                middle = [sum(axis) / len(axis) for axis in zip(*mark.points, strict=True)]
                held += [m for m in scene.marks if m.color == BLACK and math.dist(m.points[0], middle) < 24]
        assert {m.kind for m in held} in ({"text"}, {"ellipse"})
        values.append(int(held[0].text) if held[0].kind == "text" else len(held))
        assert ("dots" in question) == (held[0].kind == "ellipse")
    return str(sum(values))


SOLVERS = {"geometry": solve_geometry, "counting": solve_counting, "details": solve_details}


def made(family: str, difficulty: int, seed: int) -> Problem:
    return (FAMILIES | LARGE)[family](random.Random(f"{seed}/{difficulty}"), difficulty)


@pytest.mark.parametrize("difficulty", range(1, 6))
@pytest.mark.parametrize("family", SOLVERS)
def test_the_answer_is_what_a_solver_reads_off_the_marks(family, difficulty):
    answers = Counter()
    for seed in range(200):
        one = made(family, difficulty, seed)
        assert SOLVERS[family](one.scene, one.question) == one.answer, (seed, one.question)
        answers[one.answer] += 1
    assert answers.most_common(1)[0][1] < 70, "one answer is right too often"


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_drawn_lies_on_the_image_and_texts_do_not_touch(family):
    for seed in range(100):
        scene = made(family, seed % 5 + 1, seed).scene
        assert SMALLEST[0] <= scene.width <= LARGEST[0] and SMALLEST[1] <= scene.height <= LARGEST[1]
        for mark in scene.marks:
            assert all(-1 <= x <= scene.width + 1 and -1 <= y <= scene.height + 1 for x, y in mark.points), (
                seed
            )
        boxes = []
        for mark in scene.marks:
            if mark.kind == "text" and mark.text:
                (x, y) = mark.points[0]
                wide = 0.27 * mark.width * len(mark.text)
                high = 0.4 * mark.width
                assert wide <= x <= scene.width - wide and high <= y <= scene.height - high, (seed, mark)
                assert not any(abs(x - u) < wide + w and abs(y - v) < high + h for u, v, w, h in boxes), (
                    seed,
                    mark,
                )
                boxes.append((x, y, wide, high))


def test_details_are_small_and_apart_in_a_large_picture():
    for seed in range(100):
        scene = made("details", seed % 5 + 1, seed).scene
        assert (scene.width, scene.height) == (1600, 1200)
        frames = [m.points for m in scene.marks if m.color != BLACK]
        assert len(frames) == 2 + 2 * (seed % 5 + 1)
        for points in frames:
            assert all(0 < x < 1600 and 0 < y < 1200 for x, y in points)
        for mark in scene.marks:
            if mark.color == BLACK:
                assert mark.width == 11 if mark.kind == "text" else math.dist(*mark.points) < 8


def test_answers_can_be_graded_and_wrong_ones_are_told_apart():
    kinds = Counter()
    for index in range(600):
        answer = problem(7, index).answer
        kind = classify(answer)
        kinds[kind] += 1
        assert reference_error(answer, kind) is None and decide(answer, answer, kind) == "correct"
        other = problem(7, index + 6).answer
        if other != answer and classify(other) == kind:
            assert decide(other, answer, kind) == "wrong", (answer, other)
    assert set(kinds) == {"number", "math"}


def test_a_seed_and_an_index_decide_everything():
    images = hashlib.sha256(b"".join(problem(3, i).scene.png() for i in range(12))).hexdigest()
    assert images == hashlib.sha256(b"".join(problem(3, i).scene.png() for i in range(12))).hexdigest()
    short = [one.scene.digest for _, _, one in Generated(30, 3).problems()]
    assert short == [one.scene.digest for _, _, one in Generated(60, 3).problems()][:30]
    assert short != [one.scene.digest for _, _, one in Generated(30, 4).problems()]


def test_chosen_families_take_turns_alone():
    rows = list(Generated(9, 3, families=("counting", "details")).problems())
    assert [family for _, family, _ in rows[:4]] == ["counting", "details", "counting", "details"]
    assert "families counting details" in Generated(9, families=("counting", "details")).files[0]["path"]
    assert "families" not in Generated(9).files[0]["path"]


def test_held_out_problems_are_in_no_training_set_of_any_seed():
    share = 0.1
    tests = {one.key for _, _, one in Generated(150, 9, validation=share, evaluation=True).problems()}
    for seed in (0, 9):
        rows = [one for _, _, one in Generated(900, seed, validation=share).problems()]
        train = {one.key for one in rows if not held_out(one, share)}
        assert not train & tests
        assert 0.06 < 1 - sum(not held_out(one, share) for one in rows) / len(rows) < 0.14


def test_images_are_what_the_rows_name_and_families_share_alike():
    source = Generated(60, 1)
    rows = list(source.rows())
    assert Counter(row.source for row in rows).keys() == {f"generated/{name}" for name in FAMILIES}
    assert set(Counter(row.source for row in rows).values()) <= {29, 30, 31}
    names = [name for row in rows for name in row.images]
    members = list(source.members(Refused(), Wanted(names[:5])))
    assert [m.name for m in members] == names[:5]
    sizes = [Image.open(io.BytesIO(m.read())).size for m in members]
    assert sizes == [(one.scene.width, one.scene.height) for _, _, one in list(source.problems())[:5]]
    assert source.files != replace(source, seed=2).files


def test_one_command_prepares_it(tmp_path, capsys):
    command = shlex.split("prepare generated --rows 48 --difficulty 2..4 --validation 0.2 --workers 1")
    assert commands.main([*command, "--out", str(tmp_path / "a")]) == 0
    dataset = Dataset(tmp_path / "a", "train")
    assert (
        len(dataset) + len(Dataset(tmp_path / "a", "validation")) == 48
        and "left out" not in capsys.readouterr().out
    )
    assert {row.source.partition("/")[2] for row in dataset} == set(FAMILIES)
    assert commands.main([*command, "--out", str(tmp_path / "b")]) == 0
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()
    assert commands.main(["prepare", "generated", "--difficulty", "4..9", "--out", str(tmp_path / "c")]) == 2
    assert "--difficulty 4..9" in capsys.readouterr().err
