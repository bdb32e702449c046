"""Gradient checkpointing: what the layers of a model compute again in the backward pass instead of keeping it.

none         nothing
selective    all of a layer but its attention (`art.trainer.attention.kept_attention`)
full         all of a layer
"""

from __future__ import annotations

from typing import Any

import torch

from art.config import TrainerConfig
from art.errors import ConfigError
from art.kernels.activation_bytes import Checkpointing
from art.trainer.attention.kept_attention import keep_attention


def configured_mode(config: TrainerConfig) -> Checkpointing | None:
    """Return the configured way of checkpointing; `None` if it is to be chosen."""
    chosen = config.gradient_checkpointing
    return None if chosen == "auto" else "selective" if chosen == "selective" else "full" if chosen else "none"


def set_checkpointing(model: Any, mode: Checkpointing) -> None:
    """Make a Hugging Face causal LM keep, or compute again, the activations of its layers.

    Layers checkpoint in training mode only. Dropout stays off, since the engine has none.

    Raises:
        ConfigError: the model has no layers that can be checkpointed.
    """
    model.train(mode != "none")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    if mode == "none":
        if model.supports_gradient_checkpointing:
            _call(model, "disable")
        return
    options = {"use_reentrant": False} | ({"context_fn": keep_attention} if mode == "selective" else {})
    try:
        _call(model, "enable", options)
    except ValueError as error:
        raise ConfigError(
            f"{type(model).__name__} cannot checkpoint its layers ({error}); set `gradient_checkpointing` to false",
            param="gradient_checkpointing",
        ) from error


def _call(model: Any, what: str, *args: Any) -> None:
    newer = getattr(model, f"activation_checkpointing_{what}", None)  # the name in transformers 5.20 and later
    (newer or getattr(model, f"gradient_checkpointing_{what}"))(*args)
