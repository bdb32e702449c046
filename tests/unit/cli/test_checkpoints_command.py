"""`art checkpoints promote` and how the list shows what is promoted."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from art.cli import checkpoints
from art.protocol.checkpoint_calls import CheckpointInfo, Promotion


class Backend:
    """A backend of one model, whose steps 0 to 4 are on the server."""

    def __init__(self) -> None:
        self.checkpoints = self
        self.promoted: int | None = None

    async def promote(self, model: checkpoints.ModelName, step: int | None) -> Promotion:
        before, self.promoted = self.promoted, 4 if step is None else step
        return Promotion(
            step=self.promoted, inference_name=f"{model.project}/{model.name}@promoted", previous_step=before
        )

    async def list_checkpoints(self, model: checkpoints.ModelName, best_metric: str) -> list[CheckpointInfo]:
        return [
            CheckpointInfo(
                step=step, created_at=0.0, size_bytes=2**20, full=False, newest=step == 4, best=step == 2,
                promoted=step == self.promoted,
            )
            for step in range(5)
        ]  # fmt: skip


async def run(backend: Any, *words: str) -> None:
    parser = argparse.ArgumentParser()
    checkpoints.add_options(parser)
    args = parser.parse_args(words)
    await args.act(backend, args)


async def test_promote_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Backend()
    await run(backend, "list", "games/agent")
    assert "promoted" not in capsys.readouterr().out
    for options, said in [
        (["--step", "2"], "step 2 answers requests to games/agent@promoted\n"),
        ([], "step 4 answers requests to games/agent@promoted in place of step 2\n"),
        (["--step", "4"], "step 4 answers requests to games/agent@promoted\n"),
    ]:
        await run(backend, "promote", "games/agent", *options)
        assert capsys.readouterr().out == said
    await run(backend, "list", "games/agent")
    assert [line.split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines()[-3:]] == [
        "best", "-", "newest, promoted"
    ]  # fmt: skip
