"""States of jobs: only the ways of the table, whatever is tried; ids, lists, and what survives a restart."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import zlib
from dataclasses import replace
from pathlib import Path
from typing import get_args

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art.config import ModelSettings, TrainConfig, TrainSFTConfig
from art.credit.plan import StepPlan
from art.credit.samples import PlannedAnswer, PlannedSample
from art.credit.sft import SftPath
from art.errors import ConflictError, NotFoundError, OverloadedError, TrainingError
from art.protocol.calls import Copy, Export, Pull, Push
from art.protocol.checkpoint_calls import S3Target
from art.protocol.training import ENDED, NEXT_STATES, UNFINISHED, JobKind, JobState, JobStatus
from art.record.recorder import create_tables
from art.record.usage_book import Amounts
from art.runtime.jobs.job import (
    PAYLOADS,
    AdoptPayload,
    Done,
    FilePayload,
    Job,
    JobStore,
    Payload,
    SftPayload,
    TrainPayload,
)
from art.runtime.registry import RegisteredModel, Registry
from art.storage.checkpoints import CheckpointState
from art.storage.database import Database
from art.storage.layout import DataDir

STATES: tuple[JobState, ...] = get_args(JobState)


async def open_store(path: Path, max_per_project: int | None = None) -> tuple[Database, JobStore]:
    database = Database(path)
    await Registry(database).start()
    store = JobStore(database, max_per_project=max_per_project)
    await store.start()
    return database, store


def job(job_id: str, project: str = "p") -> Job:
    plan = StepPlan(exchange_ids=["ex_1", "ex_2"])
    payload = TrainPayload(config=TrainConfig(), plan=plan, references={"3": "/data/0003"})
    return Job(job_id, "train", project, "m", "l", payload)


def test_the_table_is_whole() -> None:
    assert set(NEXT_STATES) == set(STATES) == ENDED | set(UNFINISHED)
    assert {"succeeded", "failed", "cancelled"} == ENDED


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*STATES, "restart"]), max_size=12))
def test_no_job_takes_a_way_that_the_table_does_not_have(moves: list[str]) -> None:
    async def run() -> None:
        database, store = await open_store(Path(":memory:"))
        await store.add(job("job"), "1")
        state: JobState = "queued"
        for move in moves:
            if move == "restart":
                queued = [entry.job_id for entry in await store.recover()]
                after: JobState = {"running": "queued", "cancelling": "cancelled"}.get(state, state)  # type: ignore[assignment]
                state = after
                assert queued == (["job"] if state == "queued" else [])
            elif move in NEXT_STATES[state]:
                state = move  # type: ignore[assignment]
                assert (await store.move("job", state)).state == state
            else:
                with pytest.raises(ConflictError, match=f"is {state} and cannot become {move}"):
                    await store.move("job", move)  # type: ignore[arg-type]
            status = await store.status("job")
            assert status.state == state
            assert (status.ended_at is not None) == (state in ENDED)
        (payload,) = await store._database.run(lambda db: db.execute("SELECT payload FROM jobs").fetchone())
        assert (payload is None) == (state in ENDED), "samples are kept for as long as they may be needed"
        database.close()

    with pytest.MonkeyPatch.context() as patched:
        # One connection for all threads, as each would see a memory of its own.
        patched.setattr(Database, "read", lambda self, sql, values=(): self._connection.execute(sql, values).fetchall())
        asyncio.run(run())


async def test_ids_and_lists(tmp_path: Path) -> None:
    database, store = await open_store(tmp_path / "art.db")
    first = await store.add(job("job-1"), "1")
    assert await store.add(job("job-1"), "1") == first == await store.known("job-1", "1")
    assert await store.known("job-2", "1") is None
    with pytest.raises(ConflictError, match="other content"):
        await store.add(job("job-1"), "2")
    await store.add(job("job-2", project="q"), "1")
    await store.move("job-1", "running", from_step=3)
    assert (await store.load("job-1")).from_step == 3
    assert [found.job_id for found in await store.find()] == ["job-2", "job-1"]
    assert [found.job_id for found in await store.find(project="p", name="m")] == ["job-1"]
    assert await store.needed_checkpoints() == ["/data/0003"] * 2
    assert await database.run(store.needed_exchanges) == ["ex_1", "ex_2"] * 2
    await store.finish("job-1", Done({"step": 4}))
    assert [found.job_id for found in await store.find(unfinished=True)] == ["job-2"]
    assert await store.needed_checkpoints() == ["/data/0003"]
    assert await database.run(store.needed_exchanges) == ["ex_1", "ex_2"]
    for call in (store.status("none"), store.move("none", "running")):
        with pytest.raises(NotFoundError, match="no job 'none'"):
            await call
    database.close()


def payloads_in(root: Path) -> dict[JobKind, Payload]:
    """A payload of each kind with paths in the data directory `root`, and one outside of it."""
    model, s3 = DataDir(root).model("p", "m"), S3Target(bucket="b")
    source = model.checkpoint(3)
    export = Export(source=source, target=model.export(3, "peft"), base_model="/b", format="peft")
    return {
        "train": TrainPayload(config=TrainConfig(), plan=StepPlan(), references={3: source}),
        "export": FilePayload(call=export, step=3, result={"format": "peft"}),
        "push": FilePayload(call=Push(source=source, target=s3, place="p", message="m"), step=3, result={"kind": "s3"}),
        "fork": AdoptPayload(call=Copy(source=source, target=model.checkpoint(4)), step=3, origin="p/m"),
        "pull": AdoptPayload(call=Pull(source=s3, place="p", checkpoints=model.checkpoints), step=None, origin="x"),
    }


async def test_queued_jobs_find_their_files_in_a_data_directory_that_was_moved(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    database, store = await open_store(before / "art.db")
    for kind, payload in payloads_in(before).items():
        await store.add(replace(job(kind), kind=kind, payload=payload), "1")
        assert (await store.load(kind)).payload == payload
    database.close()
    before.rename(after)
    database, store = await open_store(after / "art.db")
    for kind, payload in payloads_in(after).items():
        assert (await store.load(kind)).payload == payload
    assert set(await store.needed_checkpoints()) == {str(after / "p/models/m/checkpoints/0003")}
    database.close()


async def test_what_a_job_has_used_is_stored_with_its_end(tmp_path: Path) -> None:
    database, store = await open_store(tmp_path / "art.db")
    await store.add(job("job-1"), "1")
    await store.move("job-1", "running", from_step=7)
    database.close()
    database, store = await open_store(tmp_path / "art.db")
    await store.recover()
    assert (await store.load("job-1")).from_step == 7
    await database.run(create_tables)
    await store.move("job-1", "running")
    await store.finish("job-1", Done({"step": 8}, used={("2026-01", "p", "m"): Amounts(steps=1)}))
    assert database.read("SELECT name, steps FROM usage") == [("m", 1)]
    database.close()


OLD_PAYLOADS = {
    "train": {"call": {"samples": [], "config": {}, "pairs": [], "references": {}}, "metrics": {}, "findings": []},
    "train_sft": {"call": {"samples": [], "config": {}}, "metrics": {}, "findings": [], "ledger": None},
    "fork": {"call": "copy", "params": {"source": "/a", "target": "/b"}, "step": 1, "origin": "p/a"},
    "export": {"call": "export", "params": {"source": "/a"}, "step": 1, "result": {}},
}
"""Payloads as versions up to 0.5 stored them."""


@pytest.mark.parametrize("kind", OLD_PAYLOADS)
async def test_a_job_of_an_older_version_says_that_it_cannot_be_read(tmp_path: Path, kind: JobKind) -> None:
    database, store = await open_store(tmp_path / "art.db")
    await store.add(replace(job("job-old"), kind=kind), "1")
    payload = zlib.compress(orjson.dumps(OLD_PAYLOADS[kind]), 1)
    await database.run(lambda db: db.execute("UPDATE jobs SET payload = ?", (payload,)))
    assert [entry.job_id for entry in await store.recover()] == ["job-old"]
    with pytest.raises(
        TrainingError, match=rf"job-old \({kind} of p/m\) was queued by another version.*under a new id"
    ):
        await store.load("job-old")
    database.close()


async def test_a_payload_comes_back_to_the_last_digit(tmp_path: Path) -> None:
    answers = [PlannedAnswer(exchange_id="ex_1", num_tokens=3, advantages=[0.1 + 0.2, -1 / 3, 1e-17])]
    sample = PlannedSample(
        sample_id="s", rollout_id="r", answers=answers, weight=1 / 7, share=None, policy_version=3,
        teacher_logprobs=[0.0, -0.1, -1 / 3],
    )  # fmt: skip
    plan = StepPlan(
        samples=[sample], ledger={"ledger/trained_tokens": 3}, metrics={"data/x": 1 / 3}, pairs=[("a", "b")],
        findings=["x"], exchange_ids=["ex_1"],
    )  # fmt: skip
    text = SftPath(sample_id="s", rollout_id="r", token_ids="AQAAAAIAAAA=", learnt=[(1, 2)])
    database, store = await open_store(tmp_path / "art.db")
    payloads: dict[JobKind, Payload] = {
        "train": TrainPayload(config=TrainConfig(learning_rate=1 / 3), plan=plan, references={"3": "/c"}),
        "train_sft": SftPayload(config=TrainSFTConfig(), paths=[text], plan=StepPlan(findings=["y"])),
    }
    for kind, payload in payloads.items():
        await store.add(replace(job(kind), kind=kind, payload=payload), "1")
        assert (await store.load(kind)).payload == payload
        assert type(payload) is PAYLOADS[kind]
    database.close()


async def test_a_project_has_a_limit_of_jobs(tmp_path: Path) -> None:
    database, store = await open_store(tmp_path / "art.db", max_per_project=2)
    first = await store.add(job("job-1"), "1")
    await store.add(job("job-2"), "1")
    with pytest.raises(OverloadedError, match="2 unfinished jobs"):
        await store.add(job("job-3"), "1")
    assert await store.add(job("job-1"), "1") == first  # sent again, it is no further job
    await store.add(job("job-4", project="q"), "1")
    await store.move("job-1", "running")
    await store.move("job-1", "failed")
    assert (await store.add(job("job-3"), "1")).state == "queued"
    database.close()


async def test_jobs_that_come_to_nothing_are_told_of() -> None:
    dropped: list[str] = []
    database = Database(Path(":memory:"))
    await Registry(database).start()
    store = JobStore(database, on_dropped=lambda db, job_id: dropped.append(job_id))
    await store.start()
    for name in ("done", "failed", "cancelled", "stopped"):
        await store.add(job(name), "1")
        if name != "cancelled":
            await store.move(name, "running")
    await store.finish("done", Done({}))
    await store.move("failed", "failed")
    await store.move("cancelled", "cancelled")
    await store.move("stopped", "cancelling")
    await store.recover()
    assert dropped == ["failed", "cancelled", "stopped"]
    database.close()


async def test_a_job_that_was_lost_is_restored_from_its_checkpoint(tmp_path: Path) -> None:
    database, store = await open_store(tmp_path / "art.db")
    model = RegisteredModel("p", "m", "base", ModelSettings(), 1)
    await Registry(database).save_model(model)
    written = CheckpointState(
        step=2, job_id="job-lost", base_model="base", lora=None, config={}, num_updates=2, rng="", metrics={"a": 0.5}
    )

    async def restore() -> bool:
        return await store.restore(model, written, tmp_path / "0002", "identity")

    await store.add(replace(job("job-queued"), name="m"), "1")
    assert not await restore()  # what runs may have written the checkpoint
    await store.move("job-queued", "cancelled")
    assert await restore()
    assert not await restore()
    status = await store.known("job-lost", "of any request")
    assert status is not None
    assert (status.state, status.step, status.trained, status.metrics) == ("succeeded", 2, True, {"a": 0.5})
    assert "made again from its checkpoint" in status.findings[0]
    (restored,) = await Registry(database).models()
    assert restored.step == 2
    assert Registry(database).identity(restored, 2) == "identity"
    database.close()


async def test_a_database_of_an_older_version_takes_new_jobs(tmp_path: Path) -> None:
    path = tmp_path / "art.db"
    with contextlib.closing(sqlite3.connect(path)) as older:
        older.executescript(
            """
            CREATE TABLE jobs (
                job_id TEXT PRIMARY KEY, kind TEXT NOT NULL, project TEXT NOT NULL, name TEXT NOT NULL,
                state TEXT NOT NULL, fingerprint INTEGER NOT NULL, payload BLOB, from_step INTEGER,
                status TEXT NOT NULL, created_at REAL NOT NULL
            );
            CREATE INDEX jobs_by_state ON jobs (state, created_at);
            """
        )
        status = JobStatus(job_id="old", kind="train", project="p", name="m", state="succeeded", created_at=1.0)
        older.execute(
            "INSERT INTO jobs VALUES ('old', 'train', 'p', 'm', 'succeeded', 17, NULL, 3, ?, 1.0)",
            (status.model_dump_json(),),
        )
        older.commit()
    database, store = await open_store(path)
    assert (await store.known("old", "sha256:00")) == status  # its checksum cannot be compared with a hash
    assert (await store.add(job("new"), "sha256:01")).state == "queued"
    assert (await store.load("new")).payload == job("new").payload
    database.close()
