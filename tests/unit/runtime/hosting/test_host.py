"""The books that a host keeps of the adapters in its engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import art.runtime.hosting.adapter_table
from art.config import EngineConfig, ModelSettings, ServerConfig, TrainConfig, TrainerConfig, VllmConfig
from art.engine import GenerateRequest, TokenChunk
from art.errors import ConfigError, HandshakeError, ProcessError, TrainingError
from art.protocol.calls import Call, Generate, PrepareWeights, Progress, Train, UnloadAdapter, Wake
from art.protocol.samples import StepResult
from art.protocol.training import RegisterRequest
from art.runtime.host import BaseModelHost, Hosts, host_key, usage_metrics
from art.runtime.registry import RegisteredModel
from art.runtime.runtime import Runtime
from art.runtime.supervision.process import ChildProcess
from art.storage import checkpoints
from art.storage.layout import DataDir

STEP = Train(samples=[], config=TrainConfig(), from_checkpoint=Path("0000"), to_checkpoint=Path("0001"), job_id="x")
CHUNK = TokenChunk(token_ids=[1], logprobs=[-1.0], finish_reason="length")


class Connection:
    """An engine that answers `unload_adapter` when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer = asyncio.Event()
        self.dead = False

    async def call(self, call: UnloadAdapter) -> None:
        self.asked.append(call.name)
        await self.answer.wait()
        if self.dead:
            raise ProcessError("the engine died")


@pytest.fixture
def engine() -> Connection:
    return Connection()


@pytest.fixture
def host(tmp_path: Path, engine: Connection, monkeypatch: pytest.MonkeyPatch) -> BaseModelHost:
    """Room for one adapter. The content of a checkpoint is its file `content`."""
    host = BaseModelHost("base", ModelSettings(), DataDir(tmp_path), ServerConfig())
    published: list[str] = []

    async def publish(_: Any, adapter_id: str, checkpoint: Path, tolerance: float | None) -> dict[str, float]:
        published.append(adapter_id)
        return {"publish/probe_gap": float(len(published))}

    async def connect() -> Connection:
        return engine

    monkeypatch.setattr(art.runtime.hosting.adapter_table, "MAX_LOADED_ADAPTERS", 1)
    monkeypatch.setattr(art.runtime.hosting.adapter_table, "publish", publish)
    monkeypatch.setattr(
        art.runtime.hosting.adapter_table.checkpoints, "identify", lambda path: (path / "content").read_text()
    )
    monkeypatch.setattr(host.engine_process, "connect", connect)
    return host


def checkpoint(tmp_path: Path, name: str, content: str) -> Path:
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name / "content").write_text(content)
    return tmp_path / name


async def test_a_long_request_of_an_old_adapter_does_not_keep_new_ones_out(
    host: BaseModelHost, engine: Connection, tmp_path: Path
) -> None:
    async with asyncio.timeout(60):
        for name in ("a", "b", "c"):
            assert await host.adapters.load(name, checkpoint(tmp_path, name, name))
        await asyncio.sleep(0)
    assert engine.asked == ["a", "b"]
    assert [host.adapters.is_loaded(name) for name in ("a", "b", "c")] == [False, False, True]


async def test_a_restarted_engine_does_not_get_another_checkpoint_in_the_place_of_one_that_it_had(
    host: BaseModelHost, engine: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(art.runtime.hosting.adapter_table, "MAX_LOADED_ADAPTERS", 2)
    for name in ("a", "b"):
        await host.adapters.load(name, checkpoint(tmp_path, name, name))
    checkpoint(tmp_path, "a", "another one")
    await host.adapters.restore(engine)  # type: ignore[arg-type]
    assert [host.adapters.is_loaded(name) for name in ("a", "b")] == [False, True]


async def test_full_checkpoints_make_room_before_they_are_loaded(
    host: BaseModelHost, engine: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(art.runtime.hosting.adapter_table, "MAX_LOADED_FULL", 2)
    seen: list[list[str]] = []

    async def publish(_: Any, adapter_id: str, path: Path, tolerance: float | None) -> dict[str, float]:
        await asyncio.sleep(0)
        seen.append(list(engine.asked))
        return {"publish/probe_gap": 1.0}

    monkeypatch.setattr(art.runtime.hosting.adapter_table, "publish", publish)
    assert await host.adapters.load("lora", checkpoint(tmp_path, "lora", "lora"))
    for name in ("a", "b", "c", "b"):
        path = checkpoint(tmp_path, name, f"{name}{len(seen)}")
        (path / checkpoints.MODEL_WEIGHTS).touch()
        assert await host.adapters.load(name, path)
    assert seen == [[], [], [], ["a"], ["a"]], "b was loaded again, in its own place"
    assert [host.adapters.is_loaded(name) for name in ("lora", "a", "b", "c")] == [True, False, True, True]


async def test_other_weights_under_the_same_name_are_published_again(host: BaseModelHost, tmp_path: Path) -> None:
    assert await host.adapters.load("a", checkpoint(tmp_path, "0001", "of a step that failed"))
    assert await host.adapters.load("a", checkpoint(tmp_path, "0001", "of a step that failed")) == {}
    assert await host.adapters.load("a", checkpoint(tmp_path, "0001", "of the next try"))


async def test_the_largest_gap_of_a_probe_is_kept_for_the_trainer(host: BaseModelHost, tmp_path: Path) -> None:
    assert host.adapters.probe_gap is None
    for number, name in enumerate(("a", "b"), start=1):
        await host.adapters.load(name, checkpoint(tmp_path, name, name))
        assert host.adapters.probe_gap == number
    host.adapters.probe_gap = 5.0
    await host.adapters.load("c", checkpoint(tmp_path, "c", "c"))
    assert host.adapters.probe_gap == 5


async def test_hosts_do_not_share_a_log(tmp_path: Path) -> None:
    hosts = Hosts(DataDir(tmp_path), ServerConfig())
    for number, base_model in enumerate(("org/base", "other/base", "org/base")):
        settings = ModelSettings(engine=EngineConfig(max_running=1 + number))
        hosts.of(RegisteredModel(project="p", name=f"m{number}", base_model=base_model, settings=settings, step=0))
    logs = [process.spec.log_path.name for process in hosts.processes()]
    assert logs[::2] == ["engine-base.log", "engine-base-2.log", "engine-base-3.log"]
    assert len(set(logs)) == 6


async def test_a_step_that_takes_too_long_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = BaseModelHost("base", ModelSettings(), DataDir(tmp_path), ServerConfig(job_timeout_s=0.1))
    ended: list[str] = []

    class Endless:
        async def stream(self, call: Train) -> AsyncIterator[Progress]:
            while True:
                yield Progress(done=1, total=2)
                await asyncio.sleep(0.01)

    async def connect() -> Endless:
        return Endless()

    async def end(cause: str) -> None:
        ended.append(cause)

    monkeypatch.setattr(host.trainer_process, "connect", connect)
    monkeypatch.setattr(host.trainer_process, "end", end)
    with pytest.raises(TrainingError, match=r"`train` took longer than `job_timeout_s` = 0\.1 s"):
        await host.trainer.train(STEP)
    assert len(ended) == 1


async def test_forgetting_waits_for_the_last_request_and_survives_the_engine(
    host: BaseModelHost, engine: Connection, tmp_path: Path
) -> None:
    await host.adapters.load("a", checkpoint(tmp_path, "a", "a"))
    forgetting = asyncio.ensure_future(host.adapters.forget("a"))
    await asyncio.sleep(0.01)
    assert not forgetting.done()
    assert not host.adapters.is_loaded("a")
    engine.dead = True
    engine.answer.set()
    await forgetting
    assert engine.asked == ["a"], "not repeated: the name may have been loaded again"


async def ask_for(host: BaseModelHost, adapter: str) -> None:
    request = GenerateRequest(
        request_id="r", adapter=adapter, prompt_token_ids=[1], max_tokens=1, stop_token_ids=(), seed=0
    )
    async for _ in host.engine.generate(request, stream=False):
        pass


class OnePolicy:
    """A connection to an engine that holds one policy, and what was asked of it and published in it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.may_end = asyncio.Event()

    async def call(self, call: PrepareWeights) -> None:
        self.events.append(f"{call.method} {call.name}")

    async def stream(self, call: Generate) -> AsyncIterator[TokenChunk]:
        self.events.append(f"{call.method} {call.request.adapter}")
        await self.may_end.wait()
        yield CHUNK

    async def publish(self, _: Any, adapter_id: str, path: Path, tolerance: float | None) -> dict[str, float]:
        self.events.append(f"publish {adapter_id}")
        await asyncio.sleep(0)
        if (path / "wrong").exists():
            raise HandshakeError("other log-probs")
        return {"publish/probe_gap": 1.0}


@pytest.fixture
def single(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[BaseModelHost, OnePolicy]:
    settings = ModelSettings(engine=VllmConfig(device="cpu", weights="merged"))
    host, engine = BaseModelHost("base", settings, DataDir(tmp_path), ServerConfig()), OnePolicy()

    async def connect() -> OnePolicy:
        return engine

    monkeypatch.setattr(host.engine_process, "connect", connect)
    monkeypatch.setattr(art.runtime.hosting.adapter_table, "publish", engine.publish)
    monkeypatch.setattr(
        art.runtime.hosting.adapter_table.checkpoints, "identify", lambda path: (path / "content").read_text()
    )
    monkeypatch.setattr(art.runtime.hosting.adapter_table.checkpoints, "verify", lambda path: None)
    return host, engine


async def test_policies_are_exchanged_when_no_request_runs(
    single: tuple[BaseModelHost, OnePolicy], tmp_path: Path
) -> None:
    host, engine = single
    first, second = checkpoint(tmp_path, "m@1", "1"), checkpoint(tmp_path, "m@2", "2")
    assert await host.adapters.ensure_loaded("m@1", first) == "m@1"
    running = asyncio.create_task(ask_for(host, "m@1"))
    await until(lambda: "generate m@1" in engine.events)
    loading = asyncio.create_task(host.adapters.load("m@2", second))
    await until(lambda: "prepare_weights m@2" in engine.events)
    await until(lambda: not host.adapters.is_loaded("m@1"))
    held = asyncio.create_task(ask_for(host, "m@2"))
    asking = asyncio.create_task(host.adapters.ensure_loaded("m@1", first))
    await asyncio.sleep(0.02)
    assert [task.done() for task in (loading, held, asking)] == [False] * 3
    engine.may_end.set()
    assert await loading == {"publish/probe_gap": 1.0}
    assert await asking == "m@2", "a request does not bring the step before back"
    await asyncio.gather(running, held)
    assert engine.events == [
        *("prepare_weights m@1", "publish m@1", "generate m@1"),
        *("prepare_weights m@2", "publish m@2", "generate m@2"),
    ]
    assert (host.adapters.is_loaded("m@1"), host.adapters.is_loaded("m@2")) == (False, True)
    assert await host.adapters.load("m@2", second) == {}


async def test_a_policy_that_fails_the_handshake_gives_its_place_back(
    single: tuple[BaseModelHost, OnePolicy], tmp_path: Path
) -> None:
    host, engine = single
    await host.adapters.load("m@1", checkpoint(tmp_path, "m@1", "1"))
    wrong = checkpoint(tmp_path, "m@2", "2")
    (wrong / "wrong").touch()
    with pytest.raises(HandshakeError):
        await host.adapters.load("m@2", wrong)
    assert engine.events[2:] == ["prepare_weights m@2", "publish m@2", "publish m@1"]
    assert host.adapters.is_loaded("m@1")
    (tmp_path / "m@1" / "wrong").touch()  # the one before cannot come back either
    with pytest.raises(HandshakeError):
        await host.adapters.load("m@2", wrong)
    assert not host.adapters.is_loaded("m@1")
    (wrong / "wrong").unlink()
    assert await host.adapters.ensure_loaded("m@2", wrong) == "m@2"


def test_models_whose_weights_are_merged_share_no_host() -> None:
    for engine, shared in ((VllmConfig(), True), (VllmConfig(weights="merged"), False)):
        keys = {
            host_key(RegisteredModel(project="p", name=name, base_model="b", settings=ModelSettings(engine=engine), step=0))
            for name in ("a", "b")
        }  # fmt: skip
        assert (len(keys) == 1) is shared


class Machine:
    """Connections to an engine that can sleep and to a trainer, which write what they are asked into `events`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.finish_step = asyncio.Event()
        self.cannot_wake = False
        self.closed = False

    async def call(self, call: Call[Any]) -> Any:
        self.events.append(call.method)
        if isinstance(call, Wake) and self.cannot_wake:
            raise ProcessError("out of memory")
        return CHUNK if isinstance(call, Generate) else [-1.0]

    async def stream(self, call: Call[Any]) -> AsyncIterator[StepResult | TokenChunk]:
        self.events.append(call.method)
        if isinstance(call, Train):
            await self.finish_step.wait()
            yield StepResult(step=1)
        else:
            yield CHUNK


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def shared(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> BaseModelHost:
    """A host whose engine sleeps while the trainer works."""
    settings = ModelSettings(engine=VllmConfig(device="cpu", sleep="always"), trainer=TrainerConfig(device="cpu"))

    async def connect(_: ChildProcess) -> Machine:
        return machine

    monkeypatch.setattr(ChildProcess, "connect", connect)
    monkeypatch.setattr(ChildProcess, "live_client", machine)
    return BaseModelHost("base", settings, DataDir(tmp_path), ServerConfig())


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_requests_wait_while_the_trainer_has_the_memory(shared: BaseModelHost, machine: Machine) -> None:
    step = asyncio.ensure_future(shared.trainer.train(STEP))
    await until(lambda: "train" in machine.events)
    request = GenerateRequest(
        request_id="r", adapter=None, prompt_token_ids=[1], max_tokens=1, stop_token_ids=(), seed=1
    )

    async def sample() -> list[int]:
        return [token async for chunk in shared.engine.generate(request, stream=False) for token in chunk.token_ids]

    held: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(sample()),
        asyncio.ensure_future(shared.engine.generate_whole(request)),
        asyncio.ensure_future(shared.engine.score([1, 2], None)),
    ]
    await asyncio.sleep(0.01)
    assert machine.events == ["sleep", "train"]
    machine.finish_step.set()
    assert (await step).step == 1
    await asyncio.gather(*held)
    assert machine.events == ["sleep", "train", "wake", "generate", "generate", "score"]


async def test_a_request_that_runs_when_the_engine_falls_asleep_is_not_waited_for(
    shared: BaseModelHost, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout may take minutes; the engine pauses its request, and the step begins at once."""
    running, end = asyncio.Event(), asyncio.Event()

    async def stream(call: Call[Any]) -> AsyncIterator[StepResult | TokenChunk]:
        if isinstance(call, Train):
            yield StepResult(step=1)
            return
        running.set()
        await end.wait()
        yield CHUNK

    monkeypatch.setattr(machine, "stream", stream)
    request = GenerateRequest(
        request_id="r", adapter=None, prompt_token_ids=[1], max_tokens=1, stop_token_ids=(), seed=1
    )

    async def sample() -> int:
        return len([chunk async for chunk in shared.engine.generate(request, stream=True)])

    before = shared.usage()
    asked = asyncio.ensure_future(sample())
    await running.wait()
    async with asyncio.timeout(60):
        assert (await shared.trainer.train(STEP)).step == 1
    assert machine.events == ["sleep", "wake"]
    assert not asked.done()
    end.set()
    assert await asked == 1
    usage = shared.usage()
    assert usage.engine_busy_s - before.engine_busy_s <= usage.at - before.at - usage.engine_asleep_s


async def test_usage_tells_who_waits_for_whom(shared: BaseModelHost, machine: Machine) -> None:
    before = shared.usage()
    step = asyncio.ensure_future(shared.trainer.train(STEP))
    await until(lambda: "train" in machine.events)
    held = [asyncio.ensure_future(shared.engine.score([1, 2], None)) for _ in range(3)]
    await asyncio.sleep(0.5)
    assert shared.usage().engine_asleep_s > 0.45, "while it lasts too"
    machine.finish_step.set()
    await asyncio.gather(step, *held)
    await asyncio.sleep(0.5)
    metrics = usage_metrics(before, shared.usage())
    seconds = metrics["time/since_last_step_s"]
    assert 0.45 <= metrics["time/engine_asleep_s"] <= metrics["time/requests_closed_s"] < seconds - 0.45
    assert metrics["time/requests_held_s"] == pytest.approx(3 * metrics["time/engine_asleep_s"], rel=0.2)
    assert metrics["time/trainer_idle_share"] == pytest.approx(1 - metrics["time/engine_asleep_s"] / seconds, abs=0.1)
    assert metrics["time/engine_idle_share"] > 0.9


async def test_an_engine_that_does_not_wake_up_is_restarted(
    shared: BaseModelHost, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    async def end(cause: str) -> None:
        ended.append(cause)

    monkeypatch.setattr(shared.engine_process, "end", end)
    machine.cannot_wake = True
    machine.finish_step.set()
    assert (await shared.trainer.train(STEP)).step == 1
    assert ended == ["it did not wake up: out of memory"]
    assert await shared.engine.score([1, 2], None), "the gate is open again"


async def test_a_trainer_that_first_starts_after_the_registration_is_no_fault_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that comes with a checkpoint is registered before its trainer starts. Its folder may be away then."""
    (tmp_path / "base").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "base" / name).write_text("{}")
    refused = ConfigError("there is no folder")
    answers: list[object] = []

    async def load_into_the_engine(model: RegisteredModel) -> None:
        answers.append(runtime._hosts.of(model, is_new=True).trainer_process._explain(refused))

    runtime = Runtime(tmp_path / "data", ServerConfig())
    await runtime.start()
    monkeypatch.setattr(runtime.registration, "_make_ready", load_into_the_engine)
    await runtime.registration.register(RegisterRequest(project="p", name="m", base_model=str(tmp_path / "base")))
    assert answers == [(refused, True)]
    (host,) = runtime._hosts.all()
    error, is_refused = host.trainer_process._explain(refused)
    assert isinstance(error, ProcessError)
    assert not is_refused
    await runtime.close()


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
