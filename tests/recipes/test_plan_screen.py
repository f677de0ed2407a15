"""`plan` on one screen, and its facts for programs."""

import dataclasses
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from desk import bare_desk, run
from rich.console import Console

from recipes.plan import cheaper, choice, cost, prices
from recipes.presets import get
from recipes.screens import plan_facts, plan_screen

LINES, COLUMNS = 40, 100
SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
BIG = "grpo-qwen2.5-vl-72b-mathv60k"
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/memory.md"


@pytest.fixture(autouse=True)
def no_catalogs(monkeypatch, tmp_path):
    bare_desk(monkeypatch, tmp_path)


def screen(capsys, *arguments):
    code, out, err = run(capsys, "plan", *arguments)
    lines = out.splitlines()
    assert code == 0, err
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS, out
    assert "…" not in out, "nothing is cut off"
    return lines


DISTINCT = (
    *("demo", "preflight", "serve", SEVEN, BIG, "sft-qwen2.5-72b-full", "grpo-qwen2.5-vl-3b-geometry3k"),
    *("gpu-check", "opd-qwen2.5-vl-7b-from-72b-mathv60k", "grpo-qwen3.5-35b-a3b-mathv60k"),
)
"""One recipe of each shape that a screen has."""


@pytest.mark.parametrize("name", DISTINCT)
def test_a_recipe_has_one_screen(capsys, name):
    lines = screen(capsys, name)
    assert lines[0] == lines[-1] != "", "the verdict comes first and last"
    assert lines[1].startswith(f"{name}: ")
    assert len(lines[0]) < COLUMNS and "\x1b" not in "".join(lines)


def test_a_fleet_has_one_screen_and_its_command_starts_it(capsys):
    code, out, _ = run(capsys, "plan", BIG, "--fleet")
    (command,) = (line for line in out.splitlines() if line.startswith("python3 launch.py up"))
    lines = out.replace(command, "").splitlines()
    assert code == 0 and len(lines) <= LINES and max(map(len, lines)) <= COLUMNS, out
    assert "no worker has run on a GPU" in " ".join(lines)
    assert re.search(r"^workers are a gain|^only with workers|^cheapest without", out)
    assert shlex.split(command)[:4] == ["python3", "launch.py", "up", BIG]


def test_the_offer_that_is_marked_is_the_one_that_up_takes(capsys):
    for name in (SEVEN, BIG, "sft-qwen2.5-72b-full"):
        said = "\n".join(screen(capsys, name))
        (marked,) = re.findall(r"^>  (\S+)", said, re.M)
        assert marked == choice.cheapest_target(get(name))
        assert f"`up` takes {marked} (>): the cheapest; first it needs " in said
    assert ">  slurm" in "\n".join(screen(capsys, SEVEN, "--target", "slurm"))


def test_what_would_be_cheaper_costs_what_it_says():
    """Each change, put into the recipe, is planned at the dollars that its line has."""
    recipe = get(SEVEN)
    catalogs = prices.sky_catalogs()
    offers = cost.offers(recipe, catalogs, ranges=True)
    targets = choice.driven_targets(recipe)
    taken = next(offer for offer in offers if offer.usd is not None and offer.target in targets)
    found = cheaper.cheaper_changes(recipe, taken, offers, targets, 100.0, catalogs)
    assert [one.what for one in found] == ["spot elsewhere"] and found[0].usd < taken.usd
    elsewhere = cost.offers(recipe, catalogs, [found[0].change.split()[-1]])[0]
    assert elsewhere.usd == found[0].usd and elsewhere.target not in targets


def test_spot_is_proposed_where_a_recipe_wants_none(capsys):
    given = ("--set", "cluster.spot=never")
    said = " ".join("\n".join(screen(capsys, BIG, *given)).split())
    assert re.search(r"spot [\d.]+ h \$\d+ --set cluster.spot=prefer --target \S+: .* preemptions", said) or (
        "spot elsewhere" not in said
    )


def test_a_terminal_has_color_and_bars():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=COLUMNS, color_system="standard")
    where = prices.sky_catalogs(), None
    facts, *memory = plan_facts.make_plan(
        get(SEVEN), cost.offers(get(SEVEN), ranges=True), None, where, None, None
    )
    remarked = dataclasses.replace(facts, remarks=["a remark [with brackets]"])
    plan_screen.show_plan((remarked, *memory), console)
    said = file.getvalue()
    assert "█" in said and "\x1b[32mfits" in said and "a remark [with brackets]" in said
    assert len(said.splitlines()) <= LINES


def test_the_front_page_shows_what_the_plan_says(capsys):
    """Renew it from `python3 launch.py plan` with no catalog of SkyPilot's here."""
    page = (ROOT / "README.md").read_text()
    shown = re.search(r"^```text\n(.*?)^```", page, re.M | re.S)[1].splitlines()
    said = [line.rstrip() for line in screen(capsys, SEVEN)]
    assert len(shown) == 6 and set(shown) <= set(said), "\n".join(said)


def names(kind):
    return {field.name for field in dataclasses.fields(kind)}


def test_the_facts_for_programs_have_the_documented_names(capsys):
    page = PAGE.read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", page[page.index("## For programs") :], re.M))
    kinds = (plan_facts.PlanFacts, plan_facts.PlannedOffer, plan_facts.PlanLimits, cheaper.CheaperChange)
    kinds += (cost.HourlyPrice,)
    assert documented == set.union(*map(names, kinds))
    code, out, err = run(capsys, "plan", SEVEN, "--json", "--deadline", "10m")
    facts = json.loads(out)
    assert code == 2 and not err
    assert set(facts) == names(plan_facts.PlanFacts) and facts["schema"] == plan_facts.SCHEMA
    assert set(facts["offers"][0]) == set(facts["taken"]) == names(plan_facts.PlannedOffer)
    assert set(facts["cheaper"][0]) == names(cheaper.CheaperChange)
    assert set(facts["limits"]) == names(plan_facts.PlanLimits) and facts["limits"]["kept"] is False
    assert facts["limits"]["deadline_hours"] == pytest.approx(1 / 6)
    assert facts["fits"] is True and facts["memory_gib"][facts["tightest"]] < facts["gpu_gib"]
    assert sum(facts["step_s"].values()) == pytest.approx(facts["taken"]["step_s"])
    for offer in facts["offers"]:
        assert offer["hours_10"] <= offer["hours"] <= offer["hours_90"]
        assert offer["usd"] is None or offer["market"] != "yours"


def test_what_does_not_fit_what_needs_no_gpu_and_what_trains_nothing(capsys):
    code, out, _ = run(capsys, "plan", BIG, "--json", "--set", "cluster.nodes=1")
    facts = json.loads(out)
    assert code == 2 and facts["fits"] is False and facts["cure"] == "--set cluster.nodes=4"
    assert facts["verdict"].startswith("does not fit: update needs 186.5 GiB of 79.2 GiB")
    code, out, _ = run(capsys, "plan", BIG, "--json", "--set", "sample.gpu=L40S")
    facts = json.loads(out)
    assert code == 2 and facts["problem"].startswith("the second group: the engine's share of memory")
    facts = json.loads(run(capsys, "plan", "demo", "--json")[1])
    assert facts["fits"] is None and facts["offers"] == [] and len(facts["expected"]) == 3
    facts = json.loads(run(capsys, "plan", "gpu-check", "--json")[1])
    assert set(facts["hourly"][0]) == names(cost.HourlyPrice) and facts["hourly"][0]["most_usd"] > 1


def test_a_slow_network_between_nodes_costs_hours_and_dollars(capsys):
    given = json.loads(run(capsys, "plan", BIG, "--target", "dstack-runpod", "--json")[1])
    slow = json.loads(
        run(capsys, "plan", BIG, "--target", "dstack-runpod", "--json", "--network-gbit", "10")[1]
    )
    for name in ("step_s", "hours", "hours_50", "usd", "usd_50"):
        assert slow["taken"][name] > 3 * given["taken"][name], name
    assert "10 Gb/s between nodes as given" in slow["assumptions"][0]
    alone = [
        json.loads(run(capsys, "plan", SEVEN, "--json", *more)[1]) for more in ((), ("--network-gbit", "10"))
    ]
    assert alone[0]["offers"] == alone[1]["offers"], "one node has no network to others"
