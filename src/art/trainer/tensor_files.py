"""Write named tensors to safetensors, and read them back with strict checks.

Both work tensor by tensor and in pieces, because weights and moments of full fine-tuning are larger than the memory
that is free.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from art.errors import AdapterError

PIECE_BYTES = 2**26
"""Most bytes of a tensor that are copied at a time."""

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
"""Names of number types in a safetensors file, in the order in which its library sorts them."""


def file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in the order of the file: larger number types first, so that every tensor is aligned."""
    ranks = {dtype: rank for rank, dtype in enumerate(_NAMES)}
    return sorted(tensors, key=lambda name: (-ranks[tensors[name].dtype], name))


def make_header(tensors: Mapping[str, Tensor]) -> bytes:
    """Make the beginning of a safetensors file that holds tensors of these shapes and number types.

    The data follows in `file_order`. The metadata is what transformers requires.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in file_order(tensors):
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def stream_tensor(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in pieces of at most `PIECE_BYTES`."""
    flat = tensor.detach().reshape(-1)
    for piece in flat.split(max(1, PIECE_BYTES // flat.element_size())):
        yield memoryview(piece.cpu().contiguous().view(torch.uint8).numpy()).cast("B")


def stream_named(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield `tensors` in the safetensors format, piece by piece."""
    yield make_header(tensors)
    for name in file_order(tensors):
        yield from stream_tensor(tensors[name])


def read_named(file: Path, like: Mapping[str, Tensor], what: str) -> Iterator[tuple[str, Tensor]]:
    """Read a safetensors file: yield each tensor with its name, in the order of `like`, mapped from the disk.

    The file must hold exactly the tensors of `like`, with their shapes and finite numbers. That is checked for all of
    them before the first is yielded.

    Args:
        what: name of the file's content, for errors.

    Raises:
        AdapterError: the file is unreadable, names or shapes differ, or a number is not finite.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            if difference := sorted(set(tensors.keys()) ^ like.keys()):
                raise AdapterError(
                    f"the {what} file does not fit the model: {len(difference)} tensors are missing or unknown, the "
                    f"first is {difference[0]!r}. It belongs to another base model or to other target modules"
                )
            for name in like:
                shape = tensors.get_slice(name).get_shape()
                if shape != list(like[name].shape):
                    raise AdapterError(
                        f"the {what} file has {name!r} of shape {shape}, expected {list(like[name].shape)}: it "
                        "belongs to another base model or LoRA rank"
                    )
            for name in like:
                pieces = tensors.get_tensor(name).view(-1).split(PIECE_BYTES)
                if not all(bool(piece.isfinite().all()) for piece in pieces):
                    raise AdapterError(f"the {what} file holds numbers in {name!r} that are not finite")
            for name in like:
                yield name, tensors.get_tensor(name)
    except SafetensorError as error:
        raise AdapterError(f"the {what} file is not readable as safetensors: {error}") from error
