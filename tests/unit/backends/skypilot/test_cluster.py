"""`Cluster`: launched, looked at, stopped, taken down and paid for, through answers that were recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from art.backends.skypilot import Cluster, Sky
from art.errors import ConfigError, MachineError, UnreachableError
from tests.support.fake_sky import CLUSTER, FakeSky


@pytest.fixture
def cluster(sky: FakeSky) -> Cluster:
    return Cluster(CLUSTER, Sky())


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "task.yaml"
    path.write_text("name: test\n")
    return path


async def launch(cluster: Cluster, task_file: Path) -> list[str]:
    lines: list[str] = []
    await cluster.launch(task_file, timeout_s=60, on_line=lines.append)
    return lines


async def test_a_cluster_is_launched_looked_at_and_taken_down(cluster: Cluster, sky: FakeSky, task_file: Path) -> None:
    assert await cluster.state() is None
    assert await launch(cluster, task_file) == ["Considered resources (1 node):"]
    assert sky.task() == "name: test\n"
    state = await cluster.state()
    assert state is not None
    assert state.is_up
    assert state.describe() == (
        "UP on Lambda/us-west-3: 1x(gpus=H100:1, cpus=26, mem=200, gpu_1x_h100_pcie, disk=256), deleted after 5 idle "
        "minutes"
    )
    await cluster.down()
    assert await cluster.state() is None
    await cluster.down()  # a cluster that is gone is no error


async def test_a_launch_whose_answer_is_lost_is_asked_for_again(
    cluster: Cluster, sky: FakeSky, task_file: Path
) -> None:
    sky.fail("after launch", "killed", "no-api-server")
    await launch(cluster, task_file)
    assert len(sky.calls("launch")) == 3
    assert list(sky.clusters()) == [CLUSTER]


async def test_answers_that_stay_away_end_it(cluster: Cluster, sky: FakeSky) -> None:
    sky.fail("status", *["no-api-server"] * 10)
    with pytest.raises(UnreachableError, match="sky api start"):
        await cluster.state()
    assert len(sky.calls("status")) == 4


@pytest.mark.parametrize("recorded", ["no-cloud", "mismatch", "no-quota", "no-capacity", "autostop-refused"])
async def test_a_launch_that_is_refused_is_not_repeated(
    cluster: Cluster, sky: FakeSky, task_file: Path, recorded: str
) -> None:
    sky.fail("launch", recorded)
    with pytest.raises((ConfigError, MachineError)):
        await launch(cluster, task_file)
    assert len(sky.calls("launch")) == 1


async def test_a_machine_that_goes_at_once_was_not_launched(
    cluster: Cluster, sky: FakeSky, task_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone() -> None:
        return None

    monkeypatch.setattr(cluster, "state", gone)
    with pytest.raises(UnreachableError, match="it is gone again"):
        await launch(cluster, task_file)


async def test_a_spot_machine_is_not_stopped(cluster: Cluster, sky: FakeSky, task_file: Path) -> None:
    await launch(cluster, task_file)
    sky.fail("stop", "spot-cannot-stop")
    with pytest.raises(ConfigError, match="Stopping spot instances is currently not supported"):
        await cluster.stop()
    await cluster.stop()
    state = await cluster.state()
    assert state is not None
    assert (state.status, state.is_up) == ("STOPPED", False)


async def test_a_machine_that_does_not_go_is_an_error(cluster: Cluster, sky: FakeSky, task_file: Path) -> None:
    await launch(cluster, task_file)
    sky.fail("down", "not-found")
    with pytest.raises(MachineError, match=r"is not gone: UP .* It costs money until it is"):
        await cluster.down()


async def test_costs_are_those_of_skypilot(cluster: Cluster, sky: FakeSky) -> None:
    assert (await cluster.spent(0)).usd == 0
    sky.set_costs((3.0, 7200.0), (0.5, 720.0))
    spent = await cluster.spent(since=0)
    assert (spent.usd, spent.usd_per_hour) == (3.5, pytest.approx(2.5))
    later = await cluster.spent(since=4_000_000_001)  # only the newer one
    assert later.usd == 0.5
    sky.set_costs((0.0, 0.0))
    assert (await cluster.spent(since=0)).usd_per_hour is None  # it has not run yet


async def test_an_answer_that_is_no_json_is_said(cluster: Cluster, sky: FakeSky) -> None:
    (sky.machine.bin_dir / "sky").write_text("#!/bin/sh\necho skypilot, version 0.14.1\n")
    with pytest.raises(UnreachableError, match="gave no JSON"):
        await cluster.state()
