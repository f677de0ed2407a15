"""SkyPilot's catalogs as each cloud publishes them: a column or a row that is missing never ends a plan."""

from __future__ import annotations

import csv

import pytest

from recipes.plan import prices

GPU = "H100"
HEADERS = {
    "runpod": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Region,SpotPrice,Price,"
    "AvailabilityZone,GpuInfo",
    "aws": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
    "AvailabilityZone,Arch",
    "azure": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,GpuInfo,"
    "Arch",
    "lambda": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice",
    "nebius": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice",
}
"""As SkyPilot 0.14.1's own fetchers write them (sky/catalog/data_fetchers)."""
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
        known = prices.price(cloud, GPU)
        name = known.engine_gpu if known else GPU
        writer.writerows(row | {"AcceleratorName": name} for row in rows)
    return folder


@pytest.mark.parametrize("cloud", HEADERS)
def test_every_clouds_catalog_is_read(tmp_path, cloud):
    found = prices.price(cloud, GPU, catalog(tmp_path, cloud, ROW, ROW | {"Price": "30", "SpotPrice": "12"}))
    assert found is not None and found.on_demand == pytest.approx(23.6 / 8)
    assert found.spot == pytest.approx(12 / 8) and found.host_gib == 200


@pytest.mark.parametrize("cloud", HEADERS)
@pytest.mark.parametrize("column", ["Price", "AcceleratorCount", "MemoryGiB", "Region", "AvailabilityZone"])
@pytest.mark.parametrize("value", ["", "n/a"])
def test_a_row_that_lacks_something_ends_no_plan(tmp_path, cloud, column, value):
    folder = catalog(tmp_path, cloud, ROW | {column: value}, ROW | {"Region": "us-1", "Price": "40"})
    found = prices.price(cloud, GPU, folder)
    assert found is not None and found.on_demand > 0


def test_a_catalog_without_a_line(tmp_path):
    (tmp_path / "lambda").mkdir()
    (tmp_path / "lambda/vms.csv").write_text("")
    assert prices.listed("lambda", GPU, GPU, tmp_path) is None
