import html
import json
import math
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ET

import pytest
from written_run import picture, values, write_run

from trainer.config import ConfigError, RunConfig, override
from trainer.config.watching import GUARDS
from trainer.observe import charts, guards, report, report_page
from trainer.observe.charts import CHARTS, Chart, Frame
from trainer.observe.metrics import Metrics
from trainer.observe.node_monitor import append_sample
from trainer.observe.phases import Phases

PLAIN = override(RunConfig(), ["logging.tensorboard=false"])


def svgs(page: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


# --- the page -----------------------------------------------------------------------------------------------


def test_the_report_holds_curves_samples_phases_and_configuration_and_asks_nothing_of_anywhere(tmp_path):
    write_run(tmp_path, 60, overrides=("logging.tensorboard=false", "optimizer.learning_rate=2e-4"))
    page = report.write_report(tmp_path).read_text()
    for title in ("Accuracy", "Reward", "KL to the reference", "Completion length", "Losses"):
        assert f"<h3>{title}</h3>" in page
    assert "Seconds per step" in page and "Where the time went" in page
    assert page.count("<article ") == report_page.MAX_SAMPLES and "24 of 48 written" in page
    assert "<tr class=set><td>learning_rate</td><td>0.0002</td></tr>" in page
    assert "<tr><td>temperature</td><td>1</td></tr>" in page
    assert not re.findall(r"""(?:src|href|action)\s*=\s*["'](?!data:)""", page)
    assert "http" not in page.replace("http-equiv", "") and "@import" not in page and "url(" not in page
    assert "default-src 'none'" in page


def test_a_run_that_is_over_does_not_fail_by_its_page(tmp_path, monkeypatch):
    write_run(tmp_path, 10)
    assert report.last_line(tmp_path) == f"report: {tmp_path / 'report.html'}"

    def broken(*_):
        raise ValueError("math domain error")

    monkeypatch.setattr(report, "line_chart", broken)
    assert re.fullmatch(
        r"warning: the report was not written \(ValueError: math domain error\); `python3 .* tries again",
        report.last_line(tmp_path),
    )


def test_a_run_with_rollout_workers_shows_them_and_why_they_ended(tmp_path):
    write_run(tmp_path, 40)
    page = report.write_report(tmp_path).read_text()
    assert "Rollout workers" not in page and "Steps that samples are behind" not in page
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        step = line["step"]
        line |= {"fleet/wait_s": 3.0 / (step + 1), "fleet/workers": 2 + step % 2, "fleet/idle_share": 0.1}
        line |= {"rollout/staleness_mean": min(step, 2), "rollout/staleness_max": min(step, 2)}
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    ended = {"lives": False, "why": "aws: <spot> notice", "completions": 300}
    workers = [
        {"worker": "w0", "device": "NVIDIA L40S", "lives": True, "why": "", "completions": 700},
        {"worker": "w1", "device": "NVIDIA L40S"} | ended,
    ]
    (tmp_path / "fleet.json").write_text(json.dumps({"unix_s": 0.0, "workers": workers}))
    page = report.write_report(tmp_path).read_text()
    for title in ("Waiting for rollout workers", "Rollout workers without a unit", "Rollout workers alive"):
        assert f"<h3>{title}</h3>" in page
    assert "<h3>Steps that samples are behind</h3>" in page and "<h2>Rollout workers</h2>" in page
    assert "<td>NVIDIA L40S</td><td>1 of 2</td><td>1,000</td><td>100%</td>" in page
    assert "<td>w1</td><td>aws: &lt;spot&gt; notice</td>" in page


def test_the_report_shows_nodes_and_gpus(tmp_path):
    write_run(tmp_path, 5)
    assert "Machines" not in report.write_report(tmp_path).read_text()
    gpu = {"gpu": 0, "busy_fraction": 0.5, "memory_bytes": 70 << 30, "power_w": 600.0, "temperature_c": 71}
    own = {"memory_fraction": 0.4, "bytes_per_s": {"network_in": 2e6, "network_out": 1e6}, "unix_s": 1.0}
    for node in (0, 1, 0):
        append_sample(tmp_path, own | {"node": node, "gpus": [gpu | {"slowdown": bits} for bits in (64, 4)]})
    page = report.write_report(tmp_path).read_text()
    cells = ["0", "50%", "70.0 GiB", "71 °C", "600 W", "50% of samples", "–", "40%", "–"]
    cells += ["2 MB/s", "1 MB/s", "–", "–"]
    assert "Machines" in page and f"<tr><td>{'</td><td>'.join(cells)}</td></tr>" in page


def test_every_drawing_is_well_formed_and_stays_within_its_frame(tmp_path):
    write_run(tmp_path, 130)
    drawings = svgs(report.write_report(tmp_path).read_text())
    assert len(drawings) >= 14
    for svg in drawings:
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        for path in svg.iter("path"):
            if path.attrib["class"] in ("main", "raw", "band"):
                numbers = [
                    tuple(map(float, p.split())) for p in re.split("[ML]", path.attrib["d"].rstrip("Z")) if p
                ]
                assert all(charts.LEFT - 0.1 <= x <= width - charts.RIGHT + 0.1 for x, _ in numbers)
                assert all(charts.TOP - 0.1 <= y <= height - charts.BOTTOM + 0.1 for _, y in numbers)


def test_what_a_model_writes_cannot_break_the_page(tmp_path):
    metrics = Metrics(tmp_path, override(PLAIN, ["run.name=<b>x</b>"]))
    metrics.log(1, {"reward/mean": 1.0})
    evil = '<script>alert(1)</script></article><img src="//x">'
    row = {"row": 0, "question": evil, "completion": "<think>" + evil, "ground_truth": evil}
    row |= {"verdict": "wrong", "reward": 0.0, "advantage": 0.0, "tokens": 1, "image_pngs": []}
    metrics.samples(1, [row])
    page = report.write_report(tmp_path).read_text()
    assert page.count("<script>") == 1 and page.count("</article>") == 1 and "<img" not in page
    assert "&lt;script&gt;alert(1)" in page and "<h1>&lt;b&gt;x" in page


def test_pictures_are_inlined_up_to_the_budget_and_named_beyond_it_or_where_lost(tmp_path, monkeypatch):
    write_run(tmp_path, 20)
    one = len(picture(1))
    (tmp_path / json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[-1])["images"][0]).unlink()
    assert '<span class="absent">samples/' in report.write_report(tmp_path).read_text()
    monkeypatch.setattr(report_page, "MAX_PICTURE_BYTES", 5 * one)
    page = report.write_report(tmp_path).read_text()
    assert 1 <= page.count("data:image/png;base64,") <= 5 < page.count('class="absent"')


@pytest.mark.slow
def test_a_run_of_fifty_thousand_steps_gives_a_small_page_quickly(tmp_path):
    names = values(1, 2, __import__("random").Random(0))
    template = ", ".join(f'"{name}": %(v)r' for name in names)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 50_001):
            rest = template % {"v": 1 + math.sin(step / 999)}
            file.write(f'{{"step": {step}, {rest}}}\n')
    began = time.process_time()
    path = report.write_report(tmp_path)
    assert path.stat().st_size < 2_000_000
    assert time.process_time() - began < 30


def failing(folder, steps=40, **changed):
    """A run of equal rewards, most of whose completions are cut and have no answer."""
    metrics, phases = Metrics(folder, PLAIN), Phases(folder, total_steps=steps)
    cut = {"reward/mean": 0.0, "reward/std": 0.0, "reward/no_answer_rate": 1.0, "grad/norm": 0.0}
    cut |= {"tokens/truncated_fraction": 0.97, "group/zero_std_fraction": 1.0}
    for step in range(1, steps + 1):
        metrics.log(step, cut | changed)
    phases.finish()
    return metrics


def problems(page):
    """(what is said, what to do) of each entry at the top of a page, without its marks."""
    section = page.partition('<section class="problems">')[2].partition("</section>")[0]
    items = re.findall(r"<li><b>(.*?):</b>(.*?)</li>", section, re.DOTALL)
    return [(html.unescape(head), html.unescape(re.sub("<.*?>", " ", rest))) for head, rest in items]


def test_a_run_that_learned_nothing_is_not_praised_and_its_top_says_what_went_wrong(tmp_path):
    failing(tmp_path)
    lines = [
        "starting from scratch",
        "warning: step 1: x (guard variance, 1 in a row)",
        "step 1 reward 0.000",
    ]
    lines += ["warning: a completion was not graded, and earns nothing: <b>f.py</b>", "report: x"]
    (tmp_path / "launch.log").write_text("\n".join([*lines, lines[-2]]) + "\n")
    page = report.write_report(tmp_path).read_text()
    assert 'chip interrupted">finished, nothing learned' in page and 'chip finished"' not in page
    said = dict(problems(page))
    assert list(said)[0] == "Nothing was learned"
    assert "the reward was 0 in every step" in said["Nothing was learned"]
    cut = said["Step 1 to 40 (guard truncated)"]
    assert "responses cut at rollout.max_tokens: share 0.97" in cut and "Raise rollout.max_tokens" in cut
    assert "no answer was found" in said["Step 1 to 40 (guard no_answer)"]
    assert "groups without variance" in said["Step 1 to 40 (guard variance)"]
    assert said["Warning"].strip().startswith("a completion was not graded, and earns nothing: <b>f.py</b>")
    assert len(said) == 5, "what the log says of guards is not said twice"
    assert page.index("Nothing was learned") < page.index('<section class="tiles"')


@pytest.mark.parametrize(
    ("changed", "line", "said"),
    [
        ({}, "", {}),
        ({"status": "failed", "why": "rank 1 on node 0 is <stopped> (state T)", "code": 34}, "",
         {"It ended with exit code 34": "rank 1 on node 0 is <stopped> (state T)"}),
        ({}, '{"step": 13, "grad/norm": 5000.0}\n', {"Step 13 (guard gradient)": "norm is 5e+03"}),
    ],
    ids=["no trouble", "why it ended", "a guard on one step"],
)  # fmt: skip
def test_the_report_says_first_what_went_wrong(tmp_path, changed, line, said):
    write_run(tmp_path, 20, overrides=("logging.tensorboard=false", "run.id=mine-1128-1500-ab12"))
    path = tmp_path / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line)
    page = report.write_report(tmp_path).read_text()
    found = dict(problems(page))
    assert bool(found) == bool(said) and all(text in found[head] for head, text in said.items())
    assert ('<section class="problems">' in page) == bool(said)
    assert "<h1>mine-1128-1500-ab12<" in page and "<title>mine-1128-1500-ab12</title>" in page
    assert "<p>written · GRPO of" in page


def test_every_guard_has_a_remedy():
    assert guards.REMEDIES.keys() == set(GUARDS)


def test_steps_that_are_not_finite_are_counted_and_marked(tmp_path):
    metrics = Metrics(tmp_path, PLAIN)
    for step in range(1, 51):
        metrics.log(step, {"reward/mean": math.nan if step in (20, 21) else step, "grad/norm": math.inf})
    page = report.write_report(tmp_path).read_text()
    assert "2 not finite" in page
    assert page.count('class="bad"') == 2
    assert "<h3>Gradient norm</h3>" not in page  # nothing of it can be drawn


def test_resumes_are_marked_and_listed(tmp_path):
    write_run(tmp_path, 20)
    write_run(tmp_path, 30, resume_step=15)
    page = report.write_report(tmp_path).read_text()
    assert "Dotted: the run was resumed here." in page and "<td>15</td>" in page and 'class="mark"' in page
    assert "<span>resumed</span><b>1×</b><small>last after step 15</small>" in page


def test_a_supervised_run_has_its_own_curves(tmp_path):
    metrics = Metrics(tmp_path, override(PLAIN, ["method=sft"]))
    phases = Phases(tmp_path)
    for step in range(1, 6):
        phases.begin(step)
        with phases("update"):
            pass
        metrics.log(step, {"sft/loss": 3 / step} | phases.take())
    phases.finish("failed")
    page = report.write_report(tmp_path).read_text()
    assert (
        "<h3>Cross-entropy</h3>" in page and "<h3>Reward</h3>" not in page and 'chip failed">failed' in page
    )
    assert "SFT of" in page


def test_a_run_with_tools_has_curves_of_its_turns_and_flat_charts_are_left_out():
    history = [{"step": s, "turns/replies_mean": 1 + s / 5, "turns/errors_mean": 0.1} for s in range(1, 6)]
    drawn = "".join(charts.line_chart(chart, history) for chart in CHARTS)
    assert "<h3>Turns</h3>" in drawn and "wrong calls" in drawn
    assert "<h3>Time in tools</h3>" not in drawn, "a run whose tools take no time"
    for seconds, shown in ((1.0, False), (history[-1]["step"], True)):
        waited = [line | {"perf/tool_s_max": seconds * line["step"] ** shown} for line in history]
        assert ("<h3>Time in tools</h3>" in "".join(charts.line_chart(c, waited) for c in CHARTS)) == shown


def test_one_step_is_enough_and_a_configuration_of_another_version_is_shown_as_it_is(tmp_path):
    Metrics(tmp_path, PLAIN).log(1, {"reward/mean": 0.0, "time/step_s": 0.0})
    (tmp_path / "config.yaml").write_text("run:\n  colour: blue\n")
    page = report.write_report(tmp_path).read_text()
    assert '<pre class="raw">run:\n  colour: blue' in page
    assert svgs(page)


def test_no_run_is_one_line(tmp_path, capsys):
    with pytest.raises(ConfigError, match="at least one step"):
        report.write_report(tmp_path)
    assert report.main([str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
FLAGS += " --disable-component-update --enable-logging=stderr --virtual-time-budget=5000"


def browse(page, scratch):
    """(document, what was logged) of a page after its scripts, in Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("no Chromium on this machine")
    command = [chromium, *FLAGS.split(), f"--user-data-dir={scratch}/profile", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.lab
def test_a_browser_draws_it_without_complaint(tmp_path):
    write_run(tmp_path, 60)
    document, complaints = browse(report.write_report(tmp_path), tmp_path)
    assert document.count('class="tip"') == document.count("data-x0=")  # the script ran to its end
    assert not complaints


MEASURE = """<script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument;
  const boxes = [...page.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect());
  const heights = boxes.map((box) => box.height).filter((height) => height > 0);
  const keys = [...page.querySelectorAll(".config td:first-child")].map((td) => td.getClientRects().length);
  const lines = [...page.querySelectorAll(".config td:first-child")].map((td) => td.offsetHeight);
  document.title = JSON.stringify({
    width: page.documentElement.scrollWidth, lowest: Math.min(...heights), drawings: heights.length,
    problems: page.querySelector(".problems").getBoundingClientRect().width, keys: keys.length,
    key: Math.min(...lines),
  });
};
</script>"""


@pytest.mark.lab
def test_on_a_phone_nothing_is_wider_than_the_page_and_no_chart_is_a_line(tmp_path):
    bands = "expected.bands=[{metric: eval/accuracy, steps: [10, 60], low: [0.5, 0.7198], high: [0.9, 1.05],"
    bands += " source: 'our own runs with five seeds on two processors of one kind, scored by rules'}]"
    write_run(tmp_path, 60, overrides=("logging.tensorboard=false", bands))
    (tmp_path / "launch.log").write_text(f"warning: {'a_long_word_without_a_blank_' * 9}\n")
    page = html.escape(report.write_report(tmp_path).read_text())
    wrapper = tmp_path / "wrapper.html"
    style = "width:390px;height:9000px;border:0"
    wrapper.write_text(f'<meta charset=utf-8><iframe style="{style}" srcdoc="{page}"></iframe>{MEASURE}')
    document, _ = browse(wrapper, tmp_path)
    measured = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", document)[1]))
    assert measured["width"] <= 390, measured
    assert measured["lowest"] >= 120 and measured["drawings"] > 12, measured
    assert measured["key"] < 30, "no option's name is broken"


def test_samples_are_chosen_by_whole_steps_first_and_last_among_them():
    samples = [{"step": s, "k": k} for s in range(5, 505, 5) for k in range(4)]
    chosen = report_page.choose_samples(samples, 24)
    steps = sorted({s["step"] for s in chosen})
    assert len(chosen) == 24 and len(steps) == 6 and steps[0] == 5 and steps[-1] == 500
    assert [s["k"] for s in chosen[:4]] == [0, 1, 2, 3] and chosen[0]["step"] == 500
    assert report_page.choose_samples(samples[:8], 24) == samples[4:8] + samples[:4]
    assert len(report_page.choose_samples([{"step": 1}] * 100, 24)) == 24
    assert report_page.choose_samples([], 24) == []


# --- numbers of the drawings --------------------------------------------------------------------------------


def test_thinning_keeps_ends_spikes_and_order():
    points = [(float(i), 0.0) for i in range(10_000)]
    points[4321] = (4321.0, 9.0)
    points[777] = (777.0, -9.0)
    kept = charts.downsample(points, 400)
    assert len(kept) <= 400 and kept[0] == points[0] and kept[-1] == points[-1]
    assert (4321.0, 9.0) in kept and (777.0, -9.0) in kept and kept == sorted(kept)
    assert charts.downsample(points[:50], 400) == points[:50]


def test_smoothing_is_the_mean_of_the_neighbours():
    points = [(i, v) for i, v in enumerate([0.0, 3.0, 6.0, 9.0, 100.0])]
    assert charts.smooth(points, 3) == [(0, 1.5), (1, 3.0), (2, 6.0), (3, pytest.approx(115 / 3)), (4, 54.5)]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.21, 0.78, [0.2, 0.4, 0.6, 0.8]),
        (-3, 12, [-5, 0, 5, 10, 15]),
        (5, 5, [5.0, 5.1, 5.2, 5.3, 5.4, 5.5]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1e-7, 4e-7, [1e-7, 2e-7, 3e-7, 4e-7]),
        (0, 5e-324, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (5, math.nextafter(5, 6), [5.0, 5.1, 5.2, 5.3, 5.4, 5.5]),
    ],
)
def test_ticks_are_round_and_cover(low, high, ticks):
    assert charts.nice_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[6e-212, 5e-324, 1e-190], [1e-150, 1e250, 1.0], [-1.7e308, 1.7e308, 2.0]])
def test_numbers_that_have_no_power_of_ten_end_no_report(log, values):
    history = [{"step": step, "x": value} for step, value in enumerate(values)]
    chart = charts.Chart("x", (charts.Line("x", "x"),), log=log)
    assert "<svg" in charts.line_chart(chart, history)


def test_log_ticks_are_powers_of_ten():
    assert charts.log_ticks(2e-7, 3e-6) == pytest.approx([1e-7, 1e-6, 1e-5])
    assert charts.log_ticks(1.0, 1.0) == pytest.approx([1.0, 10.0])
    assert len(charts.log_ticks(1e-20, 1e20)) <= 8


def test_labels_are_short():
    cases = {0.25: "0.25", 12_000: "12k", 2_110: "2,110", 3e-7: "3e-7", 2.5e6: "2.5M", 0: "0", -0.5: "-0.5"}
    assert {v: charts.format_number(v) for v in cases} == cases
    shares = {0: "0%", 0.2: "20%", 0.747: "74.7%", 1: "100%", 0.0005: "0.1%"}
    assert {v: charts.format_number(v, True) for v in shares} == shares


def test_a_point_is_drawn_where_it_belongs():
    frame = Frame(0, 10, 0.0, 1.0)
    assert (frame.x(0), frame.x(10)) == (charts.LEFT, charts.WIDTH - charts.RIGHT)
    assert (frame.y(0.0), frame.y(1.0)) == (charts.HEIGHT - charts.BOTTOM, charts.TOP)
    logarithmic = Frame(0, 10, 1e-4, 1.0, log=True)
    assert logarithmic.y(1e-2) == pytest.approx((charts.TOP + charts.HEIGHT - charts.BOTTOM) / 2)


def test_a_stack_is_as_tall_as_its_sum_and_buckets_are_means():
    rows = [(step, [1.0, 3.0]) for step in range(1, 301)]
    svg = ET.fromstring(
        re.search(r"<svg.*?</svg>", charts.stacked_bars(Chart("t", ()), rows, [("a", 1), ("b", 2)]))[0]
    )
    bars = list(svg.iter("rect"))
    assert len(bars) == 200
    plot = charts.HEIGHT - charts.TOP - charts.BOTTOM
    assert sum(float(b.attrib["height"]) for b in bars[:2]) == pytest.approx(plot, abs=0.2)
    assert float(bars[1].attrib["height"]) == pytest.approx(3 * float(bars[0].attrib["height"]), abs=0.2)


def test_every_charted_metric_is_in_the_table():
    from tests.metric_table import unknown_names

    drawn = [line.name for chart in (*CHARTS, charts.HELD_OUT) for line in chart.lines]
    drawn += [name for chart in CHARTS for name in chart.band or ()]
    assert unknown_names(drawn) == []


def test_phases_have_a_colour_in_both_displays_and_a_row_in_the_table():
    from tests.metric_table import NAMES
    from trainer.observe.live import PHASE_COLORS

    phases = {n[5:-2] for n in NAMES if n.startswith("time/")} - {"step", "unix", "sampling"}
    assert phases == set(PHASE_COLORS) - {"other"} == set(report.PHASE_COLORS)
