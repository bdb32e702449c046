"""docs/remote.md and docs/serverless.md say what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import art
from art.client.checkpoint_client import CheckpointMethod, Checkpoints
from art.config.training import train_config
from art.errors import ConfigError
from art_cloud.serverless_backend import RefusedMethod, ServerlessCheckpoints
from art_cloud.serverless_service import LEFT, REFUSED

DOCS = Path(__file__).parents[3] / "docs"
SERVICE_LOSSES = {kind.model_fields["type"].default for kind in REFUSED if "type" in kind.model_fields}


def rows(text: str) -> list[list[str]]:
    """The cells of each row of a table, without the line below the heading."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


TABLE = rows((DOCS / "remote.md").read_text().partition("## What each backend can\n")[2].partition("A *no*")[0])
KINDS: dict[str, Any] = {name.strip("`"): getattr(art, name.strip("`")) for name in TABLE[0][1:]}
CHECKPOINTS = {"ServerlessBackend": ServerlessCheckpoints}
"""Kinds with checkpoints of their own."""


def test_each_backend_has_a_column() -> None:
    public = {name for name in art.__all__ if name.endswith("Backend") and name != "Backend"}
    assert KINDS.keys() == public


def can(kind: str, what: str) -> bool:
    """Whether a kind of backend has a method that is not refused, or a loss."""
    if what.startswith("loss "):
        return kind != "ServerlessBackend" or what.removeprefix("loss ") in SERVICE_LOSSES
    method = vars(art.Backend).get(what)
    if isinstance(method, CheckpointMethod):
        return can_with_checkpoints(kind, method.method.__name__)
    if method is None:
        return can_with_checkpoints(kind, what)
    return not isinstance(getattr(KINDS[kind], what), RefusedMethod)


def can_with_checkpoints(kind: str, method: str) -> bool:
    assert hasattr(Checkpoints, method)
    return not isinstance(getattr(CHECKPOINTS.get(kind, Checkpoints), method), RefusedMethod)


@pytest.mark.parametrize("row", TABLE[1:], ids=lambda row: row[0])
def test_a_row_of_the_table_of_backends(row: list[str]) -> None:
    words = re.findall(r"`(\w+)`", row[0])
    whats = [f"loss {word}" for word in words] if row[0].startswith("loss") else words
    assert whats
    for kind, cell in zip(KINDS, row[1:], strict=True):
        assert {can(kind, what) for what in whats} == {cell == "yes"}, (kind, row[0])


def test_the_table_has_each_method_that_some_kind_refuses_and_each_loss_of_train() -> None:
    named = {word for row in TABLE[1:] for word in re.findall(r"`(\w+)`", row[0])}
    refused = {
        name for name in dir(art.ServerlessBackend) if isinstance(getattr(art.ServerlessBackend, name), RefusedMethod)
    }
    of_checkpoints = {name for name, value in vars(ServerlessCheckpoints).items() if isinstance(value, RefusedMethod)}
    assert refused | {name.replace("download", "download_checkpoint") for name in of_checkpoints} <= named
    with pytest.raises(ConfigError) as caught:
        train_config(None, {"loss": "no-such-loss"})
    known = set(re.findall(r"\w+", str(caught.value).partition("one of ")[2].partition(";")[0]))
    assert {row[0].split("`")[1] for row in TABLE if row[0].startswith("loss")} == known - {
        "grpo", "dr_grpo", "dapo", "rloo", "maxrl",
    }  # fmt: skip


@pytest.mark.parametrize("settings", [art.TrainConfig, art.TrainSFTConfig, art.ModelSettings])
def test_the_page_of_the_service_has_each_setting(settings: Any) -> None:
    there = rows((DOCS / "serverless.md").read_text())
    for name, why in REFUSED[settings].items():
        assert [f"`{name}`", "left to the service" if name in LEFT else "refused unless default", why] in there
    sent = {cells[0] for cells in there if cells[1] == "sent"}
    assert {f"`{name}`" for name in settings.model_fields.keys() - REFUSED[settings].keys()} <= sent
