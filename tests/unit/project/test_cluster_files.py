"""The files of deploy/ that start Ray: the manifests for KubeRay, SkyPilot's task file and Slurm's batch script.

`make test-images` holds the manifests to Kubernetes' schemas, `make test-skypilot` lets SkyPilot read its file. KubeRay's
own schema is in no package index, so what it asks for is listed here (from KubeRay 1.6.2).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from art.cli.server import build_parser, read_options
from art.config import ServerConfig, VllmConfig
from art.runtime.hosting.cluster import WORKER_PORT
from tests.unit.project.test_container import entrypoint

ROOT = Path(__file__).parents[3]
RAY = ROOT / "deploy/kubernetes/ray"
CLUSTER: dict[str, Any] = yaml.safe_load((RAY / "raycluster.yaml").read_text())
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((RAY / "kustomization.yaml").read_text())
PATCHES = {
    patch["target"]["kind"]: [(one["path"], one["value"]) for one in yaml.safe_load(patch["patch"])]
    for patch in KUSTOMIZATION["patches"]
}
SKYPILOT: dict[str, Any] = yaml.safe_load((ROOT / "deploy/skypilot/cluster.yaml").read_text())
SLURM = ROOT / "deploy/slurm/art.sbatch"
PAGE = (ROOT / "docs/cluster.md").read_text()
_SPEC = {
    "authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec",
    "headServiceAnnotations", "managedBy", "rayVersion", "suspend", "workerGroupSpecs",
}  # fmt: skip
_HEAD = {"enableIngress", "headService", "labels", "rayStartParams", "resources", "serviceType", "template"}
_WORKERS = {
    "groupName", "idleTimeoutSeconds", "labels", "maxReplicas", "minReplicas", "numOfHosts", "rayStartParams",
    "replicas", "resources", "scaleStrategy", "suspend", "template",
}  # fmt: skip


def groups() -> list[dict[str, Any]]:
    spec = CLUSTER["spec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def test_the_ray_cluster_has_the_fields_that_kuberay_knows() -> None:
    assert (CLUSTER["apiVersion"], CLUSTER["kind"]) == ("ray.io/v1", "RayCluster")
    assert CLUSTER["spec"].keys() <= _SPEC
    head, *workers = groups()
    assert head.keys() <= _HEAD
    for group in workers:
        assert {"groupName", "minReplicas", "maxReplicas", "template"} <= group.keys() <= _WORKERS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in groups():
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "numbers are refused"


def test_the_token_is_on_and_the_server_has_it() -> None:
    assert CLUSTER["spec"]["authOptions"] == {"mode": "token"}
    variables = {value["name"]: value for path, value in PATCHES["StatefulSet"] if path.endswith("/env/-")}
    assert variables["RAY_AUTH_MODE"]["value"] == "token"
    secret = variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": CLUSTER["metadata"]["name"], "key": "auth_token"}, "as the operator names it"


def test_server_and_nodes_have_the_same_image_and_ray() -> None:
    (image,) = KUSTOMIZATION["images"]
    containers = [container for group in groups() for container in group["template"]["spec"]["containers"]]
    assert {container["image"] for container in containers} == {f"{image['newName']}:{image['newTag']}"}
    ray, cryptography = re.findall(r"'([^']+)==([\d.]+)'", (RAY / "Dockerfile").read_text())
    assert ray == ("ray[default]", CLUSTER["spec"]["rayVersion"])
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cluster"]
    ranges = {requirement.name: requirement.specifier for requirement in map(Requirement, extra)}
    assert ranges["ray"].contains(ray[1])
    assert ranges["cryptography"].contains(cryptography[1])


def test_no_pod_of_the_cluster_may_become_root() -> None:
    for group in groups():
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}
            }  # fmt: skip


def test_the_server_goes_to_the_cluster_and_its_workers_come_through_the_network_policy() -> None:
    (argument,) = (value for path, value in PATCHES["StatefulSet"] if path.endswith("/args/-"))
    arguments = [*entrypoint(), "--config", str(RAY / "server.toml"), argument.replace("$(POD_IP)", "10.0.0.5")]
    config, _ = read_options(build_parser().parse_args(arguments))
    assert config.cluster == f"ray://{CLUSTER['metadata']['name']}-head-svc:10001"
    assert config.worker_address == f"10.0.0.5:{WORKER_PORT}"
    assert isinstance(config.settings.engine, VllmConfig), "the server's own machine has no GPU to choose it by"
    (port,) = (value for path, value in PATCHES["StatefulSet"] if path.endswith("/ports/-"))
    assert port["containerPort"] == WORKER_PORT
    nodes = {"podSelector": {"matchLabels": {"ray.io/cluster": CLUSTER["metadata"]["name"]}}}
    (_, incoming), (_, outgoing) = PATCHES["NetworkPolicy"]
    assert incoming == {"from": [nodes], "ports": [{"protocol": "TCP", "port": port["name"]}]}
    assert outgoing == {"to": [nodes], "ports": [{"protocol": "TCP", "port": 10001}]}
    policy = yaml.safe_load((RAY / "network.yaml").read_text())["spec"]
    assert policy["podSelector"] == nodes["podSelector"]
    assert policy["ingress"][1]["ports"] == outgoing["ports"]


@pytest.mark.parametrize(
    "script", [SLURM.read_text(), SKYPILOT["setup"], SKYPILOT["run"]], ids=["slurm", "setup", "run"]
)
def test_the_shell_can_read_the_scripts(script: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    if shutil.which("shellcheck"):
        checked = subprocess.run(["shellcheck", "--shell=bash", "-"], input=script, text=True, capture_output=True)
        assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.parametrize("script", [SLURM.read_text(), SKYPILOT["run"]], ids=["slurm", "skypilot"])
def test_the_scripts_start_a_server_on_ray_with_its_token_on(script: str) -> None:
    assert "RAY_AUTH_MODE=token" in script
    assert re.search(r"export RAY_ADDRESS", script)
    (command,) = re.findall(r"art-server (.+)$", script, re.MULTILINE)
    config, _ = read_options(build_parser().parse_args(command.replace('"', "").split()))
    assert config.cluster == "ray"
    assert config.host == ServerConfig().host, "reached by a tunnel"
    assert " ray stop" not in re.sub(r"#.*", "", script), "SkyPilot has a Ray of its own on the machine"


def test_skypilot_gets_its_secrets_from_the_command_line() -> None:
    assert SKYPILOT["num_nodes"] > 1
    assert SKYPILOT["secrets"] == {"ART_API_KEY": None, "RAY_AUTH_TOKEN": None}
    assert "ports" not in SKYPILOT["resources"]
    first_lines = (ROOT / "deploy/skypilot/cluster.yaml").read_text().partition("\nname:")[0]
    assert all(f"--secret {name}" in first_lines for name in SKYPILOT["secrets"])


def test_slurm_starts_one_task_on_each_node() -> None:
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", SLURM.read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    assert int(options["nodes"]) > 1
    assert "srun ray symmetric-run --address" in SLURM.read_text()


def test_the_page_names_the_files() -> None:
    assert "kubectl apply -k deploy/kubernetes/ray" in PAGE
    assert "deploy/skypilot/cluster.yaml" in PAGE
    assert "deploy/slurm/art.sbatch" in PAGE
