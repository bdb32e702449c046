"""What a model's configuration says about its decoder layers, as trainer and engines both need it.

Most layers mix tokens by attention over all earlier tokens or a window of them. Others carry a state along the
sequence (Gated DeltaNet, Mamba, short convolutions), or attend to keys that an index selects. Those cannot run over a
prefix tree or a cache of keys and values.
"""

from __future__ import annotations

from typing import Any, Final

_ATTENTION: Final = frozenset({"full_attention", "sliding_attention", "attention"})


def other_layers(config: Any) -> str:
    """Name the layers that mix tokens other than by plain attention: "layers 0, 1 and 2 are linear_attention".

    Returns:
        An empty string where there are none, or where the configuration does not name the kinds of its layers.
    """
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or []
    by_kind: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        if kind not in _ATTENTION:
            by_kind.setdefault(str(kind), []).append(index)
    return "; ".join(f"{_listed(layers)} {kind}" for kind, layers in by_kind.items())


def head_dims(config: Any) -> list[int]:
    """Return the head size of each decoder layer. Most models have one size; Gemma 4 has a larger one in some."""
    text = config.get_text_config(decoder=True)
    default = text.hidden_size // text.num_attention_heads
    return [int(size or default) for size in layer_settings(config, "head_dim")]


def layer_settings(config: Any, name: str) -> list[Any]:
    """Return the setting `name` of each decoder layer, `None` where it is absent."""
    text = config.get_text_config(decoder=True)
    is_mixed = getattr(text, "is_heterogeneous", False)  # then `text` refuses to name one value for all layers
    layers = [text.per_layer_config[index] if is_mixed else text for index in range(text.num_hidden_layers)]
    return [getattr(layer, name, None) for layer in layers]


def _listed(layers: list[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]} is"
    if len(layers) > 4:
        return f"{len(layers)} layers are"
    return f"layers {', '.join(map(str, layers[:-1]))} and {layers[-1]} are"
