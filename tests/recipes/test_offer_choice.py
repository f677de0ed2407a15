"""Choosing under a deadline and a budget: the simulation against the formula, and choices checked by hand."""

import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from desk import run

from recipes.commands.cli import main
from recipes.plan import cost, offer_choice, spread
from recipes.presets import get
from recipes.screens import limits

SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"


def offers(name=SEVEN):
    return [offer for offer in cost.offers(get(name)) if offer.usd is not None]


def test_simulated_runs_agree_with_the_expectation_that_offers_show():
    import random

    for offer in offers("grpo-qwen2.5-vl-32b-mathv60k"):
        rng = random.Random(1)
        runs = [
            offer_choice.simulate_run(offer, rng) for _ in range(1 if math.isinf(offer.between_s) else 600)
        ]
        assert sum(runs) / len(runs) == pytest.approx(offer.hours, rel=0.04), (offer.target, offer.spot)


def test_without_limits_the_cheapest_is_chosen_and_nothing_cheaper_is_given_up():
    chosen, _ = offer_choice.choose_offer(offers(), math.inf, math.inf)
    assert chosen and chosen.offer == offers()[0] and chosen.kept == 1.0
    given = limits.keep_limits(get(SEVEN), offers(), math.inf, math.inf, Path("none"), lambda _: [])
    assert given.kept and not any(line.startswith("gives up $") for line in given.said)


def test_a_deadline_takes_a_faster_and_dearer_one_and_says_so():
    slowest = max(offers(), key=lambda o: o.hours)
    fast = min(offers(), key=lambda o: o.hours)
    only = [slowest, fast] if (slowest.usd or 0) < (fast.usd or 0) else [fast, slowest]
    only.sort(key=lambda offer: offer.usd or 0)
    deadline = offer_choice.judge_offer(fast, math.inf, math.inf, published=True).hours * 1.01
    chosen, _ = offer_choice.choose_offer(only, deadline, math.inf)
    assert chosen and chosen.offer == fast
    given = limits.keep_limits(get(SEVEN), only, deadline, math.inf, Path("none"), lambda _: [])
    assert (slowest.usd or 0) > (fast.usd or 0) or given.said[-1].startswith("gives up $")


def test_chances_count_not_means():
    """A spot offer whose mean ends in time, and whose tenth run does not, is no choice at that deadline."""
    spot = next(o for o in offers("grpo-qwen2.5-vl-32b-mathv60k") if o.spot)
    at_mean = offer_choice.judge_offer(spot, spot.hours, math.inf)
    assert 0.1 < at_mean.kept < offer_choice.SURE and at_mean.hours > spot.hours
    assert offer_choice.judge_offer(spot, at_mean.hours, math.inf).kept >= offer_choice.SURE


@pytest.mark.parametrize(("text", "hours"), [("90m", 1.5), ("24h", 24.0), ("3d", 72.0)])
def test_deadlines(text, hours):
    assert offer_choice.parse_hours(text) == hours


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (["--deadline", "200h", "--budget", "5000"], 0, "simulated runs end within"),
        (["--deadline", "10m"], 2, "no offer keeps the limits"),
        (["--budget", "1"], 2, "no offer keeps the limits"),
        (["--deadline", "soon"], 2, "write it as 90m, 24h or 3d"),
    ],
)
def test_the_command(given, code, said, capsys):
    assert main(["plan", SEVEN, *given]) == code
    out = capsys.readouterr()
    assert said in " ".join((out.out + out.err).split())


def test_the_regions_are_named_by_price(tmp_path, monkeypatch, capsys):
    folder = tmp_path / ".sky/catalogs/v8/runpod"
    folder.mkdir(parents=True)
    rows = [
        f"8x,A100-80GB-SXM,8.0,96.0,2000.0,{region},{usd},{usd},{region}-1,"
        for region, usd in (("CA", 16.0), ("US", 12.0), ("NO", 12.8), ("SE", 20.0), ("IN", 24.0))
    ]
    header = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Region,SpotPrice,Price,"
    header += "AvailabilityZone,GpuInfo"
    (folder / "vms.csv").write_text("\n".join([header, *rows]) + "\n")
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))
    asked = ["plan", SEVEN, "--target", "skypilot-runpod", "--deadline", "30d"]
    asked += ["--set", "cluster.gpu=A100-80GB", "--set", "cluster.alternatives=[]"]
    assert main(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "per GPU-hour in US $1.50, NO $1.60, CA $2.00, SE $2.50, and 1 more: the platform tries" in said
    assert main([*asked, "--set", "site.region=NO"]) == 0
    assert "in NO alone (site.region)" in " ".join(capsys.readouterr().out.split())


def test_no_offer_in_time_says_how_far_off_the_nearest_is_and_how_many_nodes_would_do(capsys):
    code, out, _ = run(capsys, "plan", SEVEN, "--deadline", "50h", "--all")
    assert code == 2 and re.search(
        r"no offer keeps the limits in 90% of 200 simulated runs: the nearest is .*, [\d.]+ h and \$", out
    )
    nodes = re.search(r"--set cluster.nodes=(\d) keeps them: .*, ([\d.]+) h and \$", out)
    assert int(nodes[1]) > 1 and float(nodes[2]) <= 50
    given = ["--deadline", "50h", "--set", f"cluster.nodes={nodes[1]}"]
    assert run(capsys, "plan", SEVEN, *given)[0] == 0
    code, out, _ = run(capsys, "plan", SEVEN, "--budget", "10", "--all")
    assert code == 2 and "the nearest is" in out and "keeps them" not in out


def test_an_offer_on_demand_has_a_range_too():
    """Its runs differ in speed, length of completions, starts and lost machines; a supervised run's in no
    length."""
    by_spread = {}
    for name in (SEVEN, "grpo-qwen2.5-7b-gsm8k", "sft-qwen2.5-7b-lora"):
        priced = [offer for offer in cost.offers(get(name), ranges=True) if offer.usd is not None]
        offer = next(offer for offer in priced if not offer.spot)
        judged = offer_choice.judge_offer(offer, math.inf, math.inf)
        # published steps of vision models are slower than planned: the quickest tenth is about the plan's
        assert judged.least < 1.05 * offer.hours < judged.hours and judged.usd > 1.05 * offer.usd
        by_spread[name] = judged.hours / judged.least
        assert bool(offer.stretch) == name.startswith("grpo")
        assert 0.08 < offer_choice.judge_offer(offer, 1.05 * offer.hours, math.inf).kept < offer_choice.SURE
    assert sorted(by_spread, key=by_spread.get) == list(reversed(by_spread))


def test_spread_draws_lie_within_their_bounds_nine_times_in_ten():
    import random

    rng = random.Random(0)
    for low, high in (
        spread.STEP,
        spread.VISION_STEP,
        spread.SEVERAL_NODES_STEP,
        spread.COMPLETIONS,
        spread.START,
    ):
        drawn = [spread.draw_within((low, high), rng) for _ in range(4000)]
        assert sum(low <= x <= high for x in drawn) / len(drawn) == pytest.approx(0.9, abs=0.02)
    assert spread.interpolated((0.8, 1.0, 1.5, 3.0), 3.0) == pytest.approx(2.25)
    assert spread.interpolated((0.8, 1.0, 1.5, 3.0), 0.1) == 0.8
    starts = [spread.draw_luck(spread.STEP, (), rng)[2] for _ in range(4000)]
    assert sum(starts) / len(starts) == pytest.approx(0.1 / 0.9, abs=0.03)


def test_the_table_names_the_assumed_length_and_both_ranges(capsys):
    code, out, _ = run(capsys, "plan", "grpo-qwen2.5-vl-72b-mathv60k", "--all")
    said = " ".join(out.split())
    assert code == 0 and "completions of 400 tokens, of 8,000 allowed" in said
    assert "completions of 320 to 1,200 tokens" in said and said.count("10-90%") == 3
    assert re.search(
        r"dstack-runpod A100-80GB on demand [\d.]+ [\d.]+-[\d.]+ \d[\d,]* \d[\d,]*-\d[\d,]*", said
    )


def test_limits_are_kept_at_the_published_end():
    """The plan's own range has no run on a GPU behind it: what is bought keeps its limits where a step takes
    as long as the slowest that others have published."""
    offer = next(o for o in offers() if not o.spot)
    own = offer_choice.judge_offer(offer, math.inf, math.inf)
    published = offer_choice.judge_offer(offer, math.inf, math.inf, published=True)
    work_h = offer.work_s / 3600
    assert published.least > spread.PUBLISHED_VISION_END * work_h * 0.8 > own.hours
    chosen, _ = offer_choice.choose_offer([offer], own.hours, math.inf)
    assert chosen is None
    assert offer_choice.choose_offer([offer], published.hours, math.inf)[0].kept >= offer_choice.SURE


def test_thousands_of_segments_take_a_run_no_time():
    """Losses are drawn one by one, segments are not: the same mean as segment by segment, in a thousandth of
    the draws."""
    import random

    offer = replace(offers()[0], interval_s=30.0, stall_s=2.0, start_s=0.0, restart_s=400.0)
    offer = replace(offer, steps=round(3e6 / (offer.step.total - offer.step.checkpoint)))
    offer = replace(offer, between_s=30_000.0)

    def by_segment(rng: random.Random) -> float:
        clock = done = down = 0.0
        while done < offer.work_s:
            segment = down + offer.interval_s + offer.stall_s
            life = rng.expovariate(1 / offer.between_s)
            clock += min(life, segment)
            done += offer.interval_s if life >= segment else 0.0
            down = 0.0 if life >= segment else offer.restart_s
        return clock / 3600

    rng = random.Random(1)
    looped = [by_segment(rng) for _ in range(6)]
    drawn = [offer_choice.simulate_run(offer, rng) for _ in range(400)]
    assert statistics.fmean(drawn) == pytest.approx(statistics.fmean(looped), rel=0.004)
    often = replace(offer, between_s=60.0, interval_s=600.0)  # every segment is cut off again and again
    assert math.isfinite(offer_choice.simulate_run(often, rng))


def test_the_plan_s_own_figure_lies_in_the_range_beside_it(capsys):
    from recipes.commands import plan_command

    plan_command.show_plan(SEVEN, "slurm", [], form="all")
    rows = re.findall(r"(\d+\.\d)\s+(\d+\.\d)-(\d+\.\d)", capsys.readouterr().out)
    assert rows and all(float(low) <= float(point) <= float(high) for point, low, high in rows)
