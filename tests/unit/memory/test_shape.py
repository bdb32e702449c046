"""Shapes of models from their `config.json`: as many weights, and as large an adapter, as transformers and peft make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

from art.config import LoraConfig
from art.memory import count_weights, read_shape, shape_of
from tests.support.model_shapes import QWEN3, QWEN3_MOE

SMALL = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip


def made(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
        transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False),
        transformers.LlamaConfig(**SMALL),
        transformers.MistralConfig(**SMALL, head_dim=32),
        transformers.Qwen2Config(**SMALL),
        transformers.Gemma3TextConfig(**SMALL, head_dim=16),
        transformers.Qwen3MoeConfig(
            **SMALL, head_dim=16, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2
        ),
    ],
    ids=lambda config: f"{config.model_type}-{getattr(config, 'tie_word_embeddings', '')}",
)
def test_weights_are_counted_from_the_sizes(config: Any) -> None:
    """Norms, biases, positions and routers are left out or rounded: a few percent of these tiny models."""
    expected = sum(parameter.numel() for parameter in made(config).parameters())
    found = shape_of(config.to_dict())
    assert found.num_layers == 3
    assert found.num_weights == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("name", "billions"), [("0.6B", 0.596), ("4B", 4.02), ("8B", 8.19), ("14B", 14.77), ("32B", 32.76)]
)
def test_well_known_models_have_their_size(name: str, billions: float) -> None:
    assert shape_of(QWEN3[name]).num_weights / 1e9 == pytest.approx(billions, rel=0.005)


def test_experts_count_as_weights_and_have_no_adapter() -> None:
    shape = shape_of(QWEN3_MOE)
    assert shape.num_weights / 1e9 == pytest.approx(30.5, rel=0.01)
    assert set(shape.linear_layers) == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"], ["self_attn.o_proj", "down_proj"]])
def test_an_adapter_has_as_many_weights_as_pefts(targets: list[str] | None) -> None:
    config = transformers.Qwen3Config(**SMALL, head_dim=16)
    model: Any = peft.get_peft_model(
        made(config), peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=targets or "all-linear")
    )
    expected = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)
    assert shape_of(config.to_dict()).adapter_weights(LoraConfig(rank=8, target_modules=targets)) == expected


def test_a_multimodal_model_has_the_shape_of_its_text() -> None:
    assert shape_of({"model_type": "gemma3", "text_config": QWEN3["4B"]}) == shape_of(QWEN3["4B"])


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path, metadata={"format": "pt"})


def test_weights_in_files_are_counted_without_loading_them(tmp_path: Path) -> None:
    assert count_weights(tmp_path) is None
    write_safetensors(tmp_path / "model-1.safetensors", {"a": [3, 5], "b": [7]})
    write_safetensors(tmp_path / "model-2.safetensors", {"scalar": []})
    assert count_weights(tmp_path) == 23
    (tmp_path / "config.json").write_text(json.dumps(QWEN3["8B"]))
    shape = read_shape(str(tmp_path))
    assert shape is not None
    assert shape.num_weights == 23
    (tmp_path / "model-3.safetensors").write_bytes(b"not one")
    assert count_weights(tmp_path) is None


def test_what_is_no_decoder_has_no_shape(tmp_path: Path) -> None:
    assert read_shape(str(tmp_path)) is None
    for text in ("not json", "[]", "{}", '{"hidden_size": "wide"}'):
        (tmp_path / "config.json").write_text(text)
        assert read_shape(str(tmp_path)) is None
    assert read_shape("no-such-organisation/no-such-model") is None
