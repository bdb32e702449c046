"""Readiness, metrics and the OpenAPI document."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from art.config import ServerConfig
from art.errors import InvalidRequestError
from art.protocol.answers import Measurement
from art.record.recorder import Recorder
from art.runtime import live as measurements
from art.runtime.live import (
    _COUNTERS,
    _GAUGES,
    find_obstacles,
    measure_engines,
    measure_processes,
)
from art.runtime.runtime import Runtime as RealRuntime
from art.server.app import App
from art.server.call import SCENARIO_HEADER, SEED_HEADER, build_openapi
from art.server.state import BUCKETS_S, FAMILIES, Metrics
from art.storage.database import Database
from art.storage.keys import KeyStore
from tests.support.page import ALL_ROUTES
from tests.support.spies import TwoProjects


class Runtime(TwoProjects):
    found: dict[str, str] = {}

    async def obstacles(self) -> dict[str, str]:
        return self.found

    async def measurements(self) -> list[Measurement]:
        return [Measurement("art_process_restarts_total", 2.0, {"process": 'engine "x"\n'})]


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def app(runtime: Runtime) -> App:
    return App(runtime, api_key="k")  # type: ignore[arg-type]


@pytest.fixture
async def http(app: App) -> AsyncIterator[httpx2.AsyncClient]:
    transport, headers = httpx2.ASGITransport(app), {"authorization": "Bearer k"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://t", headers=headers, verify=False) as http:
        yield http


# -- ready --


async def test_ready(http: httpx2.AsyncClient, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art.server.state.READY_EVERY_S", 0.0)
    response = await http.get("/ready")
    assert (response.status_code, response.json()) == (200, {"ready": True, "obstacles": {}})
    runtime.found = {"disk": "full"}
    response = await http.get("/ready")
    assert (response.status_code, response.json()) == (503, {"ready": False, "obstacles": {"disk": "full"}})
    assert (await http.get("/ready", headers={"authorization": ""})).json() == {"ready": False, "obstacles": {}}


async def test_strangers_cannot_make_it_write_all_the_time(http: httpx2.AsyncClient, runtime: Runtime) -> None:
    asked = []

    async def obstacles() -> dict[str, str]:
        asked.append(1)
        await asyncio.sleep(0)
        return {}

    runtime.obstacles = obstacles  # type: ignore[method-assign]
    await asyncio.gather(*(http.get("/ready", headers={"authorization": ""}) for _ in range(20)))
    assert len(asked) == 1


def host(engine: str = "up", trainer: str = "up", stats: Any = None, **status: Any) -> Any:
    def process(kind: str, state: str) -> Any:
        return SimpleNamespace(
            spec=SimpleNamespace(name=f"{kind} of m"), status={"state": state, "restarts": 1, **status}
        )

    sampling, training = process("engine", engine), process("trainer", trainer)
    replica = SimpleNamespace(process=sampling, num_requests=2, policies=["p/m@1"], refused={})
    gated = SimpleNamespace(name="engine of m", state=engine, replicas=[replica], stats=stats)
    return SimpleNamespace(name="m", engine=gated, trainer_process=training, processes=[sampling, training])


async def test_obstacles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(tmp_path / "art.db")
    recorder = Recorder(database)
    await recorder.start()
    assert await find_obstacles([host()], recorder, tmp_path) == {}
    with monkeypatch.context() as patch:
        patch.setattr(measurements, "MIN_FREE_BYTES", 2**60)
        found = await find_obstacles([host("starting", "failed")], recorder, tmp_path)
    assert found["engine of m"] == "starting"
    assert found["trainer of m"] == "failed"
    assert "MiB are free" in found["disk"]
    await database.run(lambda db: db.execute("PRAGMA query_only=ON"))  # as on a disk that has become read-only
    assert "readonly" in (await find_obstacles([], recorder, tmp_path))["database"]
    database.close()


async def test_a_recorder_that_cannot_write_is_an_obstacle(tmp_path: Path) -> None:
    database = Database(tmp_path / "art.db")
    recorder = Recorder(database)
    await recorder.start()
    for _ in range(2):
        await recorder.check()
    assert database.read("SELECT count(*) FROM exchanges") == [(0,)]
    await database.run(lambda db: db.execute("ALTER TABLE exchanges RENAME TO elsewhere"))
    assert "exchanges" in (await find_obstacles([], recorder, tmp_path))["recorder"]
    database.close()


async def test_a_data_directory_that_is_gone_is_an_obstacle(tmp_path: Path) -> None:
    database = Database(tmp_path / "data" / "art.db")
    recorder = Recorder(database)
    await recorder.start()
    shutil.rmtree(tmp_path / "data")
    assert "deleted, moved or replaced" in (await find_obstacles([], recorder, tmp_path / "data"))["database"]
    database.close()


async def test_keys_that_cannot_be_checked_are_503_and_an_obstacle(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art.server.state.READY_EVERY_S", 0.0)
    store = KeyStore(tmp_path / "keys.db")
    _, text = store.create("ci", project=None, scopes=["infer"])
    app = App(runtime, api_key="k", keys=store)  # type: ignore[arg-type]
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://t", verify=False) as http:
        own, stored = {"authorization": "Bearer k"}, {"authorization": f"Bearer {text}"}
        assert (await http.get("/api/models/a/x", headers=stored)).status_code == 200
        assert (await http.get("/ready")).status_code == 200
        (tmp_path / "keys.db").unlink()
        answer = await http.get("/api/models/a/x", headers=stored)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "keys_unavailable")
        assert str(tmp_path) not in answer.text
        assert (await http.get("/api/models/a/x", headers=own)).status_code == 200, "the server's own key is no file"
        assert "file of API keys" in (await http.get("/ready", headers=own)).json()["obstacles"]["keys"]
        for headers in (stored, {}):
            answer = await http.get("/ready", headers=headers)
            assert (answer.status_code, answer.json()) == (503, {"ready": False, "obstacles": {}})
            assert (await http.get("/health", headers=headers)).status_code == 200
    store.close()


# -- metrics --

_SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)')


def parse(page: str) -> dict[tuple[str, str], float]:
    """Samples of a page in Prometheus' format; checks it on the way."""
    assert page.endswith("\n")
    samples: dict[tuple[str, str], float] = {}
    declared: dict[str, str] = {}
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in declared
            declared[name] = kind
        elif not line.startswith("# HELP "):
            match = _SAMPLE.fullmatch(line)
            assert match, line
            family = re.sub(r"_(bucket|sum|count)$", "", match[1])
            assert (family if declared.get(family) == "histogram" else match[1]) == list(declared)[-1]
            assert (match[1], match[2] or "") not in samples
            samples[match[1], match[2] or ""] = float(match[3])
    return samples


async def test_metrics(http: httpx2.AsyncClient) -> None:
    for path in ("/health", "/health", "/nothing", "/api/models/a/x", "/api/models/a/y"):
        await http.get(path)
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = parse(response.text)
    assert samples["art_http_requests_total", 'method="GET",route="/health",status="200"'] == 2
    assert samples["art_http_requests_total", 'method="GET",route="(none)",status="404"'] == 1
    assert samples["art_http_requests_total", 'method="GET",route="/api/models/{project}/{name}",status="200"'] == 2
    assert samples["art_http_running", ""] == 1  # this one
    assert samples["art_process_restarts_total", r'process="engine \"x\"\n"'] == 2


async def test_metrics_of_an_idle_server(http: httpx2.AsyncClient) -> None:
    assert parse((await http.get("/metrics")).text)


async def test_metrics_without_a_data_directory_are_503_and_show_no_path(tmp_path: Path, runtime: Runtime) -> None:
    store = KeyStore(tmp_path / "keys.db")
    _, monitor = store.create("monitor", project=None, scopes=["infer"])
    real = RealRuntime(tmp_path / "data", ServerConfig())
    runtime.measurements = real.measurements  # type: ignore[method-assign]
    app = App(runtime, api_key="k", keys=store, data_dir=tmp_path / "data")  # type: ignore[arg-type]
    headers = {"authorization": f"Bearer {monitor}"}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://t", verify=False) as http:
        await asyncio.to_thread(real._lock.acquire, 1.0)
        assert (await http.get("/metrics", headers=headers)).status_code == 200
        shutil.rmtree(tmp_path / "data")
        answer = await http.get("/metrics", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "data_directory_gone")
        assert str(tmp_path) not in answer.text
        assert answer.headers["x-should-retry"] == "false"
        operator = await http.get("/metrics", headers={"authorization": "Bearer k"})
        assert str(tmp_path) in operator.text, "the operator's own key is told where it was"
    await real.close()
    store.close()


def test_a_histogram_is_cumulative() -> None:
    metrics = Metrics()
    for seconds in (0.001, 0.005, 0.2, 1000.0):
        metrics.observe("GET", "/r", 200, seconds)
    samples = parse(metrics.render([]).decode())
    name = "art_http_request_seconds"
    counts = [samples[f"{name}_bucket", f'le="{float(bound)}",route="/r"'] for bound in BUCKETS_S]
    assert counts == [2, 2, 2, 2, 2, 3, *[3] * 9]
    assert samples[f"{name}_bucket", 'le="+Inf",route="/r"'] == samples[f"{name}_count", 'route="/r"'] == 4
    assert samples[f"{name}_sum", 'route="/r"'] == pytest.approx(1000.206)


async def test_measurements_are_in_the_catalogue() -> None:
    class Engine:
        async def stats(self) -> dict[str, float]:
            return dict.fromkeys([*_COUNTERS, *_GAUGES, "something else"], 1.0)

    busy, down = host(rss_bytes=5, stats=Engine().stats), host("starting")
    found = [*await measure_engines([busy, down]), *measure_processes([busy, down])]
    found += [Measurement("art_tokens_total", 3.0, {"model": "p/m", "kind": "prompt"})]
    assert {measurement.name for measurement in found} <= FAMILIES.keys()
    assert sum(measurement.name == "art_engine_running" for measurement in found) == 1
    assert sum(measurement.name == "art_process_up" and measurement.value == 0 for measurement in found) == 1


async def test_an_engine_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        async def stats(self) -> dict[str, float]:
            await asyncio.sleep(60)
            return {}

    class Broken:
        async def stats(self) -> dict[str, float]:
            raise InvalidRequestError("unknown method `stats`")

    monkeypatch.setattr("art.runtime.models.ENGINE_TIMEOUT_S", 0.01)
    stuck, broken = host(stats=Engine().stats), host(stats=Broken().stats)
    assert await measure_engines([stuck, broken]) == []


# -- OpenAPI --


async def test_the_document_is_valid(http: httpx2.AsyncClient) -> None:
    document = (await http.get("/openapi.json", headers={"authorization": ""})).json()
    OpenAPIV31SpecValidator(document).validate()
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert described == {(route.method, route.path) for route in ALL_ROUTES}


def test_the_document_says_what_the_table_says() -> None:
    document = build_openapi(ALL_ROUTES)
    identifiers = set()
    for route in ALL_ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        identifiers.add(operation["operationId"])
        assert operation["summary"]
        assert (operation["security"] == []) is (route.scope is None)
        assert set(operation["responses"][str(route.status)]["content"]) == set(route.media)
        named = [parameter["name"] for parameter in operation["parameters"]]
        assert named == [
            *re.findall(r"{(\w+)}", route.path),
            *route.query,
            *([SEED_HEADER, SCENARIO_HEADER] if route.samples else []),
        ]
        if route.request is not None:
            (media,) = operation["requestBody"]["content"].values()
            assert media["schema"]["$ref"].rpartition("/")[2] in document["components"]["schemas"]
    assert len(identifiers) == len(ALL_ROUTES)
