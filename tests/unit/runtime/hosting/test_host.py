"""A host of engine and trainer: the adapters in its engine, the sleep of an engine beside a trainer, and its processes."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from art.config import EngineConfig, ModelSettings, ServerConfig, TrainConfig, TrainerConfig, VllmConfig
from art.engine import GenerateRequest
from art.errors import HandshakeError, TrainingError
from art.protocol.calls import Call, Progress, Train
from art.runtime.hosting.adapter_table import MAX_LOADED_ADAPTERS
from art.runtime.hosting.host import BaseModelHost, Hosts
from art.runtime.hosting.trainer_handle import TrainerHandle
from art.runtime.registry import RegisteredModel
from art.storage import checkpoints
from art.storage.layout import DataDir
from tests.support.fake_engine import FakeEngine
from tests.support.fake_process import Connection, FakeProcess, processes_with
from tests.support.published import OnePolicyEngine, make_checkpoint

STEP = Train(samples=[], config=TrainConfig(), from_checkpoint=Path("0000"), to_checkpoint=Path("0001"), job_id="x")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def request(adapter: str | None = None, *, max_tokens: int = 1) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", adapter=adapter, prompt_token_ids=[1], max_tokens=max_tokens, stop_token_ids=(), seed=0
    )


async def ask_for(host: BaseModelHost, adapter: str | None, *, max_tokens: int = 1) -> int:
    """Sample tokens; return how many came."""
    chunks = host.engine.generate(request(adapter, max_tokens=max_tokens), stream=True)
    return sum([len(chunk.token_ids) async for chunk in chunks])


async def checkpoint(folder: Path, name: str, adapter: int, *, probe_of: int | None = None) -> Path:
    """Write a checkpoint, in place of one of the same name."""
    for path in (folder / name, folder / f"scratch-{name}"):
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
    return await make_checkpoint(folder / name, adapter=adapter, probe_of=probe_of)


# -- the adapters in an engine --


@pytest.fixture
def engine() -> Connection:
    return Connection(FakeEngine(delay_s=0.001))


@pytest.fixture
def host(tmp_path: Path, engine: Connection) -> BaseModelHost:
    return BaseModelHost(
        "base", ModelSettings(), DataDir(tmp_path), ServerConfig(), make_process=processes_with(engine)
    )


async def test_a_long_request_of_an_old_adapter_does_not_keep_new_ones_out(host: BaseModelHost, tmp_path: Path) -> None:
    names = [f"m@{number}" for number in range(MAX_LOADED_ADAPTERS + 1)]
    path = await checkpoint(tmp_path, "0001", 1)
    for name in names[:-1]:
        await host.adapters.load(name, path)
    running = asyncio.create_task(ask_for(host, names[0], max_tokens=4000))
    await until(lambda: host.engine.in_use[names[0]] == 1)
    await host.adapters.load(names[-1], path)
    assert [host.adapters.is_loaded(name) for name in names] == [False, *[True] * MAX_LOADED_ADAPTERS]
    assert not running.done()
    running.cancel()


async def test_a_restarted_engine_does_not_get_another_checkpoint_in_the_place_of_one_that_it_had(
    host: BaseModelHost, engine: Connection, tmp_path: Path
) -> None:
    for number, name in enumerate(("a", "b")):
        await host.adapters.load(name, await checkpoint(tmp_path, name, number))
    await checkpoint(tmp_path, "a", 5)
    await host.adapters.restore(host.engine.replicas[0], engine)  # type: ignore[arg-type]
    assert [host.adapters.is_loaded(name) for name in ("a", "b")] == [False, True]


async def test_full_checkpoints_make_room_before_they_are_loaded(
    host: BaseModelHost, engine: Connection, tmp_path: Path
) -> None:
    await host.adapters.load("lora", await checkpoint(tmp_path, "lora", 9))
    for number, name in enumerate(("a", "b", "c", "b")):
        path = await checkpoint(tmp_path, name, number)
        (path / checkpoints.MODEL_WEIGHTS).touch()
        assert await host.adapters.load(name, path)
    moves = [made for made in engine.made if "load_adapter" in made]
    assert moves[1:] == ["load_adapter a", "load_adapter b", "unload_adapter a", "load_adapter c", "load_adapter b"], (
        "b was loaded again, in its own place"
    )
    assert [host.adapters.is_loaded(name) for name in ("lora", "a", "b", "c")] == [True, False, True, True]


async def test_other_weights_under_the_same_name_are_published_again(host: BaseModelHost, tmp_path: Path) -> None:
    failed = await checkpoint(tmp_path, "0001", 1)
    assert await host.adapters.load("a", failed)
    assert await host.adapters.load("a", failed) == {}
    assert await host.adapters.load("a", await checkpoint(tmp_path, "0001", 2)), "of the next try"


async def test_the_largest_gap_of_a_probe_is_kept_for_the_trainer(host: BaseModelHost, tmp_path: Path) -> None:
    assert host.adapters.probe_gap is None
    await host.adapters.load("a", await checkpoint(tmp_path, "a", 1))
    assert host.adapters.probe_gap == 0.0
    host.adapters.probe_gap = 5.0
    await host.adapters.load("b", await checkpoint(tmp_path, "b", 2))
    assert host.adapters.probe_gap == 5.0


async def test_forgetting_waits_for_the_last_request_and_survives_the_engine(
    host: BaseModelHost, engine: Connection, tmp_path: Path
) -> None:
    path = await checkpoint(tmp_path, "a", 1)
    await host.adapters.load("a", path)
    running = asyncio.create_task(ask_for(host, "a", max_tokens=4000))
    await until(lambda: len(engine.engine.requests) == 1)
    forgetting = asyncio.create_task(host.adapters.forget("a"))
    await until(lambda: "unload_adapter a" in engine.made)
    assert not forgetting.done()
    assert not host.adapters.is_loaded("a")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await forgetting
    await host.adapters.load("a", path)
    engine.deadly = ("unload_adapter",)
    await host.adapters.forget("a")
    assert engine.made.count("unload_adapter a") == 2, "not repeated: the name may have been loaded again"


# -- an engine that holds one policy --


@pytest.fixture
def one() -> Connection:
    return Connection(OnePolicyEngine(delay_s=0.001))


@pytest.fixture
def single(tmp_path: Path, one: Connection) -> BaseModelHost:
    settings = ModelSettings(engine=VllmConfig(device="cpu", weights="merged"))
    return BaseModelHost("base", settings, DataDir(tmp_path), ServerConfig(), make_process=processes_with(one))


def exchanges(connection: Connection) -> list[str]:
    return [made for made in connection.made if made.startswith(("prepare", "load", "generate"))]


async def test_policies_are_exchanged_when_no_request_runs(
    single: BaseModelHost, one: Connection, tmp_path: Path
) -> None:
    first, second = await checkpoint(tmp_path, "m@1", 1), await checkpoint(tmp_path, "m@2", 2)
    assert await single.adapters.ensure_loaded("m@1", first) == "m@1"
    running = asyncio.create_task(ask_for(single, "m@1", max_tokens=4000))
    await until(lambda: "generate m@1" in one.made)
    loading = asyncio.create_task(single.adapters.load("m@2", second))
    await until(lambda: "prepare_weights m@2" in one.made and not single.adapters.is_loaded("m@1"))
    held = asyncio.create_task(ask_for(single, "m@2"))
    asking = asyncio.create_task(single.adapters.ensure_loaded("m@1", first))
    await asyncio.sleep(0.02)
    assert [task.done() for task in (running, loading, held, asking)] == [False] * 4
    running.cancel()
    assert (await loading)["publish/probe_gap"] == 0.0
    assert await asking == "m@2", "a request does not bring the step before back"
    assert await held == 1
    assert exchanges(one) == [
        *("prepare_weights m@1", "load_adapter m@1", "generate m@1"),
        *("prepare_weights m@2", "load_adapter m@2", "generate m@2"),
    ]
    assert (single.adapters.is_loaded("m@1"), single.adapters.is_loaded("m@2")) == (False, True)
    assert await single.adapters.load("m@2", second) == {}


async def test_a_policy_that_fails_the_handshake_gives_its_place_back(
    single: BaseModelHost, one: Connection, tmp_path: Path
) -> None:
    await single.adapters.load("m@1", await checkpoint(tmp_path, "m@1", 1))
    wrong = await checkpoint(tmp_path, "m@2", 2, probe_of=1)
    with pytest.raises(HandshakeError):
        await single.adapters.load("m@2", wrong)
    assert exchanges(one)[2:] == ["prepare_weights m@2", "load_adapter m@2", "load_adapter m@1"]
    assert single.adapters.is_loaded("m@1")
    await checkpoint(tmp_path, "m@1", 1, probe_of=2)  # the one before cannot come back either
    with pytest.raises(HandshakeError):
        await single.adapters.load("m@2", wrong)
    assert not single.adapters.is_loaded("m@1")
    assert await single.adapters.ensure_loaded("m@2", await checkpoint(tmp_path, "m@2", 2)) == "m@2"


# -- an engine that sleeps while the trainer works --


@pytest.fixture
def shared(tmp_path: Path, engine: Connection) -> BaseModelHost:
    settings = ModelSettings(engine=VllmConfig(device="cpu", sleep="always"), trainer=TrainerConfig(device="cpu"))
    return BaseModelHost("base", settings, DataDir(tmp_path), ServerConfig(), make_process=processes_with(engine))


async def test_requests_wait_while_the_trainer_has_the_memory(shared: BaseModelHost, engine: Connection) -> None:
    began = time.monotonic()
    step = asyncio.create_task(shared.trainer.train(STEP))
    await until(lambda: "train" in engine.made)
    held: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(ask_for(shared, None)),
        asyncio.ensure_future(shared.engine.generate_whole(request())),
        asyncio.ensure_future(shared.engine.score([1, 2], None)),
    ]
    await asyncio.sleep(0.01)
    assert engine.made == ["sleep", "train"]
    trainer_busy_s = shared.trainer.busy_s
    assert trainer_busy_s > 0, "while it lasts too"
    engine.finish_step.set()
    assert (await step).step == 1
    await asyncio.gather(*held)
    assert engine.made[:3] == ["sleep", "train", "wake"]
    assert sorted(engine.made[3:]) == ["generate", "generate", "score"]
    assert trainer_busy_s < shared.trainer.busy_s < time.monotonic() - began


async def test_a_request_that_runs_when_the_engine_falls_asleep_is_not_waited_for(
    shared: BaseModelHost, engine: Connection
) -> None:
    """A rollout may take minutes; the engine pauses its request, and the step begins at once."""
    began = time.monotonic()
    asked = asyncio.create_task(ask_for(shared, None, max_tokens=500))
    await until(lambda: len(engine.engine.requests) == 1)
    engine.finish_step.set()
    async with asyncio.timeout(60):
        assert (await shared.trainer.train(STEP)).step == 1
    assert engine.made == ["generate", "sleep", "train", "wake"]
    assert await asked == 500
    assert shared.engine.busy_s <= time.monotonic() - began - shared.trainer.busy_s


async def test_idle_shares_tell_who_waits_for_whom(host: BaseModelHost) -> None:
    assert host.end_of_step() == {}
    host._at_step = time.monotonic() - 10, -5.0, -2.0
    assert host.end_of_step() == pytest.approx(
        {"time/since_last_step_s": 10.0, "time/engine_idle_share": 0.5, "time/trainer_idle_share": 0.8}, rel=0.05
    )


async def test_an_engine_that_does_not_wake_up_is_restarted(shared: BaseModelHost, engine: Connection) -> None:
    engine.deadly = ("wake",)
    engine.finish_step.set()
    assert (await shared.trainer.train(STEP)).step == 1
    assert isinstance(shared.engine_process, FakeProcess)
    assert shared.engine_process.ended == ["it did not wake up: died during wake"]
    await engine.engine.wake()
    assert await shared.engine.score([1, 2], None), "the gate is open again"


# -- processes --


async def test_hosts_do_not_share_a_log(tmp_path: Path) -> None:
    hosts = Hosts(DataDir(tmp_path), ServerConfig())
    for number, base_model in enumerate(("org/base", "other/base", "org/base")):
        settings = ModelSettings(engine=EngineConfig(max_running=1 + number))
        hosts.of(RegisteredModel(project="p", name=f"m{number}", base_model=base_model, settings=settings, step=0))
    logs = [process.spec.log_path.name for process in hosts.processes()]
    assert logs[::2] == ["engine-base.log", "engine-base-2.log", "engine-base-3.log"]
    assert len(set(logs)) == 6


def test_models_whose_weights_are_merged_share_no_host() -> None:
    for engine, shared in ((VllmConfig(), True), (VllmConfig(weights="merged"), False)):
        keys = {
            RegisteredModel(project="p", name=name, base_model="b", settings=ModelSettings(engine=engine), step=0).host_key
            for name in ("a", "b")
        }  # fmt: skip
        assert (len(keys) == 1) is shared


async def test_a_step_that_takes_too_long_is_ended_and_named(tmp_path: Path) -> None:
    class Endless(Connection):
        async def stream(self, call: Call[Any]) -> AsyncIterator[Any]:
            while True:
                yield Progress(done=1, total=2)
                await asyncio.sleep(0.01)

    make_process = processes_with(Endless())
    host = BaseModelHost("base", ModelSettings(), DataDir(tmp_path), ServerConfig(), make_process=make_process)

    async def load(client: Any) -> None: ...

    trainer = TrainerHandle(
        host.trainer_process.spec, load, contextlib.nullcontext, tmp_path, make_process, job_timeout_s=0.1
    )
    with pytest.raises(TrainingError, match=r"`train` took longer than 0\.1 s"):
        await trainer.train(STEP)
    assert isinstance(trainer.process, FakeProcess)
    assert len(trainer.process.ended) == 1


def test_a_process_that_first_starts_after_the_registration_is_no_fault_of_a_request(tmp_path: Path) -> None:
    """A model that comes with a checkpoint is registered before its trainer starts. Its folder may be away then."""
    host = BaseModelHost("base", ModelSettings(), DataDir(tmp_path), ServerConfig(), is_new=True)
    assert (host.engine_process.is_new, host.trainer_process.is_new) == (True, True)
    host.note_registered()
    assert (host.engine_process.is_new, host.trainer_process.is_new) == (False, False)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (EngineConfig(device="cpu"), "float32"),
        (EngineConfig(device="cpu", dtype="bfloat16"), "bfloat16"),
        (VllmConfig(urls=("http://gpu:8000",)), "bfloat16"),
        (VllmConfig(device="cpu", flags={"quantization": "fp8"}), "quantized"),
        (VllmConfig(device="cpu", dtype="bfloat16", flags={"kv-cache-dtype": "fp8_e4m3"}), "quantized"),
        (VllmConfig(device="cpu", flags={"kv_cache_dtype": "auto"}), "float32"),
    ],
)
def test_a_host_knows_the_number_type_of_its_engine_before_it_runs(
    engine: EngineConfig | VllmConfig, expected: str, tmp_path: Path
) -> None:
    host = BaseModelHost("base", ModelSettings(engine=engine), DataDir(tmp_path), ServerConfig())
    assert host.engine_dtype == expected
