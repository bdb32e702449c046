"""Addresses with a user or password in them are refused wherever one is given, and never shown; so are odd hub ids."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from art.client.client import ServerClient
from art.client.connections import check_address
from art.config import VllmConfig
from art.config.base import check_no_userinfo
from art.config.base_models import SHORT_NAMES, resolve_base_model
from art.errors import ConfigError
from art.protocol.checkpoint_calls import HubTarget, PushRequest, S3Target
from art_recipes.mcp.client import MCPClient

SECRET = "hunter22"


@pytest.mark.parametrize("userinfo", [f"user:{SECRET}", SECRET, f":{SECRET}", f"a@b:{SECRET}"])
@pytest.mark.parametrize(
    "give",
    [
        lambda url: VllmConfig(urls=(url,)),
        lambda url: VllmConfig.model_validate({"urls": ["http://gpu1:8000", url]}),
        lambda url: S3Target(bucket="b", endpoint_url=url),
        lambda url: PushRequest.model_validate(
            {"job_id": "job-00000001", "target": {"kind": "s3", "bucket": "b", "endpoint_url": url}}
        ),
        lambda url: ServerClient(url, "key"),
        check_address,
        lambda url: MCPClient(url),
        resolve_base_model,
    ],
    ids=["VllmConfig", "stored settings", "S3Target", "request", "ServerClient", "Model", "MCPClient", "base model"],
)
def test_userinfo_is_refused_and_not_shown(give: Callable[[str], object], userinfo: str) -> None:
    with pytest.raises(ConfigError, match="a user or a password before the host 'host:8000'") as caught:
        give(f"http://{userinfo}@host:8000/v1")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://host/a@b", "http://host:1?x=a@b", "http://[::1]:5000/v1", "http://[broken", ""]
)
def test_other_addresses_are_left_to_who_uses_them(url: str) -> None:
    assert check_no_userinfo(url, "url") == url


@pytest.mark.parametrize(
    "name",
    [
        "owner/na me", "owner/name?token=x", "owner/name#1", "owner/..", "own..er/name", "owner/name--x", "owner/x.git",
        "owner/\x1b[2J", "owner/name\n2026 INFO all is well", "o/\u202ename", "o" * 97 + "/name", "o/" + "n" * 97,
        "https://huggingface.co/owner/name", "owner/-name", "owner/n\u00e4me",
    ],
)  # fmt: skip
def test_what_cannot_be_a_hub_id_is_refused_before_anything_is_asked_for_it(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_base_model(name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["owner/name", "01-ai/Yi-6B", "o/n.1_2-b", "hf-internal-testing/tiny_x"])
def test_hub_ids(name: str) -> None:
    assert resolve_base_model(name) == name
    assert HubTarget(repo_id=name).repo_id == name


def test_short_names_stand_for_hub_ids() -> None:
    for name in SHORT_NAMES.values():
        assert resolve_base_model(name) == name


@pytest.mark.parametrize("name", ["a b/c", "o/n/x", "../x", "o/n\x1b", ""])
def test_a_push_goes_to_a_hub_id(name: str) -> None:
    with pytest.raises(ValidationError):
        HubTarget(repo_id=name)
