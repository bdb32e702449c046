"""`backend.checkpoints`: list, promote, delete, download, fork, export, push and pull checkpoints."""

from __future__ import annotations

import os
import uuid
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

from pydantic import BaseModel

from art.client.client import ArtClient
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
from art.protocol.job_states import JobKind
from art.protocol.training import DeleteCheckpointsRequest, JobStatus

if TYPE_CHECKING:
    from art.protocol.organisation.promotions import Gate, Promotion, PromotionRecord

P = ParamSpec("P")
R = TypeVar("R")


class NamedModel(Protocol):
    """Interface of any object that has the name and project of a model."""

    @property
    def name(self) -> str: ...

    @property
    def project(self) -> str: ...


Infos = list[CheckpointInfo]
Steps = list[int]
Records: TypeAlias = "list[PromotionRecord]"


class Checkpoints:
    """Lists, promotes, copies, exports and deletes checkpoints of models on a server. Every call is safe to repeat."""

    def __init__(
        self, connect: Callable[[], Awaitable[ArtClient]], note_step: Callable[[NamedModel, int], int]
    ) -> None:
        """
        Args:
            connect: gives the client of the server.
            note_step: called when a model moved to another step; returns that step.
        """
        self._connect = connect
        self._note_step = note_step

    async def list(self, model: NamedModel, *, best_metric: str = BEST_METRIC) -> Infos:
        """List checkpoints by step, with metrics, size, and which is the newest, the best, promoted, and in use."""
        client = await self._connect()
        return (await client.checkpoints(model.project, model.name, best_metric=best_metric)).checkpoints

    async def delete(
        self, model: NamedModel, *, keep_steps: Iterable[int] = (), keep_recent: int = 1, best_metric: str = BEST_METRIC
    ) -> Steps:
        """Delete all checkpoints but `keep_steps`, the `keep_recent` newest, the best, the promoted and those in use.

        Returns:
            The steps that were deleted.
        """
        request = DeleteCheckpointsRequest(
            keep_steps=sorted(set(keep_steps)), keep_recent=keep_recent, best_metric=best_metric
        )
        client = await self._connect()
        return (await client.delete_checkpoints(model.project, model.name, request)).deleted_steps

    async def promote(
        self,
        model: NamedModel,
        step: int | None = None,
        *,
        gate: Gate | None = None,
        force: bool = False,
        note: str = "",
    ) -> Promotion:
        """Make a checkpoint the one that answers requests to `project/name@promoted`, while training goes on.

        A model has one promoted checkpoint, which is never deleted; promoting another one takes its place. The engine
        loads the checkpoint first, so that no request waits for it.

        Args:
            step: step of the checkpoint; by default the newest.
            gate: promote it only if its held-out improvement over the promoted checkpoint is certain enough.
            force: promote it even if it does not pass the gate.
            note: why, for the history.

        Returns:
            The step, the name to send as `model` in requests, the step that was promoted before, and what the gate
            has found.

        Raises:
            NotFoundError: there is no such model or checkpoint.
            PromotionError: it does not pass the gate.
            ConfigError: the model's engine cannot serve a step beside the newest, with `weights="merged"`.
        """
        client = await self._connect()
        if step is None:
            step = (await client.model_status(model.project, model.name)).step
        from art.protocol.organisation.promotions import PromoteRequest

        request = PromoteRequest(step=step, gate=gate, force=force, note=note)
        return await client.promote(model.project, model.name, request)

    async def promotions(self, model: NamedModel) -> Records:
        """List the decisions about the promoted checkpoint of a model, oldest first, refusals included."""
        return (await (await self._connect()).promotions(model.project, model.name)).promotions

    async def download(
        self, model: NamedModel, path: str | Path, *, step: int | None = None, format: ExportFormat | None = None
    ) -> Path:
        """Download a checkpoint, or an export that was made of it, as the folder `path`.

        A broken download is resumed, every file is verified, and the folder appears only when it is complete.

        Args:
            step: step of the checkpoint; by default the newest.
            format: format of the export; `None` downloads the checkpoint itself.

        Raises:
            NotFoundError: there is no such checkpoint or export.
            ConfigError: `path` exists with other content.
        """
        client = await self._connect()
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
        """Copy a checkpoint of another model to `model`, whose training then starts there, with the same step number.

        `model` need not be registered. Both must have the same base model and LoRA settings. A model that was
        forked from the same source before stays where it is, so that a script can be run again.

        Args:
            from_model: the other model, or its name.
            from_project: project of the other model; by default that of `from_model`, or of `model`.
            step: step of the checkpoint; by default the newest.
            not_after_step: take the newest checkpoint up to this step.
            show: show a progress bar.

        Returns:
            The step that `model` is at.

        Raises:
            NotFoundError: there is no such model or step.
            ConflictError: `model` has been trained already.
            ConfigError: base model or settings differ.
        """
        name = from_model if isinstance(from_model, str) else from_model.name
        if from_project is None and not isinstance(from_model, str):
            from_project = from_model.project
        request = ForkRequest(
            job_id=uuid.uuid4().hex, from_name=name, from_project=from_project, step=step, not_after_step=not_after_step
        )
        return self._note_step(model, _step(await self._run("fork", model, request, show)))

    async def export(
        self,
        model: NamedModel,
        format: ExportFormat,
        *,
        step: int | None = None,
        path: str | Path | None = None,
        show: bool = False,
    ) -> dict[str, Any]:
        """Export a checkpoint on the server, and download the export as the folder `path` if that is given.

        Args:
            format: `peft` is the adapter; `vllm-lora` is the adapter for vLLM and SGLang, with the commands to serve
                it; `merged` is a whole Hugging Face model; `gguf` and
                `gguf-lora` are made by llama.cpp's converters on the server.
            step: step of the checkpoint; by default the newest.
            path: folder on this machine to download the export to.
            show: show a progress bar.

        Returns:
            `path` on the server, `files`, `size_bytes`; for `vllm-lora` also `commands`, which are run in the folder.
        """
        request = ExportRequest(job_id=uuid.uuid4().hex, format=format, step=step)
        status = await self._run("export", model, request, show)
        if path is not None:
            await self.download(model, path, step=_step(status), format=format)
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
        """Send a checkpoint, or an export that was made of it, to `s3://bucket/prefix` or `hf://owner/name`.

        The server sends it, with the credentials in its own environment. The API key must have the scope `admin`.

        Args:
            target: address to send to.
            step: step of the checkpoint; by default the newest.
            format: `checkpoint`, or the format of an export.
            show: show a progress bar.

        Returns:
            The address of what was sent.
        """
        place = parse_target(target) if isinstance(target, str) else target
        request = PushRequest(job_id=uuid.uuid4().hex, target=place, step=step, format=format)
        return str((await self._run("push", model, request, show)).result["url"])

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
        """Start `model` from a checkpoint that `push` sent to a store. The other arguments are those of `fork`."""
        store = parse_target(source) if isinstance(source, str) else source
        if not isinstance(store, S3Target):
            raise ConfigError(f"checkpoints can be pulled from `s3://bucket/prefix` only; got {source!r}")
        request = PullRequest(
            job_id=uuid.uuid4().hex, source=store, from_name=from_model, from_project=from_project, step=step,
            not_after_step=not_after_step,
        )  # fmt: skip
        return self._note_step(model, _step(await self._run("pull", model, request, show)))

    async def _run(self, kind: JobKind, model: NamedModel, request: BaseModel, show: bool) -> JobStatus:
        client = await self._connect()
        return await client.run_job(kind, model.project, model.name, request, show=show)


class CheckpointMethod(Generic[P, R]):
    """Descriptor that makes a method of `backend.checkpoints` a method of the backend, e.g. `list_checkpoints`."""

    def __init__(self, method: Callable[Concatenate[Checkpoints, P], R]) -> None:
        self.method = method

    def __get__(self, backend: Any, owner: type) -> Callable[P, R]:
        if backend is None:
            return cast("Callable[P, R]", self.method)
        return cast("Callable[P, R]", getattr(backend.checkpoints, self.method.__name__))


def parse_target(text: str) -> HubTarget | S3Target:
    """Parse the address of a store or hub.

    Raises:
        ConfigError: `text` is neither `s3://bucket/prefix` nor `hf://owner/name`.
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
