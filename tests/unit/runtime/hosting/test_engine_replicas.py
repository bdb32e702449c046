"""Several engine processes of one base model: what each serves, and what happens when one is wrong or dies."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from art.config import EngineConfig, ModelSettings, ServerConfig, TrainerConfig, VllmConfig
from art.engine import GenerateRequest
from art.engines.routing import BLOCK
from art.errors import HandshakeError, NotFoundError, ProcessError
from art.protocol import calls
from art.runtime.hosting.host import BaseModelHost
from art.storage.layout import DataDir
from art.worker.process import ChildProcess
from tests.support.fake_engine import FakeEngine
from tests.support.fake_process import Connection
from tests.support.published import OnePolicyEngine, make_checkpoint

SEATS = 4


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


class Deaf(FakeEngine):
    """Loads adapters without effect."""

    def _salt(self, adapter: str | None) -> bytes:
        super()._salt(adapter)
        return b"base"


class Life(Connection):
    """The connection to one process, which ends when that is killed."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.death = asyncio.Event()
        self.num_calls = 0

    async def call(self, call: calls.Call[Any]) -> Any:
        if isinstance(call, calls.StartEngine | calls.StartVllm):
            return await self.engine.info()
        with self.counted():
            answer, death = asyncio.ensure_future(super().call(call)), asyncio.ensure_future(self.death.wait())
            await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
            if self.death.is_set():
                answer.cancel()
                raise ProcessError("it was killed")
            death.cancel()
            return answer.result()

    async def stream(self, call: calls.Call[Any]) -> AsyncIterator[Any]:
        with self.counted():
            async for result in super().stream(call):
                if self.death.is_set():
                    raise ProcessError("it was killed")
                yield result

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1


class ShortLived(ChildProcess):
    """A supervised process that lives in this one, and comes back when it was killed and `may_return` is set."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.make_engine: Callable[[], FakeEngine] = lambda: FakeEngine(delay_s=0.001)
        self.life: Life | None = None
        self.may_return = asyncio.Event()
        self.may_return.set()
        self.ended: list[str] = []
        self._begun: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._begun is None:
            self._begun = asyncio.create_task(self._begin())

    async def _begin(self) -> None:
        await self.may_return.wait()
        if self._may_start is not None:
            await self._may_start.wait()
        life: Any = Life(self.make_engine())
        await self._initialise(life)
        self.life = life

    @property
    def live_client(self) -> Any:
        return self.life

    @property
    def status(self) -> dict[str, Any]:
        last_end = self.ended[-1] if self.ended else None
        state = "up" if self.life else "starting"
        return {"state": state, "pid": None, "restarts": self.num_restarts, "last_end": last_end}

    async def connect(self) -> Any:
        self.start()
        async with asyncio.timeout(60):
            while self.life is None:
                if self._failure is not None:
                    raise self._failure
                await asyncio.sleep(0.001)
        return self.life

    def kill(self) -> None:
        assert self.life is not None
        self.life.death.set()
        self.life = None
        self.num_restarts += 1
        self._begun = asyncio.create_task(self._begin())

    async def end(self, cause: str) -> None:
        self.ended.append(cause)
        self.kill()


def make_host(tmp_path: Path, engine: EngineConfig | VllmConfig | None = None) -> BaseModelHost:
    engine = engine or EngineConfig(device="cpu", replicas=2, max_running=SEATS)
    settings = ModelSettings(engine=engine, trainer=TrainerConfig(device="cpu"))
    return BaseModelHost("base", settings, DataDir(tmp_path), ServerConfig(), make_process=ShortLived)


@pytest.fixture
def host(tmp_path: Path) -> BaseModelHost:
    return make_host(tmp_path)


def processes_of(host: BaseModelHost) -> list[ShortLived]:
    return [replica.process for replica in host.engine.replicas]  # type: ignore[misc]


async def all_up(host: BaseModelHost) -> list[ShortLived]:
    host.engine.start()
    await until(lambda: len(host.engine.up) == len(host.engine.replicas))
    return processes_of(host)


def request(adapter: str | None, seed: int = 0, *, max_tokens: int = 1) -> GenerateRequest:
    prompt = [seed % 100] * BLOCK
    return GenerateRequest(
        request_id="r", adapter=adapter, prompt_token_ids=prompt, max_tokens=max_tokens, stop_token_ids=(), seed=seed
    )


async def ask(host: BaseModelHost, asked: GenerateRequest) -> list[int]:
    return [token async for chunk in host.engine.generate(asked, stream=True) for token in chunk.token_ids]


def made(process: ShortLived, what: str) -> int:
    assert process.life is not None
    return sum(one.startswith(what) for one in process.life.made)


# -- what each replica serves --


async def test_a_publish_reaches_all_replicas_and_requests_go_to_all(host: BaseModelHost, tmp_path: Path) -> None:
    first, second = await all_up(host)
    metrics = await host.adapters.load("m@1", await make_checkpoint(tmp_path / "1", adapter=1))
    assert metrics["publish/probe_gap"] == 0.0
    assert [replica.policies for replica in host.engine.replicas] == [["m@1"], ["m@1"]]
    assert [made(process, "score") for process in (first, second)] == [5, 5], "the handshake of each"
    await asyncio.gather(*(ask(host, request("m@1", seed, max_tokens=20)) for seed in range(2 * SEATS)))
    assert [made(process, "generate m@1") for process in (first, second)] == [SEATS, SEATS]
    assert await host.engine.score([1, 2], "m@1")
    assert (await host.engine.generate_whole(request("m@1"))).finish_reason == "length"


async def test_one_that_does_not_serve_what_was_trained_is_refused_alone(host: BaseModelHost, tmp_path: Path) -> None:
    first, second = processes_of(host)
    second.make_engine = lambda: Deaf(delay_s=0.001)
    await all_up(host)
    second.may_return.clear()
    second.make_engine = lambda: FakeEngine(delay_s=0.001)
    assert await host.adapters.load("m@1", await make_checkpoint(tmp_path / "1", adapter=1))
    assert host.adapters.is_loaded("m@1")
    await until(lambda: bool(second.ended))
    assert second.ended[0].startswith("it refused m@1 (m@1 was not published: the engine's log-probs")
    assert first.ended == []
    told = host.status()["replicas"]
    assert told[0]["policies"] == ["m@1"]
    assert told[1]["policies"] == []
    assert "was not published" in told[1]["refused"]["m@1"]
    await asyncio.gather(*(ask(host, request("m@1", seed)) for seed in range(9)))
    assert made(first, "generate m@1") == 9
    second.may_return.set()
    await all_up(host)
    told = host.status()["replicas"]
    assert (told[1]["policies"], told[1]["refused"], told[1]["restarts"]) == (["m@1"], {}, 1)


async def test_one_that_stays_wrong_serves_the_rest_and_is_tried_again_at_the_next_step(
    host: BaseModelHost, tmp_path: Path
) -> None:
    _, second = processes_of(host)
    second.make_engine = lambda: Deaf(delay_s=0.001)
    await all_up(host)
    await host.adapters.load("m@1", await make_checkpoint(tmp_path / "1", adapter=1))
    await until(lambda: bool(second.ended) and second.life is not None)
    assert "m@1" in host.engine.replicas[1].refused
    assert len(second.ended) == 1, "it is not started again and again"
    await asyncio.gather(*(ask(host, request("m@1", seed)) for seed in range(9)))
    await asyncio.gather(*(ask(host, request(None, seed, max_tokens=20)) for seed in range(8)))
    assert made(second, "generate m@1") == 0
    assert made(second, "generate") > 0, "the base model, which it serves"
    await host.adapters.load("m@2", await make_checkpoint(tmp_path / "2", adapter=2))
    await until(lambda: len(second.ended) == 2)


async def test_one_that_is_wrong_and_alone_does_not_decide_while_another_one_starts(
    host: BaseModelHost, tmp_path: Path
) -> None:
    first, second = processes_of(host)
    second.make_engine = lambda: Deaf(delay_s=0.001)
    first.may_return.clear()
    host.engine.start()
    await until(lambda: second.life is not None)
    publishing = asyncio.create_task(host.adapters.load("m@1", await make_checkpoint(tmp_path / "1", adapter=1)))
    await until(lambda: made(second, "unload_adapter") == 1)
    await asyncio.sleep(0.01)
    assert not publishing.done()
    first.may_return.set()
    assert await publishing
    assert host.engine.replicas[0].policies == ["m@1"]
    await until(lambda: len(second.ended) == 1)


async def test_a_policy_that_no_replica_serves_is_an_error(host: BaseModelHost, tmp_path: Path) -> None:
    first, second = await all_up(host)
    with pytest.raises(HandshakeError, match="previous step stays in place"):
        await host.adapters.load("m@1", await make_checkpoint(tmp_path / "1", adapter=1, probe_of=2))
    assert not host.adapters.is_loaded("m@1")
    assert (first.ended, second.ended) == ([], [])
    assert [replica.refused for replica in host.engine.replicas] == [{}, {}]
    with pytest.raises(NotFoundError):
        await ask(host, request("m@1"))


async def test_a_replica_that_comes_up_during_a_publish_serves_it_too(host: BaseModelHost, tmp_path: Path) -> None:
    """Its adapters are restored before the publish ends, and it is up only with the one that was published."""
    checkpoint = await make_checkpoint(tmp_path / "1", adapter=1)
    first, second = processes_of(host)
    second.may_return.clear()
    publishing = asyncio.create_task(host.adapters.load("m@1", checkpoint))
    await until(lambda: first.life is not None and "load_adapter m@1" in first.life.made)
    second.may_return.set()
    await publishing
    await all_up(host)
    assert [replica.policies for replica in host.engine.replicas] == [["m@1"], ["m@1"]]


async def test_a_killed_replica_gets_its_adapters_back_before_it_is_up(host: BaseModelHost, tmp_path: Path) -> None:
    first, second = await all_up(host)
    await host.adapters.load("m@1", await make_checkpoint(tmp_path / "1", adapter=1))
    second.may_return.clear()
    second.kill()
    await host.adapters.load("m@2", await make_checkpoint(tmp_path / "2", adapter=2))
    second.may_return.set()
    await until(lambda: second.life is not None)
    assert host.engine.replicas[1].policies == ["m@1", "m@2"]
    await host.adapters.forget("m@1")
    assert [replica.policies for replica in host.engine.replicas] == [["m@2"], ["m@2"]]
    assert [made(process, "unload_adapter m@1") for process in (first, second)] == [1, 1]


async def test_a_damaged_policy_is_dropped_when_no_replica_can_serve_it(host: BaseModelHost, tmp_path: Path) -> None:
    first, second = await all_up(host)
    path = await make_checkpoint(tmp_path / "1", adapter=1)
    await host.adapters.load("m@1", path)
    await asyncio.to_thread(shutil.rmtree, path)
    second.kill()
    await all_up(host)
    assert [replica.policies for replica in host.engine.replicas] == [["m@1"], []]
    assert host.adapters.is_loaded("m@1")
    first.kill()
    await all_up(host)
    assert not host.adapters.is_loaded("m@1")
    assert [replica.refused for replica in host.engine.replicas] == [{}, {}]


async def test_a_publish_survives_the_death_of_a_replica_and_of_all(host: BaseModelHost, tmp_path: Path) -> None:
    first, second = await all_up(host)
    assert first.life is not None
    assert second.life is not None
    second.life.deadly = ("load_adapter",)
    second.may_return.clear()
    publishing = asyncio.create_task(host.adapters.load("m@1", await make_checkpoint(tmp_path / "1", adapter=1)))
    await until(lambda: made(second, "load_adapter") == 1)
    second.kill()
    assert await publishing
    second.may_return.set()
    await all_up(host)
    assert [replica.policies for replica in host.engine.replicas] == [["m@1"], ["m@1"]]
    first.kill()
    second.kill()
    assert await host.adapters.load("m@2", await make_checkpoint(tmp_path / "2", adapter=2))
    await all_up(host)
    assert [replica.policies for replica in host.engine.replicas] == [["m@1", "m@2"], ["m@1", "m@2"]]


# -- requests --


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_goes_on_at_another_replica_with_the_same_tokens(
    stream: bool, host: BaseModelHost, tmp_path: Path
) -> None:
    _, second = await all_up(host)
    await host.adapters.load("m@1", await make_checkpoint(tmp_path / "1", adapter=1))
    asked = [request("m@1", seed, max_tokens=200) for seed in range(6)]

    async def answer(one: GenerateRequest) -> list[int]:
        return await ask(host, one) if stream else (await host.engine.generate_whole(one)).token_ids

    undisturbed = await asyncio.gather(*map(answer, asked))
    running = [asyncio.create_task(answer(one)) for one in asked]
    await until(lambda: min(replica.num_requests for replica in host.engine.replicas) > 0)
    await asyncio.sleep(0.05)
    second.may_return.clear()  # it does not come back: the other one answers all
    second.kill()
    assert await asyncio.gather(*running) == undisturbed
    assert host.engine.replicas[1].num_requests == 0


async def test_a_request_waits_for_the_replica_that_serves_its_policy(host: BaseModelHost, tmp_path: Path) -> None:
    first, second = processes_of(host)
    second.make_engine = lambda: Deaf(delay_s=0.001)
    await all_up(host)
    await host.adapters.load("m@1", await make_checkpoint(tmp_path / "1", adapter=1))
    await until(lambda: bool(second.ended) and second.life is not None)
    first.may_return.clear()
    first.kill()
    waiting = asyncio.create_task(ask(host, request("m@1")))
    assert await ask(host, request(None)), "the other one serves the base model"
    assert not waiting.done()
    first.may_return.set()
    assert await waiting
    assert made(first, "generate m@1") == 1


async def test_requests_wait_while_all_start_and_learn_it_when_all_have_failed(host: BaseModelHost) -> None:
    first, second = processes_of(host)
    for process in (first, second):
        process.may_return.clear()
    waiting = asyncio.create_task(ask(host, request(None)))
    await asyncio.sleep(0.01)
    first._failure = ProcessError("no memory")
    await asyncio.sleep(0.01)
    assert not waiting.done(), "the other one may still come up"
    second._failure = ProcessError("no memory either")
    with pytest.raises(ProcessError, match="no memory"):
        await waiting


async def test_seats_are_those_of_the_replicas_that_are_up(host: BaseModelHost) -> None:
    _, second = await all_up(host)
    running = [asyncio.create_task(ask(host, request(None, seed, max_tokens=3000))) for seed in range(3 * SEATS)]
    await until(lambda: host.engine.seats.num_waiting == SEATS)
    assert [replica.num_requests for replica in host.engine.replicas] == [SEATS, SEATS], "each has its share"
    second.may_return.clear()
    second.kill()
    await until(lambda: host.engine.replicas[0].num_requests == 2 * SEATS)
    running[0].cancel()
    running[1].cancel()
    await asyncio.sleep(0.02)
    assert host.engine.seats.num_waiting == SEATS, "fewer seats: none of those that wait gets one"
    second.may_return.set()
    await until(lambda: host.engine.seats.num_waiting == SEATS - 2)
    for task in running:
        task.cancel()


@pytest.mark.parametrize("seed", range(6))
async def test_a_storm_of_kills_publishes_and_requests_loses_nothing(seed: int, tmp_path: Path) -> None:
    """One of three replicas is sometimes wrong. Three kills are fewer than the attempts of a call, so none may fail."""
    draw = random.Random(seed)
    host = make_host(tmp_path, EngineConfig(device="cpu", replicas=3, max_running=SEATS))
    processes = processes_of(host)
    processes[2].make_engine = lambda: (Deaf if draw.random() < 0.3 else FakeEngine)(delay_s=0.001)
    await all_up(host)
    paths = {f"m@{step}": await make_checkpoint(tmp_path / str(step), adapter=step) for step in range(1, 6)}
    published: list[str] = []
    answers: list[tuple[GenerateRequest, list[int]]] = []

    async def publish() -> None:
        for name, path in paths.items():
            await host.adapters.load(name, path)
            published.append(name)
            await asyncio.sleep(0.05 * draw.random())

    async def kill() -> None:
        for _ in range(3):
            await asyncio.sleep(0.1 * draw.random())
            if (victim := draw.choice(processes)).life is not None:
                victim.kill()

    async def sample(number: int) -> None:
        await until(lambda: bool(published))
        for turn in range(5):
            asked = request(draw.choice(published), 100 * number + turn, max_tokens=draw.choice([5, 60]))
            answers.append((asked, await ask(host, asked)))

    await asyncio.gather(publish(), kill(), *map(sample, range(10)))
    await all_up(host)
    undisturbed = FakeEngine()
    for name, path in paths.items():
        await undisturbed.load_adapter(name, path)
    for asked, tokens in answers:
        assert tokens == (await undisturbed.generate_whole(asked)).token_ids
    for replica, process in zip(host.engine.replicas, processes, strict=True):
        assert process.life is not None
        assert set(process.life.engine._adapters) == set(replica.policies)
        assert {*replica.policies, *replica.refused} == set(paths)


# -- all replicas together --


async def test_all_replicas_sleep_while_the_trainer_works(tmp_path: Path) -> None:
    host = make_host(tmp_path, VllmConfig(device="cpu", sleep="always", replicas=2, max_running=SEATS))
    first, second = await all_up(host)
    async with host._engine_aside():
        assert [made(process, "sleep") for process in (first, second)] == [1, 1]
        second.kill()
        await asyncio.sleep(0.01)
    await all_up(host)
    assert [made(process, "wake") for process in (first, second)] == [1, 0]
    assert await ask(host, request(None))


async def test_all_replicas_exchange_their_only_policy(tmp_path: Path) -> None:
    host = make_host(tmp_path, VllmConfig(device="cpu", weights="merged", replicas=2, max_running=SEATS))
    for process in processes_of(host):
        process.make_engine = lambda: OnePolicyEngine(delay_s=0.001)
    first, second = await all_up(host)
    for number in (1, 2):
        await host.adapters.load(f"m@{number}", await make_checkpoint(tmp_path / str(number), adapter=number))
        assert [replica.policies for replica in host.engine.replicas] == [[f"m@{number}"], [f"m@{number}"]]
    assert [made(process, "prepare_weights") for process in (first, second)] == [2, 2]
    assert len({host._work_dir(replica) for replica in host.engine.replicas}) == 2


async def test_numbers_of_all_replicas_are_added(host: BaseModelHost, tmp_path: Path) -> None:
    class Counting(Life):
        async def call(self, call: calls.Call[Any]) -> Any:
            return await self.engine.stats() if isinstance(call, calls.Stats) else await super().call(call)

    await all_up(host)
    for process in processes_of(host):
        assert process.life is not None
        process.life.__class__ = Counting
    await host.adapters.load("m@1", await make_checkpoint(tmp_path / "1", adapter=1))
    await asyncio.gather(*(ask(host, request("m@1", seed, max_tokens=5)) for seed in range(8)))
    stats = await host.engine.stats()
    assert (stats["generated_tokens"], stats["adapters"], stats["running"]) == (40.0, 1.0, 0.0)
