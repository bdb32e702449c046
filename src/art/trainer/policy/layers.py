"""What is done to the decoder layers of a Hugging Face causal LM: found, split over processes, checkpointed.

A layer that is checkpointed computes again in the backward pass what it does not keep:

    none         nothing
    selective    all of a layer but its attention (`art.trainer.attention.kept_attention`)
    full         all of a layer

Layers that are split (`shard_base`, torch's FSDP2, for models that do not fit one device) are gathered when they run,
forward and backward, and freed afterwards. The adapter is not sharded: it is injected later, and `fully_shard` manages
only what exists when it is called. Embedding, final norm and head stay whole, because the head is read outside of the
model's forward pass. Gathering needs every process, so all processes must run the model equally often.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from art.config import TrainerConfig
from art.errors import ConfigError
from art.memory.shape import Checkpointing
from art.trainer.attention.kept_attention import keep_attention


def decoder_layers(model: Any, *, option: str) -> list[Any]:
    """Return the modules that `model` names as its decoder layers.

    Args:
        option: name of the setting that needs the layers, for the error.

    Raises:
        ConfigError: the model names none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} does not name its decoder layers; set `{option}` to false", param=option
        )
    return layers


def shard_layers(model: Any, device: torch.device) -> None:
    """Split the decoder layers of a Hugging Face causal LM over all processes, and move them to `device`.

    Raises:
        ConfigError: the model does not name its decoder layers.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers = decoder_layers(model, option="shard_base")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = set(model.parameters())
    for layer in layers:
        whole -= set(layer.parameters())
        fully_shard(layer, mesh=mesh)
    backbone = getattr(model, model.base_model_prefix)
    fully_shard(backbone, mesh=mesh, ignored_params=whole)  # the root, which overlaps gathering with computing


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
