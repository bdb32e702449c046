"""`backend.checkpoints`: list, promote, delete, download, fork, export, push and pull checkpoints."""

from __future__ import annotations

import os
import uuid
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

from pydantic import BaseModel

from art.client.client import REGISTER_TIMEOUT_S, ServerClient, download, model_path
from art.errors import ConfigError
from art.protocol.checkpoint_calls import (
    BEST_METRIC,
    CheckpointInfo,
    CheckpointList,
    ExportFormat,
    ExportRequest,
    ForkRequest,
    HubTarget,
    PullRequest,
    PushRequest,
    S3Target,
)
from art.protocol.training import DeleteCheckpointsRequest, DeleteCheckpointsResponse, JobKind

if TYPE_CHECKING:
    from art.protocol.promotions import Gate, Promotion, PromotionRecord

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
    """Lists, promotes, copies, exports and deletes checkpoints of models on a server. Every call is safe to repeat.

    Where a method takes the `step` of a checkpoint, the default is the newest. `show` shows a progress bar.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[ServerClient]], note_step: Callable[[NamedModel, int], int]
    ) -> None:
        """
        Args:
            note_step: called when a model moved to another step; returns that step.
        """
        self._connect, self._note_step = connect, note_step

    async def list(self, model: NamedModel, *, best_metric: str = BEST_METRIC) -> Infos:
        """List checkpoints by step, with metrics, size, and which is the newest, the best, promoted, and in use."""
        client, path = await self._connect(), model_path(model.project, model.name, "checkpoints")
        return (await client.typed(CheckpointList, "GET", path, params={"metric": best_metric})).checkpoints

    async def delete(
        self, model: NamedModel, *, keep_steps: Iterable[int] = (), keep_recent: int = 1, best_metric: str = BEST_METRIC
    ) -> Steps:
        """Delete all checkpoints but `keep_steps`, the `keep_recent` newest, the best, the promoted and those in use.

        Returns the steps that were deleted.
        """
        request = DeleteCheckpointsRequest(
            keep_steps=sorted(set(keep_steps)), keep_recent=keep_recent, best_metric=best_metric
        )
        client, path = await self._connect(), model_path(model.project, model.name, "checkpoints/delete")
        return (await client.typed(DeleteCheckpointsResponse, "POST", path, body=request)).deleted_steps

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

        The engine loads the checkpoint first, so that no request waits for it. Arguments and errors are those of
        `TrainableModel.promote`; `gate` says which held-out improvement over the promoted checkpoint is required.

        Returns:
            The step, the name to send as `model` in requests, the step that was promoted before, and what the gate
            has found.
        """
        from art.protocol.promotions import PromoteRequest, Promotion

        client, path = await self._connect(), model_path(model.project, model.name, "promotions")
        step = (await client.model_status(model.project, model.name)).step if step is None else step
        request = PromoteRequest(step=step, gate=gate, force=force, note=note)
        what = f"step {step} of {model.project}/{model.name} to load"
        return await client.typed(Promotion, "POST", path, body=request, read_timeout_s=REGISTER_TIMEOUT_S, what=what)

    async def promotions(self, model: NamedModel) -> Records:
        """List the decisions about the promoted checkpoint of a model, oldest first, refusals included."""
        from art.protocol.promotions import PromotionHistory

        client, path = await self._connect(), model_path(model.project, model.name, "promotions")
        return (await client.typed(PromotionHistory, "GET", path)).promotions

    async def download(
        self, model: NamedModel, path: str | Path, *, step: int | None = None, format: ExportFormat | None = None
    ) -> Path:
        """Download a checkpoint, or an export that was made of it, as the folder `path`.

        A broken download is resumed, every file is verified, and the folder appears only when it is complete.

        Args:
            format: format of the export; `None` downloads the checkpoint itself.

        Raises:
            NotFoundError: there is no such checkpoint or export.
            ConfigError: `path` exists with other content.
        """
        client = await self._connect()
        step = (await client.model_status(model.project, model.name)).step if step is None else step
        place = f"checkpoints/{step}" + (f"/exports/{format}" if format else "")
        await download(client, model_path(model.project, model.name, place), Path(path))
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
            not_after_step: take the newest checkpoint up to this step.

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
        return self._note_step(model, (await self._run("fork", model, request, show))[0])

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
                it; `merged` is a whole Hugging Face model.

        Returns:
            `path` on the server, `files`, `size_bytes`; for `vllm-lora` also `commands`, which are run in the folder.
        """
        request = ExportRequest(job_id=uuid.uuid4().hex, format=format, step=step)
        made, result = await self._run("export", model, request, show)
        if path is not None:
            await self.download(model, path, step=made, format=format)
        return result

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
        Returns the address of what was sent.
        """
        place = parse_target(target) if isinstance(target, str) else target
        request = PushRequest(job_id=uuid.uuid4().hex, target=place, step=step, format=format)
        return str((await self._run("push", model, request, show))[1]["url"])

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
        return self._note_step(model, (await self._run("pull", model, request, show))[0])

    async def _run(
        self, kind: JobKind, model: NamedModel, request: BaseModel, show: bool
    ) -> tuple[int, dict[str, Any]]:
        """Run a job on files, and return the step and the result."""
        status = await (await self._connect()).run_job(kind, model.project, model.name, request, show=show)
        assert status.step is not None, "the server gives the step of every job on files"
        return status.step, status.result


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
