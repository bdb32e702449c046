"""Load a base model whose linear layers are rounded to NF4, the 4-bit numbers of QLoRA (arXiv 2305.14314).

The trainer keeps the 4-bit weights, which saves memory. The engine must use rounded weights too: the adapter learns to
compensate for the rounding, so with unrounded weights the sampled policy would differ from the trained one. The engine
converts the rounded weights back to its own dtype, and runs at its usual speed and size.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from art.config import Quantization
from art.errors import ConfigError


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
