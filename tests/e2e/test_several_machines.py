"""A trainer on two machines, played by two shells, or by two network namespaces where the user is root on Linux."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load_file

import art
from art.backend import Backend
from art.client import ArtClient
from art.config import NodeConfig, NodesConfig, ServerConfig, TrainerConfig
from art.errors import ConfigError
from art.runtime.runtime import Runtime
from art.server.app import App
from art.storage import checkpoints
from tests.support.processes import children_of

SHELL = NodesConfig(address="127.0.0.1", others=(NodeConfig(name="next-door", start=("sh", "-c", "{command}")),))
ANSWERS = [
    art.Trajectory(
        messages_and_choices=[{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    )
    for question in ("say yes", "say no", "say maybe")
    for answer in ("yes", "no", "maybe")
]
is_root = os.name == "posix" and os.geteuid() == 0


class InProcess(Backend):
    """A backend of a runtime in this process."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime
        self._client = ArtClient("http://art.test", "key", transport=httpx2.ASGITransport(App(runtime, api_key="key")))


@asynccontextmanager
async def serving(folder: Path, nodes: NodesConfig | None) -> AsyncIterator[InProcess]:
    runtime = Runtime(folder, ServerConfig(preflight=False, nodes=nodes))
    await runtime.start()
    try:
        yield InProcess(runtime)
    finally:
        await runtime.close()


async def train(backend: InProcess, base: Path, steps: int = 2, **trainer: Any) -> art.TrainableModel:
    settings = art.ModelSettings(trainer=TrainerConfig(device="cpu", num_threads=2, **trainer))
    name = "-".join(["agent", *map(str, trainer.values())])
    model = art.TrainableModel(name=name, project="p", base_model=str(base), settings=settings)
    await model.register(backend)
    for step in range(1, steps + 1):
        result = await backend.train_sft(model, ANSWERS, art.TrainSFTConfig(learning_rate=1e-2, batch_size=5))
        assert result.step == step
    return model


def weights(backend: InProcess, model: art.TrainableModel, step: int) -> dict[str, np.ndarray]:
    path = backend.runtime.data_dir.model("p", str(model.name)).checkpoint(step)
    return {
        key: load_file(path / file)[key]
        for file in (checkpoints.ADAPTER_WEIGHTS, checkpoints.OPTIMIZER)
        for key in load_file(path / file)
    }


@pytest.mark.slow
async def test_a_trainer_on_two_machines(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tmp_path, SHELL) as backend:
        await train(backend, tiny_model, num_nodes=2)
        logs = [path.read_text() for path in (tmp_path / "logs").glob("trainer*.1")]
        assert [log.count("process 1 of 2 joined") for log in logs] == [1]
        assert list(backend.runtime.data_dir.samples.iterdir()) == []
        three = art.ModelSettings(trainer=TrainerConfig(device="cpu", num_nodes=3))
        model = art.TrainableModel(name="three", project="p", base_model=str(tiny_model), settings=three)
        with pytest.raises(ConfigError, match=r"`trainer\.num_nodes` is 3, but the server knows 1 other machines"):
            await model.register(backend)


@pytest.mark.slow
@pytest.mark.skipif(not is_root or shutil.which("unshare") is None, reason="needs root and `unshare`")
async def test_a_machine_that_does_not_share_the_data_directory_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    hide = 'mount -t tmpfs none "$0" && exec sh -c "$1"'
    start = ("unshare", "-m", "sh", "-c", hide, str(tmp_path / "data"), "{command}")
    nodes = NodesConfig(address="127.0.0.1", others=(NodeConfig(name="blind", start=start),))
    async with serving(tmp_path / "data", nodes) as backend:
        with pytest.raises(ConfigError, match="does not see the data directory"):
            await train(backend, tiny_model, num_nodes=2)


@pytest.fixture
def namespace() -> Iterator[NodesConfig]:
    """Another machine as far as the network goes, 10.213.7.2, which sees this one as 10.213.7.1."""
    if not is_root or shutil.which("ip") is None:
        pytest.skip("needs root and `ip`")
    name = f"art-{os.getpid()}"
    commands = [
        f"netns add {name}",
        "link add art-here type veth peer name art-there",
        f"link set art-there netns {name}",
        "addr add 10.213.7.1/24 dev art-here",
        "link set art-here up",
        f"-n {name} addr add 10.213.7.2/24 dev art-there",
        f"-n {name} link set art-there up",
        f"-n {name} link set lo up",
    ]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
        start = ("ip", "netns", "exec", name, "sh", "-c", "{command}")
        yield NodesConfig(address="10.213.7.1", others=(NodeConfig(name="10.213.7.2", start=start),))
    finally:
        subprocess.run(["ip", "link", "del", "art-here"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
async def test_sharded_weights_over_a_network_and_a_machine_that_dies(
    namespace: NodesConfig, tiny_model: Path, tmp_path: Path
) -> None:
    async with serving(tmp_path, namespace) as backend:
        alone = await train(backend, tiny_model, steps=3)
        together = await train(backend, tiny_model, steps=2, num_nodes=2, shard_base=True)
        host = backend.runtime.models.find("p", str(together.name))[1]
        assert host.trainer_process.pid is not None
        os.kill(children_of(host.trainer_process.pid)[0], signal.SIGKILL)
        await backend.train_sft(together, ANSWERS, art.TrainSFTConfig(learning_rate=1e-2, batch_size=5))
        assert host.trainer_process.num_restarts == 1
        expected, found = weights(backend, alone, 3), weights(backend, together, 3)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert np.linalg.norm(found[name] - value) <= 0.01 * np.linalg.norm(value), name
