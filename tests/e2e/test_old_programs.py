"""Programs written for ART 0.3 to 0.5 run as they are: only base model, sizes and network are this test's."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import art
from art.testing.judge import ScriptedJudge
from art.testing.scripted_server import Reply, ScriptedServer, completion
from art.testing.tiny_model import build_tiny_model
from art_recipes.scripted_generator import ScriptedGenerator
from tests.support.old_programs_play import ASKED, play
from tests.support.shared_server import on

FOLDER = Path(__file__).with_name("old_programs")


@dataclass(frozen=True)
class Program:
    name: str
    model: str
    """As `project/name`."""
    sizes: dict[str, Any] = field(default_factory=dict)
    steps: int = 1
    """Checkpoints that it makes."""
    splits: frozenset[str] = frozenset({"train"})
    """That have rewards in its history."""
    needs: str | None = None

    def __str__(self) -> str:
        return self.name


PROGRAMS = [
    Program("game_2048", "2048-multi-turn/agent-001", {"STEPS": 1, "ROLLOUTS": 16, "WINNING_VALUE": 8}),
    Program(
        "tic_tac_toe", "tic-tac-toe/llama-8b-007", {"STEPS": 1, "SIMULTANEOUS_GAMES": 12, "VAL_GAMES": 3},
        splits=frozenset({"train", "val"}),
    ),
    Program("tic_tac_toe_self_play", "tic-tac-toe-self-play/001", {"STEPS": 1, "GAMES_PER_STEP": 8}),
    Program(
        "prisoners_dilemma", "prisoners-dilemma/001", {"STEPS": 1, "ROUNDS": 3, "GAMES": 4},
        splits=frozenset({"train", "versus-self", "versus-base", "base-model"}),
    ),
    Program("rock_paper_scissors", "rock-paper-scissors/003", {"STEPS": 1, "ROLLOUTS": 12}),
    Program("yes_no_maybe_2025", "yes-no-maybe/001", {"STEPS": 2, "ROLLOUTS": 6}, steps=2),
    Program("yes_no_maybe_2026", "yes-no-maybe-2026/001", {"STEPS": 2, "ROLLOUTS": 8}, steps=2),
    Program(
        "temporal_clue", "temporal-clue/001", {"ROLLOUTS": 8, "VAL": 4, "PUZZLES": 8},
        splits=frozenset({"train", "val"}),
    ),
    Program("mail_search", "email_search/email-agent-008", {"STEPS": 1}, splits=frozenset({"train", "rollouts"})),
    Program(
        "mcp_rl", "mcp-agentic/mcp-agent", {"NUM_TRAIN": 2, "NUM_VAL": 1, "MAX_TURNS": 3},
        splits=frozenset({"train", "val"}),
    ),
    Program("auto_rl", "custom-task/auto-rl", {"NUM_INPUTS": 4}, steps=2),
    Program("langgraph_mail", "email-langgraph/langgraph-agent", {"STEPS": 1}, needs="langgraph"),
    Program("sft_distillation", "sft/distilled", steps=4, splits=frozenset()),
    Program("litellm_agent", "litellm/001", {"STEPS": 1}, needs="litellm"),
]  # fmt: skip


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"old_programs_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    conversations = play(load, random.Random(0))
    path = tmp_path_factory.mktemp("old") / "model"
    return build_tiny_model(path, conversations=conversations, warm_start_steps=60)


@pytest.fixture(scope="module")
def network() -> Iterator[dict[str, Any]]:
    """A judge, a generator and an open-ended model on this machine, under the names that programs give them."""

    def grade(trajectory: dict[str, Any]) -> float:
        return zlib.crc32(json.dumps(trajectory["messages"]).encode()) / 2**32

    def answer(body: dict[str, Any]) -> Reply:
        text = body["messages"][-1]["content"]
        rows = {"scenarios": [{"input": asked} for asked in ASKED]}
        return completion(body, {"content": json.dumps(rows) if "inputs" in text else f"select {text.split()[1]}"})

    with ExitStack() as stack:
        judge = stack.enter_context(ScriptedJudge(grade))
        generator = stack.enter_context(ScriptedGenerator(inputs=ASKED))
        model = stack.enter_context(ScriptedServer(answer))
        at = {"base_url": model.base_url, "api_key": "none"}
        yield {
            "JUDGE_PARAMS": {"base_url": judge.base_url, "api_key": "none"},
            "GENERATOR": {
                "generator_model": "openai/gpt-4.1-mini", "generator_base_url": generator.base_url,
                "generator_api_key": "x",
            },
            "WRITER": at, "TEACHER": at,
        }  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
@pytest.mark.asyncio(loop_scope="module")
async def test_it_runs_unchanged(
    program: Program, shared_backend: art.LocalBackend, base_model: Path, network: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if program.needs is not None:
        pytest.importorskip(program.needs)
    monkeypatch.chdir(tmp_path)
    module = load(program.name)
    for name, value in {"BASE_MODEL": str(base_model), "MAX_SEQ_LENGTH": None, **network, **program.sizes}.items():
        if hasattr(module, name):
            value = module.PUZZLES[:value] if name == "PUZZLES" else value
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "LocalBackend", on(shared_backend))
    project, _, name = program.model.partition("/")
    for _ in range(3):  # rewards that happen to be equal leave a step out; the same program run again goes on
        await module.main()
        while [task for task in asyncio.all_tasks() if task.get_name() == "local-backend-close"]:
            await asyncio.sleep(0.01)
        step = (await (await shared_backend.open()).model_status(project, name)).step
        if step == program.steps:
            break
    assert step == program.steps
    log = tmp_path / ".art" / project / "models" / name / "history.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert {key.partition("/")[0] for row in rows for key in row if key.endswith("/reward")} >= program.splits
    assert sum("loss/train" in row for row in rows) == program.steps
