"""A server that requires a gate of every promotion: what keys of each scope may do, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

from art.client.client import ServerClient
from art.config import ServerConfig
from art.errors import ConfigError, PermissionDeniedError, PromotionError
from art.protocol.keys import KeyScope
from art.protocol.promotions import Gate, PromoteRequest, Promotion, PromotionHistory
from art.runtime.model_checkpoints import Promotions
from art.server.app import App
from art.storage.keys import KeyStore
from tests.unit.runtime.test_promotion import Server as Parts
from tests.unit.runtime.test_promotion_gate import log, rewards


class Server:
    """The HTTP side of a server whose model `p/agent` has steps 0 to 4, and keys of each scope."""

    def __init__(self, folder: Path, parts: Parts) -> None:
        self.parts, self.keys = parts, KeyStore(folder / "keys.db")
        scopes: dict[str, list[KeyScope]] = {"infer": ["infer"], "train": ["train"], "admin": ["admin"]}
        made = {name: self.keys.create(name, project="p", scopes=granted) for name, granted in scopes.items()}
        self.texts = {name: text for name, (_, text) in made.items()} | {"operator": "operator"}
        self.ids = {key.id: name for name, (key, _) in made.items()} | {"server": "operator"}
        self.set_required(None)

    def set_required(self, require: float | None) -> None:
        promotions = Promotions(self.parts.models, self.parts.checkpoints, required=require)
        self.app = App(SimpleNamespace(promotions=promotions), api_key="operator", keys=self.keys)  # type: ignore[arg-type]

    async def promote(
        self, key: str, step: int, *, require: float | None = None, force: bool = False, note: str = ""
    ) -> Promotion:
        gate = None if require is None else Gate(require=require)
        request = PromoteRequest(step=step, gate=gate, force=force, note=note)
        async with self._client(key) as client:
            return await client.typed(Promotion, "POST", "/api/models/p/agent/promotions", body=request)

    async def history(self) -> list[tuple[int, str, str, float | None]]:
        """Step, decision, who asked, and the bound of the gate."""
        async with self._client("infer") as client:
            records = (await client.typed(PromotionHistory, "GET", "/api/models/p/agent/promotions")).promotions
        return [
            (one.step, one.decision, self.ids[one.key_id], None if one.verdict is None else one.verdict.require)
            for one in records
        ]

    def _client(self, key: str) -> ServerClient:
        return ServerClient("http://localhost", self.texts[key], transport=httpx2.ASGITransport(self.app))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    parts = await Parts(tmp_path).start()
    await parts.add_model()
    log(parts, 0, rewards(0.3))
    log(parts, 1, rewards(0.35, seed=1))
    log(parts, 2, rewards(0.6, seed=2))
    server = Server(tmp_path, parts)
    yield server
    server.keys.close()
    parts.database.close()


async def test_without_the_setting_each_caller_chooses(server: Server) -> None:
    await server.promote("train", 1)
    await server.promote("train", 2, require=-1.0)
    await server.promote("train", 3, require=0.0, force=True)
    assert await server.history() == [(1, "ungated", "train", None), (2, "passed", "train", -1.0),
                                      (3, "forced", "train", 0.0)]  # fmt: skip


async def test_the_gate_of_the_server_judges_promotions_that_name_none(server: Server) -> None:
    server.set_required(0.1)
    with pytest.raises(PromotionError) as refused:
        await server.promote("train", 1)
    assert "This server requires +0.1 of every promotion (`require_gain`" in refused.value.message
    promotion = await server.promote("train", 2)
    assert promotion.verdict is not None
    assert (promotion.verdict.passed, promotion.verdict.require) == (True, 0.1)
    assert await server.history() == [(1, "refused", "train", 0.1), (2, "passed", "train", 0.1)]


@pytest.mark.parametrize("key", ["train", "admin", "operator"])
async def test_a_caller_may_ask_for_more_and_not_for_less(server: Server, key: str) -> None:
    server.set_required(0.1)
    for require in (0.09, 0.0, -1.0):
        with pytest.raises(
            ConfigError, match=r"`require` is .*, which is less than 0\.1\..*or leave `require` out"
        ) as no:
            await server.promote(key, 2, require=require)
        assert no.value.param == "require"
    assert await server.history() == []
    with pytest.raises(PromotionError):
        await server.promote(key, 2, require=0.5)
    await server.promote(key, 2, require=0.2)
    assert await server.history() == [(2, "refused", key, 0.5), (2, "passed", key, 0.2)]


async def test_only_keys_with_scope_admin_force_a_promotion(server: Server) -> None:
    server.set_required(0.1)
    for key in ("infer", "train"):
        for require in (None, 0.1):
            with pytest.raises(PermissionDeniedError, match=f"scope `(admin|train)`.* has {key}"):
                await server.promote(key, 1, require=require, force=True)
    assert await server.history() == []
    for key, step in (("admin", 1), ("operator", 3)):
        promotion = await server.promote(key, step, force=True, note="the other one has a leak")
        assert promotion.verdict is not None
        assert not promotion.verdict.passed
    assert await server.history() == [(1, "forced", "admin", 0.1), (3, "forced", "operator", 0.1)]
    assert server.parts.models.by_key["p/agent"].promoted_step == 3


async def test_a_bound_of_zero_is_a_bound(server: Server) -> None:
    config = ServerConfig(require_gain=0.0)
    server.set_required(config.require_gain)
    with pytest.raises(ConfigError, match="less than 0"):
        await server.promote("train", 2, require=-0.5)
    with pytest.raises(PermissionDeniedError):
        await server.promote("train", 2, force=True)
    await server.promote("train", 2)
    assert await server.history() == [(2, "passed", "train", 0.0)]
