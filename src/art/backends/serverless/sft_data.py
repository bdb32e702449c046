"""Data of supervised fine-tuning travels as an artifact in W&B, which the package `wandb` uploads."""

from __future__ import annotations

import importlib
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from art.backends.serverless.wire import ServiceModel
from art.errors import ConfigError, ProcessError

FILE_NAME = "train.jsonl"
UPLOAD_TIMEOUT_S = 600


def upload(lines: Sequence[str], model: ServiceModel, api_key: str) -> str:
    """Upload the lines as a new artifact of type `dataset`, and wait until W&B has it. Blocks meanwhile.

    Returns:
        The address of the artifact, `wandb-artifact:///entity/project/name:v0`.

    Raises:
        ConfigError: `wandb` is not installed.
        ProcessError: W&B did not take the data.
    """
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            "train_sft on ServerlessBackend uploads its data by the package wandb; install it with `pip install wandb`"
        ) from error
    name = f"{model.name}-sft-data-{uuid.uuid4().hex[:12]}"  # an artifact of the same name would get another version
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / FILE_NAME
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        try:
            run = wandb.init(
                entity=model.entity, project=model.project, name=model.name, id=model.run_id or model.name,
                resume="allow", reinit="create_new", dir=folder,
                settings=wandb.Settings(api_key=api_key, console="off", silent=True),
            )  # fmt: skip
            try:
                artifact = wandb.Artifact(name, type="dataset", metadata={"num_conversations": len(lines)})
                artifact.add_file(str(file), name=FILE_NAME)
                run.log_artifact(artifact).wait(timeout=UPLOAD_TIMEOUT_S)
            finally:
                run.finish()
        except Exception as error:  # wandb raises many kinds of errors, and none of them is ours
            raise ProcessError(f"W&B did not take the training data: {type(error).__name__}: {error}") from error
    return f"wandb-artifact:///{model.entity}/{model.project}/{name}:v0"
