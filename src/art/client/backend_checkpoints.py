"""What a backend does with checkpoints: list, fetch, fork, export, send elsewhere."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from art.client import ArtClient
from art.errors import ConfigError
from art.protocol.checkpoint_calls import (
    BEST_METRIC,
    CheckpointInfo,
    ExportFormat,
    ExportRequest,
    ForkRequest,
    HubTarget,
    PullRequest,
    PushRequest,
    S3Target,
)
from art.protocol.training import DeleteCheckpointsRequest, JobStatus


class NamedModel(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def project(self) -> str: ...


class CheckpointMethods:
    """Of every `Backend`. Each call that changes something is a job of the server and may be repeated."""

    async def _connection(self) -> ArtClient:
        raise NotImplementedError

    def _note_step(self, model: NamedModel, step: int) -> int:
        """Remember that this backend brought `model` to `step`, which is returned."""
        raise NotImplementedError

    async def list_checkpoints(self, model: NamedModel, *, best_metric: str = BEST_METRIC) -> list[CheckpointInfo]:
        """In the order of steps, with metrics, size, and which is the newest, the best, in use."""
        client = await self._connection()
        return (await client.checkpoints(model.project, model.name, best_metric=best_metric)).checkpoints

    async def delete_checkpoints(
        self,
        model: NamedModel,
        *,
        keep_steps: Iterable[int] = (),
        keep_recent: int = 1,
        best_metric: str = BEST_METRIC,
    ) -> list[int]:
        """Delete all but `keep_steps`, the `keep_recent` newest, the best and those in use; the steps that are gone."""
        request = DeleteCheckpointsRequest(
            keep_steps=sorted(set(keep_steps)), keep_recent=keep_recent, best_metric=best_metric
        )
        client = await self._connection()
        return (await client.delete_checkpoints(model.project, model.name, request)).deleted_steps

    async def download_checkpoint(
        self, model: NamedModel, path: str | Path, *, step: int | None = None, format: ExportFormat | None = None
    ) -> Path:
        """Fetch a checkpoint, or an export of it that has been made, as the folder `path`; resumed, verified, and there
        whole or not at all.

        Args:
            step: by default the newest.

        Raises:
            NotFoundError: there is none.
            ConfigError: `path` is there with other content.
        """
        client = await self._connection()
        if step is None:
            step = (await client.model_status(model.project, model.name)).step
        await client.download_checkpoint(model.project, model.name, step, Path(path), format=format)
        return Path(path)

    async def fork(
        self,
        model: NamedModel,
        from_model: str | NamedModel,
        *,
        from_project: str | None = None,
        step: int | None = None,
        not_after_step: int | None = None,
        show: bool = False,
    ) -> int:
        """Begin `model` with a checkpoint of another one, under the same step; before or after its registration.

        Its base model and LoRA settings must be the same. A model that was forked from there before goes on where it
        is, so that a script can be run again.

        Args:
            show: a progress bar; the methods below have the same.

        Returns:
            The step that `model` is at.

        Raises:
            NotFoundError: no such model or step.
            ConflictError: `model` has trained already.
            ConfigError: another base model, or other settings.
        """
        name = from_model if isinstance(from_model, str) else from_model.name
        if from_project is None and not isinstance(from_model, str):
            from_project = from_model.project
        request = ForkRequest(
            job_id=uuid.uuid4().hex, from_name=name, from_project=from_project, step=step, not_after_step=not_after_step
        )
        client = await self._connection()
        return self._note_step(model, _step(await client.fork(model.project, model.name, request, show=show)))

    async def export(
        self,
        model: NamedModel,
        format: ExportFormat,
        *,
        step: int | None = None,
        path: str | Path | None = None,
        show: bool = False,
    ) -> dict[str, Any]:
        """Make an export on the server; with `path` it is then fetched as that folder.

        Args:
            format: `peft` is the adapter, which peft and vLLM load; `merged` a whole Hugging Face model; `gguf` and
                `gguf-lora` are made by llama.cpp's converters on the server.

        Returns:
            `path` on the server, `files`, `size_bytes`.
        """
        client = await self._connection()
        request = ExportRequest(job_id=uuid.uuid4().hex, format=format, step=step)
        status = await client.export(model.project, model.name, request, show=show)
        if path is not None:
            await client.download_checkpoint(model.project, model.name, _step(status), Path(path), format=format)
        return status.result

    async def push(
        self,
        model: NamedModel,
        target: str | HubTarget | S3Target,
        *,
        step: int | None = None,
        format: Literal["checkpoint"] | ExportFormat = "checkpoint",
        show: bool = False,
    ) -> str:
        """Send a checkpoint, or an export of it that has been made, to `s3://bucket/prefix` or `hf://owner/name`.

        The server sends it, with the keys in its own environment; that needs a key with scope `admin`.

        Returns:
            Its address there.
        """
        wanted = parse_target(target) if isinstance(target, str) else target
        request = PushRequest(job_id=uuid.uuid4().hex, target=wanted, step=step, format=format)
        client = await self._connection()
        status = await client.push(model.project, model.name, request, show=show)
        return str(status.result["url"])

    async def pull(
        self,
        model: NamedModel,
        source: str | S3Target,
        *,
        from_model: str | None = None,
        from_project: str | None = None,
        step: int | None = None,
        not_after_step: int | None = None,
        show: bool = False,
    ) -> int:
        """Begin `model` with a checkpoint that `push` has sent to a store; else as `fork`."""
        wanted = parse_target(source) if isinstance(source, str) else source
        if not isinstance(wanted, S3Target):
            raise ConfigError(f"checkpoints can be fetched from `s3://bucket/prefix` only; got {source!r}")
        request = PullRequest(
            job_id=uuid.uuid4().hex,
            source=wanted,
            from_name=from_model,
            from_project=from_project,
            step=step,
            not_after_step=not_after_step,
        )
        client = await self._connection()
        return self._note_step(model, _step(await client.pull(model.project, model.name, request, show=show)))

    # -- names of older code --

    async def _experimental_fork_checkpoint(
        self,
        model: NamedModel,
        from_model: str,
        from_project: str | None = None,
        from_s3_bucket: str | None = None,
        not_after_step: int | None = None,
        verbose: bool = False,
        prefix: str | None = None,
    ) -> None:
        """`fork`, or with a bucket `pull`."""
        if from_s3_bucket is None:
            await self.fork(model, from_model, from_project=from_project, not_after_step=not_after_step, show=verbose)
            return
        source = S3Target(bucket=from_s3_bucket, prefix=prefix or "")
        await self.pull(
            model, source, from_model=from_model, from_project=from_project, not_after_step=not_after_step, show=verbose
        )

    async def _experimental_push_to_s3(
        self,
        model: NamedModel,
        *,
        s3_bucket: str | None = None,
        prefix: str | None = None,
        verbose: bool = False,
        delete: bool = False,
    ) -> None:
        """`push` of the newest checkpoint."""
        _refuse_delete(delete)
        await self.push(model, S3Target(bucket=_bucket(s3_bucket), prefix=prefix or ""), show=verbose)

    async def _experimental_pull_from_s3(
        self,
        model: NamedModel,
        *,
        s3_bucket: str | None = None,
        prefix: str | None = None,
        verbose: bool = False,
        delete: bool = False,
        only_step: int | Literal["latest"] | None = None,
        step: int | None = None,
        exclude: list[str] | None = None,
        latest_only: bool = False,
    ) -> None:
        """`pull` of one checkpoint: the newest there, or the one that is asked for.

        Raises:
            ConfigError: `delete`, or an `exclude` of what is fetched here; logs and trajectories never are.
        """
        _refuse_delete(delete)
        if unknown := sorted(set(exclude or ()) - {"logs", "trajectories"}):
            raise ConfigError(f"a checkpoint is all that is fetched; `exclude` cannot leave out {', '.join(unknown)}")
        wanted = step if only_step in (None, "latest") else only_step
        source = S3Target(bucket=_bucket(s3_bucket), prefix=prefix or "")
        await self.pull(model, source, step=wanted, show=verbose)  # type: ignore[arg-type]


def parse_target(text: str) -> HubTarget | S3Target:
    """
    Raises:
        ConfigError: neither `s3://bucket/prefix` nor `hf://owner/name`.
    """
    url = urlsplit(text)
    if url.scheme == "s3" and url.netloc:
        return S3Target(bucket=url.netloc, prefix=url.path.strip("/"), endpoint_url=os.environ.get("AWS_ENDPOINT_URL"))
    if url.scheme == "hf" and url.netloc:
        return HubTarget(repo_id=f"{url.netloc}{url.path}".strip("/"))
    raise ConfigError(f"expected an address like s3://bucket/prefix or hf://owner/name, got {text!r}")


def _step(status: JobStatus) -> int:
    assert status.step is not None, "the server gives the step of every job on files"
    return status.step


def _bucket(name: str | None) -> str:
    bucket = name or os.environ.get("BACKUP_BUCKET")
    if not bucket:
        raise ConfigError("no bucket: pass s3_bucket, or set BACKUP_BUCKET")
    return bucket


def _refuse_delete(delete: bool) -> None:
    if delete:
        raise ConfigError("delete=True is not honoured: what is in the bucket or on the server stays; leave it out")
