"""Models for benchmarks: the Qwen3 architecture with random weights, and a LoRA adapter, written as files to load."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
import transformers
from transformers.utils import logging as hf_logging

from art.config import LoraConfig

MAX_CONTEXT = 2048
LORA = LoraConfig()
"""Rank 16 on every linear layer: the product's own default."""

_SHAPES: dict[str, dict[str, Any]] = {
    "1.2 M": {
        "vocab_size": 3072,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "30 M": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    name: str
    """Its number of parameters."""
    base: Path
    adapter: Path
    vocab_size: int


def model_names(args: argparse.Namespace) -> list[str]:
    return list(_SHAPES) if args.full else list(_SHAPES)[:1]


def choose_dtype(args: argparse.Namespace) -> str:
    dtype: str = args.dtype or {"cpu": "float32", "cuda": "bfloat16"}[args.device]
    return dtype


@contextmanager
def model_files(name: str) -> Iterator[ModelFiles]:
    """The model `name` with an adapter of random A and B, as float32 files that are removed at the end."""
    hf_logging.disable_progress_bar()
    with TemporaryDirectory() as directory:
        base, adapter = Path(directory) / "base", Path(directory) / "adapter"
        torch.manual_seed(0)
        config = transformers.Qwen3Config(
            **_SHAPES[name],
            max_position_embeddings=MAX_CONTEXT,
            initializer_range=0.05,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        model = transformers.Qwen3ForCausalLM(config)
        model.save_pretrained(base)
        settings = peft.LoraConfig(
            task_type="CAUSAL_LM", r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear"
        )
        adapted = peft.get_peft_model(model, settings)
        for parameter_name, parameter in adapted.named_parameters():
            if ".lora_B." in parameter_name:  # zero in a fresh adapter, which would then compute nothing
                torch.nn.init.normal_(parameter, std=0.02)
        adapted.save_pretrained(adapter)
        yield ModelFiles(name, base, adapter, config.vocab_size)


def load_peft_model(files: ModelFiles, *, device: str, dtype: str, is_trainable: bool) -> Any:
    """The same model and adapter in transformers and peft, as their documentation loads them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(files.base, dtype=getattr(torch, dtype)).to(device)
    adapted = peft.PeftModel.from_pretrained(model, files.adapter, is_trainable=is_trainable)
    return adapted.eval()
