"""`art promote`, and how `art checkpoints list` shows what is promoted."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from art.cli import checkpoints
from art.cli.arguments import ModelArgument
from art.errors import ConfigError
from art.protocol.checkpoint_calls import CheckpointInfo
from art.protocol.promotions import Gate, Promotion, PromotionRecord, Verdict
from art_recipes import promote_command

VERDICT = Verdict(
    passed=True, reason="the figures", require=0.02, source="reward", reference_step=2, num_scenarios=40, difference=0.3,
    low=0.2,
)  # fmt: skip


class Backend:
    """A backend of one model, whose steps 0 to 4 are on the server."""

    def __init__(self) -> None:
        self.checkpoints = self
        self.promoted: int | None = None
        self.gate: Gate | None = None
        self.records: list[PromotionRecord] = []
        self.deleted: list[int] = []

    async def delete_checkpoints(self, model: ModelArgument, keep_steps: list[int], **options: Any) -> list[int]:
        self.deleted = [step for step in range(4) if step != 2 and step not in keep_steps]
        return self.deleted

    async def promote(
        self, model: ModelArgument, step: int | None, *, gate: Gate | None, force: bool, note: str
    ) -> Promotion:
        self.gate = gate
        before, self.promoted = self.promoted, 4 if step is None else step
        return Promotion(
            step=self.promoted,
            inference_name=f"{model.project}/{model.name}@promoted",
            previous_step=before,
            verdict=None if gate is None else VERDICT.model_copy(update={"passed": not force}),
        )

    async def promotions(self, model: ModelArgument) -> list[PromotionRecord]:
        return self.records

    async def get_status(self, model: ModelArgument) -> SimpleNamespace:
        return SimpleNamespace(step=4, promoted_step=self.promoted)

    async def list_checkpoints(self, model: ModelArgument, best_metric: str) -> list[CheckpointInfo]:
        return [
            CheckpointInfo(
                step=step, created_at=0.0, size_bytes=2**20, full=False, newest=step == 4, best=step == 2,
                promoted=step == self.promoted,
            )
            for step in range(5)
        ]  # fmt: skip


async def run(backend: Any, *words: str) -> None:
    parser = argparse.ArgumentParser()
    if words[0] == "promote":
        promote_command.add_options(parser)
        await promote_command.promote(backend, parser.parse_args(words[1:]))
        return
    checkpoints.add_checkpoints_options(parser)
    args = parser.parse_args(words)
    await args.act(backend, args)


async def test_promote_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Backend()
    await run(backend, "list", "games/agent")
    assert "promoted" not in capsys.readouterr().out
    for model, said in [
        ("games/agent@2", "step 2 answers requests to games/agent@promoted\n"),
        ("games/agent", "step 4 answers requests to games/agent@promoted in place of step 2\n"),
        ("games/agent@4", "step 4 is already the one that answers requests to games/agent@promoted\n"),
    ]:
        await run(backend, "promote", model)
        assert capsys.readouterr().out == said
    await run(backend, "list", "games/agent")
    assert [line.split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines()[-3:]] == [
        "best", "-", "newest, promoted"
    ]  # fmt: skip


async def test_nothing_is_deleted_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Backend()
    await run(backend, "delete", "games/agent")
    listed, said = capsys.readouterr().out.splitlines()
    assert listed == "3 of 5 checkpoints of games/agent, 3.0 MiB: steps 0, 1, 3"
    assert said == "nothing was deleted: that cannot be undone, so add --yes to do it"
    assert backend.deleted == []


async def test_what_was_listed_is_deleted_when_the_user_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Backend()
    await run(backend, "delete", "games/agent", "--keep", "1", "--keep-recent", "2", "--yes")
    assert backend.deleted == [0]
    assert capsys.readouterr().out.endswith("deleted 0\n")
    await run(backend, "delete", "games/agent", "--keep-recent", "9", "--yes")
    assert capsys.readouterr().out == "there is nothing to delete: all 5 checkpoints are kept\n"


async def test_the_gate_of_a_promotion(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Backend()
    await run(backend, "promote", "games/agent@2", "--require", "0.02", "--split", "test", "--metric", "win")
    assert backend.gate == Gate(require=0.02, split="test", metric="win")
    assert capsys.readouterr().out == "step 2 answers requests to games/agent@promoted\npassed: the figures\n"
    await run(backend, "promote", "games/agent", "--require", "0", "--force")
    assert backend.promoted == 4
    assert capsys.readouterr().out.endswith("in place of step 2\nforced: the figures\n")
    await run(backend, "promote", "games/agent@4", "--require", "0", "--task", "tic_tac_toe")
    assert capsys.readouterr().out == "step 4 is already the one that answers requests to games/agent@promoted\n"
    assert backend.gate is not None
    assert backend.gate.measured is None, "nothing was rolled out"
    with pytest.raises(ConfigError, match="--require 0"):
        await run(backend, "promote", "games/agent", "--task", "tic_tac_toe")


async def test_the_list_ends_with_the_history_of_promotions(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Backend()
    backend.records = [
        PromotionRecord(number=1, at=0.0, step=2, previous_step=None, decision="ungated", key_id="server"),
        PromotionRecord(
            number=2, at=0.0, step=4, previous_step=2, decision="refused", key_id="3f9c", verdict=VERDICT, note="a try"
        ),
        PromotionRecord(number=3, at=0.0, step=4, previous_step=2, decision="forced", key_id="3f9c"),
        PromotionRecord(
            number=4,
            at=0.0,
            step=3,
            previous_step=4,
            decision="refused",
            key_id="3f9c",
            verdict=Verdict(passed=False, reason="", require=0, source="reward", reference_step=4, num_scenarios=0),
        ),
    ]
    await run(backend, "list", "games/agent")
    lines = [line.partition("  ")[2] for line in capsys.readouterr().out.splitlines()[-4:]]
    assert lines == [
        "step 2 promoted in place of nothing without a gate, by key server",
        "step 4 refused: step 2 stays, by key 3f9c; +0.300 against step 2, above +0.200 (40 scenarios, required +0.02); "
        "a try",
        "step 4 promoted in place of step 2 by force, by key 3f9c",
        "step 3 refused: step 4 stays, by key 3f9c; 0 scenarios were measured with both checkpoints, too few to compare",
    ]


def test_a_model_is_named_with_its_step() -> None:
    parser = argparse.ArgumentParser()
    promote_command.add_options(parser)
    args = parser.parse_args(["games/agent@40", "--require", "0.02"])
    assert (str(args.model), args.require, args.split) == ("games/agent@40", 0.02, None)
    for name in ("agent", "games/agent@", "games/agent@best", "a/b/c", "/agent"):
        with pytest.raises(SystemExit):
            parser.parse_args([name])
