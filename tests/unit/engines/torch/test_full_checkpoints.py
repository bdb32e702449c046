"""Full checkpoints beside the base model and its adapters: each request gets the weights that it names."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from art.config import EngineConfig, TrainerConfig, TrainSFTConfig
from art.engine import AdapterInfo, EngineInfo, TokenChunk
from art.engines.torch import pool as full
from art.engines.torch.embedded import Output
from art.engines.torch.pool import EnginePool
from art.errors import AdapterError, HandshakeError, NotFoundError
from art.protocol.calls import TrainSft
from art.protocol.samples import plain_sample
from art.runtime.publish import publish
from art.storage.checkpoints import read_probe
from art.trainer.trainer import Trainer
from tests.support.engine import hf_logprobs, hf_model, request, tokens


def write_full(folder: Path, base: Path, seed: int, **changes: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A checkpoint of `base` whose weights have moved, or the tensors that `changes` names by the end of theirs."""
    shutil.copytree(base, folder)
    weights = load_file(folder / full.WEIGHTS_FILE)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        if "embed" not in name and "lm_head" not in name:
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    for end, change in changes.items():
        (name,) = (name for name in weights if name.endswith(f"0.self_attn.{end}.weight"))
        weights[name] = change(weights[name])
    save_file(weights, folder / full.WEIGHTS_FILE, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def checkpoints(models: Path, qwen3: Path) -> tuple[Path, Path]:
    return write_full(models / "full-a", qwen3, 1), write_full(models / "full-b", qwen3, 2)


@pytest.fixture
def pool(qwen3: Path) -> EnginePool:
    return EnginePool.load(str(qwen3), EngineConfig(device="cpu", num_threads=1))


def drain(pool: EnginePool) -> list[Output]:
    outputs = []
    while busy := pool.busy:
        for engine in busy:
            outputs += engine.step()
    return outputs


def generate(pool: EnginePool, *requests: Any) -> list[TokenChunk]:
    for one in requests:
        pool.submit(one, stream=False)
    results = {output.request_id: output.chunk for output in drain(pool)}
    return [results[one.request_id] for one in requests]


def score(pool: EnginePool, token_ids: list[int], adapter: str | None) -> list[float]:
    pool.submit_score("score", token_ids, adapter)
    (output,) = drain(pool)
    assert output.logprobs is not None
    return output.logprobs


def train(model: Path, folder: Path, dtype: Any = "float32", learning_rate: float = 3e-3) -> list[float]:
    """Full checkpoints of steps 0 to 2 in `folder`; the norms of what steps 1 and 2 have changed."""
    trainer = Trainer(str(model), TrainerConfig(device="cpu", dtype=dtype, num_threads=1))
    trainer.init_checkpoint(folder / "0", None)
    norms = []
    for number in (1, 2):
        call = TrainSft(
            samples=[replace(plain_sample(tokens(number, 30), "probe"), component="sft")],
            config=TrainSFTConfig(learning_rate=learning_rate),
            from_checkpoint=folder / str(number - 1),
            to_checkpoint=folder / str(number),
            job_id=f"job-{number}",
        )
        result = trainer.train(call)
        norms.append(result.metrics["loss/adapter_norm"])
    return norms


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-4), pytest.param("bfloat16", 0.15, marks=pytest.mark.slow)]
)
def test_what_was_trained_is_served(dtype: Any, tolerance: float, qwen3: Path, tmp_path: Path) -> None:
    """Log-probs of the probe, and the norm of the change after rounding."""
    norms = train(qwen3, tmp_path, dtype)
    pool = EnginePool.load(str(qwen3), EngineConfig(device="cpu", dtype=dtype, num_threads=1))
    assert pool.load_adapter("m@0", tmp_path / "0").norm == 0
    for number, norm in enumerate(norms, start=1):
        assert pool.load_adapter(f"m@{number}", tmp_path / str(number)).norm == pytest.approx(norm, rel=1e-6)
        probe = read_probe(tmp_path / str(number))
        assert score(pool, probe.token_ids, f"m@{number}") == pytest.approx(probe.logprobs, abs=tolerance)
        assert score(pool, probe.token_ids, None) == pytest.approx(probe.base_logprobs, abs=tolerance)
        assert max(abs(a - b) for a, b in zip(probe.logprobs, probe.base_logprobs, strict=True)) > 2 * tolerance


class InProcess:
    """As much of `art.engine.Engine` as a publish asks for; loads what `swap` makes of a checkpoint."""

    def __init__(self, pool: EnginePool, swap: Callable[[Path], Path] = lambda path: path) -> None:
        self._pool = pool
        self._swap = swap

    async def info(self) -> EngineInfo:
        return self._pool.info()

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        return self._pool.load_adapter(name, self._swap(path))

    async def unload_adapter(self, name: str) -> None:
        self._pool.unload_adapter(name)

    async def score(self, token_ids: list[int], adapter: str | None) -> list[float]:
        return score(self._pool, token_ids, adapter)


async def test_the_handshake_tells_a_full_checkpoint_from_the_one_before(
    pool: EnginePool, qwen3: Path, tmp_path: Path
) -> None:
    """After steps that move log-probs by less than 0.01 nats."""
    train(qwen3, tmp_path, learning_rate=5e-6)
    for step in ("0", "1", "2"):
        metrics = await publish(InProcess(pool), "m", tmp_path / step)
        assert metrics["publish/probe_gap"] < 1e-4
    assert 1e-4 < metrics["publish/probe_effect"] < 1e-2
    for other in ("0", "1"):
        with pytest.raises(HandshakeError, match="m was not published"):
            await publish(InProcess(pool, lambda _, other=other: tmp_path / other), "m", tmp_path / "2")
        with pytest.raises(NotFoundError):
            score(pool, tokens(1, 4), "m")


@pytest.mark.parametrize("general", [False, True])
def test_log_probs_are_those_of_transformers(
    general: bool, pool: EnginePool, checkpoints: tuple[Path, Path], qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if general:
        monkeypatch.setattr("art.engines.torch.base_model.LLAMA_CLASSES", frozenset())
    sequence = tokens(3, 20)
    for name, path in zip("ab", checkpoints, strict=True):
        info = pool.load_adapter(name, path)
        differences = (a - b for a, b in zip(hf_model(path).parameters(), hf_model(qwen3).parameters(), strict=True))
        norm = sum(float(difference.detach().double().square().sum()) for difference in differences) ** 0.5
        assert info.norm == pytest.approx(norm, rel=1e-5)
        assert (info.name, info.rank) == (name, 0)
        assert score(pool, sequence, name) == pytest.approx(hf_logprobs(hf_model(path), sequence), abs=1e-4)
    assert score(pool, sequence, None) == pytest.approx(hf_logprobs(hf_model(qwen3), sequence), abs=1e-4)


def test_requests_of_all_kinds_run_at_the_same_time(
    pool: EnginePool, checkpoints: tuple[Path, Path], adapters: tuple[Path, Path], qwen3: Path
) -> None:
    paths = {"full-a": checkpoints[0], "full-b": checkpoints[1], "lora": adapters[0]}
    for name, path in paths.items():
        pool.load_adapter(name, path)
    names = (None, *paths)
    requests = [request(tokens(i % 4, 6 + i), 16, seed=i, adapter=names[i % 4]) for i in range(12)]
    together = generate(pool, *requests)
    assert pool.stats()["generated_tokens"] == sum(len(chunk.token_ids) for chunk in together)
    for name in names:
        alone = EnginePool.load(str(qwen3), EngineConfig(device="cpu", num_threads=1))
        if name is not None:
            alone.load_adapter(name, paths[name])
        for one, result in zip(requests, together, strict=True):
            if one.adapter == name:
                assert generate(alone, one)[0].token_ids == result.token_ids
                sequence = one.prompt_token_ids + result.token_ids
                expected = score(pool, sequence, name)[len(one.prompt_token_ids) - 1 :]
                assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_unloading_waits_for_the_last_request(pool: EnginePool, checkpoints: tuple[Path, Path]) -> None:
    pool.load_adapter("m@1", checkpoints[0])
    running = request(tokens(1, 8), 6, adapter="m@1")
    pool.submit(running, stream=False)
    (engine,) = pool.busy
    engine.step()
    ended: list[str] = []
    pool.unload_adapter("m@1", lambda: ended.append("m@1"))
    with pytest.raises(NotFoundError, match="m@1"):
        pool.submit(request(tokens(1, 8), adapter="m@1"), stream=False)
    assert ended == []
    (output,) = drain(pool)
    assert output.request_id == running.request_id
    assert len(output.chunk.token_ids) == 6
    assert ended == ["m@1"]
    assert pool.stats()["generated_tokens"] == 6, "what was counted stays"
    assert pool.stats()["adapters"] == 0
    pool.unload_adapter("m@1", lambda: ended.append("again"))
    assert ended == ["m@1", "again"]


def test_under_a_name_in_use_later_requests_get_the_new_weights(
    pool: EnginePool, checkpoints: tuple[Path, Path], adapters: tuple[Path, Path]
) -> None:
    prompt = tokens(5, 9)
    expected = []
    for path in (*checkpoints, adapters[0]):
        pool.load_adapter("name", path)
        expected.append(generate(pool, request(prompt, adapter="name"))[0].token_ids)
        pool.unload_adapter("name")
    requests = []
    for path in (*checkpoints, adapters[0]):
        pool.load_adapter("name", path)
        requests.append(request(prompt, adapter="name"))
        pool.submit(requests[-1], stream=False)
    found = {output.request_id: output.chunk.token_ids for output in drain(pool)}
    assert [found[one.request_id] for one in requests] == expected
    assert len(set(map(tuple, expected))) == 3
    assert pool.stats()["adapters"] == 1


def test_files_that_do_not_fit_are_refused(
    pool: EnginePool, qwen3: Path, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    cut = write_full(tmp_path / "cut", qwen3, 1)
    (cut / full.WEIGHTS_FILE).write_bytes((cut / full.WEIGHTS_FILE).read_bytes()[:-100])
    lacking = write_full(tmp_path / "lacking", qwen3, 1)
    weights = load_file(lacking / full.WEIGHTS_FILE)
    del weights["model.norm.weight"]
    save_file(weights, lacking / full.WEIGHTS_FILE, metadata={"format": "pt"})
    shaped = write_full(tmp_path / "shaped", qwen3, 1, q_proj=lambda weight: weight[:8].clone())
    broken = write_full(tmp_path / "broken", qwen3, 1, o_proj=lambda weight: weight / 0)
    bare = write_full(tmp_path / "bare", qwen3, 1)
    (bare / "config.json").write_text("{")
    for path, message in [
        (cut, r"model\.safetensors cannot be read, it is corrupted"),
        (lacking, r"1 tensors are missing or unknown, the first is 'model\.norm\.weight'"),
        (shaped, r"q_proj\.weight' of shape \[8, 64\], expected \[64, 64\]"),
        (broken, "holds NaN or infinite values"),
        (bare, "cannot load base model"),
    ]:
        with pytest.raises(AdapterError, match=rf"^full checkpoint 'm@1': {path}: .*{message}"):
            pool.load_adapter("m@1", path)
        with pytest.raises(NotFoundError):
            pool.submit(request(tokens(1, 4), adapter="m@1"), stream=False)
    pool.load_adapter("m@1", checkpoints[0])


def test_too_little_memory_is_said(
    pool: EnginePool, checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(full, "load_model", load_model)
    with pytest.raises(AdapterError, match=r"'m@1'.*does not fit into memory with the base model"):
        pool.load_adapter("m@1", checkpoints[0])
