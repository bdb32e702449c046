"""The exchange of weights in vLLM (a fake server): who waits, who is refused, and the folders that vLLM reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from art.config import VllmConfig
from art.engine import EngineInfo, GenerateRequest
from art.engines.vllm import replica as vllm_replica
from art.engines.vllm.command import MODEL_NAME, Installation, server_command
from art.engines.vllm.replica import Replica
from art.engines.vllm.vllm_engine import MergedVllmEngine
from art.errors import AdapterError, NotFoundError, ProcessError
from art.storage import checkpoints
from art.worker.vllm_child import MergedWeights
from tests.support.fake_vllm import CONTEXT, VOCAB, FakeVllm

CPU = Installation("python", "0.32.0", "2.13.0+cpu", "cpu")
INFO = EngineInfo(vocab_size=64, max_context=64, dtype="float32", device="cpu")


@asynccontextmanager
async def engine_of(fake: FakeVllm) -> AsyncIterator[MergedVllmEngine]:
    info = EngineInfo(vocab_size=VOCAB, max_context=CONTEXT - 1, dtype="float32", device="cpu", one_policy=True)
    async with fake.serve() as url:
        engine = MergedVllmEngine([Replica(url, None)], "the-base", info)
        try:
            yield engine
        finally:
            await engine.close()


async def run(engine: MergedVllmEngine, adapter: str | None) -> list[float]:
    request = GenerateRequest(
        request_id="r", adapter=adapter, prompt_token_ids=[7], max_tokens=2, stop_token_ids=(), seed=1
    )
    return [logprob async for chunk in engine.generate(request, stream=False) for logprob in chunk.logprobs]


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_new_weights_wait_for_running_requests() -> None:
    fake = FakeVllm()
    async with engine_of(fake) as engine:
        with pytest.raises(NotFoundError, match="now nothing"):
            await run(engine, None)
        await engine.replace_weights("m@1", Path("/a"))
        assert fake.control == ["/a", "reset"]
        fake.gate.clear()
        running = asyncio.ensure_future(run(engine, "m@1"))
        await until(lambda: fake.num_running == 1)
        pushing = asyncio.ensure_future(engine.replace_weights("m@2", Path("/b")))
        await asyncio.sleep(0.05)
        assert not pushing.done()
        with pytest.raises(NotFoundError):
            await run(engine, "m@1")  # it would keep the new weights out
        fake.refused_resets = 2
        fake.gate.set()
        assert await running == [-1.1, -1.1]
        await pushing
        assert fake.control[2:] == ["/b", "reset", "reset", "reset"]
        assert await run(engine, "m@2") == [-1.2, -1.2]
        for other in ("m@1", None):
            with pytest.raises(NotFoundError, match="one step at a time, now 'm@2'"):
                await run(engine, other)
        await engine.unload_adapter("m@1")
        assert await engine.score([1, 2], "m@2") == [-1.2]
        await engine.unload_adapter("m@2")
        with pytest.raises(NotFoundError, match="now nothing"):
            await engine.score([1, 2], "m@2")


async def test_nothing_is_served_after_a_failed_exchange_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_replica, "RESET_AGAIN_S", 0.0)
    fake = FakeVllm()
    async with engine_of(fake) as engine:
        await engine.replace_weights("m@1", Path("/a"))
        with pytest.raises(ProcessError, match="deserializing"):
            await engine.replace_weights("m@2", Path("/broken"))
        for name in ("m@1", "m@2"):
            with pytest.raises(NotFoundError, match="now nothing"):
                await run(engine, name)
        fake.refused_resets = 1000
        with pytest.raises(ProcessError, match="prefix cache"):
            await engine.replace_weights("m@2", Path("/b"))
        with pytest.raises(NotFoundError, match="now nothing"):
            await run(engine, "m@2")


def test_the_command_line_has_no_adapters() -> None:
    command = server_command(CPU, "base", VllmConfig(weights="merged"), INFO, lora_rank=None)
    assert f"--served-model-name={MODEL_NAME}" in command
    assert not [argument for argument in command if "lora" in argument]


def write_base(folder: Path, dtype: type = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    folder.mkdir()
    names = ("model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight")
    weights = {name: rng.normal(size=(3, 5)).astype(dtype) for name in names}
    save_file(weights, folder / checkpoints.MODEL_WEIGHTS)
    (folder / checkpoints.MODEL_CONFIG).write_text("{}")
    return weights


def write_checkpoint(path: Path, files: dict[str, bytes]) -> Path:
    rest = {checkpoints.OPTIMIZER: save({}), checkpoints.STATE: b"{}", checkpoints.PROBE: b"{}"}
    checkpoints.write_checkpoint(path, files | rest)
    return path


def adapter_checkpoint(path: Path, value: float) -> Path:
    key = "base_model.model.model.layers.0.mlp.down_proj"
    a, b = np.full((2, 5), value, np.float32), np.ones((3, 2), np.float32)
    config = b'{"peft_type": "LORA", "r": 2, "lora_alpha": 4}'
    weights = save({f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b})
    return write_checkpoint(path, {checkpoints.ADAPTER_WEIGHTS: weights, checkpoints.ADAPTER_CONFIG: config})


def test_an_adapter_becomes_a_folder_of_whole_weights(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    folder = tmp_path / "work" / "engine"
    folder.mkdir(parents=True)
    (folder / "of a process before").touch()
    merged = MergedWeights(str(tmp_path / "base"), folder)
    assert not folder.exists()
    for number, value in enumerate((0.5, 1.5)):
        checkpoint = adapter_checkpoint(tmp_path / f"000{number}", value)
        info = merged.prepare("m@1", checkpoint)
        assert merged.prepare("m@1", checkpoint) is info
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
        tensors = load_file(folder / "model.safetensors")
        expected = base["model.layers.0.mlp.down_proj.weight"] + 2 * 2 * value  # alpha / rank * B A
        np.testing.assert_allclose(tensors["model.layers.0.mlp.down_proj.weight"], expected, rtol=1e-6)
        np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
        assert (info.num_layers, info.norm) == (1, None)
    merged.clear()
    assert not folder.exists()
    merged.prepare("m@1", checkpoint)
    assert folder.is_dir()


def test_a_full_checkpoint_is_served_without_its_optimiser(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    name = "model.layers.0.mlp.down_proj.weight"
    weights = save(base | {name: base[name] + np.float32(0.5)})
    files = {checkpoints.MODEL_WEIGHTS: weights, checkpoints.MODEL_CONFIG: b"{}"}
    checkpoint = write_checkpoint(tmp_path / "0001", files)
    info = MergedWeights(str(tmp_path / "base"), tmp_path / "work").prepare("m@1", checkpoint)
    assert sorted(file.name for file in (tmp_path / "work").iterdir()) == ["config.json", "model.safetensors"]
    with safe_open(tmp_path / "work" / "model.safetensors", "np") as file:
        np.testing.assert_array_equal(file.get_tensor(name), base[name] + np.float32(0.5))
    assert (info.rank, info.num_layers, info.norm) == (0, 2, None)


def test_a_checkpoint_that_cannot_be_merged_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = adapter_checkpoint(tmp_path / "0001", 1.0)
    (tmp_path / "other").mkdir()
    save_file({"x": np.ones(1, np.float32)}, tmp_path / "other" / checkpoints.MODEL_WEIGHTS)
    with pytest.raises(AdapterError, match=r"cannot be merged.*do not have under this name"):
        MergedWeights(str(tmp_path / "other"), tmp_path / "work").prepare("m@1", checkpoint)
