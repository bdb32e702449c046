"""Programs of others read the Dockerfile, compose.yaml, the manifests and the workflows: hadolint, Compose, kustomize,
Kubernetes' schemas, actionlint."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="`make test-images` installs it")

ROOT = Path(__file__).parents[2]
VERSIONS = ["1.30", "1.37"]
"""The oldest and the newest Kubernetes whose schemas the manifests are held to."""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment)


def compose() -> list[str]:
    """The command of Docker Compose.

    Raises:
        pytest.skip.Exception: there is none.
    """
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and run(*command, "version").returncode == 0:
            return command
    pytest.skip("there is no Docker Compose")


def manifests(folder: str) -> list[dict[str, Any]]:
    """The manifests of a folder as kustomize writes them.

    Raises:
        pytest.skip.Exception: there is neither kubectl nor kustomize.
    """
    for program, *words in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(program):
            done = run(program, *words, folder)
            assert done.returncode == 0, done.stderr
            return list(yaml.safe_load_all(done.stdout))
    pytest.skip("there is neither kubectl nor kustomize")


RAY_DOCKERFILE = "deploy/kubernetes/ray/Dockerfile"


@pytest.mark.parametrize(
    "command",
    [["hadolint", "--no-color", "Dockerfile"], ["hadolint", "--no-color", RAY_DOCKERFILE], ["actionlint", "-no-color"]],
)
def test_they_find_nothing(command: list[str]) -> None:
    done = run(str(Path(sys.executable).with_name(command[0])), *command[1:])
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_actionlint_finds_an_action_that_github_no_longer_runs(tmp_path: Path) -> None:
    old = (ROOT / ".github/workflows/checks.yml").read_text(encoding="utf-8").replace("checkout@v7", "checkout@v4")
    (tmp_path / "old.yml").write_text(old, encoding="utf-8")
    done = run(str(Path(sys.executable).with_name("actionlint")), "-no-color", str(tmp_path / "old.yml"))
    assert done.returncode == 1
    assert "actions/checkout@v4" in done.stdout


@pytest.mark.parametrize("profile", ["gpu", "cpu"])
def test_compose_accepts_the_file(profile: str) -> None:
    done = run(*compose(), "--profile", profile, "config", ART_API_KEY="0123456789abcdef", ART_MODEL="org/model")
    assert done.returncode == 0, done.stderr
    (service,) = yaml.safe_load(done.stdout)["services"].values()
    assert service["environment"]["ART_API_KEY"] == "0123456789abcdef"
    assert service["command"][-2:] == ["--model", "org/model"]


def test_compose_refuses_to_start_without_a_key() -> None:
    done = run(*compose(), "--profile", "cpu", "config", ART_API_KEY="")
    assert done.returncode != 0
    assert "set ART_API_KEY" in done.stderr


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_manifests_match_the_schemas_of_kubernetes(kind: str, version: str) -> None:
    found = manifests(f"deploy/kubernetes/{kind}")
    assert sorted(manifest["kind"] for manifest in found) == ["ConfigMap", "NetworkPolicy", "Service", "StatefulSet"]
    for manifest in found:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_with_ray_match_the_schemas_too(version: str) -> None:
    """KubeRay's own kind is in no package index: tests/unit/project/test_cluster_files.py. Its pods are Kubernetes'."""
    found = manifests("deploy/kubernetes/ray")
    ray = next(manifest for manifest in found if manifest["kind"] == "RayCluster")
    kinds = sorted(manifest["kind"] for manifest in found)
    assert kinds == ["ConfigMap", "NetworkPolicy", "NetworkPolicy", "RayCluster", "Service", "StatefulSet"]
    for manifest in found:
        if manifest is not ray:
            kubernetes_validate.validate(manifest, version, strict=True)
    for group in (ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_worker_of_the_page_about_clusters_matches_the_schemas(version: str) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs/cluster.md").read_text(), re.MULTILINE | re.DOTALL)
    kubernetes_validate.validate(yaml.safe_load(text), version, strict=True)


def test_the_schemas_find_a_wrong_field() -> None:
    (server,) = (manifest for manifest in manifests("deploy/kubernetes/cpu") if manifest["kind"] == "StatefulSet")
    server["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(server, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_kustomize_joins_the_parts(kind: str) -> None:
    found = {manifest["kind"]: manifest for manifest in manifests(f"deploy/kubernetes/{kind}")}
    pod = found["StatefulSet"]["spec"]["template"]
    (settings,) = (volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume)
    assert settings == found["ConfigMap"]["metadata"]["name"]
    assert settings != "art-server", "a change of the settings changes the name, so the pod starts again"
    assert pod["spec"]["containers"][0]["image"] == f"art-server:{kind}"
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"]


def test_kustomize_joins_the_overlay_of_the_page(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs/images.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "art").symlink_to(ROOT)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kustomization.yaml").write_text(text)
    (tmp_path / "mine/server.toml").write_text("only_models = true\n")
    found = {manifest["kind"]: manifest for manifest in manifests(str(tmp_path / "mine"))}
    for manifest in found.values():
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    assert server["image"] == "registry.example/art-server:v1"
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert pod["runtimeClassName"] == "nvidia"
    assert found["ConfigMap"]["data"] == {"server.toml": "only_models = true\n"}
    data, models = found["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert (data["metadata"]["name"], models["metadata"]["name"]) == ("data", "models")
    assert models["spec"]["resources"]["requests"]["storage"] == "500Gi"
