"""`compare_models` with servers that fail: what failed is counted and named, and never becomes a score of 0."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from art.recipes import CompareConfig, Endpoint, compare_models
from art.task import Task
from art.testing.scripted_server import ScriptedServer, completion, failure
from art_recipes.comparing.model_comparison import ModelComparison, ModelRow, remarks
from tests.support.parity import Parity, Server
from tests.support.scripted_chat import ScriptedChat, answer

GAMES = 12


async def compare(tmp_path: Path, *servers: Server, task: Task | None = None, **settings: Any) -> ModelComparison:
    """Compare the models `m0`, `m1`, ... of these servers."""
    running = [ScriptedServer(server).__enter__() for server in servers]
    try:
        models = [Endpoint(label=f"m{i}", url=one.base_url, model=f"m{i}") for i, one in enumerate(running)]
        chosen = {"held_out": GAMES, "attempts": 1, "data_dir": tmp_path, **settings}
        return await compare_models(task or Parity(), models, config=CompareConfig(**chosen))
    finally:
        for one in running:
            one.__exit__()


def numbers(row: ModelRow) -> tuple[int, int, int]:
    return row.num_rollouts, row.num_failed_rollouts, row.num_rollouts_left


async def test_a_model_that_fails_half_of_its_calls_is_scored_on_what_worked(tmp_path: Path) -> None:
    half = Server(lambda number, _: failure(500, "boom") if number % 4 == 3 else None)
    comparison = await compare(tmp_path, Server(), half, concurrency=1)
    row = comparison.row("m1")
    assert row.calls is not None
    # A rollout has two requests. With every fourth request failing, every second rollout fails in its second turn.
    assert numbers(row) == (6, 6, 0)
    assert (row.calls.num_answered, row.calls.faults) == (18, {"500": 6})
    assert row.headline is not None
    assert (row.headline.mean, row.headline.num) == (1.0, 6)
    assert row.difference is not None
    assert (row.difference.mean, row.difference.num, comparison.num_common) == (0.0, 6, 6)
    said = "\n".join(remarks(comparison))
    assert "6 rollouts failed and have no score" in said
    assert "boom" in said


async def test_a_repeated_request_that_works_is_a_failed_call_and_no_failed_rollout(tmp_path: Path) -> None:
    flaky = Server(lambda number, _: failure(500, "boom") if number == 3 else None)
    row = (await compare(tmp_path, flaky, attempts=2, concurrency=1)).row("m0")
    assert row.calls is not None
    assert (numbers(row), row.calls.num_failed, row.problem) == ((GAMES, 0, 0), 1, None)


async def test_a_model_that_fails_all_calls_has_no_score_and_is_given_up(tmp_path: Path) -> None:
    down = Server(lambda *_: failure(401, "wrong key"))
    comparison = await compare(tmp_path, down, Server(), concurrency=2, held_out=30)
    row = comparison.row("m0")
    assert row.state == "gave_up"
    assert row.headline is None
    assert row.reward is None
    assert row.num_rollouts == 0
    assert 8 <= row.num_failed_rollouts <= 9
    assert row.num_rollouts_left == 30 - row.num_failed_rollouts
    assert row.problem is not None
    assert "wrong key" in row.problem
    other = comparison.row("m1")
    assert (other.state, other.num_rollouts, other.difference) == ("done", 30, None)  # the reference has no score
    assert comparison.is_complete


async def test_a_model_that_stops_working_is_given_up_later(tmp_path: Path) -> None:
    dies = Server(lambda number, _: failure(500, "gone") if number >= 10 else None)
    row = (await compare(tmp_path, dies, concurrency=1, held_out=60)).row("m0")
    assert (row.state, numbers(row)) == ("gave_up", (5, 24, 31))


async def test_garbage_text_is_the_models_own_fault_and_scored_by_the_task(tmp_path: Path) -> None:
    garbage = Server(lambda _, body: completion(body, {"content": "potato"}))
    row = (await compare(tmp_path, Server(), garbage)).row("m1")
    assert row.headline is not None
    assert row.reward is not None
    assert (row.headline.mean, row.reward.mean, row.policy_fault_rate) == (0.0, -1.0, 1.0)
    assert numbers(row) == (GAMES, 0, 0)


@pytest.mark.parametrize(
    "body", [{"hello": 1}, {"choices": []}, {"choices": [{"message": None}]}, {"choices": "none"}, [1, 2]]
)
async def test_an_answer_that_is_no_completion_is_a_failed_call(tmp_path: Path, body: Any) -> None:
    comparison = await compare(tmp_path, Server(lambda *_: (200, body)), held_out=2)
    row = comparison.row("m0")
    assert row.calls is not None
    assert (row.headline, row.calls.faults) == (None, {"unreadable": 2})
    assert row.problem is not None
    assert "without a chat completion" in row.problem


async def test_html_in_place_of_json_is_a_failed_call(tmp_path: Path) -> None:
    page = answer(200, b"<html>Sign in</html>")
    async with ScriptedChat(then=page).running() as chat:
        config = CompareConfig(held_out=2, attempts=1, data_dir=tmp_path)
        comparison = await compare_models(Parity(), [f"m={chat.base_url}"], config=config)
    row = comparison.row("m")
    assert row.calls is not None
    assert row.calls.faults == {"unreadable": 2}
    assert row.problem is not None
    assert "Sign in" in row.problem


async def test_cut_answers_are_counted(tmp_path: Path) -> None:
    def cut(number: int, body: dict[str, Any]) -> Any:
        status, content = completion(body, {"content": "even"})
        content["choices"][0]["finish_reason"] = "length"
        return status, content

    comparison = await compare(tmp_path, Server(cut), concurrency=1, held_out=2)
    row = comparison.row("m0")
    assert row.calls is not None
    assert (row.calls.num_answered, row.calls.num_cut) == (4, 4)
    said = "\n".join(remarks(comparison))
    assert "100% of the answers were cut" in said


async def test_a_model_that_hangs_fails_in_time(tmp_path: Path) -> None:
    is_over = threading.Event()

    def hang(*_: Any) -> None:
        is_over.wait()

    try:
        row = (await compare(tmp_path, Server(hang), held_out=3, call_timeout=0.2)).row("m0")
    finally:
        is_over.set()
    assert row.calls is not None
    assert (row.calls.faults, row.headline) == ({"timeout": 3}, None)
    assert row.problem is not None
    assert "no answer within 0.2 s" in row.problem


async def test_a_rollout_that_takes_too_long_fails_with_its_request(tmp_path: Path) -> None:
    is_over = threading.Event()

    def slow(number: int, _: dict[str, Any]) -> None:
        if number >= 1:
            is_over.wait()

    try:
        row = (await compare(tmp_path, Server(slow), held_out=1, rollout_timeout=1)).row("m0")
    finally:
        is_over.set()
    assert row.calls is not None
    assert (numbers(row), row.calls.faults) == ((0, 1, 0), {"cut_off": 1})
    assert row.problem is not None
    assert "longer than 1 s" in row.problem


async def test_a_limited_rate_is_waited_for_and_is_no_failure(tmp_path: Path) -> None:
    limited = Server(lambda number, _: failure(429, "slow down") if number in (0, 3) else None)
    comparison = await compare(tmp_path, limited, held_out=2, concurrency=1, attempts=2)
    row = comparison.row("m0")
    assert row.calls is not None
    assert (numbers(row), row.calls.num_rate_limited, row.calls.faults) == ((2, 0, 0), 2, {})
    assert "limited the rate 2 times" in "\n".join(remarks(comparison))


async def test_a_rate_that_stays_limited_is_no_score(tmp_path: Path) -> None:
    limited = Server(lambda *_: failure(429, "slow down"))
    row = (await compare(tmp_path, limited, held_out=1, attempts=2)).row("m0")
    assert row.calls is not None
    assert (row.headline, row.calls.num_rate_limited, len(limited.bodies)) == (None, 2, 2)
    assert row.problem is not None
    assert "slow down" in row.problem


async def test_a_server_without_tools_says_so(tmp_path: Path) -> None:
    class WithTools(Parity):
        with_tools = True

    plain = Server(lambda _, body: failure(400, "tools are not supported by this model") if body["tools"] else None)
    row = (await compare(tmp_path, plain, task=WithTools(), held_out=2)).row("m0")
    assert row.headline is None
    assert row.problem is not None
    assert "tools are not supported" in row.problem


async def test_nobody_at_the_address_is_a_failed_connection(tmp_path: Path) -> None:
    config = CompareConfig(held_out=2, attempts=1, data_dir=tmp_path)
    row = (await compare_models(Parity(), ["m=http://127.0.0.1:9/v1"], config=config)).row("m")
    assert row.calls is not None
    assert (row.headline, row.calls.faults) == (None, {"connection": 2})


async def test_a_reward_that_is_no_number_is_no_score(tmp_path: Path) -> None:
    class Broken(Parity):
        async def rollout(self, model: Any, scenario: Any, **how: Any) -> Any:
            trajectory = await super().rollout(model, scenario, **how)
            trajectory.reward = float("nan")
            return trajectory

    row = (await compare(tmp_path, Server(), task=Broken(), held_out=2)).row("m0")
    assert row.headline is None
    assert row.problem is not None
    assert "reward nan" in row.problem


async def test_an_error_that_repeats_the_key_is_kept_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVICE_PASS", "sk-verysecret-0123456789")
    echo = Server(lambda *_: failure(401, "Incorrect key sk-verysecret-0123456789"))
    with ScriptedServer(echo) as server:
        chosen = CompareConfig(held_out=1, attempts=1, data_dir=tmp_path)
        comparison = await compare_models(Parity(), [f"m={server.base_url}#DEVICE_PASS"], config=chosen)
    assert "verysecret" not in comparison.model_dump_json()
    folder = tmp_path / "comparisons" / "parity-test-seed0" / "rollouts"
    (name,) = os.listdir(folder)
    kept = (folder / name).read_text()
    assert "Incorrect key" in kept
    assert "verysecret" not in kept
