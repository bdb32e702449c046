"""Run decoder layers through torch.compile: fewer passes over memory, after minutes of compilation."""

from __future__ import annotations

import torch

from art.errors import ConfigError
from art.trainer.attention.tree_attention import ATTENTION_NAME, attend
from art.trainer.policy.base_model import BaseModel
from art.trainer.policy.layers import decoder_layers


def compile_layers(base: BaseModel) -> None:
    """Compile each decoder layer of `base` for layouts of any length. Compilation happens on the first pass.

    Attention is not compiled: its kernels read the layout, which changes each time. Flex compiles itself.

    Raises:
        ConfigError: torch.compile does not work here, or the model does not name its decoder layers.
    """
    from transformers import AttentionInterface

    layers = decoder_layers(base.model, option="compile_layers")
    try:
        torch.compile(lambda x: torch.sin(x) + 1)(torch.ones(8, device=base.device))
    except Exception as error:  # may be anything: no C++ compiler, no Triton, no headers
        raise ConfigError(
            f"torch.compile does not work here ({type(error).__name__}: {error}); it needs a C++ compiler, and on CUDA "
            "also Triton. Set `compile_layers` to false",
            param="compile_layers",
        ) from error
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(attend))
    for layer in layers:
        layer.compile(dynamic=True)
