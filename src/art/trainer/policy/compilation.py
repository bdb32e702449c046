"""Decoder layers through torch.compile: fewer passes over memory between matrix products, after minutes of waiting."""

from __future__ import annotations

import torch

from art.errors import ConfigError
from art.trainer.attention.tree_attention import ATTENTION_NAME, attend
from art.trainer.policy.base_model import BaseModel
from art.trainer.policy.layers import decoder_layers


def compile_layers(base: BaseModel) -> None:
    """Compile each decoder layer of `base`, which happens on its first pass, for layouts of any length.

    Attention stays out of it: its kernels read the layout, which is another one each time, and flex compiles itself.

    Raises:
        ConfigError: nothing can be compiled here, or the model does not say which of its modules are its layers.
    """
    from transformers import AttentionInterface

    layers = decoder_layers(base.model, option="compile_layers")
    try:
        torch.compile(_probe)(torch.ones(8, device=base.device))
    except Exception as error:  # whatever is missing: a C++ compiler, Triton, headers
        raise ConfigError(
            f"torch.compile does not work here ({type(error).__name__}: {error}); it needs a C++ compiler, on CUDA "
            "Triton too. Leave `compile_layers` off",
            param="compile_layers",
        ) from error
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(attend))
    for layer in layers:
        layer.compile(dynamic=True)


def _probe(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) + 1
