"""Loud test adapters tell engines that apply adapters from engines that do not, while training has moved nothing yet."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

from art.config import EngineConfig, LoraConfig, TrainerConfig
from art.engine import AdapterInfo
from art.engines.torch.embedded import TorchEngine
from art.errors import HandshakeError
from art.runtime.publish import BASE_NATS, prove_layers, publish, rms_gap
from art.storage import checkpoints
from art.trainer.proof import natural_probe_tokens
from art.trainer.trainer import Trainer
from benchmarks.in_process import InProcessEngine
from tests.support.engine import make_model

KINDS = {
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}
LORA = LoraConfig(rank=4)


class Pair:
    """A trainer and an engine of one base model, with the trainer's test adapters."""

    def __init__(self, model: Path, dtype: str, folder: Path) -> None:
        torch.set_num_threads(1)
        settings = {"device": "cpu", "dtype": dtype, "num_threads": 1}
        self.trainer = Trainer(str(model), TrainerConfig.model_validate(settings))
        self.engine = TorchEngine.load(str(model), EngineConfig.model_validate({**settings, "kv_cache_tokens": 2048}))
        self.adapters = folder / "loud"
        self.effects = self.trainer.write_loud_adapters(self.adapters, LORA)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    return Pair(make_model(root / "model", "qwen3"), "float32", root)


class Spoilt(InProcessEngine):
    """An engine that loads other weights than it is given: what `spoil` makes of each, by its name in the file."""

    def __init__(self, engine: TorchEngine, scratch: Path, spoil: Callable[[str], float]) -> None:
        super().__init__(engine)
        self._scratch, self._spoil = scratch, spoil

    async def load_adapter(self, name: str, path: Path) -> AdapterInfo:
        honest = await super().load_adapter(name, path)
        folder = self._scratch / str(len(list(self._scratch.iterdir())))
        folder.mkdir()
        weights = {
            key: array * self._spoil(key) for key, array in load_file(path / "adapter_model.safetensors").items()
        }
        save_file(weights, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_bytes((path / "adapter_config.json").read_bytes())
        return replace(await super().load_adapter(name, folder), norm=honest.norm)


def ignoring(module: str, share: float = 0.0) -> Callable[[str], float]:
    return lambda key: share if f"{module}.lora_B" in key else 1.0


async def test_an_engine_that_applies_every_layer_is_proved(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "art.runtime.publish")
    assert set(pair.effects) == KINDS
    assert min(pair.effects.values()) > 0.5
    await prove_layers(InProcessEngine(pair.engine), pair.adapters)
    (record,) = caplog.records
    assert all(kind in record.getMessage() for kind in KINDS)
    assert (await InProcessEngine(pair.engine).stats())["adapters"] == 0


@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_an_engine_that_ignores_one_kind_of_layer_is_refused_by_its_name(
    kind: str, pair: Pair, tmp_path: Path
) -> None:
    with pytest.raises(HandshakeError, match=f"does not apply adapters to `{re.escape(kind)}`"):
        await prove_layers(Spoilt(pair.engine, tmp_path, ignoring(kind)), pair.adapters)
    assert (await InProcessEngine(pair.engine).stats())["adapters"] == 0


async def test_a_wrong_scale_and_a_missing_block_are_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(HandshakeError, match=r"applies adapters wrongly to `mlp\.down_proj`"):
        await prove_layers(Spoilt(pair.engine, tmp_path, ignoring("down_proj", share=2.0)), pair.adapters)
    with pytest.raises(HandshakeError, match=r"applies adapters wrongly to `mlp\.down_proj`"):
        await prove_layers(Spoilt(pair.engine, tmp_path, ignoring("layers.1.mlp.down_proj")), pair.adapters)


async def test_ignored_adapters_are_found_where_small_steps_hide_them(pair: Pair, tmp_path: Path) -> None:
    """In bfloat16 nothing else tells: the fresh adapter of step 0 changes nothing, and the norm is that of the file."""
    fresh, scratch = tmp_path / "0000", tmp_path / "scratch"
    scratch.mkdir()
    pair.trainer.init_checkpoint(fresh, LORA)
    deaf = Spoilt(pair.engine, scratch, lambda key: 0.0 if "lora_B" in key else 1.0)
    await publish(deaf, "m@0", fresh)
    with pytest.raises(HandshakeError, match="does not apply adapters to"):
        await prove_layers(deaf, pair.adapters)


async def test_another_base_model_is_refused(pair: Pair, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "qwen3", rms_norm_eps=1e-2)
    engine = TorchEngine.load(str(other), EngineConfig(device="cpu", num_threads=1))
    with pytest.raises(HandshakeError, match="do not have the same base model"):
        await prove_layers(InProcessEngine(engine), pair.adapters)


async def test_a_quiet_test_adapter_proves_nothing_and_says_so(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "quiet" / "mlp.up_proj"
    folder.mkdir(parents=True)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).write_bytes((pair.adapters / "mlp.up_proj" / name).read_bytes())
    probe = checkpoints.read_probe(pair.adapters / "mlp.up_proj")
    (folder / "probe.json").write_text(probe.model_copy(update={"logprobs": probe.base_logprobs}).model_dump_json())
    await prove_layers(InProcessEngine(pair.engine), folder.parent)
    assert "not proved that the engine applies adapters to mlp.up_proj" in caplog.text


@pytest.mark.parametrize("num_layers", [12, pytest.param(36, marks=pytest.mark.slow)])
async def test_deep_models_in_bfloat16_are_served_and_proved(num_layers: int, tmp_path: Path) -> None:
    """A model of 4B has 36 layers. There the noise of a correct pair reaches more than 0.15 nats at single tokens."""
    changes = {"num_hidden_layers": num_layers, "initializer_range": 0.15, "intermediate_size": 192}
    model = make_model(tmp_path / "model", "qwen3", tie_word_embeddings=True, **changes)
    deep = Pair(model, "bfloat16", tmp_path)
    engine = InProcessEngine(deep.engine)
    fresh = tmp_path / "0000"
    deep.trainer.init_checkpoint(fresh, LORA)
    metrics = await publish(engine, "m@0", fresh)
    assert num_layers < 36 or metrics["publish/base_gap"] > 0.15
    probe = checkpoints.read_probe(fresh)
    assert rms_gap(await engine.score(probe.token_ids, None), probe.base_logprobs) < BASE_NATS["bfloat16"]
    await prove_layers(engine, deep.adapters)
    (tmp_path / "scratch").mkdir()
    with pytest.raises(HandshakeError, match=r"`self_attn\.k_proj`"):
        await prove_layers(Spoilt(deep.engine, tmp_path / "scratch", ignoring("k_proj")), deep.adapters)


def test_the_probe_is_natural_text_where_the_model_has_a_tokenizer(pair: Pair, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    vocab_size = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    tokens = natural_probe_tokens(str(tiny_model), vocab_size)
    assert AutoTokenizer.from_pretrained(tiny_model).decode(tokens).startswith("The harbour was quiet")
    assert len(tokens) == 64
    assert natural_probe_tokens(str(tiny_model), vocab_size) == tokens
    made_up = natural_probe_tokens(pair.trainer._base.name, 128)  # it has no tokenizer
    assert len({*made_up}) == len(made_up) == 64
    assert natural_probe_tokens(str(tiny_model), 10) == natural_probe_tokens("no such model", 10)  # it does not fit
