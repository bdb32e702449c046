"""`SkyPilotBackend`: from nothing to a server, and what becomes of its data. `sky` and `ssh` are fakes, rsync is real."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from art.errors import ConfigError, MachineError
from art_cloud.skypilot_backend import SkyConfig, SkyPilotBackend
from art_cloud.ssh_backend import Install
from tests.support.fake_sky import CLUSTER, FakeSky

NewBackend = Callable[[], SkyPilotBackend]


@pytest.fixture
async def new(sky: FakeSky) -> AsyncIterator[NewBackend]:
    made: list[SkyPilotBackend] = []

    def new() -> SkyPilotBackend:
        made.append(SkyPilotBackend(cluster=CLUSTER, install=Install(source="art==1.2.3")))
        return made[-1]

    yield new
    for backend in made:
        await backend.close()


def write_data(sky: FakeSky, step: int) -> Path:
    """Write on the machine what a server with some steps has."""
    checkpoint = sky.machine.server_folder / "data" / "checkpoints" / "new"
    checkpoint.parent.mkdir(exist_ok=True)
    checkpoint.write_text(str(step))
    (sky.machine.server_folder / "data" / "art.db").touch()
    return checkpoint


async def test_the_first_use_launches_installs_starts_and_connects_without_a_secret_in_sight(
    sky: FakeSky, new: NewBackend
) -> None:
    backend = new()
    assert await backend.describe() == (False, "no machine")
    backend.environment = {"HF_TOKEN": "hf_secret"}
    client = await backend.open()
    assert (await client.health())["is_known"]
    assert sky.task() == backend.task()
    assert client.api_key is not None
    seen = (sky.folder / "sky-calls").read_text() + "\n".join(sky.machine.calls()) + sky.task()
    assert not any(secret in seen for secret in (client.api_key, "hf_secret"))
    places = [sky.machine.server_folder / name for name in ("environment.sh", "api.key")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in places] == [0o600] * 2
    assert places[0].read_text() == "export HF_TOKEN=hf_secret\n"

    assert (await new().open()).api_key == client.api_key
    assert len(sky.calls("launch")) == 1, "the next backend finds the machine"
    (sky.machine.server_folder / "in-use").unlink()
    await new().open()
    assert len(sky.calls("launch")) == 2, "a machine whose job has ended would go soon"
    is_up, words = await backend.describe()
    assert is_up
    assert words.startswith("UP on Lambda us-west-3 1x(gpus=H100:1")


@pytest.mark.slow
async def test_a_launch_that_fails_is_said(sky: FakeSky, new: NewBackend) -> None:
    sky.fail("launch", "no-capacity")
    with pytest.raises(MachineError, match="SkyPilot said"):
        await new().open()
    with pytest.raises(MachineError, match="there is no CUDA device"):
        await SkyPilotBackend("H100:1", cluster=CLUSTER, install=Install(source="art==1.2.3")).open()


@pytest.mark.slow
async def test_down_copies_the_data_home_and_the_next_launch_brings_it_back(
    sky: FakeSky, new: NewBackend, tmp_path: Path
) -> None:
    backend = new()
    await backend.open()
    write_data(sky, 5)
    mine = tmp_path / "mine"
    mine.write_text("of the user")
    (sky.machine.server_folder / "data" / "link").symlink_to(mine)  # nothing of the machine leads out of the copy
    (backend_copy := tmp_path / ".art/clusters" / CLUSTER).mkdir(parents=True)
    (backend_copy / "older").touch()
    assert await backend.down()
    assert sky.clusters() == {}
    assert {path.name for path in backend_copy.iterdir()} == {"art.db", "checkpoints", "logs", "server.lock"}
    assert (backend_copy / "checkpoints/new").read_text() == "5"
    assert sky.machine.processes() == {}
    sky.lose_machine()
    again = new()
    await again.open()
    assert (sky.machine.server_folder / "data/checkpoints/new").read_text() == "5"
    assert not await again.down(delete_data=True)
    assert not backend_copy.exists()
    assert mine.read_text() == "of the user"
    await again.down()  # what has gone by itself is no error


@pytest.mark.slow
async def test_a_machine_whose_data_cannot_be_copied_goes_on(
    sky: FakeSky, new: NewBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = new()
    await backend.open()
    write_data(sky, 5)
    (sky.machine.bin_dir / "rsync").write_text("#!/bin/sh\necho disk full >&2; exit 11\n")
    (sky.machine.bin_dir / "rsync").chmod(0o755)
    with pytest.raises(MachineError, match="disk full"):
        await backend.down()
    assert list(sky.clusters()) == [CLUSTER]


@pytest.mark.slow
async def test_stop_keeps_the_disk(sky: FakeSky, new: NewBackend) -> None:
    backend = new()
    await backend.open()
    checkpoint = write_data(sky, 6)
    await backend.stop()
    assert sky.machine.processes() == {}
    assert sky.clusters()[CLUSTER]["status"] == "STOPPED"
    await new().open()
    assert checkpoint.read_text() == "6"


@pytest.mark.slow
async def test_older_code_makes_a_cluster_and_restarts_its_server(sky: FakeSky, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("# of mine\nexport HF_TOKEN='hf_1'\n")

    class Resources:  # of the library `sky`
        def to_yaml_config(self) -> dict[str, object]:
            return {"infra": "lambda", "accelerators": {"H100": 1}, "ports": ["7999"], "disk_size": None}

    async def initialize(**options: bool) -> SkyPilotBackend:
        return await SkyPilotBackend.initialize_cluster(
            cluster_name=CLUSTER, resources=Resources(), env_path=tmp_path / ".env", art_version="1.2.3", **options
        )

    backend = await initialize()
    pid = (await (await backend.open()).health())["pid"]
    assert (sky.machine.server_folder / "environment.sh").read_text() == "export HF_TOKEN=hf_1\n"
    assert '"infra": "lambda"' in sky.task()
    assert "7999" not in sky.task()
    await backend.close()
    backend = await initialize(force_restart=True)
    assert (await (await backend.open()).health())["pid"] != pid
    await backend.down()
    assert sky.clusters() == {}


async def test_what_older_code_cannot_mean_is_refused(tmp_path: Path) -> None:
    make = SkyPilotBackend.initialize_cluster
    with pytest.raises(ConfigError, match="needs `gpu`"):
        await make()
    with pytest.raises(ConfigError, match=r"a sky.Resources; got 'H100'"):
        await make(resources="H100")
    with pytest.raises(ConfigError, match="env_path: cannot read"):
        await make(gpu="H100:1", env_path=tmp_path / "none")
    (tmp_path / ".env").write_text("HF TOKEN\n")
    with pytest.raises(ConfigError, match="env_path: line 1"):
        await make(gpu="H100:1", env_path=tmp_path / ".env")


def test_a_volume_holds_the_whole_server() -> None:
    backend = SkyPilotBackend(config=SkyConfig(volume="alice-disk"))
    assert backend.server_data_dir == "/art-volume/art/data"
    assert '"/art-volume": "alice-disk"' in backend.task().replace("/art-volume: ", '"/art-volume": ')
    assert "sudo chown $(id -u) /art-volume; mkdir -p /art-volume/art/data" in backend.task()
