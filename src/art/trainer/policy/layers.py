"""Find the decoder layers of a Hugging Face causal LM."""

from __future__ import annotations

from typing import Any

from art.errors import ConfigError


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
