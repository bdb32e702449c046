"""The decoder layers of a Hugging Face causal LM."""

from __future__ import annotations

from typing import Any

from art.errors import ConfigError


def decoder_layers(model: Any, *, option: str) -> list[Any]:
    """The modules that `model` names as its layers; `option` is the setting that asks for them.

    Raises:
        ConfigError: it names none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} does not name its decoder layers; leave `{option}` off", param=option
        )
    return layers
