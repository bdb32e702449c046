"""What configurations say about the layers of their models."""

from __future__ import annotations

import transformers

from art.kernels.base_model import head_dims, layer_settings, other_layers


def test_layers_that_mix_tokens_otherwise_are_named() -> None:
    kinds = ["linear_attention"] * 5 + ["full_attention", "conv", "sliding_attention"]
    config = transformers.Qwen3_5TextConfig(num_hidden_layers=8, layer_types=kinds)
    assert other_layers(config) == "5 layers are linear_attention; layer 6 is conv"
    config = transformers.Lfm2Config(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
    assert other_layers(config) == "layers 0 and 2 are conv"
    assert other_layers(transformers.LlamaConfig()) == other_layers(transformers.Gemma3TextConfig()) == ""


def test_the_text_model_of_a_larger_one_is_read() -> None:
    text = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 32}
    config = transformers.Qwen3_5Config(text_config=text)
    assert other_layers(config) == "layer 0 is linear_attention"
    assert head_dims(config) == [0, 32]
    assert head_dims(transformers.MambaConfig(num_hidden_layers=2)) == [0, 0]


def test_head_sizes_may_differ_by_layer() -> None:
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    config = transformers.Gemma4TextConfig(
        num_hidden_layers=3, layer_types=kinds, head_dim=64, num_key_value_heads=4,
        attention_k_eq_v=True, num_global_key_value_heads=2,
    )  # fmt: skip
    assert head_dims(config) == [64, 64, 512]
    assert layer_settings(config, "num_key_value_heads") == [4, 4, 2]
    assert layer_settings(config, "nothing_like_it") == [None] * 3
    assert head_dims(transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4)) == [16]
