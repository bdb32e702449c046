"""`Dockerfile` and `compose.yaml`, as far as they can be checked without Docker: what they start, and what they keep shut."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from art.cli.server import build_parser, read_options
from art.config.base_models import resolve_base_model
from tools.images.containers import DOCKER, PODMAN, Containers
from tools.images.walk import restrictions

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
TARGETS = {"gpu": "cuda", "cpu": "cpu"}
EXTRAS = {"cuda": ("local", "vllm"), "cpu": ("local",)}
CONSTRAINTS = {"cuda": "deploy/constraints-cuda.txt", "cpu": "constraints.txt"}


def instructions(name: str, text: str = DOCKERFILE) -> list[str]:
    joined = text.replace("\\\n", " ")
    return re.findall(rf"^{name} +(.*)$", joined, re.MULTILINE)


def stage(name: str) -> str:
    """The lines of one stage of the Dockerfile."""
    (lines,) = re.findall(rf"^FROM \S+ AS {name}$(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return str(lines)


def entrypoint() -> list[str]:
    (command,) = instructions("ENTRYPOINT")
    *init, program = json.loads(command)[:3]
    assert (init, program) == (["tini", "--"], "art-server")
    return list(json.loads(command)[3:])


def test_the_image_starts_the_server_for_other_machines() -> None:
    config, data_dir = read_options(build_parser().parse_args(entrypoint()))
    assert (config.host, f"{config.port}") == ("0.0.0.0", instructions("EXPOSE")[0])
    assert f":{config.port}/health" in instructions("HEALTHCHECK")[0]
    assert str(data_dir) in json.loads(instructions("VOLUME")[0])
    assert instructions("STOPSIGNAL") == ["SIGTERM"]


def test_what_libraries_keep_lies_in_a_volume() -> None:
    volumes = json.loads(instructions("VOLUME")[0])
    (environment,) = (line for line in instructions("ENV", stage("server")))
    folders = re.findall(r"\b(?:HOME|\w+_HOME|\w+_DIR)=(\S+)", environment)
    assert len(folders) == 3
    assert all(folder.startswith(tuple(volumes)) for folder in folders)
    assert all(f" {volume}" in stage("server") for volume in volumes)


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_the_image_has_no_root_and_no_secret(target: str) -> None:
    assert re.search(r"^USER 10001:10001$\s*\Z", stage(target), re.MULTILINE), "the last line of the target"
    assert "--uid 10001" in stage("server")
    assert not any(re.search(r"KEY|TOKEN|SECRET", line) for line in [*instructions("ENV"), *instructions("ARG")])


def test_the_image_is_built_from_what_exists() -> None:
    sources = {word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]}
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(source.removeprefix("./") for source in sources) == sorted(allowed)
    assert all((ROOT / source).exists() for source in sources)


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_versions_are_pinned_to_what_the_project_asks_for(target: str) -> None:
    file = CONSTRAINTS[target]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *(line for extra in EXTRAS[target] for line in project["optional-dependencies"][extra]),
    ]
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), (file, str(requirement))
    installs = instructions("RUN", stage(f"build-{target}"))
    assert f".[{','.join(EXTRAS[target])}]" in installs[-1]
    assert all(f"--constraint {Path(file).name}" in line for line in installs)


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_services(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["profiles"] == [name]
    assert service["build"] == {"context": ".", "target": TARGETS[name]}
    assert service["image"] == f"art-server:{TARGETS[name]}"
    command = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in service["command"]]
    config, _ = read_options(build_parser().parse_args([*entrypoint(), *command]))
    assert config.gpu is (name == "gpu")
    assert all(resolve_base_model(model) for model in config.models)
    assert service["environment"]["ART_API_KEY"].startswith("${ART_API_KEY:?")  # no server without a key
    assert all(port.startswith("127.0.0.1:") and port.endswith(f":{config.port}") for port in service["ports"])
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"]
    declared = set(COMPOSE["volumes"])
    assert {volume.split(":")[0] for volume in service["volumes"]} == declared
    assert [volume.split(":")[1] for volume in service["volumes"]] == json.loads(instructions("VOLUME")[0])


@pytest.mark.parametrize("containers", [DOCKER, PODMAN])
def test_the_walk_runs_the_image_as_compose_does(containers: Containers) -> None:
    flags = restrictions(containers, COMPOSE["services"]["cpu"])
    for flag in ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--volume=art-walk-data:/data"):
        assert flag in flags
