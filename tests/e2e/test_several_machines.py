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
from art.config import EngineConfig, LoraConfig, NodeConfig, NodesConfig, ServerConfig, TrainerConfig
from art.errors import ConfigError
from art.runtime.runtime import Runtime
from art.server.app import App
from art.storage import checkpoints
from tests.support.processes import children_of

SHELL = NodesConfig(address="127.0.0.1", others=(NodeConfig(name="next-door", start=("sh", "-c", "{command}")),))
LORA = LoraConfig()
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


async def train(
    backend: InProcess, base: Path, steps: int = 2, *, lora: LoraConfig | None = LORA, **trainer: Any
) -> art.TrainableModel:
    config = TrainerConfig(device="cpu", num_threads=2, **trainer)
    settings = art.ModelSettings(lora=lora, trainer=config, engine=EngineConfig(device="cpu"))
    name = "-".join(["full" if lora is None else "lora", *map(str, trainer.values())])
    model = art.TrainableModel(name=name, project="p", base_model=str(base), settings=settings)
    await model.register(backend)
    for _ in range(steps):
        await make_step(backend, model)
    return model


async def make_step(backend: InProcess, model: art.TrainableModel) -> None:
    before = await model.get_step()
    result = await backend.train_sft(model, ANSWERS, art.TrainSFTConfig(learning_rate=1e-2, batch_size=5))
    assert result.step == before + 1


def weights(backend: InProcess, model: art.TrainableModel, step: int) -> dict[str, np.ndarray]:
    path = backend.runtime.data_dir.model("p", str(model.name)).checkpoint(step)
    trained = checkpoints.MODEL_WEIGHTS if checkpoints.is_full(path) else checkpoints.ADAPTER_WEIGHTS
    return load_file(path / trained) | load_file(path / checkpoints.OPTIMIZER)


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


@pytest.fixture
def network() -> Iterator[list[str]]:
    """Start of a command that runs on 10.213.7.2, another machine as far as the network goes. This one is 10.213.7.1."""
    if not is_root or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, `ip` and `unshare`")
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
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "link", "del", "art-here"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", "full"])
async def test_machines_without_a_common_folder_train_and_one_of_them_dies(
    kind: str, network: list[str], tiny_model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The other machine has an empty disk where this one has base model and data directory."""
    received, base = tmp_path_factory.mktemp("received"), tmp_path / "base"
    shutil.copytree(tiny_model, base)
    hide = 'mount -t tmpfs none "$0" && exec sh -c "$1"'
    start = (*network, "unshare", "-m", "sh", "-c", hide, str(tmp_path), "{command}")
    other = NodeConfig(name="10.213.7.2", start=start, received=str(received))
    settings: dict[str, Any] = {"shard_base": True} if kind == "sharded" else {"lora": None}
    async with serving(tmp_path / "data", NodesConfig(address="10.213.7.1", others=(other,))) as backend:
        alone = await train(backend, base, steps=4, lora=settings.get("lora", LORA))
        together = await train(backend, base, steps=3, num_nodes=2, **settings)
        assert_equal(backend, alone, together, step=3)
        [model_copy] = folders_in(received)
        host = backend.runtime.models.find("p", str(together.name))[1]
        assert host.trainer_process.pid is not None
        os.kill(children_of(host.trainer_process.pid)[0], signal.SIGKILL)
        await make_step(backend, together)  # the new processes have no checkpoint in memory
        assert host.trainer_process.num_restarts == 1
        assert_equal(backend, alone, together, step=4)
        assert folders_in(received) == [model_copy], "checkpoints and samples go, the base model stays"
        [log] = (tmp_path / "data/logs").glob("trainer*.1")
        assert "continuing from step 3" in log.read_text()


def assert_equal(backend: InProcess, one: art.TrainableModel, other: art.TrainableModel, *, step: int) -> None:
    expected, found = weights(backend, one, step), weights(backend, other, step)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= 0.01 * np.linalg.norm(value), name


def folders_in(received: Path) -> list[Path]:
    return [path for path in received.glob("*/*") if path.is_dir()]
