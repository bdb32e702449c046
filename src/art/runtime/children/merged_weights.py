"""Turn checkpoints into whole models for an engine that takes no adapters: merged with the base, in another folder.

A full checkpoint is already a whole model, but its folder also has the optimiser, which vLLM would load as weights.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art.engine import AdapterInfo
from art.engines.vllm.adapters import read_adapter
from art.errors import AdapterError, ConfigError
from art.exports.formats import base_folder
from art.exports.merge import INDEX, merge
from art.storage import checkpoints

NARROW = ("BF16", "F16")
"""Dtypes of safetensors files that are less exact than float32."""


@dataclass(frozen=True, slots=True)
class WholeModel:
    identity: str
    """Identity of the checkpoint that the model was made from."""
    folder: Path
    info: AdapterInfo
    """Its `norm` is `None`, since vLLM cannot report what it holds."""


class MergedWeights:
    """Makes the folder of a whole model from a checkpoint, one at a time. Methods may be called from any thread."""

    def __init__(self, base_model: str, dtype: str, folder: Path) -> None:
        """
        Args:
            dtype: dtype of the engine's weights.
            folder: folder to make, used by nobody else. Files that an earlier process left in it are deleted.
        """
        self._base_model = base_model
        self._dtype = dtype
        self._folder = folder
        self._lock = threading.RLock()
        self._ready: WholeModel | None = None
        self.clear()

    def prepare(self, name: str, checkpoint: Path) -> WholeModel:
        """Make the whole model of `checkpoint`, unless it is the one that was prepared last.

        Raises:
            AdapterError: the checkpoint's files cannot be read, or do not fit the base model.
        """
        with self._lock:
            identity = checkpoints.identify(checkpoint)
            if self._ready is None or self._ready.identity != identity:
                self.clear()
                self._folder.mkdir(parents=True)
                try:
                    info = self._make(name, checkpoint)
                except ConfigError as error:
                    raise AdapterError(f'{name!r} cannot be merged (`weights="merged"`): {error.message}') from error
                self._ready = WholeModel(identity, self._folder, info)
            return self._ready

    def clear(self) -> None:
        """Delete the prepared model from the disk."""
        with self._lock:
            self._ready = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def _make(self, name: str, checkpoint: Path) -> AdapterInfo:
        base = base_folder(self._base_model)
        if checkpoints.is_full(checkpoint):
            for file in checkpoint.iterdir():
                if file.name not in (*checkpoints.COMMON_FILES, checkpoints.MANIFEST):
                    (self._folder / file.name).symlink_to(file.resolve())
            return _full_info(name, checkpoint, base)
        info = read_adapter(name, checkpoint)
        if self._dtype == "float32" and (narrow := {kind for _, kind in _tensor_kinds(base)} & {*NARROW}):
            raise ConfigError(
                f"the files of the base model hold {', '.join(sorted(narrow))}, to which merged weights are rounded, "
                'but the engine computes in float32. Set `engine.dtype="bfloat16"`, or `weights="lora"`'
            )
        merge(checkpoint, base, self._folder, lambda done, total: None)
        return info


def _full_info(name: str, checkpoint: Path, base: Path) -> AdapterInfo:
    """Describe a full checkpoint, whose tensors must be some of the base model's, with their shapes."""
    shapes = {key: entry["shape"] for file in _files(base) for key, entry in _head(file).items()}
    held = _head(checkpoint / checkpoints.MODEL_WEIGHTS)
    for key, entry in held.items():
        if key not in shapes:
            raise AdapterError(f"{name!r} has weights {key!r}, which the base model in {base} does not have")
        if entry["shape"] != shapes[key]:
            raise AdapterError(
                f"{name!r}: {key!r} has shape {entry['shape']}, and {shapes[key]} in the base model {base}"
            )
    return AdapterInfo(name=name, num_layers=len(held), rank=0, norm=None)


def _files(base: Path) -> set[Path]:
    """The safetensors files of the model in `base`."""
    if (base / INDEX).is_file():
        return {base / file for file in json.loads((base / INDEX).read_text(encoding="utf-8"))["weight_map"].values()}
    file = base / checkpoints.MODEL_WEIGHTS
    return {file} if file.is_file() else set()


def _tensor_kinds(base: Path) -> Iterator[tuple[str, str]]:
    """Yield each tensor of the model in `base` with its dtype as safetensors names it."""
    for file in _files(base):
        yield from ((key, entry["dtype"]) for key, entry in _head(file).items())


def _head(file: Path) -> dict[str, Any]:
    """Return the JSON header of a safetensors file, tensors only."""
    with file.open("rb") as reader:
        head: dict[str, Any] = json.loads(reader.read(int.from_bytes(reader.read(8), "little")))
    return {key: entry for key, entry in head.items() if key != "__metadata__"}
