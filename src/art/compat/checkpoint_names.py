"""The functions `backend._experimental_...` of older code, which call today's functions for checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from art.client.checkpoint_client import Checkpoints, NamedModel
from art.compat.refused import refuse
from art.errors import ConfigError, NotFoundError
from art.protocol.checkpoint_calls import S3Target

logger = logging.getLogger(__name__)


async def experimental_fork_checkpoint(
    checkpoints: Checkpoints,
    model: NamedModel,
    from_model: str,
    from_project: str | None = None,
    from_s3_bucket: str | None = None,
    not_after_step: int | None = None,
    verbose: bool = False,
    prefix: str | None = None,
) -> None:
    """Begin `model` with a checkpoint of another model, by `checkpoints.fork`, or by `pull` if a bucket is given."""
    if from_s3_bucket is None:
        await checkpoints.fork(
            model, from_model, from_project=from_project, not_after_step=not_after_step, show=verbose
        )
    else:
        await checkpoints.pull(
            model, S3Target(bucket=from_s3_bucket, prefix=prefix or ""), from_model=from_model,
            from_project=from_project, not_after_step=not_after_step, show=verbose,
        )  # fmt: skip


async def experimental_push_to_s3(
    checkpoints: Checkpoints,
    model: NamedModel,
    *,
    s3_bucket: str | None = None,
    prefix: str | None = None,
    verbose: bool = False,
    delete: bool = False,
) -> None:
    """Push the model's newest checkpoint to an S3 bucket.

    Raises:
        ConfigError: `delete` is set, or no bucket is given, neither here nor as BACKUP_BUCKET.
    """
    await checkpoints.push(model, _target(s3_bucket, prefix, delete), show=verbose)


async def experimental_pull_from_s3(
    checkpoints: Checkpoints,
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
    """Pull one checkpoint of the model from an S3 bucket: the given step, or the newest if there is one.

    Raises:
        ConfigError: `delete` is set, no bucket is given, or `exclude` names anything but logs and trajectories, which
            are never pulled.
    """
    source = _target(s3_bucket, prefix, delete)
    if not latest_only and only_step is None and step is None:
        logger.info("only the newest checkpoint is pulled, as with latest_only=True")
    if unknown := sorted(set(exclude or ()) - {"logs", "trajectories"}):
        raise ConfigError(f"only a checkpoint is pulled; `exclude` cannot leave out {', '.join(unknown)}")
    chosen = step if only_step in (None, "latest") else only_step
    try:
        await checkpoints.pull(model, source, step=chosen, show=verbose)  # type: ignore[arg-type]
    except NotFoundError as error:
        if chosen is not None:
            raise
        logger.warning("nothing is pulled, and the model begins as it is: %s", error)  # the first run of a script


async def experimental_pull_model_checkpoint(
    checkpoints: Checkpoints,
    model: NamedModel,
    *,
    step: int | Literal["latest"] | None = None,
    local_path: str | None = None,
    s3_bucket: str | None = None,
    prefix: str | None = None,
    verbose: bool = False,
) -> str:
    """Download a checkpoint, by default the newest, and return its folder. With a bucket, pull it from there first.

    Args:
        local_path: Folder to make; by default `checkpoints/<project>/<name>/<step>` in the working directory.

    Raises:
        NotFoundError: there is no such checkpoint.
    """
    chosen = None if step == "latest" else step
    if s3_bucket is not None:
        chosen = await checkpoints.pull(model, _target(s3_bucket, prefix, False), step=chosen, show=verbose)
    if chosen is None:
        chosen = max((checkpoint.step for checkpoint in await checkpoints.list(model)), default=0)
    folder = Path(local_path or Path("checkpoints", model.project, model.name, f"{chosen:04d}"))
    return str(await checkpoints.download(model, folder, step=chosen))


def find_experimental(name: str, checkpoints: Checkpoints) -> Callable[..., Any]:
    """Return the method `backend._experimental_...` of this name.

    Raises:
        AttributeError, ImportError: there is none; the message says what to use today.
    """
    methods = (
        experimental_fork_checkpoint, experimental_pull_from_s3, experimental_pull_model_checkpoint,
        experimental_push_to_s3,
    )  # fmt: skip
    method = next((method for method in methods if name == f"_{method.__name__}"), None)
    return refuse("backend", name) if method is None else partial(method, checkpoints)


def _target(bucket: str | None, prefix: str | None, delete: bool) -> S3Target:
    if delete:
        raise ConfigError("delete=True is not supported: nothing is ever deleted in the bucket or on the server")
    bucket = bucket or os.environ.get("BACKUP_BUCKET")
    if not bucket:
        raise ConfigError("no bucket: pass s3_bucket, or set BACKUP_BUCKET")
    return S3Target(bucket=bucket, prefix=prefix or "")
