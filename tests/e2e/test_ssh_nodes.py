"""Two machines that train one model together, each with a home directory of its own: launch, train, kill, stop, down.

They are one user account behind two ssh servers, one of them in a network and with a home directory of its own; see
`tests/support/ssh_neighbour.py`. Times are printed (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import art
from art.backends.ssh import Install, Ssh
from art.config import TrainerConfig
from art.errors import ConfigError
from tests.support import ssh_machine, ssh_neighbour
from tests.support.ssh_machine import SshMachine
from tests.support.ssh_neighbour import SshNeighbour

_MISSING = ssh_machine.missing() or ssh_neighbour.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(_MISSING is not None, reason=f"no two machines: {_MISSING}"),
]
ROOT = Path(__file__).parents[2]
SERVER = ".art/servers/default"
NUM_STEPS = 3
ANSWERS = [
    art.Trajectory(
        messages_and_choices=[{"role": "user", "content": question}, {"role": "assistant", "content": answer * times}]
    )
    for question in ("say yes", "say no", "say maybe")
    for answer in ("yes ", "no ", "maybe ")
    for times in range(1, 21)
]


def tell(text: str) -> None:
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    sys.stdout.flush()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SshMachine]:
    made = SshMachine(tmp_path)
    yield made
    made.close()


@pytest.fixture
def neighbour(machine: SshMachine, request: pytest.FixtureRequest) -> Iterator[SshNeighbour]:
    made = SshNeighbour(machine, own_home=getattr(request, "param", True))
    yield made
    made.close()


async def prepare(*machines: Ssh) -> None:
    """Make the environments of the servers with the packages of this one, where the machine's Python is of the same
    version. ART itself is then installed in seconds; `test_ssh_storm.py` installs everything."""
    packages = Path(np.__file__).parents[1]
    name = f"python3.{sys.version_info.minor}"
    script = f"""set -e; test -r {packages}; python3 -c 'import sys; assert sys.version_info[1] == {sys.version_info.minor}'
    umask 077; python3 -m venv {SERVER}/venv; echo {packages} > {SERVER}/venv/lib/{name}/site-packages/of-tests.pth"""
    for machine in machines:
        done = await machine.run(script, timeout_s=600)
        tell(f"{machine.name}: {'has' if done.rc == 0 else 'lacks'} the packages of the tests {done.stderr}")


def art_command(folder: Path, *words: str) -> str:
    """Run an `art` command; returns what it prints."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "art.cli.main", *words], capture_output=True, text=True, timeout=3000,
        env=os.environ | {"ART_LAUNCHED_DIR": str(folder / "launched")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tell(f"{done.stderr}art {' '.join(words[:2])}: {time.monotonic() - started:.1f} s")
    return done.stdout


def launch_words(machine: SshMachine) -> list[str]:
    where = ["--host", ssh_machine.ALIAS, "--node", ssh_neighbour.ALIAS, "--ssh-config", machine.config]
    return ["launch", "--cloud", "ssh", *where, "--source", str(ROOT)]


def make_tiny_model(machine: SshMachine) -> None:
    command = f"cd ~ && ~/{SERVER}/venv/bin/art tiny-model ~/tiny --task tic_tac_toe"
    subprocess.run(["runuser", "-u", machine.user, "--", "sh", "-c", command], check=True, capture_output=True)


def keys(home: Path) -> list[str]:
    return (home / ".ssh" / "authorized_keys").read_text().splitlines()


async def train(
    backend: art.SshBackend, base: str, num_nodes: int, num_steps: int = NUM_STEPS
) -> tuple[art.TrainableModel, list[float]]:
    settings = art.ModelSettings(trainer=TrainerConfig(device="cpu", num_threads=2, num_nodes=num_nodes))
    model = art.TrainableModel(name=f"on-{num_nodes}", project="p", base_model=base, settings=settings)
    started = time.monotonic()
    await model.register(backend)
    tell(f"registered on {num_nodes}: {time.monotonic() - started:.1f} s")
    losses = []
    for step in range(1, num_steps + 1):
        started = time.monotonic()
        result = await backend.train_sft(model, ANSWERS, learning_rate=1e-3, batch_size=60)
        assert result.step == step
        losses.append(result.metrics["loss/train"])
        tell(f"step {step} on {num_nodes}: {time.monotonic() - started:.1f} s")
    return model, losses


def members(neighbour: SshNeighbour) -> list[int]:
    return [pid for pid, words in neighbour.processes().items() if "art.runtime.children.trainer_team" in words]


async def test_two_machines_are_launched_train_together_and_are_left_clean(
    machine: SshMachine, neighbour: SshNeighbour, tmp_path: Path
) -> None:
    before = [keys(machine.home), keys(neighbour.home)]
    await prepare(machine.ssh(), Ssh(ssh_neighbour.ALIAS, config=machine.config))
    art_command(tmp_path, *launch_words(machine))
    line = keys(neighbour.home)[-1]
    assert line.startswith("restrict ssh-ed25519 ")
    assert keys(machine.home) == before[0]
    private = machine.home / SERVER / "nodes" / "key"
    assert private.stat().st_mode & 0o777 == 0o600
    assert not (neighbour.home / SERVER / "nodes" / "key").exists()

    make_tiny_model(machine)
    nodes = [ssh_neighbour.ALIAS]
    async with art.SshBackend(machine.ssh(), nodes=nodes, install=Install(source=str(ROOT))) as backend:
        alone, expected = await train(backend, f"{machine.home}/tiny", 1)
        assert members(neighbour) == []
        together, losses = await train(backend, f"{machine.home}/tiny", 2)
        tell(f"losses on one machine and on two: {expected}, {losses}")
        assert losses == pytest.approx(expected, rel=1e-4)
        assert len(members(neighbour)) == 1
        assert "joined, 1 process of the trainer" in art_command(tmp_path, "launch", "status")

        started = time.monotonic()
        job = await backend.train_sft(together, ANSWERS * 10, learning_rate=1e-3, batch_size=60, wait=False)
        while (await job.status()).progress is None:
            assert not job.done()
            await asyncio.sleep(0.02)
        assert not job.done()
        os.kill(members(neighbour)[0], signal.SIGKILL)
        result = await job
        tell(f"a longer step whose process on the second machine was killed: {time.monotonic() - started:.1f} s")
        assert result.step == NUM_STEPS + 1
        expected_result = await backend.train_sft(alone, ANSWERS * 10, learning_rate=1e-3, batch_size=60)
        assert result.metrics["loss/train"] == pytest.approx(expected_result.metrics["loss/train"], rel=1e-3)
        weights = []
        for model in (alone, together):
            path = await backend.download_checkpoint(model, tmp_path / str(model.name))
            weights.append(load_file(path / "adapter_model.safetensors"))
        for name, value in weights[0].items():
            assert np.linalg.norm(weights[1][name] - value) <= 0.01 * np.linalg.norm(value) + 1e-6, name

    with pytest.raises(ConfigError, match=r"runs together with gpu-box2, and asked for is other"):
        await art.SshBackend(machine.ssh(), nodes=["other"], install=Install(source=str(ROOT))).open()
    art_command(tmp_path, "launch", "stop")
    assert machine.processes() == {}
    art_command(tmp_path, *launch_words(machine))  # joins again, with the same key
    assert keys(neighbour.home) == [*before[1], line]
    art_command(tmp_path, "launch", "down", "--delete-data")
    assert [keys(machine.home), keys(neighbour.home)] == before
    assert machine.processes() == {}
    for home in (machine.home, neighbour.home):
        assert not (home / SERVER).exists()


@pytest.mark.parametrize("neighbour", [False], indirect=True)
async def test_machines_that_share_their_home_directory_share_the_installation(
    machine: SshMachine, neighbour: SshNeighbour, tmp_path: Path
) -> None:
    before = keys(machine.home)
    await prepare(machine.ssh())
    art_command(tmp_path, *launch_words(machine))
    assert len(keys(machine.home)) == len(before) + 1
    status = art_command(tmp_path, "launch", "status")
    assert "gpu-box2" in status
    assert "joined" in status
    make_tiny_model(machine)
    backend = art.SshBackend(machine.ssh(), nodes=[ssh_neighbour.ALIAS], install=Install(source=str(ROOT)))
    async with backend:
        await train(backend, f"{machine.home}/tiny", 2, num_steps=1)
        assert len(members(neighbour)) == 1
    art_command(tmp_path, "launch", "down")
    assert machine.processes() == {}
    assert keys(machine.home) == before
    assert [path.name for path in (machine.home / SERVER).iterdir()] == ["data"]
