"""Adapters that would not act as they were trained are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from art.engines.torch.embedded import TorchEngine
from art.errors import AdapterError
from tests.support.engine import generate, load, request, tokens, write_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def engine(qwen3: Path) -> TorchEngine:
    return load(qwen3)


@pytest.fixture
def adapter(qwen3: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", qwen3)


def weights_of(adapter: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(adapter / "adapter_model.safetensors")
    change(weights)
    save_file(weights, adapter / "adapter_model.safetensors")


def refusal(engine: TorchEngine, adapter: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        engine.load_adapter("games/agent@3", adapter)
    message = caught.value.message
    assert "'games/agent@3'" in message
    assert str(adapter) in message
    assert engine.stats()["adapters"] == 0
    return message


@pytest.mark.parametrize("text", ["{", "[]", '{"peft_type": "IA3"}'])
def test_unreadable_config(engine: TorchEngine, adapter: Path, text: str) -> None:
    (adapter / "adapter_config.json").write_text(text)
    assert "adapter_config.json" in refusal(engine, adapter)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("some_future_setting", 1),
        ("r", 0),
        ("r", "8"),
        ("lora_alpha", float("nan")),
        ("lora_alpha", None),
    ],
)
def test_settings_that_are_not_computed(engine: TorchEngine, adapter: Path, key: str, value: object) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    assert f"`{key}`" in refusal(engine, adapter)


def test_settings_as_peft_writes_them(engine: TorchEngine, qwen3: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from tests.support.engine import hf_model

    get_peft_model(hf_model(qwen3), LoraConfig(r=3, target_modules="all-linear")).save_pretrained(tmp_path)
    info = engine.load_adapter("fresh", tmp_path)
    assert (info.num_layers, info.rank, info.norm) == (14, 3, 0.0)
    engine.unload_adapter("fresh")


def test_an_adapter_of_another_model(engine: TorchEngine, adapter: Path) -> None:
    weights_of(adapter, lambda w: [w.update({k.replace("layers", "blocks"): w.pop(k)}) for k in list(w)])
    assert "matches no layer" in refusal(engine, adapter)
    weights_of(adapter, lambda w: w.clear())
    assert "matches no layer" in refusal(engine, adapter)


def test_a_key_that_would_be_ignored(engine: TorchEngine, adapter: Path) -> None:
    weights_of(adapter, lambda w: w.update({Q.replace("0", "7") + ".lora_A.weight": torch.zeros(4, 64)}))
    assert "layers.7.self_attn.q_proj" in refusal(engine, adapter)


def test_half_a_pair(engine: TorchEngine, adapter: Path) -> None:
    weights_of(adapter, lambda w: w.pop(f"{Q}.lora_B.weight"))
    message = refusal(engine, adapter)
    assert f"{Q}.lora_B.weight' is missing" in message


@pytest.mark.parametrize(
    ("factor", "shape", "expected"),
    [("A", (4, 63), "[4, 64]"), ("B", (65, 4), "[64, 4]"), ("A", (5, 64), "[4, 64]"), ("B", (64, 5), "[64, 4]")],
)
def test_shapes_that_do_not_fit(
    engine: TorchEngine, adapter: Path, factor: str, shape: tuple[int, int], expected: str
) -> None:
    key = f"{Q}.lora_{factor}.weight"
    weights_of(adapter, lambda w: w.update({key: torch.zeros(shape)}))
    message = refusal(engine, adapter)
    assert key in message
    assert f"{list(shape)}, expected {expected}" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(engine: TorchEngine, adapter: Path, value: float) -> None:
    weights_of(adapter, lambda w: w[f"{Q}.lora_A.weight"].fill_(value))
    assert "NaN" in refusal(engine, adapter)


def test_a_refused_reload_leaves_the_old_weights(engine: TorchEngine, adapter: Path) -> None:
    engine.load_adapter("a@1", adapter)
    one = request(tokens(1, 9), adapter="a@1")
    (want,) = generate(engine, one)
    (adapter / "adapter_model.safetensors").write_bytes(b"junk")
    with pytest.raises(AdapterError):
        engine.load_adapter("a@1", adapter)
    assert generate(engine, one)[0].token_ids == want.token_ids
    engine.unload_adapter("a@1")


def test_the_head_can_be_adapted(engine: TorchEngine, qwen3: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    from tests.support.engine import hf_logprobs, hf_model, score

    adapter = write_adapter(tmp_path, qwen3, modules=("q_proj", "lm_head"))
    engine.load_adapter("head", adapter)
    sequence = tokens(2, 20)
    want = hf_logprobs(PeftModel.from_pretrained(hf_model(qwen3), adapter), sequence)
    assert score(engine, sequence, "head") == pytest.approx(want, abs=1e-4)
    engine.unload_adapter("head")
