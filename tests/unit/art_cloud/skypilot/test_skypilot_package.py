"""The task file, as the real SkyPilot reads it: its schema, `sky.Task.from_yaml`, and its optimiser in a dry run.

`make test-skypilot` installs SkyPilot into an environment of its own. No account is needed: clouds are enabled by hand in a
home directory made for the test, with a catalogue of three machines.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from art_cloud.skypilot_backend import SkyConfig

PYTHON = os.environ.get("ART_SKYPILOT_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not PYTHON, reason="SkyPilot is not installed: `make test-skypilot` does, in its own environment"
    ),
]
CONFIGS = {
    "plain": SkyConfig(gpu="H100:1", cloud="lambda"),
    "spot": SkyConfig(gpu="H100:1", cloud="runpod", spot=True, resources={"cpus": "8+", "max_hourly_cost": 3.0}),
    "kept": SkyConfig(gpu="A100:1", cloud="lambda", region="us-west-3", on_idle="stop", resources={"disk_size": 500}),
    "volume": SkyConfig(
        gpu="H100:1", cloud="kubernetes", volume="alice-disk", resources={"image_id": "docker:python:3.12"}
    ),
}
CLUSTER = Path(__file__).parents[4] / "deploy/skypilot/cluster.yaml"
"""Two machines that share their work by Ray: docs/cluster.md."""
_CATALOGUE = {
    "lambda/vms.csv": """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
gpu_1x_h100_pcie,H100,1,26,200,2.49,us-west-3,,
gpu_1x_a100,A100,1,30,200,1.29,us-west-3,,
""",
    "runpod/vms.csv": """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,SpotPrice,Price,Region,AvailabilityZone
1x_H100_SECURE,H100,1,16,80,,1.25,2.69,US,US-CA-2
""",
    "common/accelerators.csv": "AcceleratorName,Clouds\nH100,\"['Lambda', 'RunPod']\"\nA100,\"['Lambda']\"\n",
    "common/metadata.csv": "GPU,MemoryGB,Manufacturer\nH100,80,NVIDIA\nA100,40,NVIDIA\n",
}
_READ = """\
import sys
import sky
for path in sys.argv[1:]:
    task = sky.Task.from_yaml(path)
    task.validate_name()
    (resources,) = task.resources
    print(path, task.name, task.num_nodes, resources.ports, resources.autostop_config, resources.use_spot, sep="|")
"""
_CHOOSE = """\
import sys
import sky
from sky import check, global_user_state, optimizer
from sky.clouds import cloud
check.get_cached_enabled_clouds_or_refresh(cloud.CloudCapability.COMPUTE)  # finds none; what is enabled after it stays
for capability in (cloud.CloudCapability.COMPUTE, cloud.CloudCapability.STORAGE):
    global_user_state.set_enabled_clouds(["Lambda", "RunPod"], capability, "default")
for path in sys.argv[1:]:
    with sky.Dag() as dag:
        task = sky.Task.from_yaml(path)
    optimizer.Optimizer.optimize(dag, quiet=True)
    best = task.best_resources
    print(path, best.cloud, best.instance_type, best.use_spot, f"{task.num_nodes * best.get_cost(3600):.2f}", sep="|")
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A task file for each config."""
    paths = {}
    for name, config in CONFIGS.items():
        paths[name] = tmp_path / f"{name}.sky.yaml"
        paths[name].write_text(json.dumps(config.task(f"art-{name}", "~/.art/servers/art")))
    for name, text in _CATALOGUE.items():
        path = tmp_path / "home" / ".sky" / "catalogs" / "v8" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return paths


def run(tmp_path: Path, script: str, *paths: Path) -> list[list[str]]:
    (tmp_path / "home").mkdir(exist_ok=True)
    environment = os.environ | {"HOME": str(tmp_path / "home"), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [PYTHON, "-c", script, *map(str, paths)], capture_output=True, text=True, env=environment, timeout=900
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split("|") for line in done.stdout.splitlines() if line.startswith("/")]


def test_skypilot_reads_the_task_files(tmp_path: Path, files: dict[str, Path]) -> None:
    rows = {row[1]: row[2:] for row in run(tmp_path, _READ, *files.values())}
    assert rows.keys() == {f"art-{name}" for name in CONFIGS}
    for name, (num_nodes, ports, autostop, is_spot) in ((name, rows[f"art-{name}"]) for name in CONFIGS):
        assert (num_nodes, ports) == ("1", "None")
        assert "idle_minutes=5" in autostop
        assert f"down={name in ('spot', 'volume')}" in autostop
        assert is_spot == str(CONFIGS[name].spot)


def test_skypilot_reads_the_task_file_of_a_cluster(tmp_path: Path) -> None:
    ((_, name, num_nodes, ports, autostop, _),) = run(tmp_path, _READ, CLUSTER)
    assert (name, num_nodes, ports, autostop) == ("art", "2", "None", "None")


def test_skypilot_refuses_a_file_with_a_word_that_it_does_not_know(tmp_path: Path, files: dict[str, Path]) -> None:
    text = files["plain"].read_text()
    files["plain"].write_text(text.replace('"run":', '"rum":'))
    with pytest.raises(AssertionError, match="did you mean 'run'"):
        run(tmp_path, _READ, files["plain"])


def test_its_optimiser_chooses_a_machine(tmp_path: Path, files: dict[str, Path]) -> None:
    rows = run(tmp_path, _CHOOSE, files["plain"], files["spot"])
    assert [row[1:] for row in rows] == [
        ["Lambda", "gpu_1x_h100_pcie", "False", "2.49"], ["RunPod", "1x_H100_SECURE", "True", "1.25"],
    ]  # fmt: skip
