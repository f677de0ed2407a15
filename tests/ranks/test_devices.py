"""Every rank sees all GPUs of its machine, and knows which one is its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trainer.ranks.environment import SHOW_ALL, device_position


@pytest.mark.parametrize(
    ("gpu", "env", "found"),
    [
        ("3", {}, 3),
        ("5", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 1),
        ("GPU-bb", {"CUDA_VISIBLE_DEVICES": "GPU-aa, GPU-bb"}, 1),
        (" GPU-bb", {"CUDA_VISIBLE_DEVICES": "GPU-aa, GPU-bb"}, 1),
        ("MIG-2", {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, 1),
        ("1", {"HIP_VISIBLE_DEVICES": "2,1"}, 1),
    ],
)
def test_a_gpu_is_found_by_its_index_or_its_uuid(gpu, env, found):
    assert device_position(gpu, env) == found


ACTORS = """
import json, os, ray
from trainer.config import Placement, RunConfig
from trainer.ranks.environment import rank_environment
from trainer.ranks.process import RankProcess

config = RunConfig(placement=Placement(workers_per_node=2))
class Named(RankProcess):
    def __init__(self): self.config = config
    def seen(self): return os.environ.get("CUDA_VISIBLE_DEVICES")
ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
options = dict(num_gpus=1, num_cpus=1, runtime_env={"env_vars": rank_environment(config)})
actors = [ray.remote(Named).options(**options).remote() for _ in range(2)]
places = ray.get([actor.where.remote() for actor in actors])
print(json.dumps([sorted(place.position for place in places), ray.get([a.seen.remote() for a in actors])]))
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seen", ["GPU-5f3c,GPU-77aa", "4,5"])
def test_ray_hides_no_gpu_from_a_rank_and_uuids_are_no_obstacle(seen, tmp_path):
    env = os.environ | {"CUDA_VISIBLE_DEVICES": seen, "RAY_TMPDIR": str(tmp_path)[:40]}
    done = subprocess.run(
        [sys.executable, "-c", ACTORS], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f'[[0, 1], ["{seen}", "{seen}"]]'


def test_the_variables_are_those_that_ray_reads():
    from ray._private.accelerators import amd_gpu, nvidia_gpu

    assert nvidia_gpu.NOSET_CUDA_VISIBLE_DEVICES_ENV_VAR in SHOW_ALL
    names = {value for name, value in vars(amd_gpu).items() if name.startswith("NOSET_")}
    assert names and names <= set(SHOW_ALL)


JOINS = """
import os, sys
import torch
from trainer.config import Placement, RunConfig
from trainer.ranks.process import RankProcess

torch.cuda.set_device = lambda index: None  # there is none
cores = int(sys.argv[1])
os.sched_getaffinity = lambda pid: set(range(cores))
torch.set_num_threads(1)  # as Ray leaves it
rank = RankProcess(RunConfig(placement=Placement(device="cuda", workers_per_node=int(sys.argv[2]))))
rank.set_rank(0, 0, "127.0.0.1", 1)
print(torch.get_num_threads())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "ranks", "threads"), [(26, 1, 26), (208, 8, 26), (4, 8, 1)])
def test_a_rank_on_a_gpu_computes_with_its_share_of_the_cores(cores, ranks, threads):
    command = [sys.executable, "-c", JOINS, str(cores), str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.splitlines()[-1]) == threads
