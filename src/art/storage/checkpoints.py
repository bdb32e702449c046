"""Read and write checkpoints: one directory per step, either complete or absent.

    <checkpoints>/0007/
      adapter_model.safetensors  adapter_config.json     the LoRA in PEFT's format; or, after full fine-tuning,
      model.safetensors  config.json  tokenizer* ...     the whole model as transformers loads it: a *full checkpoint*
      optimizer.safetensors                              Adam's first and second moments of every trained tensor
      state.json                                         `CheckpointState`
      probe.json                                         `Probe`: log-probs that the engine must reproduce
      manifest.json                                      size and sha256 of each file above

Nothing is pickled. The hash of the manifest identifies a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from art.errors import CorruptCheckpointError, NotFoundError
from art.storage.atomic import new_directory, remove_directory, storage_errors, write_file

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
    """The content of a checkpoint's `state.json`: where the step comes from, and what the next step needs to go on."""

    step: int
    job_id: str | None
    """The job that trained this step; `None` for step 0."""
    base_model: str
    lora: dict[str, Any] | None
    """`LoraConfig` as a dict; `None` after full fine-tuning."""
    config: dict[str, Any]
    """The training configuration of the step; empty for step 0."""
    num_updates: int
    """Number of optimiser updates since step 0, needed for Adam's bias correction."""
    rng: str
    """State of torch's random generator in base64."""
    metrics: dict[str, float]


class Probe(_Record):
    """Log-probs of fixed tokens that the trainer computed right after a step. An engine must reproduce them."""

    token_ids: list[int]  # [T]
    logprobs: list[float]  # [T - 1] of token_ids[1:] under the policy
    base_logprobs: list[float]  # [T - 1] under the base model

    def shortened(self, num_tokens: int) -> Probe:
        """Return the probe's first `num_tokens` tokens, at least 2, for an engine with a short context."""
        n = max(2, num_tokens)
        return Probe(
            token_ids=self.token_ids[:n],
            logprobs=self.logprobs[: n - 1],
            base_logprobs=self.base_logprobs[: n - 1],
        )


class FileEntry(_Record):
    size: int
    sha256: str


class _Manifest(_Record):
    files: dict[str, FileEntry]


_Model = TypeVar("_Model", bound=BaseModel)


def write_checkpoint(path: Path, files: Mapping[str, bytes]) -> str:
    """Write `files` and their manifest as the checkpoint `path`. Returns the checkpoint's identity.

    Args:
        files: contents by name: all of `COMMON_FILES` and `ADAPTER_FILES`, or all of `COMMON_FILES` and `MODEL_FILES`
            with any further files of the model's folder.

    Raises:
        DiskFullError, StorageError: writing failed. Nothing was written.
    """
    wrong = _missing(files)
    if MODEL_WEIGHTS not in files:
        wrong |= files.keys() - {*ADAPTER_FILES, *COMMON_FILES}
    if wrong:
        raise ValueError(f"these files are missing in a checkpoint, or do not belong there: {sorted(wrong)}")
    entries = {name: FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    manifest = _Manifest(files=entries).model_dump_json(indent=1).encode()
    with new_directory(path) as directory:
        for name, data in {**files, MANIFEST: manifest}.items():
            (directory / name).write_bytes(data)
    return hashlib.sha256(manifest).hexdigest()


def _missing(names: Collection[str]) -> set[str]:
    """The required files of a checkpoint that are not among `names`."""
    weights = MODEL_FILES if MODEL_WEIGHTS in names else ADAPTER_FILES
    return {*weights, *COMMON_FILES} - set(names)


def is_full(path: Path) -> bool:
    """Whether the checkpoint `path` is a full checkpoint: a whole model instead of an adapter."""
    return (path / MODEL_WEIGHTS).is_file()


def identify(path: Path) -> str:
    """Return the identity of the checkpoint `path`, the hash of its manifest. Equal identities mean equal files."""
    return hashlib.sha256(read_file(path, MANIFEST)).hexdigest()


def verify(path: Path) -> None:
    """Check that the checkpoint `path` has all its files, and that they match its manifest.

    Raises:
        NotFoundError: there is no such directory.
        CorruptCheckpointError: a file is missing, truncated or changed. The message names it.
    """
    if missing := _missing(list_files(path)):
        raise CorruptCheckpointError(f"the manifest of checkpoint {path} does not list {', '.join(sorted(missing))}")
    verify_files(path)


def list_files(path: Path) -> dict[str, FileEntry]:
    """Return size and hash of every file in the manifest of the checkpoint or export `path`, by name.

    Raises:
        NotFoundError: there is no such directory.
        CorruptCheckpointError: there is no valid manifest.
    """
    return _parse(_Manifest, path, MANIFEST).files


def created_at(path: Path) -> float:
    """Time at which the checkpoint was completed, in seconds since the epoch."""
    with storage_errors(_file(path, MANIFEST), "reading"):
        return (path / MANIFEST).stat().st_mtime


def write_manifest(directory: Path) -> None:
    """Write the manifest of the export in `directory`, with size and hash of every file there."""
    entries = {file.name: _measure(directory, file.name) for file in sorted(directory.iterdir())}
    write_file(directory / MANIFEST, _Manifest(files=entries).model_dump_json(indent=1).encode())


def verify_files(path: Path) -> None:
    """Check that every file in the manifest of the checkpoint or export `path` has its size and hash.

    Raises:
        NotFoundError: there is no such directory.
        CorruptCheckpointError: a file is missing, truncated or changed. The message names it.
    """
    for name, entry in list_files(path).items():
        actual = _measure(path, name)
        if actual.size != entry.size:
            raise CorruptCheckpointError(
                f"{path / name} has {actual.size} bytes, but its manifest says {entry.size}: the file was truncated or "
                "replaced. Delete this checkpoint and continue from an older one"
            )
        if actual != entry:
            raise CorruptCheckpointError(
                f"{path / name} does not have the sha256 of its manifest: its content changed after it was written. "
                "Delete this checkpoint and continue from an older one"
            )


def read_state(path: Path) -> CheckpointState:
    return _parse(CheckpointState, path, STATE)


def read_probe(path: Path) -> Probe:
    return _parse(Probe, path, PROBE)


def read_file(path: Path, name: str) -> bytes:
    """Read one file of the checkpoint `path` without checking it. Call `verify` before."""
    file = _file(path, name)
    with storage_errors(file, "reading"):
        return file.read_bytes()


def list_steps(directory: Path) -> list[int]:
    """Steps with a complete checkpoint under `directory`, ascending."""
    if not directory.is_dir():
        return []
    entries = (entry for entry in directory.iterdir() if entry.name.isdecimal() and (entry / MANIFEST).is_file())
    return sorted(int(entry.name) for entry in entries)


def latest(directory: Path) -> int | None:
    """Newest step with a complete checkpoint under `directory`."""
    return max(list_steps(directory), default=None)


def delete(path: Path) -> None:
    """Delete the checkpoint `path`. It is not an error if it does not exist."""
    if path.exists():
        remove_directory(path)


def _measure(path: Path, name: str) -> FileEntry:
    """Read a file piece by piece for its size and sha256."""
    with storage_errors(_file(path, name), "reading"), (path / name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(size=file.tell(), sha256=digest)


def _file(path: Path, name: str) -> Path:
    file = path / name
    if not path.is_dir():
        raise NotFoundError(f"there is no checkpoint at {path}")
    if not file.is_file():
        raise CorruptCheckpointError(f"checkpoint {path} has no {name}. Delete it and continue from an older one")
    return file


def _parse(model: type[_Model], path: Path, name: str) -> _Model:
    try:
        return model.model_validate_json(read_file(path, name))
    except ValidationError as error:
        raise CorruptCheckpointError(f"{path / name} is not a valid {name}: {error.errors()[0]['msg']}") from error
