"""A pipeline goes on, and trains each rollout once, wherever a power cut has ended the log of the server's database."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

import art
from art.errors import ArtError, TrajectoryMismatchError
from art.record.recorder import Recorder, new_exchange_id
from art.storage.database import Database
from benchmarks.power_cut import cut_copy, frame_ends
from tests.support.journals import answer
from tests.support.recorded_exchanges import USER, exchange
from tests.support.scripted_backend import TrainCall
from tests.unit.asynchronous.test_resuming import Script


class RecordingScript(Script):
    """A program whose server records an answer of each rollout in a database."""

    @classmethod
    async def open(cls, folder: Path, before: RecordingScript | None = None) -> RecordingScript:
        """Open the data directory `folder`. The steps that the server had trained before stay trained."""
        script = cls(folder, steps=4)
        if before is not None:
            script.backend.step, script.backend.jobs = before.backend.step, dict(before.backend.jobs)
            script.backend.calls = list(before.backend.calls)
        script.recorder = Recorder(Database(folder / "art.db"))
        script.findings = []
        script.backend.missing_exchanges = script.missing  # type: ignore[method-assign]
        script.backend.fail = script.refuse
        await script.recorder.start()
        return script

    async def rollout(self, model: Any, scenario: dict[str, str], rollout_index: int, seed: int) -> art.Trajectory:
        trajectory = await super().rollout(model, scenario, rollout_index, seed)
        recorded = exchange(new_exchange_id(), [1], [2], messages=[USER], text="yes", project="shop", name="agent")
        await self.recorder.append(recorded, conversation=b"c")
        trajectory.messages_and_choices = [{"role": "user", "content": "?"}, answer("yes", recorded.id)]
        return trajectory

    def refuse(self, call: TrainCall) -> ArtError | None:
        ids = {t.messages_and_choices[-1].exchange_id for group in call.groups for t in group}  # type: ignore[union-attr]
        is_known = len(self.recorder.find(ids)) == len(ids)
        return None if is_known else TrajectoryMismatchError("an exchange is not recorded on this server")

    async def missing(self, model: Any, exchange_ids: list[str]) -> list[str]:
        return self.recorder.find_missing(exchange_ids, "shop")

    async def _train(self) -> None:
        async for step in self.pipeline().train(self.steps):
            self.findings += step.findings


async def check(tmp_path: Path, num_cuts: int) -> None:
    whole = await RecordingScript.open(tmp_path / "whole")
    assert not await whole.run(lambda: len(whole.backend.calls) == 2 and whole.finished.total() >= 10)
    await asyncio.gather(*whole.backend.jobs.values())
    ends = frame_ends(tmp_path / "whole/art.db-wal")
    first = len(ends) // 2  # after the tables were made
    num_lost = 0
    for number in range(num_cuts):
        end = ends[first + round(number * (len(ends) - 1 - first) / (num_cuts - 1))]
        folder = tmp_path / f"cut-{number}"
        cut_copy(tmp_path / "whole", folder, end)
        script = await RecordingScript.open(folder, whole)
        kept = {row[0] for row in script.recorder.database.read("SELECT id FROM exchanges")}
        assert await script.run(), end
        seeds = [t.metadata["seed"] for call in script.backend.calls for group in call.groups for t in group]
        assert len(seeds) == len(set(seeds)) == 16, end
        assert script.rows() == [1, 2, 3, 4]
        assert kept <= {row[0] for row in script.recorder.database.read("SELECT id FROM exchanges")}
        num_lost += any("recorded answers in rollouts of an earlier run" in text for text in script.findings)
        script.recorder.database.close()
        shutil.rmtree(folder)
    whole.recorder.database.close()
    assert 0 < num_lost < num_cuts


async def test_a_pipeline_goes_on_after_a_power_cut(tmp_path: Path) -> None:
    await check(tmp_path, 4)


@pytest.mark.slow
async def test_a_pipeline_goes_on_wherever_the_log_was_cut(tmp_path: Path) -> None:
    await check(tmp_path, 50)
