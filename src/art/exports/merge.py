"""Merge an adapter into its base model: W' = W + alpha / rank * B A, for every adapted layer.

Each safetensors file of the base is copied, and the adapted weights are then changed in the copy, some rows at a time.
The copy keeps the base's names, order and dtypes. Memory holds one block of rows, however large the model is.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.errors import ConfigError
from art.exports.folder import OnBytes, copy_files
from art.storage import checkpoints

INDEX = "model.safetensors.index.json"
ROWS = 1024
"""Rows of a weight that are changed at once."""
_PLAIN_ONLY = (
    "only plain LoRA of one rank can be merged here. Merge it with peft's `merge_and_unload`, and use the folder of "
    "the merged model"
)
_KEPT = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Endings of the other files to copy: configuration, tokenizer, chat template."""
_PREFIXES = (("", ""), ("model.", "model.language_model."), ("model.", "language_model.model."), ("model.", ""))
"""Prefixes (in memory, in the file) of layer names. They differ in some families, such as vision models."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    file: Path
    dtype: str
    shape: list[int]
    start: int
    """Offset of the first byte in the file."""


@dataclass(frozen=True, slots=True)
class _Adapter:
    scale: float
    transposed: bool
    """Whether the base stores W as [in, out]."""
    layers: dict[str, tuple[Any, Any]]
    """A [rank, in] and B [out, rank] of each adapted layer, float32."""


def merge(checkpoint: Path, base: Path, target: Path, on_bytes: OnBytes) -> None:
    """Write the whole model of `checkpoint`, an adapter merged with its base, into the folder `target`.

    Args:
        base: folder of the adapter's base model. A full checkpoint does not need it.

    Raises:
        ConfigError: the base has no safetensors, or its weights do not fit the adapter.
    """
    if checkpoints.is_full(checkpoint):
        leave = {*checkpoints.COMMON_FILES, checkpoints.MANIFEST}
        names = [entry.name for entry in checkpoint.iterdir() if entry.name not in leave]
        copy_files(checkpoint, target, sorted(names), on_bytes)
        return
    names = _files_of(base)
    copy_files(base, target, names, on_bytes)
    tensors: dict[str, _Tensor] = {}
    for file in names:
        if file.endswith(".safetensors"):
            tensors |= _read_head(target / file)
    adapter = _read_adapter(checkpoint)
    for layer, name in _match(adapter.layers, tensors, base).items():
        _add(tensors[name], name, adapter, layer)


def _files_of(base: Path) -> list[str]:
    if (base / INDEX).is_file():
        weights = sorted(set(json.loads((base / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        weights = [entry.name for entry in base.glob("model.safetensors")]
    if not weights or any("/" in name for name in weights):
        raise ConfigError(f"{base} has no safetensors weights to merge with; other formats are not read")
    return weights + sorted(entry.name for entry in base.iterdir() if entry.suffix in _KEPT and entry.is_file())


def _read_head(file: Path) -> dict[str, _Tensor]:
    with file.open("rb") as reader:
        (length,) = struct.unpack("<Q", reader.read(8))
        head = json.loads(reader.read(length))
    return {
        name: _Tensor(file, entry["dtype"], entry["shape"], 8 + length + entry["data_offsets"][0])
        for name, entry in head.items()
        if name != "__metadata__"
    }


def _read_adapter(checkpoint: Path) -> _Adapter:
    from safetensors.torch import load_file

    config = json.loads((checkpoint / checkpoints.ADAPTER_CONFIG).read_text(encoding="utf-8"))
    other = [key for key in ("rank_pattern", "alpha_pattern", "use_dora") if config.get(key)]
    if (kind := config.get("peft_type") or "LORA") != "LORA" or other:
        raise ConfigError(f"the adapter {checkpoint} is {' with '.join([kind, *other])}; {_PLAIN_ONLY}")
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = load_file(checkpoint / checkpoints.ADAPTER_WEIGHTS)
    layers = {}
    for key, a in tensors.items():
        if key.endswith(".lora_A.weight"):
            layer = key.removesuffix(".lora_A.weight")
            b = tensors[f"{layer}.lora_B.weight"]
            layers[layer.removeprefix("base_model.model.")] = a.float(), b.float()
    if unknown := [key for key in tensors if not key.endswith((".lora_A.weight", ".lora_B.weight"))]:
        raise ConfigError(f"the adapter {checkpoint} has {unknown[0]!r}; {_PLAIN_ONLY}")
    return _Adapter(scale, bool(config.get("fan_in_fan_out")), layers)


def _match(layers: Mapping[str, Any], tensors: Mapping[str, _Tensor], base: Path) -> dict[str, str]:
    """Map each adapted layer to the name of its weight in the base."""
    for inside, in_file in _PREFIXES:
        names = {layer: f"{in_file}{layer.removeprefix(inside)}.weight" for layer in layers if layer.startswith(inside)}
        if len(names) == len(layers) and all(name in tensors for name in names.values()):
            return names
    missing = next(layer for layer in layers if f"{layer}.weight" not in tensors)
    raise ConfigError(
        f"the adapter changes {missing!r}, which the files of {base} do not have under this name (they have "
        f"{next(iter(tensors))!r} and {len(tensors) - 1} others): this family stores its weights in another form "
        "than it computes with. Export as `peft`, and merge with peft's `merge_and_unload`"
    )


def _add(tensor: _Tensor, name: str, adapter: _Adapter, layer: str) -> None:
    import torch

    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    a, b = adapter.layers[layer]
    left, right = (a.T, b.T) if adapter.transposed else (b, a)  # [rows, rank], [rank, columns]
    if tensor.shape != [left.shape[0], right.shape[1]] or tensor.dtype not in dtypes:
        raise ConfigError(
            f"{name} is {tensor.dtype} {tensor.shape} and its adapter is for {[left.shape[0], right.shape[1]]}: the "
            "base is quantised, or is not the model that was trained"
        )
    dtype = dtypes[tensor.dtype]
    row_bytes = tensor.shape[1] * dtype.itemsize
    with tensor.file.open("r+b") as file:
        for row in range(0, tensor.shape[0], ROWS):
            delta = adapter.scale * (left[row : row + ROWS] @ right)
            size = delta.shape[0] * row_bytes
            file.seek(tensor.start + row * row_bytes)
            block = bytearray(file.read(size))
            weight = torch.frombuffer(block, dtype=dtype).reshape(delta.shape)
            weight.copy_((weight.double() + delta.double()).to(dtype))
            file.seek(tensor.start + row * row_bytes)
            file.write(block)


def write_plain_scale(file: Path) -> None:
    """Write the scale of a rsLoRA into an `adapter_config.json` as an alpha that is divided by the rank."""
    config = json.loads(file.read_bytes())
    if config.get("use_rslora"):
        config |= {"lora_alpha": config["lora_alpha"] * math.sqrt(config["r"]), "use_rslora": False}
        file.write_text(json.dumps(config, indent=1, sort_keys=True), encoding="utf-8")
