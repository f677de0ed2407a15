"""GPUs of an AMD node, on answers written down from AMD SMI's API reference."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from trainer.node.preflight import amd, gpus

GIB = 1 << 30
KINDS = SimpleNamespace(HOTSPOT="hotspot")
METRICS = SimpleNamespace(CURRENT="current", CRITICAL="critical")
PAGES = SimpleNamespace(RESERVED=0, PENDING=1, UNRESERVABLE=2)


class AmdSmiException(Exception):
    pass


class Recorded:
    """Answers for eight MI300X, one of which may be changed; what is None is not supported."""

    AmdSmiException = AmdSmiException
    AmdSmiTemperatureType = KINDS
    AmdSmiTemperatureMetric = METRICS
    AmdSmiMemoryPageStatus, AmdSmiMemoryType = PAGES, SimpleNamespace(VRAM="vram")

    def __init__(self, **changes):
        card = {"ecc": {"correctable_count": 3, "uncorrectable_count": 0, "deferred_count": 0}, "pages": []}
        card |= {"width": 16, "temperature": 48, "processes": []}
        self.cards = [card | {"serial": f"0xC{i}C{i}"} for i in range(8)]
        self.cards[5] |= changes
        self.open = 0

    def amdsmi_init(self):
        self.open += 1

    def amdsmi_shut_down(self):
        self.open -= 1

    def amdsmi_get_processor_handles(self):
        return self.cards

    def amdsmi_get_gpu_asic_info(self, card):
        return {"market_name": card.get("name", "AMD Instinct MI300X"), "asic_serial": card["serial"]}

    def amdsmi_get_gpu_memory_total(self, card, kind):
        return 192 * GIB

    def amdsmi_get_gpu_total_ecc_count(self, card):
        return card["ecc"]

    def amdsmi_get_gpu_bad_page_info(self, card):
        return card["pages"] or "No bad pages found."

    def amdsmi_get_pcie_info(self, card):
        return {"pcie_static": {"max_pcie_width": 16}, "pcie_metric": {"pcie_width": card["width"]}}

    def amdsmi_get_temp_metric(self, card, kind, metric):
        if card["temperature"] is None:
            raise AmdSmiException("not supported")
        return card["temperature"] if metric == "current" else 100

    def amdsmi_get_gpu_process_list(self, card):
        return card["processes"]


def faults(**changes):
    smi = Recorded(**changes)
    found = gpus.judge_gpus(amd.read_amd_gpus(smi, {}), 0, 8, 0, "")
    assert smi.open == 0
    return [(f.level, f.figure) for f in found if f.level != "pass"]


def test_healthy_gpus_have_no_finding():
    assert faults() == []
    reading = amd.read_amd_gpus(Recorded(), {"HIP_VISIBLE_DEVICES": "4,5"})
    serials = amd.read_amd_gpus(Recorded(), {"ROCR_VISIBLE_DEVICES": "GPU-c5c5, 4"})
    assert [g.index for g in serials.gpus] == [5, 4]
    assert [g.index for g in reading.gpus] == [4, 5] and reading.gpus[0].memory_bytes == 192 * GIB


@pytest.mark.parametrize(("changes", "level", "text"), [
    ({"ecc": {"uncorrectable_count": 2}}, "fail", "GPU 5 has 2 uncorrectable memory errors"),
    ({"pages": [{"status": PAGES.UNRESERVABLE}]}, "fail", "GPU 5 has failed to remap a memory row"),
    ({"pages": [{"status": PAGES.RESERVED}, {"status": PAGES.PENDING}]}, "warn", "GPU 5 waits for a reset"),
    ({"width": 8}, "warn", "GPU 5 is on PCIe x8, it can do x16"),
    ({"temperature": 97}, "warn", "GPU 5 is at 97 C and slows down at 100"),
    ({"processes": [{"pid": 7, "mem": GIB}, {"pid": 8, "mem": 0}]}, "warn", "used by 1 other processes"),
    ({"name": "AMD Instinct MI250X"}, "fail", "its GPUs are not alike"),
])  # fmt: skip
def test_each_fault_is_named_with_its_gpu(changes, level, text):
    ((found, figure),) = faults(**changes)
    assert found == level and text in figure


def test_what_is_not_supported_is_no_fault():
    assert faults(temperature=None, width="N/A", ecc="N/A") == []


def test_the_library_is_asked_where_it_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", Recorded(width=8))
    assert [f.level for f in amd.check_amd_gpus(0, 8)].count("warn") == 1
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert amd.check_amd_gpus(0, 8) == []
