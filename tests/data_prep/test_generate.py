"""Generated problems: every answer against a solver that reads the marks alone, and the set they are prepared
into."""

from __future__ import annotations

import hashlib
import io
import math
import random
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from PIL import Image

from data_prep import cli
from data_prep.generate.scene import BLACK, COLORS, LARGEST, SMALLEST, Problem, Scene
from data_prep.generate.source import FAMILIES, LARGE, Generated, held_out, problem
from data_prep.ingest.archive import Refused
from data_prep.ingest.wanted import Wanted
from trainer.data.dataset import Dataset
from trainer.rewards.grading.grader import classify, decide, reference_error

NAME_OF = {color: name for name, color in COLORS.items()}


def texts(scene: Scene) -> list[tuple[float, float, str]]:
    return [(*m.points[0], m.text) for m in scene.marks if m.kind == "text"]


def number(text: str) -> str:
    return re.findall(r"-?\d+", text)[-1]


def named(question: str, name: str) -> str:
    """The letter of a name, where the question lists choices."""
    return next(
        (letter for letter, choice in re.findall(r"^([A-Z])\. (\w+)$", question, re.M) if choice == name),
        name,
    )


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


def solve_clocks(scene: Scene, question: str) -> str:
    hands = [m for m in scene.marks if m.kind == "line" and m.color == COLORS["blue"]]
    shown = []
    for minute_hand in sorted(hands, key=lambda m: m.points[0]):
        middle = minute_hand.points[0]
        (hour_hand,) = [
            m for m in scene.marks if m.kind == "line" and m.points[0] == middle and m.color == BLACK
        ]
        turns = [
            math.atan2(end[0] - middle[0], middle[1] - end[1]) / (2 * math.pi) % 1
            for end in (hour_hand.points[1], minute_hand.points[1])
        ]
        hour, minute = turns[0] * 12, turns[1] * 60
        assert abs((hour * 60 - minute + 30) % 60 - 30) < 1e-6, "the hands contradict each other"
        shown.append(round(hour * 60) % 720)
    if len(shown) == 2:
        return str((shown[1] - shown[0]) % 720)
    moved = re.search(r"(\d+) minutes (after|before)", question)
    time = shown[0] + (int(moved[1]) * (1 if moved[2] == "after" else -1) if moved else 0)
    hour, minute = divmod(time % 720, 60)
    return f"{hour if hour else 12}:{minute:02}"


def solve_tables(scene: Scene, question: str) -> str:
    lines: dict[float, list[str]] = {}
    for _, y, text in sorted(texts(scene), key=lambda t: t[0]):
        lines.setdefault(round(y, 3), []).append(text)
    head, *rows = [lines[y] for y in sorted(lines)]
    j = next(i for i, name in enumerate(head) if i and re.search(rf"\b{name.lower()}\b", question))
    column = {row[0]: int(row[j]) for row in rows}
    asked = [w for w in re.findall(r"[A-Z][a-z]+", question.partition("\n")[0]) if w in column]
    if "Who" in question:
        best = [name for name in column if column[name] == max(column.values())]
        assert len(best) == 1
        return named(question, best[0])
    if "people" in question:
        return str(sum(v > int(number(question)) for v in column.values()))
    if "in total" in question:
        return str(sum(column.values()))
    if "than" in question:
        assert column[asked[0]] > column[asked[1]]
        return str(column[asked[0]] - column[asked[1]])
    return str(sum(column[name] for name in asked))


def solve_charts(scene: Scene, question: str) -> str:
    scale = sorted((y, int(t)) for _, y, t in texts(scene) if t.isdigit())
    (y0, v0), (y1, v1) = scale[0], scale[-1]
    days = {t: x for x, _, t in texts(scene) if not t.isdigit()}
    ends = [
        (sum(m.points[k][0] for k in (0, 1)) / 2, m.points[0][1]) for m in scene.marks if m.kind == "polygon"
    ]
    ends += [
        (m.points[0][0] / 2 + m.points[1][0] / 2, m.points[0][1] / 2 + m.points[1][1] / 2)
        for m in scene.marks
        if m.kind == "ellipse"
    ]
    values = {}
    for day, x in days.items():
        ((_, y),) = [end for end in ends if abs(end[0] - x) < 1e-6]
        exact = v0 + (y - y0) * (v1 - v0) / (y1 - y0)
        values[day] = round(exact)
        assert abs(exact - values[day]) < 1e-6
        assert any(
            m.kind == "line" and m.points[0][1] == m.points[-1][1] and abs(m.points[0][1] - y) < 1e-6
            for m in scene.marks
        ), "no line of the scale at this value"
    asked = [w for w in re.findall(r"[A-Z][a-z]+", question) if w in values]
    extreme = max if "highest" in question else min
    if "Which day" in question:
        best = [day for day in values if values[day] == extreme(values.values())]
        assert len(best) == 1
        return named(question, best[0])
    if "highest and the lowest" in question:
        return str(max(values.values()) - min(values.values()))
    if "above" in question:
        return str(sum(v > int(number(question)) for v in values.values()))
    if "greater" in question:
        assert values[asked[0]] > values[asked[1]]
        return str(values[asked[0]] - values[asked[1]])
    return str(sum(values[day] for day in asked))


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


def solve_functions(scene: Scene, question: str) -> str:
    """Reads the graphs by the numbers at the axes."""
    numbers = [(x, y, int(t)) for x, y, t in texts(scene) if re.fullmatch(r"-?\d+", t)]
    axis_x = sorted({(v, x) for x, y, v in numbers if sum(abs(y - q) < 1e-6 for _, q, _ in numbers) > 1})
    axis_y = sorted({(v, y) for x, y, v in numbers if sum(abs(x - q) < 1e-6 for q, _, _ in numbers) > 1})

    def reading(axis, pixel):
        (v0, p0), (v1, p1) = axis[0], axis[-1]
        return v0 + (pixel - p0) / (p1 - p0) * (v1 - v0)

    graphs = {}
    shift_x = reading(axis_x, scene.width / 2), reading(axis_y, scene.height / 2)
    assert max(map(abs, shift_x)) < 1e-6, "the numbers stand beside their lines"
    for mark in scene.marks:
        if mark.kind == "line" and mark.color in NAME_OF:
            graph = [(reading(axis_x, x), reading(axis_y, y)) for x, y in mark.points]
            graphs[NAME_OF[mark.color]] = {round(60 * x): y for x, y in graph}

    def value(color, x):
        y = graphs[color][60 * x]
        assert abs(y - round(y)) < 1e-6
        return round(y)

    curve = next(iter(graphs.values()))
    zeros = [x // 60 for x, y in curve.items() if abs(y) < 1e-6]
    if "f(x) = g(x)" in question:
        both = graphs["blue"].keys() & graphs["red"].keys()
        (x,) = [x for x in both if abs(graphs["blue"][x] - graphs["red"][x]) < 1e-6]
        return str(Fraction(x, 60))
    if nested := re.search(r"f\(g\((-?\d+)\)\)", question):
        return str(value("blue", value("red", int(nested[1]))))
    if asked := re.search(r"f\((-?\d+)\)", question):
        return str(value("blue", int(asked[1])))
    if "slope" in question:
        dots = [
            tuple((a + b) / 2 for a, b in zip(*m.points, strict=True))
            for m in scene.marks
            if m.kind == "ellipse"
        ]
        (x0, y0), (x1, y1) = [(round(reading(axis_x, x)), round(reading(axis_y, y))) for x, y in dots]
        assert value("blue", x0) == y0 and value("blue", x1) == y1
        return str(Fraction(y1 - y0, x1 - x0))
    if "y-axis" in question:
        return str(value("blue", 0))
    if "line cross the x-axis" in question:
        (x,) = zeros
        return str(x)
    if "crosses the x-axis twice" in question:
        assert len(zeros) == 2
        return str(sum(zeros) if "sum" in question else max(zeros))
    return str(round((min if "smallest" in question else max)(curve.values())))


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


SOLVERS = {
    "geometry": solve_geometry,
    "charts": solve_charts,
    "counting": solve_counting,
    "clocks": solve_clocks,
    "tables": solve_tables,
    "functions": solve_functions,
    "details": solve_details,
}


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
    assert set(kinds) == {"letter", "number", "text", "math"}


def test_a_seed_and_an_index_decide_everything():
    images = hashlib.sha256(b"".join(problem(3, i).scene.png() for i in range(12))).hexdigest()
    assert images == hashlib.sha256(b"".join(problem(3, i).scene.png() for i in range(12))).hexdigest()
    short = [one.scene.digest for _, _, one in Generated(30, 3).problems()]
    assert short == [one.scene.digest for _, _, one in Generated(60, 3).problems()][:30]
    assert short != [one.scene.digest for _, _, one in Generated(30, 4).problems()]


def test_chosen_families_take_turns_alone():
    rows = list(Generated(9, 3, families=("counting", "clocks")).problems())
    assert [family for _, family, _ in rows[:4]] == ["counting", "clocks", "counting", "clocks"]
    assert "families counting clocks" in Generated(9, families=("counting", "clocks")).files[0]["path"]
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
    assert set(Counter(row.source for row in rows).values()) <= {9, 10, 11}
    names = [name for row in rows for name in row.images]
    members = list(source.members(Refused(), Wanted(names[:5])))
    assert [m.name for m in members] == names[:5]
    sizes = [Image.open(io.BytesIO(m.read())).size for m in members]
    assert sizes == [(one.scene.width, one.scene.height) for _, _, one in list(source.problems())[:5]]
    assert source.files != replace(source, seed=2).files


def test_one_command_prepares_it(tmp_path, capsys):
    command = [
        "prepare",
        "generated",
        "--rows",
        "48",
        "--difficulty",
        "2..4",
        "--validation",
        "0.2",
        "--workers",
        "1",
    ]
    assert cli.main([*command, "--out", str(tmp_path / "a")]) == 0
    dataset = Dataset(tmp_path / "a", "train")
    assert (
        len(dataset) + len(Dataset(tmp_path / "a", "validation")) == 48
        and "left out" not in capsys.readouterr().out
    )
    assert {row.source.partition("/")[2] for row in dataset} == set(FAMILIES)
    assert cli.main([*command, "--out", str(tmp_path / "b")]) == 0
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()
    assert cli.main(["prepare", "generated", "--difficulty", "4..9", "--out", str(tmp_path / "c")]) == 2
    assert "--difficulty 4..9" in capsys.readouterr().err
