"""What trainer and engines both must know of a base model: the kinds of its decoder layers, and how it is loaded.

Most layers mix tokens by attention over all earlier tokens or a window of them. Others carry a state along the
sequence (Gated DeltaNet, Mamba, short convolutions), or attend to keys that an index selects. Those cannot run over a
prefix tree or a cache of keys and values.

Linear layers may be rounded to NF4, the 4-bit numbers of QLoRA (arXiv 2305.14314). The trainer keeps the 4-bit weights,
which saves memory. The engine must use rounded weights too: the adapter learns to compensate for the rounding, so with
unrounded weights the sampled policy would differ from the trained one. The engine converts the rounded weights back to
its own dtype, and runs at its usual speed and size.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final

from art.config import Quantization
from art.errors import ConfigError

_ATTENTION: Final = frozenset({"full_attention", "sliding_attention", "attention"})
_WITHOUT_HEADS: Final = frozenset({"linear_attention", "conv", "mamba"})
"""Kinds of layers whose work does not grow with the number of tokens before."""


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
    """Return the size of an attention head in each decoder layer, 0 where a layer has no attention over tokens.

    Most models have one size; Gemma 4 has a larger one in some layers.
    """
    text = config.get_text_config(decoder=True)
    if not (num_heads := getattr(text, "num_attention_heads", None)):
        return [0] * text.num_hidden_layers
    sizes = [int(size or text.hidden_size // num_heads) for size in layer_settings(config, "head_dim")]
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(sizes)
    return [0 if kind in _WITHOUT_HEADS else size for kind, size in zip(kinds, sizes, strict=False)]


def layer_settings(config: Any, name: str) -> list[Any]:
    """Return the setting `name` of each decoder layer, `None` where it is absent."""
    text = config.get_text_config(decoder=True)
    is_mixed = getattr(text, "is_heterogeneous", False)  # then `text` refuses to name one value for all layers
    layers = [text.per_layer_config[index] if is_mixed else text for index in range(text.num_hidden_layers)]
    return [getattr(layer, name, None) for layer in layers]


def _listed(layers: list[int]) -> str:
    if len(layers) > 4:
        return f"{len(layers)} layers are"
    *others, last = map(str, layers)
    return f"layers {', '.join(others)} and {last} are" if others else f"layer {last} is"


def loading_options(quantization: Quantization, *, device: str, dtype: Any) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that load a model with `quantization`. Head and embedding are not rounded.

    Raises:
        ConfigError: the package `bitsandbytes` is missing, or does not support `device`.
    """
    if quantization == "none":
        return {}
    if device.partition(":")[0] not in ("cpu", "cuda"):
        problem = f"works on cpu and cuda, not on {device!r}; set it to 'none'"
        raise ConfigError(f"`quantization` {quantization!r} {problem}", param="quantization")
    if find_spec("bitsandbytes") is None:
        hint = "pip install 'agent-reinforcement-trainer[qlora]', or set it to 'none'"
        raise ConfigError(f"`quantization` {quantization!r} needs bitsandbytes: {hint}", param="quantization")
    import torch
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=False,
    )
    place = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
    return {"quantization_config": settings, "device_map": {"": place}}
