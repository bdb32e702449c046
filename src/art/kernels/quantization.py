"""A base model whose linear layers are rounded to NF4, the 4-bit numbers of QLoRA (arXiv 2305.14314).

The trainer keeps the 4-bit weights, which is what saves memory. An engine cannot serve the unrounded model beside it:
the adapter learns to make up for the rounding, and without it the sampled policy would be another than the trained one.
So an engine rounds in the same way, and computes with what is left, in its own dtype and at its usual speed and size.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from art.config import Quantization
from art.errors import ConfigError


def loading_options(quantization: Quantization, *, device: str, dtype: Any) -> dict[str, Any]:
    """What `from_pretrained` is to be told, beside the dtype; the language-model head and the embedding stay whole.

    Raises:
        ConfigError: the package `bitsandbytes` is missing, or `device` is not one that it computes on.
    """
    if quantization == "none":
        return {}
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(
            f"`quantization` {quantization!r} works on cpu and cuda, not on {device!r}; leave it 'none'",
            param="quantization",
        )
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"`quantization` {quantization!r} needs the package bitsandbytes: "
            "pip install 'agent-reinforcement-trainer[qlora]', or leave it 'none'",
            param="quantization",
        )
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
