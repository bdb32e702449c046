"""Checkpoints on disk: one directory per step, complete or absent.

    <checkpoints>/0007/
      adapter_model.safetensors  adapter_config.json     the LoRA in PEFT's format; or, after full fine-tuning,
      model.safetensors  config.json  tokenizer* ...     the whole model as transformers loads it: a *full checkpoint*
      optimizer.safetensors                              first and second moments of every trained tensor
      state.json                                         `CheckpointState`
      probe.json                                         `Probe`: what the engine must reproduce
      manifest.json                                      size and sha256 of each file above

Nothing is pickled. The manifest's own hash identifies a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from art.errors import CorruptCheckpointError, NotFoundError
from art.storage.atomic import remove_directory, remove_leftovers, storage_errors, write_directory, write_file

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
MODEL_WEIGHTS = "model.safetensors"
MODEL_CONFIG = "config.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
PROBE = "probe.json"
MANIFEST = "manifest.json"
ADAPTER_FILES = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
MODEL_FILES = (MODEL_WEIGHTS, MODEL_CONFIG)
COMMON_FILES = (OPTIMIZER, STATE, PROBE)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CheckpointState(_Record):
    """Everything of a checkpoint that is neither weights nor moments."""

    step: int
    job_id: str | None
    """The job that made this step; `None` for step 0."""
    base_model: str
    lora: dict[str, Any] | None
    """`LoraConfig` as a dict; `None` after full fine-tuning."""
    config: dict[str, Any]
    """The training configuration of the step; empty for step 0."""
    num_updates: int
    """Optimiser updates since step 0: Adam's bias correction needs it."""
    rng: str
    """State of torch's generator, base64."""
    metrics: dict[str, float]


class Probe(_Record):
    """Log-probs that the trainer measured on a fixed token path right after a step, for the publish handshake."""

    token_ids: list[int]  # [T]
    logprobs: list[float]  # [T - 1] of token_ids[1:] under the policy
    base_logprobs: list[float]  # [T - 1] under the base model


class FileEntry(_Record):
    size: int
    sha256: str


class _Manifest(_Record):
    files: dict[str, FileEntry]


_Model = TypeVar("_Model", bound=BaseModel)


def write_checkpoint(path: Path, files: Mapping[str, bytes]) -> str:
    """Write `files` and their manifest as the checkpoint `path`; returns its identity.

    `files` has every name of `COMMON_FILES`, and those of `ADAPTER_FILES` or `MODEL_FILES`; beside the latter whatever
    else belongs to the model's folder.

    Raises:
        DiskFullError, StorageError: nothing was written.
    """
    wrong = _missing(files)
    if MODEL_WEIGHTS not in files:
        wrong |= files.keys() - {*ADAPTER_FILES, *COMMON_FILES}
    if wrong:
        raise ValueError(f"these files are missing in a checkpoint, or do not belong there: {sorted(wrong)}")
    entries = {n: FileEntry(size=len(d), sha256=hashlib.sha256(d).hexdigest()) for n, d in files.items()}
    manifest = _Manifest(files=entries).model_dump_json(indent=1).encode()
    remove_leftovers(path.parent)
    write_directory(path, {**files, MANIFEST: manifest})
    return hashlib.sha256(manifest).hexdigest()


def _missing(names: Collection[str]) -> set[str]:
    """What a checkpoint that has the files `names` lacks."""
    weights = MODEL_FILES if MODEL_WEIGHTS in names else ADAPTER_FILES
    return {*weights, *COMMON_FILES} - set(names)


def is_full(path: Path) -> bool:
    """Whether the checkpoint `path` is a full one, with a whole model instead of an adapter."""
    return (path / MODEL_WEIGHTS).is_file()


def identify(path: Path) -> str:
    """The identity of the checkpoint `path`: the hash of its manifest. Two equal ones hold the same bytes."""
    return hashlib.sha256(_read(path, MANIFEST)).hexdigest()


def verify(path: Path) -> None:
    """Read every file of the checkpoint `path` and compare it with the manifest.

    Raises:
        NotFoundError: there is no such directory.
        CorruptCheckpointError: a file is missing, cut or altered; the message names it.
    """
    manifest = _parse(_Manifest, path, MANIFEST)
    if missing := _missing(manifest.files):
        raise CorruptCheckpointError(f"the manifest of checkpoint {path} does not list {', '.join(sorted(missing))}")
    verify_files(path)


def list_files(path: Path) -> dict[str, FileEntry]:
    """Name, size and hash of every file of the checkpoint or export `path`, by its manifest.

    Raises:
        NotFoundError: there is no such directory.
        CorruptCheckpointError: it has no valid manifest.
    """
    return _parse(_Manifest, path, MANIFEST).files


def created_at(path: Path) -> float:
    """Unix time at which the checkpoint was completed."""
    with storage_errors(_file(path, MANIFEST), "reading"):
        return (path / MANIFEST).stat().st_mtime


def write_manifest(directory: Path) -> None:
    """Make the manifest of an export that lies in `directory`, of all files there. It is read file by file."""
    entries = {}
    for file in sorted(directory.iterdir()):
        size, digest = _measure(directory, file.name)
        entries[file.name] = FileEntry(size=size, sha256=digest)
    write_file(directory / MANIFEST, _Manifest(files=entries).model_dump_json(indent=1).encode())


def verify_files(path: Path) -> None:
    """Read every file that the manifest of the checkpoint or export `path` lists, and compare.

    Raises:
        NotFoundError: there is no such directory.
        CorruptCheckpointError: a file is missing, cut or altered; the message names it.
    """
    for name, entry in list_files(path).items():
        size, digest = _measure(path, name)
        if size != entry.size:
            raise CorruptCheckpointError(
                f"{path / name} has {size} bytes where its manifest says {entry.size}: the file was cut or "
                "replaced. Delete this checkpoint and continue from an older one"
            )
        if digest != entry.sha256:
            raise CorruptCheckpointError(
                f"{path / name} does not have the sha256 of its manifest: its content changed after it was written. "
                "Delete this checkpoint and continue from an older one"
            )


def read_state(path: Path) -> CheckpointState:
    return _parse(CheckpointState, path, STATE)


def read_probe(path: Path) -> Probe:
    return _parse(Probe, path, PROBE)


def read_file(path: Path, name: str) -> bytes:
    """One file of the checkpoint `path`, unchecked; `verify` first."""
    return _read(path, name)


def list_steps(directory: Path) -> list[int]:
    """Steps with a complete checkpoint under `directory`, ascending."""
    if not directory.is_dir():
        return []
    found = [entry for entry in directory.iterdir() if entry.name.isdecimal() and (entry / MANIFEST).is_file()]
    return sorted(int(entry.name) for entry in found)


def latest(directory: Path) -> int | None:
    """Newest complete step under `directory`."""
    return max(list_steps(directory), default=None)


def delete(path: Path) -> None:
    """Delete the checkpoint `path`; one that is gone already is no error."""
    if path.exists():
        remove_directory(path)


def _read(path: Path, name: str) -> bytes:
    file = _file(path, name)
    with storage_errors(file, "reading"):
        return file.read_bytes()


def _measure(path: Path, name: str) -> tuple[int, str]:
    """Size and sha256 of a file that may be larger than memory."""
    with storage_errors(_file(path, name), "reading"), (path / name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _file(path: Path, name: str) -> Path:
    file = path / name
    if not path.is_dir():
        raise NotFoundError(f"there is no checkpoint at {path}")
    if not file.is_file():
        raise CorruptCheckpointError(f"checkpoint {path} lacks {name}. Delete it and continue from an older one")
    return file


def _parse(model: type[_Model], path: Path, name: str) -> _Model:
    try:
        return model.model_validate_json(_read(path, name))
    except ValidationError as error:
        raise CorruptCheckpointError(f"{path / name} is not a valid {name}: {error.errors()[0]['msg']}") from error
