"""Create and save the tiny model's weights: the Qwen3 architecture with about 0.1 M parameters, drawn from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from art.testing.tiny.tokenizer import END_OF_TURN, PAD_TOKEN

HIDDEN = 64
HEAD_DIM = 16
VLLM_HEAD_DIM = 32
"""The smallest head size that vLLM's attention kernels support. Half as many heads keep the number of parameters."""


def create_model(tokenizer: Any, *, seed: int, head_dim: int = HEAD_DIM, max_context: int = 1024) -> Any:
    """Create a `Qwen3ForCausalLM` in float32 with random weights for a tokenizer.

    The wide initialisation matters: with the usual 0.02, a model this small spends most of its warm start on a plateau.
    The base of the rotary embedding matters too: conversations are a few hundred tokens long, and with a base of 10,000
    most of the eight frequencies would be equal at neighbouring positions.
    """
    pad, end = tokenizer.convert_tokens_to_ids([PAD_TOKEN, END_OF_TURN])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=HIDDEN // head_dim,
        num_key_value_heads=HIDDEN // head_dim // 2,
        head_dim=head_dim,
        max_position_embeddings=max_context,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000.0},
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=[end, pad], pad_token_id=pad
    )
    return model


def save_model(model: Any, path: Path) -> None:
    """Save weights and configs for `from_pretrained`, without the progress bar of `save_pretrained`."""
    path.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})  # the head is tied to the embedding
