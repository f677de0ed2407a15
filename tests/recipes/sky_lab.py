"""A real SkyPilot API server without a cloud: `.venvs/launch/bin/python tests/recipes/sky_lab.py HOME <
files.json`.

Run it inside a network namespace (`unshare -n`), in the repository's root. Catalogs are seeded, RunPod and
GCP enabled as `sky check` stores them, and every task goes through `sky launch --dryrun`; prints what was
chosen, or why not.
"""

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

RUNPOD = (("A100-80GB", 1.39), ("A100-80GB-SXM", 1.79), ("H100-SXM", 3.29))
GCP = (
    ("a2-ultragpu", "A100-80GB", 12, 170, 1.10, 0.44, 3.97, 1.59),
    ("a3-highgpu", "H100", 26, 234, 1.18, 0.27, 9.80, 6.30),
)
GCP_IMAGES = (
    "custom-cpu-ubuntu-2204",
    "custom-gpu-ubuntu-2204",
    "custom-gpu-ubuntu-2204-cuda13",
    "gpu-direct-cos",
)
"""Machine images that SkyPilot starts; our container runs in one."""
ACCELERATORS = {
    "A100-80GB": ["GCP", "RunPod"],
    "A100-80GB-SXM": ["RunPod"],
    "H100": ["GCP"],
    "H100-SXM": ["RunPod"],
}


def _info(gpu: str, count: int) -> str:
    memory = f"{{'SizeInMiB': 81920}}}}], 'TotalGpuMemoryInMiB': {81920 * count}}}"
    return (
        f"\"{{'Gpus': [{{'Name': '{gpu}', 'Manufacturer': 'NVIDIA', 'Count': {count}, 'MemoryInfo':"
        f' {memory}"'
    )


def write_catalogs(folder: Path) -> None:
    """Rows in the format of SkyPilot's catalog v8: GPUs by 1, 2, 4 and 8, and a few CPU machines."""
    for cloud in ("runpod", "gcp", "common"):
        (folder / cloud).mkdir(parents=True)
    lines = [
        "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Region,SpotPrice,Price,AvailabilityZone,GpuInfo"
    ]
    for gpu, usd in RUNPOD:
        for n in (1, 2, 4, 8):
            prices = f"{usd * n:.2f},{usd * n:.2f}"
            lines.append(
                f"{n}x_{gpu}_SECURE,{gpu},{n}.0,{8 * n}.0,{117 * n}.0,US,{prices},US-KS-2,{_info(gpu, n)}"
            )
    lines += [f"cpu3g-{n}-{4 * n},,,{n}.0,{4 * n}.0,US,,{0.04 * n:.2f},US-KS-2," for n in (2, 4, 8)]
    (folder / "runpod/vms.csv").write_text("\n".join(lines) + "\n")
    lines = [
        "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice"
    ]
    place = "us-central1,us-central1-a"
    for machine, gpu, cpus, memory, host, host_spot, usd, spot in GCP:
        for n in (1, 2, 4, 8):
            lines.append(
                f"{machine}-{n}g,{cpus * n}.0,{memory * n}.0,,,,{place},{host * n:.4f},{host_spot * n:.4f}"
            )
            lines.append(f",,,{gpu},{n}.0,{_info(gpu, n)},{place},{usd * n:.4f},{spot * n:.4f}")
    lines += [
        f"n2-standard-{n},{n}.0,{4 * n}.0,,,,{place},{0.048 * n:.3f},{0.012 * n:.3f}" for n in (4, 8, 16, 32)
    ]
    (folder / "gcp/vms.csv").write_text("\n".join(lines) + "\n")
    images = [
        f"skypilot:{tag},,ubuntu,22.04,projects/stand-in/global/images/{tag},20260101" for tag in GCP_IMAGES
    ]
    (folder / "gcp/images.csv").write_text(
        "\n".join(["Tag,Region,OS,OSVersion,ImageId,CreationDate", *images]) + "\n"
    )
    rows = [f'{name},"{clouds}"' for name, clouds in ACCELERATORS.items()]
    (folder / "common/accelerators.csv").write_text("AcceleratorName,Clouds\n" + "\n".join(rows) + "\n")


def write_credentials(home: Path) -> None:
    """Files that the clouds' checks look for; the keys are not valid anywhere."""
    (home / ".runpod").mkdir()
    (home / ".runpod/config.toml").write_text('[default]\napi_key = "stand-in"\n')
    (home / ".config/gcloud/configurations").mkdir(parents=True)
    (home / ".config/gcloud/active_config").write_text("default")
    config = "[core]\naccount = stand-in@example.com\nproject = stand-in\n"
    (home / ".config/gcloud/configurations/config_default").write_text(config)
    keys = {"type": "authorized_user", "client_id": "x", "client_secret": "x", "refresh_token": "x"}
    (home / ".config/gcloud/application_default_credentials.json").write_text(json.dumps(keys))
    (home / ".sky/config.yaml").write_text("allowed_clouds: [runpod, gcp]\n")


def enable_clouds(home: Path) -> None:
    """What `sky check` stores for clouds that answered; after the server's own check at boot, which finds
    none."""
    from sky import check, global_user_state, skypilot_config
    from sky.clouds.cloud import CloudCapability

    log, deadline = home / ".sky/api_server/server.log", time.monotonic() + 180
    while "skypilot-server-on-boot-check finished" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.5)
    workspace = skypilot_config.get_active_workspace()
    global_user_state.set_allowed_clouds(check._get_workspace_allowed_clouds(workspace), workspace)
    for capability in CloudCapability:
        global_user_state.set_enabled_clouds(["RunPod", "GCP"], capability, workspace)


def dry_runs(files: dict[str, str]) -> dict:
    """Every task through the server's optimizer and provisioner, as `sky launch --dryrun` does it."""
    import sky
    import yaml

    requests, out = {}, {}
    for i, (name, text) in enumerate(files.items()):
        try:
            task = sky.Task.from_yaml_config(
                yaml.safe_load(text), env_overrides=[("RUN_ID", "r"), ("BUCKET", "gs://bucket")]
            )
            requests[name] = sky.launch(task, cluster_name=f"c{i}", dryrun=True)
        except Exception as error:
            out[name] = {"error": f"{type(error).__name__}: {error}"}
    for name, request in requests.items():
        log = io.StringIO()
        try:
            sky.stream_and_get(request, output_stream=log)
            text = re.sub(r"\x1b\[[0-9;]*m", "", log.getvalue())
            chosen = [line.replace("✔", "") for line in text.splitlines() if "✔" in line]
            out[name] = {"chosen": " ".join(chosen[0].split()) if chosen else ""}
        except Exception as error:
            out[name] = {"error": f"{type(error).__name__}: {error}"}
    return out


def main() -> None:
    home = Path(sys.argv[1]).absolute()
    files = json.load(sys.stdin)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.environ |= {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    os.environ["SKYPILOT_POD_MEMORY_GB_LIMIT"] = "4.5"  # four processes for requests in place of fifty
    # pip reads it as "no": SkyPilot packs itself with what is installed
    os.environ["PIP_NO_BUILD_ISOLATION"] = "0"
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    write_catalogs(home / ".sky/catalogs/v8")
    write_credentials(home)
    started = time.monotonic()
    for last in (False, False, True):  # on a busy machine it gives up before its server is ready
        if subprocess.run(["sky", "api", "start"], check=last, stdout=sys.stderr).returncode == 0:
            break
    seconds = time.monotonic() - started
    try:
        enable_clouds(home)
        print(json.dumps({"start_s": round(seconds, 1), "plans": dry_runs(files)}))
    finally:
        subprocess.run(["sky", "api", "stop"], stdout=sys.stderr)


if __name__ == "__main__":
    main()
