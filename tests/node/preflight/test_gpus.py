"""GPU, driver, InfiniBand and speed checks on answers written down from NVML's and the kernel's
documentation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from trainer.hardware import driver
from trainer.node.preflight import gpus, host, infiniband, speed
from trainer.observe.node_monitor import NodeMonitor

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "total": 80 * GIB,
    "ecc": 0,
    "rows": (0, 0, False, False),
    "links": 18,
}
H100 |= {"width": 16, "generation": 5, "temperature": 40, "slowdown": 90, "pids": ()}
H100 |= {"width_max": 16, "power": 300_000}
H100["reasons"] = pynvml.nvmlClocksEventReasonGpuIdle


READINGS = {
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetTotalEccErrors": "ecc",
    "nvmlDeviceGetRemappedRows": "rows",
    "nvmlDeviceGetCurrPcieLinkWidth": "width",
    "nvmlDeviceGetMaxPcieLinkWidth": "width_max",
    "nvmlDeviceGetMaxPcieLinkGeneration": "generation",
    "nvmlDeviceGetCurrentClocksEventReasons": "reasons",
    "nvmlDeviceGetTemperature": "temperature",
    "nvmlDeviceGetTemperatureThreshold": "slowdown",
    "nvmlDeviceGetPowerUsage": "power",
}
"""What NVML is asked of a card, by the field that answers."""


class Recorded:
    """Answers of NVML for eight H100 GPUs, each of which may be changed; what is None is not supported."""

    def __init__(self, driver: str = "580.95.05", cuda: int = 13000, **changes):
        self.driver, self.cuda = driver, cuda
        self.cards = [H100 | {"uuid": f"GPU-{i}00{i}"} | changes.get(f"gpu{i}", {}) for i in range(8)]
        self.open = 0

    def __getattr__(self, name):
        """A reading of a card, if it is one of them; all else is NVML's own."""
        if name not in READINGS:
            return getattr(pynvml, name)

        def read(card, *more):
            if name == "nvmlDeviceGetTotalEccErrors":
                assert more == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
            if card[READINGS[name]] is None:
                raise pynvml.NVMLError_NotSupported
            return card[READINGS[name]]

        return read

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self.cuda

    def nvmlDeviceGetCount(self):
        return 8

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index]

    def nvmlDeviceGetMaxMigDeviceCount(self, card):
        return 7 if card["uuid"] == "GPU-5005" else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card, number):
        if number > 2:
            raise pynvml.NVMLError_NotFound
        return {"uuid": f"MIG-5{number}"}

    def nvmlDeviceGetUtilizationRates(self, card):
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetMemoryInfo(self, card):
        return SimpleNamespace(total=card["total"], used=0)

    def nvmlDeviceGetNvLinkState(self, card, link):
        if link >= card["links"]:
            raise pynvml.NVMLError_InvalidArgument
        return link not in card.get("down", ())

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        return [SimpleNamespace(pid=pid) for pid in card["pids"]]


def wrong(nvml: Recorded, log: str = "booted", cuda: int = 13):
    found = gpus.judge_gpus(gpus.read_gpus(nvml, {}), rank=2, wanted=8, cuda=cuda, log=log)
    assert nvml.open == 0 and all(f.nodes == (2,) for f in found)
    return [(f.level, f.check, f.figure) for f in found if f.level != "pass"]


def test_eight_good_gpus_pass():
    assert wrong(Recorded()) == []
    idle = {"gpu0": {"reasons": pynvml.nvmlClocksEventReasonSwPowerCap}}
    assert wrong(Recorded(**idle)) == []


ALL_DOWN = {"down": tuple(range(18))}
UNLINKED = f"GPU 5 has NVLink {', '.join(map(str, range(18)))} of 18 down"
HOT = "GPU 5 is slowed down: hardware slowdown, hardware thermal slowdown"
MIXED = "its GPUs are not alike: NVIDIA A100-SXM4-80GB of 80 GiB, NVIDIA H100 80GB HBM3 of 80 GiB"


@pytest.mark.parametrize(("change", "finding"), [
    ({"ecc": 3}, ("fail", "ECC", "GPU 5 has 3 uncorrectable memory errors")),
    ({"rows": (0, 2, True, False)},
     ("warn", "row remapping", "GPU 5 waits for a reset to remap a memory row")),
    ({"rows": (0, 2, True, True)}, ("fail", "ECC", "GPU 5 has failed to remap a memory row")),
    ({"down": (3, 7)}, ("fail", "NVLink", "GPU 5 has NVLink 3, 7 of 18 down")),
    (ALL_DOWN, ("fail", "NVLink", UNLINKED)),
    ({"width": 8}, ("warn", "PCIe", "GPU 5 is on PCIe x8, it can do x16")),
    ({"generation": 4}, ("warn", "PCIe", "GPU 5 is on PCIe 4, others here on PCIe 5")),
    ({"reasons": 8 | 64}, ("fail", "clocks", HOT)),
    ({"temperature": 87}, ("warn", "temperature", "GPU 5 is at 87 C and slows down at 90")),
    ({"pids": (11, 12)}, ("warn", "processes on the GPU", "GPU 5 is used by 2 other processes")),
    ({"name": "NVIDIA A100-SXM4-80GB"}, ("fail", "GPU model", MIXED)),
])  # fmt: skip
def test_each_fault_of_a_gpu_is_named(change, finding):
    assert wrong(Recorded(gpu5=change)) == [finding]


def test_cards_without_a_bridge_have_no_fault():
    """PCIe cards, and a board whose fabric is off: each of their links says that it is inactive."""
    assert wrong(Recorded(**{f"gpu{i}": ALL_DOWN for i in range(8)})) == []
    found = gpus.judge_gpus(
        gpus.read_gpus(Recorded(gpu0=ALL_DOWN), {"CUDA_VISIBLE_DEVICES": "0"}), 0, 1, 13, ""
    )
    assert {f.figure for f in found if f.check == "NVLink"} == {"no bridge: none of 18 links is up"}


def test_what_a_gpu_does_not_support_is_no_fault():
    bare = dict.fromkeys(("ecc", "rows", "width", "generation", "reasons", "slowdown")) | {"links": 0}
    assert wrong(Recorded(**{f"gpu{i}": bare for i in range(8)})) == []


def test_a_node_with_other_gpus_or_another_driver_than_the_rest_is_named():
    def of(rank: int, driver: str = "580.95.05", **changes) -> list:
        nvml = Recorded(**{f"gpu{i}": changes for i in range(8)}, driver=driver)
        return gpus.judge_gpus(gpus.read_gpus(nvml, {}), rank, 8, 13, "booted")

    same = [f for rank in range(4) for f in of(rank)]
    assert gpus.compare_gpus(same) == [] == gpus.compare_gpus([])
    small = [*of(0), *of(1), *of(2, total=40 * GIB), *of(3, driver="590.10")]
    model, other = gpus.compare_gpus(small)
    assert (model.level, model.nodes) == ("fail", (2,))
    assert "of 40 GiB, theirs 8 x NVIDIA H100" in model.figure
    assert (other.level, other.nodes, other.check) == ("warn", (3,), "driver")
    assert model.remedy and model.target


@pytest.mark.parametrize(
    "listed", ["5,7", "5, 7", "GPU-5005,GPU-7007", "GPU-50, GPU-70", "MIG-51,MIG-52,GPU-7007"]
)
def test_a_neighbor_s_fault_is_its_own_and_ours_is_ours(listed):
    env = {"CUDA_VISIBLE_DEVICES": listed}
    for faulty, levels in (("gpu3", set()), ("gpu7", {"fail"})):
        reading = gpus.read_gpus(Recorded(**{faulty: {"ecc": 3}}), env)
        assert [g.index for g in reading.gpus] == [5, 7]
        found = gpus.judge_gpus(reading, 0, 2, 13, "")
        assert {f.level for f in found if f.level != "pass"} == levels


@pytest.mark.parametrize("listed", ["", "-1"])
def test_where_no_gpu_is_ours_none_is_read(listed):
    assert gpus.read_gpus(Recorded(gpu3={"ecc": 3}), {"CUDA_VISIBLE_DEVICES": listed}).gpus == ()


def test_the_monitor_samples_our_gpus_alone(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", Recorded())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5005, GPU-70")
    assert [gpu["gpu"] for gpu in NodeMonitor(0, tmp_path, tmp_path).sample()["gpus"]] == [5, 7]


def test_xids_of_the_hardware_are_found_in_the_kernel_log():
    log = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
    log += "NVRM: Xid (PCI:0000:86:00): 31, pid=2"
    assert wrong(Recorded(), log) == [
        ("fail", "kernel log", "the kernel log has Xid 79 (fallen off the bus)")
    ]
    assert wrong(Recorded(), "") == []


def test_what_the_loaded_library_answers_decides():
    """Driver 570 with the image's forward-compatibility libraries runs CUDA 13; its kernel module is as
    old."""
    assert wrong(Recorded(driver="570.124.06", cuda=13000)) == []
    (finding,) = wrong(Recorded(driver="570.124.06", cuda=12080))
    assert finding[:2] == ("fail", "driver")
    assert "runs CUDA 12.8, and CUDA 13 needs driver 580.65 or newer" in finding[2]
    assert driver.required_cuda() == 13
    assert driver.driver_problem(13010, 13) == driver.driver_problem(13000, 12) == ""
    assert driver.driver_problem("no GPU driver (none)", 13).startswith(
        "no GPU driver (none): take a GPU machine"
    )


def test_the_driver_check_runs_without_any_package():
    command = [sys.executable, "-I", "-S", str(ROOT / "trainer/hardware/driver.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, driver.EXIT_MACHINE) and len((done.stdout + done.stderr).splitlines()) == 1


# --- InfiniBand and speed -------------------------------------------------------------------------------


def sysfs(root: Path, *devices: tuple[str, str, str]) -> Path:
    for name, state, rate in devices:
        folder = root / name / "ports" / "1"
        folder.mkdir(parents=True)
        for file, text in (("state", state), ("rate", rate), ("link_layer", "InfiniBand")):
            (folder / file).write_text(text + "\n")
    return root


def test_nccl_is_told_which_ports_to_use_only_where_it_would_choose_others(tmp_path):
    good = sysfs(tmp_path / "good", *[(f"mlx5_{i}", "4: ACTIVE", "400 Gb/sec (4X NDR)") for i in range(8)])
    assert infiniband.nccl_variables(infiniband.infiniband_ports(good), {}) == ({}, "")
    ports = [("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "10 Gb/sec")]
    mixed = sysfs(tmp_path / "mixed", *ports, ("mlx5_2", "4: ACTIVE", "25 Gb/sec"))
    found = infiniband.infiniband_ports(mixed)
    variables, reason = infiniband.nccl_variables(found, {})
    assert variables == {"NCCL_IB_HCA": "=mlx5_0:1"} and "mlx5_1, mlx5_2 is down or slower" in reason
    assert infiniband.nccl_variables(found, {"NCCL_IB_HCA": "mlx5_2"}) == ({}, "")
    assert infiniband.nccl_variables(infiniband.infiniband_ports(tmp_path / "none"), {}) == ({}, "")


def test_a_node_with_less_fabric_than_the_others_is_named(tmp_path):
    root = sysfs(tmp_path / "8", *[(f"m{i}", "4: ACTIVE", "400 Gb/sec") for i in range(8)])
    eight = [vars(port) for port in infiniband.infiniband_ports(root)]
    seven = [*eight[:7], eight[7] | {"active": False}]
    (finding,) = [f for f in infiniband.judge_infiniband({0: eight, 1: seven, 2: eight}) if f.level != "pass"]
    figure = "2800 Gb/s of InfiniBand or RoCE (m7 down), another node has 3200"
    assert (finding.nodes, finding.figure) == ((1,), figure)
    assert infiniband.judge_infiniband({0: [], 1: []}) == []


def measured(**changes) -> list[dict]:
    base = {"gpu": "NVIDIA H100 80GB HBM3", "tflops": 700.0, "memory_gb_per_s": 3000.0, "wrong": False}
    base |= {"inside_gb_per_s": 440.0, "between_gb_per_s": 380.0}
    return [base | {"rank": r, "node": r // 8} | changes.get(f"r{r}", {}) for r in range(16)]


def not_passed(ranks: list[dict]) -> list:
    return [f for f in speed.judge_speed(ranks, 3200.0) if f.level != "pass"]


def test_speeds_are_held_against_the_targets():
    assert {f.level for f in speed.judge_speed(measured(), 3200.0)} == {"pass"}
    slow = measured(r11={"tflops": 600.0})
    (finding,) = not_passed(slow)
    assert finding.nodes == (1,) and finding.figure == "GPU of rank 11 reaches 600 TFLOP/s, the median is 700"
    pcie = [r | {"inside_gb_per_s": 20.0} if r["node"] == 0 else r for r in measured()]
    (finding,) = not_passed(pcie)
    assert finding.nodes == (0,) and finding.level == "fail" and "400 GB/s (Together" in finding.target
    for wrong, nodes in (({"r9": {"wrong": True}}, (1,)), ({"r9": {"wrong_between": True}}, ())):
        (finding,) = not_passed(measured(**wrong))
        assert (finding.check, finding.nodes, finding.machine) == ("sums", nodes, True)
    sockets = [r | {"between_gb_per_s": 6.0} for r in measured()]
    (finding,) = not_passed(sockets)
    assert finding.level == "fail" and finding.target.startswith("320 GB/s: 80% of 3200 Gb/s")


def test_the_cuda_of_torch_is_read_without_importing_it():
    import torch

    assert gpus.cuda_of_torch() == int((torch.version.cuda or "0").partition(".")[0])


def test_a_gpu_that_is_lost_is_named_and_not_passed_over(monkeypatch):
    def lost(nvml):
        raise pynvml.NVMLError_GpuIsLost

    monkeypatch.setattr(gpus, "read_gpus", lost)
    (finding,) = gpus.check_gpus(0, 8)
    assert finding.level == "fail" and "does not answer" in finding.figure
    monkeypatch.setattr(
        gpus, "read_gpus", lambda nvml: (_ for _ in ()).throw(pynvml.NVMLError_LibraryNotFound)
    )
    assert gpus.check_gpus(0, 8) == []


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Has nvidia-smi print what it is given."""

    def prints(text: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{text}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return prints


def test_a_line_about_a_lost_gpu_counts_none(nvidia_smi):
    lost = "Unable to determine the device handle for GPU 1: GPU is lost"
    nvidia_smi(f"GPU 0: NVIDIA H100 (UUID: GPU-1)\\n{lost}\\n")
    assert host.count_gpus({}) == 1


@pytest.mark.parametrize(
    ("listed", "count"),
    [("GPU-5f, GPU-77", 2), ("MIG-5f-1,MIG-5f-2", 2), ("0,9", 1), ("GPU-gone", 0), ("", 0), ("-1", 0)],
)
def test_gpus_are_counted_as_the_driver_names_them(nvidia_smi, listed, count):
    lines = "GPU 0: NVIDIA A100 (UUID: GPU-5f3c)\\n  MIG 3g.40gb Device 0: (UUID: MIG-5f-1)\\n"
    lines += "  MIG 3g.40gb Device 1: (UUID: MIG-5f-2)\\nGPU 1: NVIDIA A100 (UUID: GPU-77aa)\\n"
    nvidia_smi(lines)
    assert host.count_gpus({"CUDA_VISIBLE_DEVICES": listed}) == count
    assert host.count_gpus({}) == 2
