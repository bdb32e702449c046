"""`Journal`: what a pipeline writes down before it goes on, so that a kill at any moment loses nothing.

started          a group has a place in the stream of scenarios
rollout_ended    one rollout of it is over; interrupted ones start again, with the same seeds
group_ended      the judge has scored it
step_begun       a training job is about to be submitted, under an id by which it runs only once
step_ended       it is trained, and in the model's log: its groups leave

journal = await Journal.open(folder, {"rollouts_per_group": 8, "seed": 0})
journal.resumed.groups                  # what an earlier run had under way
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from art.asynchronous.journal.kept import VERSION, JournalState
from art.asynchronous.journal.lines import Span, read_journal
from art.asynchronous.journal.records import (
    PendingStep,
    Resumed,
    dump_group,
    dump_outcome,
    dump_pending,
    dump_plan,
    load_kept,
    load_outcomes,
    load_pending,
)
from art.asynchronous.journal.writer import JournalWriter, MakeRecord
from art.asynchronous.plan import GroupPlan, RolloutOutcome
from art.errors import ConfigError, StorageError
from art.storage.lock import take_lock
from art.trajectory import TrajectoryGroup


class Journal:
    """The journal of one pipeline, in a folder that one process at a time uses. Use it in one event loop."""

    def __init__(self, writer: JournalWriter, resumed: Resumed, lock: int) -> None:
        self._writer = writer
        self._lock = lock
        self.resumed = resumed
        """What an earlier run left. It is not kept up to date."""

    @classmethod
    async def open(cls, folder: Path, identity: Mapping[str, Any]) -> Self:
        """Open the journal in `folder`, and begin it if there is none.

        Args:
            identity: what the groups under way depend on, as JSON data by names that the user knows.

        Raises:
            ConfigError: groups are under way that were begun with another identity.
            StorageError: the journal is damaged, another process uses it, or it is of another version of ART.
        """
        opening = asyncio.ensure_future(asyncio.to_thread(_open, folder, dict(identity)))
        try:
            return cls(*await asyncio.shield(opening))
        except asyncio.CancelledError:  # the thread goes on, and takes the lock
            await cls(*await opening).close()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Write what waits, and let another process open the journal."""
        await asyncio.to_thread(self._writer.close)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def started(
        self, plan: GroupPlan, *, replaces: int | None = None, chooser_state: Mapping[str, Any] | None = None
    ) -> None:
        """Record that a group has taken its place in the stream, before its rollouts begin.

        Args:
            replaces: number of a group that is given up, because this one runs its scenario again.
            chooser_state: state of what chooses scenarios, if this changed it.
        """
        more = _chosen(chooser_state) | ({} if replaces is None else {"replaces": replaces})
        await self._write(lambda: {"event": "started", "plan": dump_plan(plan), **more})

    async def rollout_ended(self, number: int, index: int, outcome: RolloutOutcome) -> None:
        """Record how rollout `index` of group `number` ended. Do not change the trajectory before this returns."""
        await self._write(lambda: {"event": "rollout_ended", "group": number, "index": index, **dump_outcome(outcome)})

    async def group_ended(
        self, number: int, groups: Sequence[TrajectoryGroup], *, chooser_state: Mapping[str, Any] | None = None
    ) -> None:
        """Record what `after_each` made of a finished group; nothing means that the group is dropped and leaves."""
        await self._write(
            lambda: {
                "event": "group_ended", "group": number,
                "groups": [dump_group(group) for group in groups], **_chosen(chooser_state),
            }
        )  # fmt: skip

    async def step_begun(self, pending: PendingStep) -> None:
        """Record a training step before it is submitted. A step that was begun before and not ended is replaced."""
        await self._write(lambda: {"event": "step_begun", "pending": dump_pending(pending)})

    async def step_ended(
        self, step: int, numbers: Sequence[int], *, chooser_state: Mapping[str, Any] | None = None
    ) -> None:
        """Record that groups were trained and are in the model's log; they leave the journal.

        Args:
            step: checkpoint that was made, or the unchanged one if there was nothing to learn.
        """
        await self._write(
            lambda: {"event": "step_ended", "step": step, "numbers": list(numbers), **_chosen(chooser_state)}
        )

    async def evaluation_begun(self, step: int) -> None:
        """Record that a checkpoint is to be evaluated. Call it before `step_ended`: a kill may come between."""
        await self._write(lambda: {"event": "evaluation_begun", "step": step})

    async def evaluation_rollout_ended(self, step: int, index: int, outcome: RolloutOutcome) -> None:
        """Record how rollout `index` of an evaluation ended."""
        await self._write(
            lambda: {"event": "rollout_ended", "evaluation": step, "index": index, **dump_outcome(outcome)}
        )

    async def evaluation_ended(self, step: int) -> None:
        """Record that an evaluation is in the model's log; its rollouts leave the journal."""
        await self._write(lambda: {"event": "evaluation_ended", "step": step})

    async def _write(self, make: MakeRecord) -> None:
        await self._writer.write(make)


def _chosen(state: Mapping[str, Any] | None) -> dict[str, Any]:
    return {} if state is None else {"chooser_state": dict(state)}


def _open(folder: Path, identity: dict[str, Any]) -> tuple[JournalWriter, Resumed, int]:
    path, lock = folder / "journal.jsonl", take_lock(folder / "lock")
    if lock is None:
        raise StorageError(
            f"another process runs a pipeline with the journal {path}. Let it end, or give each program a model `name` "
            "of its own"
        )
    try:
        state = JournalState(identity)
        if path.exists():
            for line in read_journal(path):
                _check_version(path, line.record)
                state.fold(line.record, line.span)
        resumed = _resume(path, state)
        _check_identity(path, resumed, state.head.identity, identity)
        state.head.identity = identity
        return JournalWriter(path, state), resumed, lock
    except BaseException:
        with suppress(OSError):
            os.close(lock)
        raise


def _check_version(path: Path, record: Mapping[str, Any]) -> None:
    if record["event"] == "opened" and record["version"] != VERSION:
        raise StorageError(
            f"{path} was written by another version of ART (form {record['version']}, expected {VERSION}). Finish the "
            f"pipeline with that version, or delete the folder {path.parent} to begin without what was under way"
        )


def _resume(path: Path, state: JournalState) -> Resumed:
    if not path.exists():
        return Resumed()
    head = state.head
    with path.open("rb") as file:
        return Resumed(
            next_number=head.next_number,
            next_position=head.next_position,
            chooser_state=head.chooser_state,
            groups=[load_kept(_records(file, spans)) for _, spans in sorted(state.groups.items())],
            pending=load_pending(head.pending),
            evaluations={
                step: load_outcomes(_records(file, spans)) for step, spans in sorted(state.evaluations.items())
            },
        )


def _records(file: BinaryIO, spans: Sequence[Span]) -> list[dict[str, Any]]:
    return [_record(file, span) for span in spans]


def _record(file: BinaryIO, span: Span) -> dict[str, Any]:
    file.seek(span.offset)
    record: dict[str, Any] = json.loads(b"{" + file.read(span.length))
    return record


def _check_identity(path: Path, resumed: Resumed, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if groups are under way that another pipeline began. Without any, a change is no harm."""
    changed = [
        f"{name} = {now.get(name)!r}, was {before.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if not changed or not (resumed.groups or resumed.pending or resumed.evaluations):
        return
    raise ConfigError(
        f"the pipeline continues one that was begun with other settings ({'; '.join(changed)}), and "
        f"{len(resumed.groups)} of its groups are not trained yet. Set them back to finish those groups, or delete the "
        f"folder {path.parent} to begin without them: checkpoints and log stay as they are"
    )
