"""Write named tensors to safetensors, and read them back with strict checks."""

from __future__ import annotations

from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from art.errors import AdapterError


def dump_named(tensors: Mapping[str, Tensor]) -> bytes:
    """Return `tensors` in the safetensors format, with the metadata that transformers requires."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data: bytes = save_tensors(contiguous, metadata={"format": "pt"})
    return data


def read_named(data: bytes, like: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """Read the safetensors `data`. It must hold exactly the tensors of `like`, with their shapes and finite numbers.

    Args:
        what: name of the file's content, for errors.

    Raises:
        AdapterError: `data` is unreadable, names or shapes differ, or a number is not finite.
    """
    try:
        tensors: dict[str, Tensor] = load_tensors(data)
    except SafetensorError as error:
        raise AdapterError(f"the {what} file is not readable as safetensors: {error}") from error
    if difference := sorted(tensors.keys() ^ like.keys()):
        raise AdapterError(
            f"the {what} file does not fit the model: {len(difference)} tensors are missing or unknown, the first is "
            f"{difference[0]!r}. It belongs to another base model or to other target modules"
        )
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape:
            raise AdapterError(
                f"the {what} file has {name!r} of shape {list(tensor.shape)}, expected {list(like[name].shape)}: it "
                "belongs to another base model or LoRA rank"
            )
        if not tensor.isfinite().all():
            raise AdapterError(f"the {what} file holds numbers in {name!r} that are not finite")
    return tensors


def copy_named(data: bytes, into: Mapping[str, Tensor], what: str) -> None:
    """Copy the tensors in the safetensors `data` into those of the same names.

    Raises:
        AdapterError: `data` is unreadable or does not fit; nothing was changed.
    """
    for name, tensor in read_named(data, into, what).items():
        into[name].copy_(tensor)
