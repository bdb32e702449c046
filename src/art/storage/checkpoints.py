"""Read and write checkpoints: one directory per step, either complete or absent.

    <checkpoints>/0007/
      adapter_model.safetensors  adapter_config.json     the LoRA in PEFT's format; or, after full fine-tuning,
      model.safetensors  config.json  tokenizer* ...     the whole model as transformers loads it: a *full checkpoint*
      optimizer.safetensors                              Adam's first and second moments of every trained tensor
      state.json                                         `CheckpointState`
      probe.json                                         `Probe`: log-probs that the engine must reproduce
      manifest.json                                      size and sha256 of each file above

Nothing is pickled. The hash of the manifest identifies a checkpoint. Moments take the most space and only training
needs them, so older steps lose theirs: `optimizer.removed` then takes the place of the file (`remove_moments`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
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
MOMENTS_REMOVED = "optimizer.removed"
STATE = "state.json"
PROBE = "probe.json"
MANIFEST = "manifest.json"
ADAPTER_FILES = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
MODEL_FILES = (MODEL_WEIGHTS, MODEL_CONFIG)
COMMON_FILES = (OPTIMIZER, STATE, PROBE)

Content = bytes | Iterable[bytes | memoryview]
"""What a file holds: its bytes, or pieces of them in order, so that a large file is never whole in memory."""

_REMOVED_TEXT = b"""The optimiser's moments of this step were deleted to save space (`TrainerConfig.keep_moments`).
The weights are complete. A step that is trained from here starts with an optimiser that has seen no updates.
"""


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
            token_ids=self.token_ids[:n], logprobs=self.logprobs[: n - 1], base_logprobs=self.base_logprobs[: n - 1]
        )


class FileEntry(_Record):
    size: int
    sha256: str


class _Manifest(_Record):
    files: dict[str, FileEntry]


_Model = TypeVar("_Model", bound=BaseModel)


def write_checkpoint(path: Path, files: Mapping[str, Content]) -> str:
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
    with new_directory(path) as directory:
        entries = {name: write_content(directory / name, content) for name, content in files.items()}
        manifest = _Manifest(files=entries).model_dump_json(indent=1).encode()
        (directory / MANIFEST).write_bytes(manifest)
    return hashlib.sha256(manifest).hexdigest()


def write_content(file: Path, content: Content) -> FileEntry:
    """Write the new file `file` piece by piece. Returns its size and sha256."""
    digest = hashlib.sha256()
    with file.open("wb") as target:
        for piece in (content,) if isinstance(content, bytes) else content:
            target.write(piece)
            digest.update(piece)
        return FileEntry(size=target.tell(), sha256=digest.hexdigest())


def _missing(names: Collection[str]) -> set[str]:
    """The required files of a checkpoint that are not among `names`."""
    weights = MODEL_FILES if MODEL_WEIGHTS in names else ADAPTER_FILES
    removed = {OPTIMIZER} if MOMENTS_REMOVED in names else set()
    return {*weights, *COMMON_FILES} - removed - set(names)


def has_moments(path: Path) -> bool:
    """Whether the checkpoint `path` has its optimiser's moments, or should have them."""
    return (path / OPTIMIZER).is_file() or not (path / MOMENTS_REMOVED).is_file()


def remove_moments(path: Path) -> None:
    """Delete the optimiser's moments of the checkpoint `path`, which stays valid and keeps its identity. Raises
    `StorageError` if the file cannot be deleted."""
    write_file(path / MOMENTS_REMOVED, _REMOVED_TEXT)
    with storage_errors(path / OPTIMIZER, "deleting"):
        (path / OPTIMIZER).unlink(missing_ok=True)


def remove_old_moments(directory: Path, *, newest: int, keep: int, needed: Collection[Path] = ()) -> list[int]:
    """Delete the moments of the checkpoints under `directory`, except those of the last `keep` steps up to `newest`.

    Checkpoints in `needed` and steps above `newest` are left as they are. Returns the steps that lost their moments.
    """
    steps = [step for step in list_steps(directory) if step <= newest]
    paths = {step: directory / f"{step:04d}" for step in steps[:-keep]}
    removed = [step for step, path in paths.items() if (path / OPTIMIZER).is_file() and path not in needed]
    for step in removed:
        remove_moments(paths[step])
    return removed


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

    Where the moments were removed, the file that says so is listed instead of them.

    Raises:
        NotFoundError: there is no such directory.
        CorruptCheckpointError: there is no valid manifest.
    """
    files = _parse(_Manifest, path, MANIFEST).files
    if has_moments(path):
        return files
    files = {name: entry for name, entry in files.items() if name != OPTIMIZER}
    return files | {MOMENTS_REMOVED: _measure(path, MOMENTS_REMOVED)}


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
        if actual == entry:
            continue
        what = "does not have the sha256 of its manifest: its content changed after it was written"
        if actual.size != entry.size:
            what = f"has {actual.size} bytes, but its manifest says {entry.size}: the file was truncated or replaced"
        raise CorruptCheckpointError(f"{path / name} {what}. Delete this checkpoint and continue from an older one")


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
    found = directory.glob(f"*/{MANIFEST}")
    return sorted(int(file.parent.name) for file in found if file.parent.name.isdecimal())


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
