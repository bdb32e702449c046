"""`SkyPilotBackend`: from nothing to a server, and what becomes of a machine that is lost, idle or too expensive.

`sky` and `ssh` are fakes; what runs on the machine for copies is the real code. Most of these tests take seconds of CPU,
for dozens of processes each, so they are slow tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from art.backends.skypilot import SkyConfig, SkyPilotBackend, sky_server, skypilot_backend
from art.backends.ssh import ssh_backend
from art.backends.ssh.launched import Launched
from art.errors import ArtError, BudgetError, ConfigError, MachineError
from tests.support.fake_sky import CLUSTER, FakeSky

NewBackend = Callable[..., SkyPilotBackend]


@pytest.fixture
async def new(sky: FakeSky) -> AsyncIterator[NewBackend]:
    made: list[SkyPilotBackend] = []

    def new(config: SkyConfig | None = None) -> SkyPilotBackend:
        made.append(SkyPilotBackend(cluster=CLUSTER, config=config))
        return made[-1]

    yield new
    for backend in made:
        await SkyPilotBackend._disconnect(backend)


def write_data(sky: FakeSky, step: int) -> None:
    """Write on the machine what a server with some steps has."""
    data = sky.machine.server_folder / "data"
    data.mkdir(exist_ok=True)
    (data / "checkpoint").write_text(str(step))
    with contextlib.closing(sqlite3.connect(data / "art.db")) as db, db:
        db.execute("CREATE TABLE IF NOT EXISTS published (step)")
        db.execute("INSERT INTO published VALUES (?)", [step])


def write_watch(sky: FakeSky, *, idle_s: float = 0.0, ended: str | None = None) -> None:
    seen = {"last_active_at": time.time() - idle_s, "ends_at": None, "ended": ended}
    (sky.machine.server_folder / "watch.json").write_text(json.dumps(seen))


def home_copy() -> Path:
    return Launched().folder / f"{CLUSTER}.data"


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(120):
        while not await is_so():
            await asyncio.sleep(0.02)


async def test_the_first_use_launches_installs_starts_and_connects(sky: FakeSky, new: NewBackend) -> None:
    backend = new()
    client = await backend.open()
    assert (await client.health())["is_known"]
    assert len(sky.calls("launch")) == 1
    assert sky.task() == backend.task() == (Launched().folder / f"{CLUSTER}.sky.yaml").read_text()
    record = Launched().find(CLUSTER)
    assert (record.kind, record.url) == ("skypilot", client.base_url)
    assert Launched().key_path(CLUSTER).read_text() == client.api_key


async def test_the_key_and_the_variables_are_in_no_command_and_no_file_that_others_can_read(
    sky: FakeSky, new: NewBackend
) -> None:
    backend = new()
    backend.environment = {"HF_TOKEN": "hf_secret"}
    client = await backend.open()
    assert client.api_key is not None
    seen = (sky.folder / "sky-calls").read_text() + "\n".join(sky.machine.calls()) + sky.task()
    for path in Launched().folder.glob("*.json"):
        seen += path.read_text()
    for secret in (client.api_key, "hf_secret"):
        assert secret not in seen
    places = [sky.machine.server_folder / "environment.json", sky.machine.server_folder / "api.key",
              Launched().key_path(CLUSTER)]  # fmt: skip
    assert [stat.S_IMODE(path.stat().st_mode) for path in places] == [0o600] * 3
    assert json.loads(places[0].read_text()) == {"HF_TOKEN": "hf_secret"}


@pytest.mark.slow
async def test_the_next_backend_finds_the_machine(sky: FakeSky, new: NewBackend) -> None:
    first = await new().open()
    again = await new().open()
    assert again.api_key == first.api_key
    assert len(sky.calls("launch")) == 1


@pytest.mark.slow
async def test_a_machine_without_the_gpu_that_was_asked_for_is_no_server(sky: FakeSky) -> None:
    with pytest.raises(MachineError, match="has no GPU: `nvidia-smi -L` lists none"):
        await SkyPilotBackend("H100:1", cluster=CLUSTER).open()
    assert Launched().names() == [CLUSTER]  # the machine costs money, so it is known


@pytest.mark.slow
async def test_a_set_up_that_does_not_end_is_said(
    sky: FakeSky, new: NewBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sky_server, "_WAIT_S", 1)
    monkeypatch.setattr(skypilot_backend, "SET_UP_TIMEOUT_S", 0.0)
    (sky.folder / "setup-fails").touch()
    with pytest.raises(MachineError, match="`sky logs default` says why"):
        await new().open()


@pytest.mark.slow
async def test_a_launch_that_fails_is_said_and_known(sky: FakeSky, new: NewBackend) -> None:
    sky.fail("launch", "no-capacity")
    backend = new()
    with pytest.raises(MachineError, match="no cloud has such a machine free now"):
        await backend.open()
    await backend.open()  # free now


@pytest.mark.slow
async def test_a_lost_machine_is_replaced_and_the_same_client_goes_on(
    sky: FakeSky, new: NewBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ssh_backend, "PING_EVERY_S", 0.05)
    backend = new()
    client = await backend.open()
    pid = (await client.health())["pid"]
    write_data(sky, 7)
    await backend.pull_home()
    sky.lose_machine()

    async def is_another() -> bool:
        with contextlib.suppress(ArtError):
            return (await client.health())["pid"] != pid
        return False

    await until(is_another)
    assert (await client.health())["is_known"]  # the key is the same
    assert (sky.machine.server_folder / "data" / "checkpoint").read_text() == "7"
    assert len(sky.calls("launch")) == 2
    assert "another one is launched (1 of 3)" in caplog.text


@pytest.mark.slow
async def test_several_machines_are_joined_and_one_that_is_lost_is_replaced(
    sky: FakeSky, new: NewBackend, caplog: pytest.LogCaptureFixture
) -> None:
    sky.machine.set_nodes()
    backend = new(SkyConfig(num_nodes=2))
    client = await backend.open()

    def nodes() -> dict[str, Any]:
        values: dict[str, Any] = json.loads((sky.machine.server_folder / "settings.json").read_text())
        return values["config"]["nodes"]

    worker = f"{CLUSTER}-worker1"
    assert (nodes()["address"], [node["name"] for node in nodes()["others"]]) == ("127.0.0.1", [worker])
    assert nodes()["others"][0]["python"].endswith("/nodes/python")  # it sets the variables of the backend
    assert "HostName 127.0.0.1\n" in (sky.machine.server_folder / "nodes" / "ssh_config").read_text()
    assert await backend.describe_nodes() == [(worker, "joined", "1.2.3")]
    pid = (await client.health())["pid"]
    write_watch(sky)
    await backend._look_after()
    assert len(sky.calls("launch")) == 1
    sky.lose_worker()
    await backend._look_after()
    assert len(sky.calls("launch")) == 2
    assert f"['{worker}'] cannot be reached; the server stops until there are others" in caplog.text
    assert (await client.health())["pid"] != pid
    assert (await client.health())["is_known"]  # at the same address, with the same key
    again = await new(SkyConfig(num_nodes=2)).open()
    assert again.api_key == client.api_key
    await backend.stop()
    assert sky.clusters()[CLUSTER]["status"] == "STOPPED"
    assert await backend.describe_nodes() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "idle_s", "num_lost", "words"),
    [
        (SkyConfig(idle_minutes=10), 700, 0, r"it was idle for \d+ minutes, so it is not replaced"),
        (SkyConfig(pull_minutes=None), 0, 0, "and its data with it"),
        (SkyConfig(num_relaunches=2), 0, 2, "after 2 others within a day"),
    ],
)
async def test_a_lost_machine_is_not_always_replaced(
    sky: FakeSky,
    new: NewBackend,
    monkeypatch: pytest.MonkeyPatch,
    config: SkyConfig,
    idle_s: float,
    num_lost: int,
    words: str,
) -> None:
    monkeypatch.setattr(ssh_backend, "PING_EVERY_S", 600.0)  # only the test asks for machines
    backend = new(config)
    await backend.open()
    for _ in range(num_lost):
        sky.lose_machine()
        await backend.find_machine()
    write_watch(sky, idle_s=idle_s)
    await backend._look_after()
    sky.lose_machine()
    num_launches = len(sky.calls("launch"))
    with pytest.raises(MachineError, match=words):
        await backend.find_machine()
    assert len(sky.calls("launch")) == num_launches


@pytest.mark.slow
async def test_when_the_watch_has_ended_the_data_comes_home_and_the_next_use_launches(
    sky: FakeSky, new: NewBackend
) -> None:
    backend = new()
    client = await backend.open()
    write_data(sky, 3)
    write_watch(sky, ended="idle for 25 minutes")  # before the server stops, as the watch does
    await backend.server.stop()
    with pytest.raises(MachineError, match="goes soon: idle for 25 minutes"):
        await backend.server.ensure()  # nothing is started on a machine that goes
    await backend._look_after()
    assert (home_copy() / "checkpoint").read_text() == "3"
    assert backend.tunnel is None
    again = await backend.open()  # the machine is still there: it gets the job again
    assert len(sky.calls("launch")) == 2
    assert (again.base_url, again.api_key) == (client.base_url, client.api_key)


@pytest.mark.slow
async def test_a_spent_budget_takes_the_machine_down_with_the_data_at_home(sky: FakeSky, new: NewBackend) -> None:
    backend = new(SkyConfig(budget_usd=5.0))
    sky.set_costs((2.0, 3600.0))
    await backend.open()
    assert backend.device_usd_per_hour == pytest.approx(2.0)
    limit = json.loads((sky.machine.server_folder / "limit.json").read_text())
    assert limit["ends_at"] == pytest.approx(time.time() + 1.5 * 3600, abs=120)  # 3 USD are left
    write_data(sky, 4)
    write_watch(sky)
    sky.set_costs((5.5, 9900.0))
    backend._asked_costs_at = -1e9
    await backend._look_after()
    assert sky.clusters() == {}
    assert (home_copy() / "checkpoint").read_text() == "4"
    with pytest.raises(BudgetError, match=r"have cost 5.50 of 5.00 USD"):
        await backend.open()


@pytest.mark.slow
async def test_down_copies_the_data_home_first_and_the_next_launch_brings_it_back(
    sky: FakeSky, new: NewBackend
) -> None:
    backend = new()
    await backend.open()
    write_data(sky, 5)
    await backend.down()
    assert sky.clusters() == {}
    assert Launched().names() == []
    assert (home_copy() / "checkpoint").read_text() == "5"
    sky.machine.kill()
    sky.lose_machine()
    await new().open()
    assert (sky.machine.server_folder / "data" / "checkpoint").read_text() == "5"


@pytest.mark.slow
async def test_down_keeps_a_machine_whose_data_cannot_be_copied_unless_told_to(sky: FakeSky, new: NewBackend) -> None:
    backend = new()
    await backend.open()
    (sky.machine.server_folder / "data" / "art.db").write_text("this is no database")
    with pytest.raises(MachineError, match="copying the data of default failed"):
        await backend.down()
    assert list(sky.clusters()) == [CLUSTER]
    await backend.down(delete_data=True)
    assert sky.clusters() == {}
    assert not home_copy().exists()


@pytest.mark.slow
async def test_down_of_a_machine_that_has_gone_by_itself(sky: FakeSky, new: NewBackend) -> None:
    backend = new()
    await backend.open()
    sky.lose_machine()
    await backend.down()
    assert Launched().names() == []


@pytest.mark.slow
async def test_stop_keeps_the_disk_and_spot_machines_cannot(sky: FakeSky, new: NewBackend) -> None:
    backend = new()
    await backend.open()
    write_data(sky, 6)
    await backend.stop()
    assert sky.clusters()[CLUSTER]["status"] == "STOPPED"
    assert (home_copy() / "checkpoint").read_text() == "6"
    with pytest.raises(ConfigError, match="spot machines cannot be stopped"):
        await new(SkyConfig(spot=True)).stop()


@pytest.mark.slow
async def test_closing_copies_the_data_home_and_leaves_the_machine(sky: FakeSky, new: NewBackend) -> None:
    async with new() as backend:
        await backend.open()
        write_data(sky, 8)
    assert (home_copy() / "checkpoint").read_text() == "8"
    assert list(sky.clusters()) == [CLUSTER]


@pytest.mark.slow
async def test_older_code_makes_a_cluster_and_restarts_its_server(sky: FakeSky, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("HF_TOKEN=hf_1\n")
    resources = {"infra": "lambda", "ports": ["7999", "8000"]}
    backend = await SkyPilotBackend.initialize_cluster(
        cluster_name=CLUSTER, resources=resources, env_path=tmp_path / ".env"
    )
    pid = (await (await backend.open()).health())["pid"]
    assert '  infra: "lambda"\n' in sky.task()
    assert "7999" not in sky.task()
    await backend.close()
    backend = await SkyPilotBackend.initialize_cluster(cluster_name=CLUSTER, resources=resources, force_restart=True)
    assert (await (await backend.open()).health())["pid"] != pid
    await backend.down()
    assert sky.clusters() == {}


@pytest.mark.slow
async def test_it_is_described_with_its_costs(sky: FakeSky, new: NewBackend) -> None:
    backend = new()
    assert await backend.describe() == (False, "no machine; 0.00 USD so far")
    await backend.open()
    sky.set_costs((1.25, 1800.0))
    is_up, words = await backend.describe()
    assert is_up
    assert words.endswith("deleted after 5 idle minutes; 1.25 USD so far, 2.50 USD an hour")
