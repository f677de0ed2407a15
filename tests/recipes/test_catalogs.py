"""SkyPilot's catalogs as each cloud publishes them: a column or a row that is missing never ends a plan."""

from __future__ import annotations

import csv

import pytest
import yaml

from recipes.plan import choice, cost, prices
from recipes.platforms.clouds import COUNTS
from recipes.platforms.targets import TARGETS
from recipes.presets import get
from recipes.recipe.spec import override
from tests.recipes.rendered import render
from trainer.config import ConfigError

SEVEN = "grpo-qwen2.5-vl-7b-mathv60k"
GPU = "H100"
HEADERS = {
    "runpod": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Region,SpotPrice,Price,"
    "AvailabilityZone,GpuInfo",
    "aws": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
    "AvailabilityZone,Arch",
    "azure": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
    "Generation",
    "lambda": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice",
    "nebius": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice",
    "oci": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
    "AvailabilityZone",
}
"""As SkyPilot 0.14.1's own fetchers write them (sky/catalog/data_fetchers); OCI's as published."""
ROW = {
    "InstanceType": "8x-machine",
    "AcceleratorName": GPU,
    "AcceleratorCount": "8.0",
    "vCPUs": "128",
    "MemoryGiB": "1600",
    "GpuInfo": "{'Gpus': [{'Name': 'H100', 'MemoryInfo': {'SizeInMiB': 81920}}]}",
    "Price": "23.6",
    "SpotPrice": "",
    "Region": "eu-north1",
    "AvailabilityZone": "eu-north1-a",
}


def catalog(folder, cloud: str, *rows: dict[str, str]):
    (folder / cloud).mkdir()
    with (folder / cloud / "vms.csv").open("w", newline="") as file:
        header = HEADERS[cloud].split(",")
        writer = csv.DictWriter(file, header, extrasaction="ignore", restval="")
        writer.writeheader()
        known = prices.gpu_price(cloud, GPU)
        name = known.engine_gpu if known else GPU
        writer.writerows(row | {"AcceleratorName": name} for row in rows)
    return folder


@pytest.mark.parametrize("cloud", HEADERS)
def test_every_clouds_catalog_is_read(tmp_path, cloud):
    found = prices.gpu_price(
        cloud, GPU, catalog(tmp_path, cloud, ROW, ROW | {"Price": "30", "SpotPrice": "12"})
    )
    assert found is not None and found.on_demand == pytest.approx(23.6 / 8)
    assert found.spot == pytest.approx(12 / 8) and found.host_gib == 200


@pytest.mark.parametrize("cloud", HEADERS)
@pytest.mark.parametrize("column", ["Price", "AcceleratorCount", "MemoryGiB", "Region", "AvailabilityZone"])
@pytest.mark.parametrize("value", ["", "n/a"])
def test_a_row_that_lacks_something_ends_no_plan(tmp_path, cloud, column, value):
    folder = catalog(tmp_path, cloud, ROW | {column: value}, ROW | {"Region": "us-1", "Price": "40"})
    found = prices.gpu_price(cloud, GPU, folder)
    assert found is not None and found.on_demand > 0


def test_a_catalog_without_a_line(tmp_path):
    (tmp_path / "lambda").mkdir()
    (tmp_path / "lambda/vms.csv").write_text("")
    assert prices.catalog_entry("lambda", GPU, GPU, tmp_path) is None


def test_machines_of_the_size_that_is_asked_for_are_priced(tmp_path):
    """A cloud's smallest machine may be another card at another price than an eighth of its largest."""
    one, eight = (
        ROW | {"AcceleratorCount": count, "Price": usd, "MemoryGiB": ram}
        for count, usd, ram in (("1.0", "3.29", "200"), ("8.0", "31.92", "1800"))
    )
    folder = catalog(tmp_path, "lambda", one, eight)
    asked = {count: prices.gpu_price("lambda", GPU, folder, count=count) for count in (0, 1, 4, 8)}
    assert [row.on_demand for row in asked.values()] == [3.29, 3.29, 3.29, 3.99]
    assert asked[8].host_gib == 225
    assert list(prices.region_prices("lambda", GPU, False, folder, count=8).values()) == [3.99]


SKY_NAMES = {"aws", "azure", "gcp", "lambda", "nebius", "runpod"}
"""SkyPilot 0.14.1's names of the clouds that it can start containers on (sky/clouds)."""


@pytest.mark.parametrize("row", prices.price_snapshot(), ids=lambda row: f"{row.cloud} {row.gpu} {row.sizes}")
def test_a_row_of_the_snapshot_can_be_planned_with(row):
    year, month, *_ = (int(part) for part in row.read.split("-"))
    assert (year, 1 <= month <= 12) == (2026, True) and len(row.source) > 10
    assert 0.2 < row.on_demand < 20
    assert row.spot is None or 0.2 < row.spot <= row.on_demand
    assert row.host_gib is None or 50 <= row.host_gib <= 512
    targets = [name for name, can in TARGETS.items() if can.cloud == row.cloud]
    assert targets and row.cloud.removesuffix("-cluster") in SKY_NAMES
    assert any(row.gpu in TARGETS[name].gpus for name in targets)
    sold = COUNTS.get((row.cloud, row.gpu), range(1, 9))
    assert set(row.sizes) <= set(sold)


def test_no_two_rows_of_the_snapshot_price_the_same_machine():
    for cloud, gpu in {(row.cloud, row.gpu) for row in prices.price_snapshot()}:
        for count in COUNTS.get((cloud, gpu), range(1, 9)):
            forms = [
                row.engine_gpu
                for row in prices.price_snapshot()
                if (row.cloud, row.gpu) == (cloud, gpu) and (not row.sizes or count in row.sizes)
            ]
            assert len(forms) == len(set(forms)), (cloud, gpu, count)


def test_a_plan_without_catalogs_compares_every_cloud(tmp_path):
    """And one with catalogs goes by them."""
    found = {offer.target for offer in cost.offers(get(SEVEN), tmp_path) if offer.usd is not None}
    assert found == {f"skypilot-{cloud}" for cloud in SKY_NAMES} | {"dstack-runpod", "dstack-gcp"}
    catalog(tmp_path, "nebius", ROW | {"Price": "16", "SpotPrice": "8"})
    prices.catalog_entry.cache_clear()
    listed = cost.offers(get(SEVEN), tmp_path, ["skypilot-nebius"])
    assert {round(offer.usd_per_hour) for offer in listed} == {16, 8}, "and the disk's cents"


def test_the_default_target_is_one_that_our_launch_environment_drives(tmp_path, monkeypatch):
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))
    cheapest = next(o.target for o in cost.offers(get(SEVEN), tmp_path) if o.usd is not None)
    assert TARGETS[cheapest].needs and choice.cheapest_target(get(SEVEN)) == "skypilot-runpod"
    prices.sky_catalogs().mkdir(parents=True)
    catalog(prices.sky_catalogs(), "nebius", ROW | {"Price": "4"})
    assert choice.cheapest_target(get(SEVEN)) == "skypilot-nebius"


@pytest.mark.parametrize("clouds", ["aws,nebius,lambda", "azure", "runpod,gcp,aws,azure,lambda,nebius"])
def test_skypilot_chooses_among_the_clouds_that_are_named(clouds):
    recipe = override(get(SEVEN), [f"site.clouds=[{clouds}]"])
    task = yaml.safe_load(next(iter(render(recipe, "skypilot").values())))
    places = task["resources"]["ordered"]
    assert {place["infra"] for place in places} == set(clouds.split(","))
    expected = {
        (o.target.removeprefix("skypilot-"), o.spot): o.usd for o in cost.offers(recipe) if o.usd is not None
    }
    first = (places[0]["infra"], places[0].get("use_spot", False))
    assert expected[first] == min(usd for (cloud, _), usd in expected.items() if cloud in clouds.split(","))


def test_clouds_that_cannot_be_chosen_among():
    with pytest.raises(ConfigError, match="site.clouds has ibm, oci: give some of aws, azure, gcp"):
        render(override(get(SEVEN), ["site.clouds=[ibm,aws,oci]"]), "skypilot")
    four_nodes = override(get("grpo-qwen2.5-vl-72b-mathv60k"), ["site.clouds=[runpod]"])
    with pytest.raises(ConfigError, match="skypilot-runpod runs one node"):
        render(four_nodes, "skypilot")


def test_the_snapshot_s_rows_of_runpod_are_those_of_the_catalog_or_say_so():
    """Rows as SkyPilot's catalog of November 2026 has them, for machines of one GPU."""
    for form, usd in (("A100-80GB", 1.39), ("H100-SXM", 3.29)):
        (row,) = [one for one in prices.price_snapshot() if (one.cloud, one.engine_gpu) == ("runpod", form)]
        assert usd == row.on_demand or f"${usd}" in row.source
