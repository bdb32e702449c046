"""The size of a base model, read from the headers of its weight files without torch and without loading the model."""

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
    """Count the numbers in the safetensors files of a local model; `None` for a hub id or other files."""
    files = sorted(Path(base_model).glob("*.safetensors")) if Path(base_model).is_dir() else []
    try:
        return sum(map(_count_in_file, files)) if files else None
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
        return None  # engine and trainer will report what is wrong with the files


def weight_bytes(num_weights: int, device: str, dtype: Dtype, quantization: Quantization = "none") -> int:
    """Bytes that the weights take on `device` ("cpu", "cuda", "mps") as engine and trainer load them."""
    if quantization == "nf4":
        return int(num_weights * _NF4_BYTES)
    resolved = dtype if dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    return int(num_weights * _BYTES_OF_DTYPE[resolved])


def _count_in_file(path: Path) -> int:
    """Count the numbers in one safetensors file from its JSON header, which has the shape of every tensor."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file")
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
