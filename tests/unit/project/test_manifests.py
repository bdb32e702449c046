"""The Kubernetes manifests agree with the image, the server's settings and each other. `make test-images` has real tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from art.cli.server import build_parser, read_options
from art.config.base_models import resolve_base_model
from tests.unit.project.test_container import entrypoint, instructions

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy/kubernetes"
KINDS = ["cpu", "cuda"]


def read(path: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / path).read_text())
    return loaded


POD: dict[str, Any] = read("base/server.yaml")["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
PAGE = (ROOT / "docs/images.md").read_text()


def overlay(kind: str) -> dict[str, Any]:
    """What an overlay sets in the StatefulSet, by its path."""
    (patch,) = read(f"{kind}/kustomization.yaml")["patches"]
    return {operation["path"]: operation["value"] for operation in yaml.safe_load(patch["patch"])}


def test_the_pod_is_as_restricted_as_the_image_allows() -> None:
    assert POD["securityContext"]["runAsNonRoot"]
    (user,) = {POD["securityContext"][field] for field in ("runAsUser", "runAsGroup", "fsGroup")}
    assert set(instructions("USER")) == {f"{user}:{user}"}
    assert SERVER["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(POD)
    kinds = {kind for volume in POD["volumes"] for kind in volume if kind != "name"}
    assert kinds == {"configMap", "emptyDir"}, "the restricted level allows these, and no folder of the node"
    assert POD["automountServiceAccountToken"] is False
    assert POD["enableServiceLinks"] is False, "variables such as ART_SERVER_PORT look like settings"


def test_ports_and_probes() -> None:
    (port,) = SERVER["ports"]
    assert f"{port['containerPort']}" == instructions("EXPOSE")[0]
    (served,) = read("base/service.yaml")["spec"]["ports"]
    (allowed,) = read("base/network.yaml")["spec"]["ingress"][0]["ports"]
    assert {served["targetPort"], allowed["port"]} == {port["name"]}
    assert read("base/service.yaml")["spec"]["type"] == "ClusterIP"
    probes = {name: SERVER[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert [probe["path"] for probe in probes.values()] == ["/health", "/health", "/ready"]


def test_service_and_policy_select_the_pod_and_no_other() -> None:
    server = read("base/server.yaml")["spec"]
    labels = server["template"]["metadata"]["labels"]
    assert labels == server["selector"]["matchLabels"] == read("base/service.yaml")["spec"]["selector"]
    assert labels == read("base/network.yaml")["spec"]["podSelector"]["matchLabels"]
    assert server["serviceName"] == read("base/service.yaml")["metadata"]["name"]


def test_every_folder_that_is_written_is_mounted() -> None:
    claims = {claim["metadata"]["name"] for claim in read("base/server.yaml")["spec"]["volumeClaimTemplates"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in SERVER["volumeMounts"]}
    assert set(mounts.values()) == claims | {volume["name"] for volume in POD["volumes"]}
    assert {path for path, name in mounts.items() if name in claims} == set(json.loads(instructions("VOLUME")[0]))
    assert "/tmp" in mounts


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_accepts_the_settings_and_ends_within_the_grace_period(kind: str) -> None:
    (generator,) = read(f"{kind}/kustomization.yaml")["configMapGenerator"]
    assert generator == {"name": "art-server", "files": ["server.toml"]}
    (settings,) = (volume["configMap"]["name"] for volume in POD["volumes"] if "configMap" in volume)
    assert settings == generator["name"]
    (mounted,) = (mount["mountPath"] for mount in SERVER["volumeMounts"] if mount["name"] == "settings")
    assert SERVER["args"] == ["--config", f"{mounted}/server.toml"]
    arguments = [*entrypoint(), "--config", str(FOLDER / kind / "server.toml")]
    config, _ = read_options(build_parser().parse_args(arguments))
    assert config.gpu is (kind == "cuda")
    assert config.models
    assert all(resolve_base_model(model) for model in config.models)
    assert SERVER["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "10"]
    assert POD["terminationGracePeriodSeconds"] >= 10 + 10
    assert config.host == "0.0.0.0"


@pytest.mark.parametrize("kind", KINDS)
def test_an_overlay_names_its_image_and_what_it_needs(kind: str) -> None:
    (image,) = read(f"{kind}/kustomization.yaml")["images"]
    assert (image["name"], image["newTag"]) == (SERVER["image"], kind)
    resources = overlay(kind)["/spec/template/spec/containers/0/resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"], "the last to be evicted"
    assert ("nvidia.com/gpu" in resources["limits"]) is (kind == "cuda")


def test_the_page_makes_the_secret_that_the_pod_reads() -> None:
    secrets = {variable["name"]: variable["valueFrom"]["secretKeyRef"] for variable in SERVER["env"]}
    assert set(secrets) == {"ART_API_KEY", "HF_TOKEN"}
    assert not secrets["ART_API_KEY"].get("optional")
    assert secrets["HF_TOKEN"]["optional"]
    assert (
        f"create secret generic {secrets['ART_API_KEY']['name']} --from-literal={secrets['ART_API_KEY']['key']}="
        in PAGE
    )
    assert f"--from-literal={secrets['HF_TOKEN']['key']}=" in PAGE


def test_names_on_the_page_are_those_of_the_manifests() -> None:
    assert all(f"kubectl apply -k deploy/kubernetes/{kind}" in PAGE for kind in KINDS)
    (label,) = read("base/network.yaml")["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items()
    assert "=".join(label) in PAGE
