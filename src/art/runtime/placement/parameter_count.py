"""How large a base model is, read from the heads of its weight files, without torch and without loading it."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from art.config import Dtype, Quantization

_MAX_HEADER_BYTES = 100 * 2**20
_BYTES_OF_DTYPE = {"float32": 4.0, "bfloat16": 2.0}
_NF4_BYTES = 0.5625
"""4 bits, and a float32 scale per block of 64 weights (arXiv 2305.14314, without double quantisation)."""


def count_weights(base_model: str) -> int | None:
    """Numbers in the safetensors files of a local model; `None` if there are none to read, as of a hub id."""
    files = sorted(Path(base_model).glob("*.safetensors")) if Path(base_model).is_dir() else []
    try:
        return sum(map(_count_in_file, files)) if files else None
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
        return None  # whoever loads it will say what is wrong with it


def weight_bytes(num_weights: int, device: str, dtype: Dtype, quantization: Quantization = "none") -> int:
    """What they take on `device` ("cpu", "cuda", "mps"), as engine and trainer load them; see `EngineConfig.dtype`."""
    if quantization == "nf4":
        return int(num_weights * _NF4_BYTES)
    known = dtype if dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    return int(num_weights * _BYTES_OF_DTYPE[known])


def _count_in_file(path: Path) -> int:
    """A safetensors file begins with the length of a JSON header that has the shape of every tensor."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is no safetensors file")
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
