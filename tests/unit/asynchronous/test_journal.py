"""What a journal keeps over a kill, what it forgets, and how it stays small."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import art
from art.asynchronous.journal import Journal, PendingStep, Resumed
from art.client.submission import wire_groups
from art.errors import ConfigError, ConflictError, DiskFullError, StorageError
from art.storage.database import Database
from art.storage.jsonl import encode
from art.trajectory import PydanticException
from tests.support.journals import IDENTITY, group, plan, trajectory


async def reopen(folder: Path, journal: Journal | None = None) -> tuple[Journal, Resumed]:
    if journal is not None:
        await journal.close()
    journal = await Journal.open(folder, IDENTITY)
    return journal, journal.resumed


class Board(art.Trajectory):
    moves: int = 0


async def test_an_interrupted_pipeline_is_found_as_it_was(tmp_path: Path) -> None:
    journal, resumed = await reopen(tmp_path)
    assert resumed == Resumed()
    for number in range(4):
        await journal.started(plan(number, version=number // 2))
    error = PydanticException.from_exception(ValueError("no"))
    await journal.rollout_ended(1, 1, Board(moves=7, reward=0.25))
    await journal.rollout_ended(1, 0, error)
    for index in range(2):
        await journal.rollout_ended(2, index, trajectory(2, index))
    judged = group(2)
    await journal.group_ended(2, [judged, group(9)])
    await journal.group_ended(3, [])
    pending = PendingStep(step=5, job_id="job-000001", numbers=(0, 2), config={"learning_rate": 1e-5})
    await journal.step_begun(pending)
    await journal.evaluation_begun(4)
    await journal.evaluation_rollout_ended(4, 7, trajectory(0, 7))

    for again in range(2):  # the second opening reads the same
        journal, resumed = await reopen(tmp_path, journal)
        assert (resumed.next_number, resumed.next_position) == (4, 4), again
        assert [kept.plan for kept in resumed.groups] == [plan(0), plan(1), plan(2, version=1)]
        assert (resumed.groups[0].rollouts, resumed.groups[0].groups) == ({}, None)
        assert resumed.groups[1].rollouts[0] == error
        board = resumed.groups[1].rollouts[1]
        assert isinstance(board, Board)
        assert (board.moves, board.reward) == (7, 0.25)
        assert resumed.groups[2].rollouts == {}
        assert [encode(one.model_dump(mode="json")) for one in resumed.groups[2].groups or ()] == [
            encode(one.model_dump(mode="json")) for one in (judged, group(9))
        ]
        assert resumed.pending == pending
        assert {step: list(ended) for step, ended in resumed.evaluations.items()} == {4: [7]}
    await journal.step_ended(6, pending.numbers)
    await journal.evaluation_ended(4)
    await journal.rollout_ended(2, 0, trajectory(2, 0))  # late: its group has left
    journal, resumed = await reopen(tmp_path, journal)
    assert [kept.plan.number for kept in resumed.groups] == [1]
    assert (resumed.pending, resumed.evaluations, resumed.next_position) == (None, {}, 4)
    await journal.close()


async def test_rollouts_that_end_together_share_a_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_transactions, run = 0, Database.run

    async def counting(database: Database, work: Callable[[Any], Any]) -> Any:
        nonlocal num_transactions
        num_transactions += 1
        return await run(database, work)

    monkeypatch.setattr(Database, "run", counting)
    async with await Journal.open(tmp_path, IDENTITY) as journal:
        await journal.started(plan(0, num_rollouts=200))
        await asyncio.gather(*(journal.rollout_ended(0, index, trajectory(0, index)) for index in range(60)))
    assert num_transactions == 2
    journal, resumed = await reopen(tmp_path)
    assert sorted(resumed.groups[0].rollouts) == list(range(60))
    await journal.close()


async def test_the_file_stays_small_while_steps_are_trained(tmp_path: Path) -> None:
    async with await Journal.open(tmp_path, IDENTITY) as journal:
        for number in range(40):
            await journal.started(plan(number))
            await asyncio.gather(
                *(journal.rollout_ended(number, index, trajectory(number, index)) for index in range(2))
            )
            await journal.group_ended(number, [group(number)])
            if number >= 2:
                await journal.step_ended(number, [number - 2])
    written = sum(len(encode(group(number).model_dump(mode="json"))) for number in range(40))
    assert (tmp_path / "journal.db").stat().st_size < written
    journal, resumed = await reopen(tmp_path)
    assert [kept.plan.number for kept in resumed.groups] == [38, 39]
    assert [encode(kept.groups[0].model_dump(mode="json")) for kept in resumed.groups if kept.groups] == [
        encode(group(number).model_dump(mode="json")) for number in (38, 39)
    ]
    await journal.close()


async def test_other_settings_are_refused_while_groups_are_under_way(tmp_path: Path) -> None:
    async with await Journal.open(tmp_path, IDENTITY) as journal:
        await journal.started(plan(0))
    with pytest.raises(ConfigError, match=r"seed = 1, was 0.*1 of its groups .*delete the folder"):
        await Journal.open(tmp_path, IDENTITY | {"seed": 1})
    journal, resumed = await reopen(tmp_path)
    assert [kept.plan for kept in resumed.groups] == [plan(0)]
    await journal.step_ended(1, [0])
    await journal.close()
    async with await Journal.open(tmp_path, IDENTITY | {"seed": 1}) as journal:
        assert journal.resumed.next_position == 1


async def test_a_second_process_is_refused(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path, IDENTITY)
    with pytest.raises(StorageError, match="another process runs a pipeline"):
        await Journal.open(tmp_path, IDENTITY)
    await journal.close()
    with pytest.raises(ConflictError, match="is closed"):
        await journal.started(plan(0))
    await (await Journal.open(tmp_path, IDENTITY)).close()


async def test_what_json_does_not_have_fails_alone(tmp_path: Path) -> None:
    async with await Journal.open(tmp_path, IDENTITY) as journal:
        await journal.started(plan(0))
        strange = trajectory(0, 0)
        strange.metadata["object"] = object()  # type: ignore[assignment]
        good, bad = await asyncio.gather(
            journal.rollout_ended(0, 1, trajectory(0, 1)),
            journal.rollout_ended(0, 0, strange),
            return_exceptions=True,
        )
        assert good is None
        assert isinstance(bad, Exception)
    journal, resumed = await reopen(tmp_path)
    assert list(resumed.groups[0].rollouts) == [1]
    await journal.close()


async def test_a_full_disk_is_told_and_nothing_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = await Journal.open(tmp_path, IDENTITY)
    await journal.started(plan(0))

    async def full(database: Database, work: Any) -> Any:
        raise DiskFullError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "run", full)
        with pytest.raises(DiskFullError, match="disk is full"):
            await journal.rollout_ended(0, 0, trajectory(0, 0))
    await journal.rollout_ended(0, 1, trajectory(0, 1))
    journal, resumed = await reopen(tmp_path, journal)
    assert list(resumed.groups[0].rollouts) == [1]
    await journal.close()


async def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    async with await Journal.open(tmp_path, IDENTITY) as journal:
        await journal.started(plan(0))
    path = tmp_path / "journal.db"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(StorageError, match=r"journal.db is damaged .*delete the folder"):
        await Journal.open(tmp_path, IDENTITY)


async def test_a_journal_of_an_earlier_form_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("{}")
    with pytest.raises(StorageError, match="form 1, expected 2"):
        await Journal.open(tmp_path, IDENTITY)
    assert (tmp_path / "journal.jsonl").read_text() == "{}"


async def test_training_gets_the_same_request_from_what_was_kept(tmp_path: Path) -> None:
    rewarded = group(0)
    by_turn = art.TrajectoryGroup([trajectory(1, 0), trajectory(1, 1)])
    for one in by_turn:
        one.turn_rewards = [0.5]
        one.model_fields_set.discard("reward")
    async with await Journal.open(tmp_path, IDENTITY) as journal:
        for number, one in enumerate((rewarded, by_turn)):
            await journal.started(plan(number))
            await journal.group_ended(number, [one])
    journal, resumed = await reopen(tmp_path)
    await journal.close()
    kept = [one for group in resumed.groups for one in group.groups or ()]
    assert wire_groups(kept, with_texts=False) == wire_groups([rewarded, by_turn], with_texts=False)
    assert wire_groups(kept) == wire_groups([rewarded, by_turn])
    assert wire_groups(kept)[1].trajectories[0].reward is None


async def test_a_scenario_that_runs_again_is_never_out_of_the_journal(tmp_path: Path) -> None:
    async with await Journal.open(tmp_path, IDENTITY) as journal:
        await journal.started(plan(0))
        await journal.started(replace(plan(0), number=5), replaces=0)
    journal, resumed = await reopen(tmp_path)
    await journal.close()
    assert [(one.plan.number, one.plan.position) for one in resumed.groups] == [(5, 0)]
    assert resumed.next_number == 6
