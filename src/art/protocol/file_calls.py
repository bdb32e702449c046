"""Calls of the process that works on files: what the server writes to its standard input, as one line of JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from art.protocol.checkpoint_calls import ExportFormat, HubTarget, S3Target
from art.protocol.training import Wire


class CopyCall(Wire):
    """Copy a checkpoint."""

    call: Literal["copy"] = "copy"
    source: Path
    target: Path


class ExportCall(Wire):
    """Write a checkpoint in the format of other programs."""

    call: Literal["export"] = "export"
    source: Path
    target: Path
    base_model: str
    format: ExportFormat
    llama_cpp: str | None
    """Folder of llama.cpp; `None` looks for it in the usual places."""


class MergeAdapterCall(Wire):
    """Merge an adapter into its base model."""

    call: Literal["merge_adapter"] = "merge_adapter"
    adapter: Path
    base_model: str
    target: Path


class PushCall(Wire):
    """Send a checkpoint or export to a hub or store."""

    call: Literal["push"] = "push"
    source: Path
    target: Annotated[HubTarget | S3Target, Field(discriminator="kind")]
    place: str
    """Folder in an S3 store."""
    message: str
    """Commit message on a hub."""


class PullCall(Wire):
    """Fetch a checkpoint from a store, unless it is here already."""

    call: Literal["pull"] = "pull"
    source: S3Target
    place: str
    step: int | None
    """`None` fetches the newest step in the store."""
    not_after_step: int | None
    checkpoints: Path
    """The folder that gets the checkpoint."""


FileCall = Annotated[CopyCall | ExportCall | MergeAdapterCall | PushCall | PullCall, Field(discriminator="call")]
