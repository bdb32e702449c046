"""A checkpoint folder that was swapped whole, with its manifest, is not taken for the one that was published."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from art.config import ModelSettings
from art.errors import CorruptCheckpointError
from art.protocol.checkpoint_calls import ExportRequest, ForkRequest
from art.runtime.jobs.file_jobs import plan_export, plan_fork
from art.runtime.models import Models, PolicyResolver
from art.runtime.registry import RegisteredModel, Registry, set_identity
from art.storage import checkpoints
from art.storage.database import Database
from art.storage.layout import DataDir

MODEL = RegisteredModel("p", "agent", "base/model", ModelSettings(), 1)


def write(path: Path, weights: bytes) -> str:
    files = dict.fromkeys((*checkpoints.ADAPTER_FILES, *checkpoints.COMMON_FILES), b"{}")
    return checkpoints.write_checkpoint(path, files | {checkpoints.ADAPTER_WEIGHTS: weights})


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "art.db")


@pytest.fixture
async def models(tmp_path: Path, database: Database) -> Models:
    """A model with two published steps."""
    registry = Registry(database)
    await registry.start()
    await registry.save_model(MODEL)
    models = Models(DataDir(tmp_path), SimpleNamespace(of=lambda model: None), None, registry)  # type: ignore[arg-type]
    models.by_key[MODEL.key] = MODEL
    for step in (0, 1):
        identity = write(models.checkpoint(MODEL, step), b"weights of step %d" % step)
        await database.run(lambda db, step=step, identity=identity: set_identity(db, "p", "agent", step, identity))
    return models


def swap(models: Models) -> Path:
    """Put the checkpoint of step 0 in the place of step 1."""
    target = models.checkpoint(MODEL, 1)
    shutil.rmtree(target)
    shutil.copytree(models.checkpoint(MODEL, 0), target)
    checkpoints.verify(target)  # it is whole, and agrees with its own manifest
    return target


async def test_the_published_checkpoint_is_found(models: Models) -> None:
    for step in (0, 1):
        assert models.published(MODEL, step) == models.checkpoint(MODEL, step)


async def test_another_one_is_refused_wherever_it_is_asked_for(models: Models) -> None:
    swap(models)
    with pytest.raises(CorruptCheckpointError, match="step 1 of p/agent is not the checkpoint that was published"):
        models.published(MODEL, 1)
    with pytest.raises(CorruptCheckpointError, match="was published"):
        await PolicyResolver(models).resolve("p/agent")
    export = ExportRequest(job_id="job-00000001", format="peft")
    with pytest.raises(CorruptCheckpointError, match="was published"):
        await asyncio.to_thread(plan_export, models, "p", "agent", export)
    fork = ForkRequest(job_id="job-00000002", from_name="agent")
    with pytest.raises(CorruptCheckpointError, match="was published"):
        await asyncio.to_thread(plan_fork, models, "p", "other", fork)
    assert models.published(MODEL, 0)


async def test_the_same_checkpoint_from_a_backup_is_the_published_one(models: Models, tmp_path: Path) -> None:
    shutil.copytree(models.checkpoint(MODEL, 1), tmp_path / "backup")
    target = swap(models)
    shutil.rmtree(target)
    shutil.copytree(tmp_path / "backup", target)
    assert models.published(MODEL, 1) == target


async def test_steps_of_servers_that_recorded_nothing_are_taken_as_they_are(models: Models, database: Database) -> None:
    await database.run(lambda db: db.execute("DELETE FROM published"))
    assert models.published(MODEL, 1) == swap(models)
