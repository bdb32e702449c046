"""The files of calls on a node: what one actor there deletes is not missed by another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: `make test-cluster` does")

from art.storage.atomic import write_file
from art_cluster import worker_actor
from art_cluster.files import digest_of, pack
from art_cluster.worker_actor import WorkerActor


@pytest.fixture
def actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[WorkerActor]:
    """Two ranks of one trainer, and an engine, all on one node."""
    monkeypatch.setattr(worker_actor, "log_to_stderr", lambda: None)
    monkeypatch.setattr(worker_actor.tempfile, "gettempdir", lambda: str(tmp_path))
    return [WorkerActor("trainer"), WorkerActor("trainer"), WorkerActor("engine")]


async def store(actor: WorkerActor) -> Path:
    path, model = Path(actor.root(), "hash", "model"), Path(actor.root()).with_name("model")
    model.mkdir(exist_ok=True)
    (model / "config.json").write_bytes(b"{}")
    (model / "weights").write_bytes(b"1" * 1000)
    await actor.store(str(path), pack(model), digest_of(model))
    return path


def names_in(actor: WorkerActor) -> list[str]:
    return sorted(path.relative_to(actor.root()).as_posix() for path in Path(actor.root()).rglob("*"))


async def test_two_ranks_on_a_node_delete_the_same_files(actors: list[WorkerActor]) -> None:
    ranks = actors[:2]
    for _ in range(20):
        paths = [str(await store(rank)) for rank in ranks]
        write_file(single := Path(ranks[0].root(), "samples"), b"1")
        await asyncio.gather(*(rank.forget([paths[0], str(single)]) for rank in ranks))
    assert names_in(ranks[0]) == ["hash"]


async def test_an_engine_keeps_its_files_when_a_trainer_on_its_node_deletes_the_same(
    actors: list[WorkerActor],
) -> None:
    trainer, _, engine = actors
    kept, deleted = await store(engine), await store(trainer)
    await trainer.forget([str(deleted)])
    assert (await engine.load(str(kept), None))[0] == {"config.json": b"{}", "weights": b"1" * 1000}
    trainer.leave()
    assert (await engine.load(str(kept), None))[0] == {"config.json": b"{}", "weights": b"1" * 1000}
