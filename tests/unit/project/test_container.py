"""`Dockerfile` and `compose.yaml`, as far as they can be checked without Docker: what they start, and what they keep shut."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from art.cli.options.server_options import build_parser, read_options
from art.config.base_models import resolve_base_model

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())


def instructions(name: str) -> list[str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{name} +(.*)$", joined, re.MULTILINE)


def entrypoint() -> list[str]:
    (command,) = instructions("ENTRYPOINT")
    program, *arguments = json.loads(command)
    assert program == "art-server"
    return list(arguments)


def test_the_image_starts_the_server_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    config, data_dir = read_options(build_parser().parse_args(entrypoint()))
    assert (config.host, f"{config.port}") == ("0.0.0.0", instructions("EXPOSE")[0])
    assert str(data_dir) in json.loads(instructions("VOLUME")[0])


def test_the_image_has_no_root_and_no_secret() -> None:
    order = re.findall(r"^(FROM|USER|ENTRYPOINT|HEALTHCHECK)", DOCKERFILE, re.MULTILINE)
    assert order[-3:] == ["USER", "HEALTHCHECK", "ENTRYPOINT"]
    assert instructions("USER") == ["art"]
    assert "--uid 10001" in DOCKERFILE
    assert not any(re.search(r"KEY|TOKEN|SECRET", line) for line in [*instructions("ENV"), *instructions("ARG")])


def test_the_image_is_built_from_what_exists() -> None:
    sources = [word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]]
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(source.removeprefix("./") for source in sources) == sorted(allowed)
    assert all((ROOT / source).exists() for source in sources)


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_services(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["profiles"] == [name]
    command = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in service["command"]]
    config, _ = read_options(build_parser().parse_args([*entrypoint(), *command]))
    assert config.gpu is (name == "gpu")
    assert all(resolve_base_model(model) for model in config.models)
    assert service["environment"]["ART_API_KEY"].startswith("${ART_API_KEY:?")  # no server without a key
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"]
    declared = set(COMPOSE["volumes"])
    assert {volume.split(":")[0] for volume in service["volumes"]} == declared
    assert [volume.split(":")[1] for volume in service["volumes"]] == json.loads(instructions("VOLUME")[0])
