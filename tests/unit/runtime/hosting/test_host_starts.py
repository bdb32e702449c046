"""How a host starts its two processes, and proves once that the engine applies adapters."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from art.config import EngineConfig, LoraConfig, ModelSettings, ServerConfig, TrainerConfig, VllmConfig
from art.engine import EngineInfo
from art.errors import HandshakeError
from art.protocol import calls
from art.runtime.hosting.host import BaseModelHost
from art.runtime.placement import Devices, Gpu
from art.storage.layout import DataDir

GIB = 2**30


def make_host(tmp_path: Path, settings: ModelSettings, num_gpus: int) -> BaseModelHost:
    gpus = tuple(Gpu(name="a GPU", memory_bytes=80 * GIB, selector=str(index)) for index in range(num_gpus))
    devices = Devices(gpus=gpus, has_mps=False, memory_bytes=64 * GIB)
    return BaseModelHost("base", settings, DataDir(tmp_path), ServerConfig(), devices=devices)


class Loading:
    """A process whose start takes a moment."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.made: list[calls.Call[Any]] = []

    async def call(self, call: calls.Call[Any]) -> EngineInfo:
        self.made.append(call)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        return EngineInfo(vocab_size=3, max_context=8, dtype="bfloat16", device="cuda", max_running=320)


@pytest.mark.parametrize(("num_gpus", "at_once"), [(1, 1), (2, 2)])
async def test_processes_that_share_a_gpu_load_one_after_the_other(num_gpus: int, at_once: int, tmp_path: Path) -> None:
    host = make_host(tmp_path, ModelSettings(engine=VllmConfig()), num_gpus)
    process: Any = Loading()
    await asyncio.gather(host._start_trainer(process), host.engine_process._initialise(process))
    assert process.most == at_once
    (start,) = [call for call in process.made if isinstance(call, calls.StartVllm)]
    assert start.memory_bytes == 80 * GIB
    assert start.config.max_running is None
    seats = host.engine.seats
    assert (
        seats._num_seats - seats._held.total() == 312
    )  # of the 320 requests that the engine has chosen; handshakes take no seat


def test_only_a_trainer_on_a_gpu_gets_expandable_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    host = make_host(tmp_path, ModelSettings(engine=VllmConfig()), 1)
    assert host.trainer_process.spec.variables["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in host.engine_process.spec.variables
    on_cpu = make_host(tmp_path, ModelSettings(), 0)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in on_cpu.trainer_process.spec.variables
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    own = make_host(tmp_path, ModelSettings(engine=VllmConfig()), 1)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in own.trainer_process.spec.variables


class Proofs:
    def __init__(self, host: BaseModelHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders: list[Path] = []
        self.error: HandshakeError | None = None
        monkeypatch.setattr(host.trainer, "write_loud_adapters", self._write)
        monkeypatch.setattr(host.adapters, "prove_layers", self._prove)

    async def _write(self, folder: Path, lora: LoraConfig) -> None:
        await asyncio.to_thread(folder.mkdir, parents=True)

    async def _prove(self, folder: Path) -> None:
        assert await asyncio.to_thread(folder.is_dir)
        self.folders.append(folder)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error


async def test_layers_are_proved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ModelSettings(engine=EngineConfig(device="cpu"), trainer=TrainerConfig(device="cpu"))
    host = make_host(tmp_path, settings, 0)
    proofs = Proofs(host, monkeypatch)
    proofs.error = HandshakeError("the engine does not apply adapters to `mlp.up_proj`")
    with pytest.raises(HandshakeError, match="up_proj"):
        await host.prove_layers(LoraConfig())
    proofs.error = None
    await asyncio.gather(*(host.prove_layers(LoraConfig(seed=seed)) for seed in range(3)))
    assert len(proofs.folders) == 2  # the one that failed, and one for three models that differ in their seed
    await host.prove_layers(LoraConfig(rank=4))
    assert len(proofs.folders) == 3
    assert not any(folder.exists() for folder in proofs.folders)


async def test_nothing_is_proved_where_the_engine_gets_no_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = make_host(tmp_path, ModelSettings(lora=None), 0)
    merged = make_host(tmp_path, ModelSettings(engine=VllmConfig(weights="merged")), 0)
    for host in (full, merged):
        proofs = Proofs(host, monkeypatch)
        await host.prove_layers(host.settings.lora)
        assert not proofs.folders
