"""Files of several nodes on eight kinds of Kubernetes clusters, as SkyPilot judges by labels."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from recipes.presets import get
from recipes.recipe.spec import override
from tests.recipes.rendered import render

LAUNCH = Path(__file__).parents[2] / ".venvs/launch/bin/python"
LABELS = {
    "InfiniBand of one's own": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "GKE A2": {
        "cloud.google.com/machine-family": "a2",
        "cloud.google.com/gke-accelerator": "nvidia-tesla-a100",
    },
    "GKE A3": {"cloud.google.com/machine-family": "a3", "node.kubernetes.io/instance-type": "a3-highgpu-8g"},
    "AKS": {"kubernetes.azure.com/accelerator": "nvidia"},
    "EKS": {"topology.k8s.aws/zone-id": "use1-az1", "k8s.io/cloud-provider-aws": "x"},
    "Nebius": {"nebius.com/node-group-id": "x"},
    "CoreWeave": {"ib.coreweave.cloud/speed": "400G"},
    "OCI": {"oci.oraclecloud.com/rdma.cluster_id": "x"},
}
"""Labels of a node of each kind; the cluster's API is played, the decision is SkyPilot's."""
REFUSE_A_TIER = {"InfiniBand of one's own", "GKE A2", "AKS"}
"""Kinds on which a file that asks for a tier of the network does not start."""
CODE = """
import json, sys, types
import sky, yaml
from sky.clouds import kubernetes as kind
from sky.provision.kubernetes import utils
labels, texts = json.load(sys.stdin)
utils.get_spot_label = lambda *a, **k: (None, None)
refused = []
for cluster, own in labels.items():
    metadata, status = types.SimpleNamespace(labels=own), types.SimpleNamespace(allocatable={})
    node = types.SimpleNamespace(metadata=metadata, status=status)
    utils.get_kubernetes_nodes = lambda context=None, node=node: [node]
    for name, text in texts.items():
        given = [("RUN_ID", "r"), ("BUCKET", "gs://b")]
        task = sky.Task.from_yaml_config(yaml.safe_load(text), env_overrides=given)
        for resources in task.resources:
            wanted = resources.get_required_cloud_features()
            lacks = kind.Kubernetes._unsupported_features_for_resources(resources, region="mine")
            lacks = wanted & set(lacks)
            if lacks:
                refused.append([cluster, name, sorted(map(str, lacks))])
print(json.dumps(refused))
"""


@pytest.mark.skipif(not LAUNCH.exists(), reason="no .venvs/launch")
def test_no_kind_of_cluster_refuses_what_a_file_asks_for():
    """And one that asks for a tier of the network would be refused by three of the eight."""
    texts = {}
    for name in ("grpo-qwen2.5-vl-72b-mathv60k", "grpo-qwen2.5-vl-32b-mathv60k"):
        texts[name] = next(
            iter(render(override(get(name), ["site.rdma=rdma/ib:8"]), "skypilot-kubernetes").values())
        )
    asks = yaml.safe_load(texts["grpo-qwen2.5-vl-72b-mathv60k"])
    asks["resources"]["network_tier"] = "best"
    done = subprocess.run(
        [LAUNCH, "-c", CODE],
        input=json.dumps([LABELS, texts | {"tier": yaml.safe_dump(asks)}]),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refused = json.loads(done.stdout.strip().splitlines()[-1])
    assert {name for _, name, _ in refused} == {"tier"}
    assert {cluster for cluster, _, _ in refused} == REFUSE_A_TIER
