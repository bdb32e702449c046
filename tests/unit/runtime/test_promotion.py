"""The promoted checkpoint of a model: recorded, served under its own name, kept by deletions, replaced at once."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from art.config import ModelSettings
from art.errors import AdapterError, ConfigError, NotFoundError
from art.protocol.checkpoint_calls import BEST_METRIC, CheckpointInfo
from art.protocol.promotions import PromoteRequest, Promotion
from art.protocol.training import DeleteCheckpointsRequest, ModelStatus
from art.runtime.model_checkpoints import ModelCheckpoints, Promotions
from art.runtime.models import Models, PolicyResolver, status_of
from art.runtime.registry import RegisteredModel, Registry, set_identity
from art.storage import checkpoints
from art.storage.database import Database
from art.storage.layout import DataDir
from tests.support.leaving import cancel_while_stored

MODEL = RegisteredModel("p", "agent", "base/model", ModelSettings(), 4)
EVERY_OLD_ONE = DeleteCheckpointsRequest()


class Host:
    """An engine that loads any adapter, or fails to."""

    def __init__(self) -> None:
        self.one_policy = False
        self.engine = SimpleNamespace(in_use=Counter())
        self.adapters = self
        self.loaded: list[str] = []
        self.forgotten: list[str] = []
        self.problem: Exception | None = None
        self.may_forget = asyncio.Event()
        self.may_forget.set()

    async def renderer(self) -> str:
        return "the renderer"

    async def engine_info(self) -> Any:
        return SimpleNamespace(max_context=512, longest_context=512)

    def is_loaded(self, adapter: str) -> bool:
        return adapter in self.loaded

    async def load(self, adapter: str, checkpoint: Path) -> None:
        if self.problem is not None:
            raise self.problem
        assert (checkpoint / checkpoints.ADAPTER_WEIGHTS).is_file()
        self.loaded.append(adapter)

    async def ensure_loaded(self, adapter: str, checkpoint: Path) -> str:
        return adapter

    async def forget(self, adapter: str) -> None:
        self.forgotten.append(adapter)
        await self.may_forget.wait()


class Server:
    """The parts of a server that know of promotions, on a real data directory."""

    def __init__(self, folder: Path) -> None:
        self.host, self.database = Host(), Database(folder / "art.db")
        self.registry = Registry(self.database)
        hosts: Any = SimpleNamespace(of=lambda model: self.host)
        self.models = Models(DataDir(folder), hosts, None, self.registry)  # type: ignore[arg-type]
        self.resolver = PolicyResolver(self.models)
        jobs: Any = SimpleNamespace(store=SimpleNamespace(needed_checkpoints=self._nothing))
        self.checkpoints = ModelCheckpoints(self.models, jobs)
        self.promotions = Promotions(self.models, self.checkpoints)

    async def start(self) -> Server:
        await self.registry.start()
        for model in await self.registry.models():
            self.models.by_key[model.key] = model
        return self

    async def add_model(self) -> None:
        """Register a model that is at step 4."""
        await self.registry.save_model(MODEL)
        self.models.by_key[MODEL.key] = MODEL
        files = dict.fromkeys((*checkpoints.ADAPTER_FILES, *checkpoints.COMMON_FILES), b"{}")
        state = checkpoints.CheckpointState(
            step=0, job_id=None, base_model="base/model", lora=None, config={}, num_updates=0, rng="", metrics={}
        )
        files[checkpoints.STATE] = state.model_dump_json().encode()
        for step in range(5):
            weights = {checkpoints.ADAPTER_WEIGHTS: b"weights of step %d" % step}
            identity = checkpoints.write_checkpoint(self.models.checkpoint(MODEL, step), files | weights)
            await self.database.run(lambda db, step=step, is_=identity: set_identity(db, "p", "agent", step, is_))

    async def promote(self, step: int, **options: Any) -> Promotion:
        return await self.promotions.promote("p", "agent", PromoteRequest(step=step, **options), "key-1")

    async def listed(self) -> list[CheckpointInfo]:
        return await self.checkpoints.list_all("p", "agent", BEST_METRIC)

    @staticmethod
    async def _nothing() -> list[str]:
        return []


@pytest.fixture
async def server(tmp_path: Path) -> Server:
    server = await Server(tmp_path).start()
    await server.add_model()
    return server


async def test_requests_to_the_promoted_name_get_the_promoted_step(server: Server) -> None:
    for asked in ("p/agent@promoted", "agent@promoted"):
        with pytest.raises(NotFoundError, match=r"no checkpoint of p/agent is promoted.*art promote p/agent"):
            await server.resolver.resolve(asked)
    assert await server.promote(2) == Promotion(step=2, inference_name="p/agent@promoted", previous_step=None)
    assert server.host.loaded == ["p/agent@2"], "before the first request for it"
    for asked in ("p/agent@promoted", "agent@promoted"):
        policy = await server.resolver.resolve(asked)
        assert (policy.adapter, policy.policy_version, policy.name) == ("p/agent@2", 2, "agent")
    assert server.resolver.name_in("p", "agent@promoted") == "p/agent@promoted"
    assert (await server.resolver.resolve("p/agent")).policy_version == 4

    server.models.set_step("p/agent", 5)
    assert server.resolver.resolve_ready("p/agent@promoted") is None, "each publish forgets what was found"
    assert (await server.resolver.resolve("p/agent@promoted")).policy_version == 2

    assert (await server.promote(3)).previous_step == 2
    assert server.resolver.resolve_ready("p/agent@promoted") is None, "the old step is not served from a cache"
    assert (await server.resolver.resolve("p/agent@promoted")).policy_version == 3
    assert (await server.promote(3)).previous_step == 3, "a repeated call is as good as one"


async def test_lists_and_status_say_what_is_promoted(server: Server) -> None:
    assert [info.promoted for info in await server.listed()] == [False] * 5
    assert status_of(server.models.by_key["p/agent"]).promoted_step is None
    await server.promote(1)
    assert [info.step for info in await server.listed() if info.promoted] == [1]
    assert status_of(server.models.by_key["p/agent"]).promoted_step == 1


async def test_no_deletion_removes_the_promoted_one(server: Server) -> None:
    await server.promote(1)
    assert await server.checkpoints.delete("p", "agent", EVERY_OLD_ONE) == [0, 2, 3]
    checkpoints.verify(server.models.checkpoint(MODEL, 1))
    await server.promote(4)
    assert await server.checkpoints.delete("p", "agent", EVERY_OLD_ONE) == [1], "it was replaced"


async def test_a_step_that_is_being_deleted_cannot_be_promoted(server: Server) -> None:
    server.host.may_forget.clear()
    deleting = asyncio.create_task(server.checkpoints.delete("p", "agent", DeleteCheckpointsRequest(keep_recent=3)))
    while not server.host.forgotten:
        await asyncio.sleep(0)
    promoting = asyncio.create_task(server.promote(0))
    await asyncio.sleep(0.01)
    assert not promoting.done()
    server.host.may_forget.set()
    assert await deleting == [0, 1]
    with pytest.raises(NotFoundError, match="no checkpoint of step 0"):
        await promoting
    assert server.models.by_key["p/agent"].promoted_step is None


async def test_what_cannot_be_served_is_not_promoted(server: Server) -> None:
    await server.promote(1)
    for step in (5, 9):  # 5 is on the disk, but was never published
        checkpoint = server.models.checkpoint(MODEL, 5)
        checkpoint.mkdir(exist_ok=True)
        with pytest.raises(NotFoundError, match=f"no checkpoint of step {step}; its newest step is 4"):
            await server.promote(step)
    server.host.problem = AdapterError("it matches no layer")
    with pytest.raises(AdapterError):
        await server.promote(2)
    server.host.problem = None
    server.host.one_policy = True
    with pytest.raises(ConfigError, match=r'weights="merged".*weights="lora"'):
        await server.promote(2)
    server.host.one_policy = False
    assert (await server.resolver.resolve("p/agent@promoted")).policy_version == 1


async def test_a_model_registered_again_with_merged_weights_refuses_its_promoted_step(server: Server) -> None:
    await server.promote(1)
    server.host.one_policy = True
    with pytest.raises(NotFoundError, match=r"p/agent@1 is not served.*one step at a time, now step 4"):
        await server.resolver.resolve("p/agent@promoted")


async def test_a_promoted_folder_that_is_gone_is_named(server: Server) -> None:
    await server.promote(1)
    server.models.checkpoint(MODEL, 1).rename(server.models.checkpoint(MODEL, 99))
    with pytest.raises(NotFoundError, match="step 1, which is promoted"):
        await server.resolver.resolve("p/agent@promoted")


async def test_a_promotion_survives_a_restart_and_a_new_registration(server: Server, tmp_path: Path) -> None:
    await server.promote(1)
    await server.promote(2)
    restarted = await Server(tmp_path).start()  # beside the first one, which never closed its database
    assert restarted.models.by_key["p/agent"].promoted_step == 2
    await restarted.registry.save_model(MODEL)
    restarted.models.replace(MODEL)
    assert (await restarted.resolver.resolve("p/agent@promoted")).policy_version == 2
    assert (await (await Server(tmp_path).start()).resolver.resolve("p/agent@promoted")).policy_version == 2


async def test_a_promotion_whose_caller_is_gone_is_the_same_in_memory_and_on_disk(server: Server) -> None:
    await cancel_while_stored(server.database, server.promote(2))
    await server.database.run(lambda db: None)  # after the transaction of the promotion
    (stored,) = await server.registry.models()
    assert stored.promoted_step == server.models.by_key["p/agent"].promoted_step == 2
    assert (await server.promote(3)).previous_step == 2


async def test_a_database_of_an_older_version_has_nothing_promoted(server: Server, tmp_path: Path) -> None:
    server.database.close()
    with sqlite3.connect(tmp_path / "art.db") as db:
        db.execute("DROP TABLE promoted")
    db.close()
    updated = await Server(tmp_path).start()
    assert updated.models.by_key["p/agent"].promoted_step is None
    await updated.promote(3)
    assert updated.models.by_key["p/agent"].promoted_step == 3


def test_older_clients_understand_a_model_without_a_promoted_step() -> None:
    """They refuse fields that they do not know."""
    status = status_of(MODEL)
    assert "promoted_step" not in status.model_dump_json()
    promoted = status.model_copy(update={"promoted_step": 0})
    assert ModelStatus.model_validate_json(promoted.model_dump_json()).promoted_step == 0
    info = CheckpointInfo(step=0, created_at=0.0, size_bytes=1, full=False, newest=True, best=False)
    assert "promoted" not in info.model_dump_json()
    assert '"promoted":true' in info.model_copy(update={"promoted": True}).model_dump_json()
