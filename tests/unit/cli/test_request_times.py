"""What `art doctor` makes of the requests of its rollouts, and what it then advises."""

from __future__ import annotations

import asyncio
import io

import pytest
from openai.types.chat.chat_completion import Choice
from rich.console import Console

from art.asynchronous.simulation.machine import Machine
from art.asynchronous.simulation.workload import Turn
from art.cli.examining.pacing import check_pacing, pacing_table
from art.cli.examining.request_times import RequestTimes, RolloutTime
from art.protocol.live.events import RequestEnded
from art.task import TaskDefaults
from art.trajectory import Trajectory


def request(name: str, started_at: float, total_s: float, num_tokens: int = 10) -> RequestEnded:
    return RequestEnded(
        id=name, project="p", name="m", policy_version=0, rollout_id=None, outcome="stop", num_prompt_tokens=1,
        num_cached_tokens=0, num_tokens=num_tokens, started_at=started_at, total_s=total_s, queue_s=None,
        prefill_s=None, decode_s=None,
    )  # fmt: skip


def times(*requests: RequestEnded) -> RequestTimes:
    return RequestTimes({one.id: one for one in requests})


def rollout(*names: str, began_s: float = 0.0, ended_s: float = 10.0) -> RolloutTime:
    message = {"role": "assistant", "content": "an answer"}
    answers = [{"index": 0, "finish_reason": "stop", "message": message, "exchange_id": name} for name in names]
    choices = [Choice.model_validate(answer) for answer in answers]
    return RolloutTime(trajectory=Trajectory(messages_and_choices=choices), began_s=began_s, ended_s=ended_s)


def test_a_rollout_is_requests_and_pauses() -> None:
    found = times(request("a", 1.0, 2.0), request("b", 4.5, 0.5))
    assert found.turns(rollout("a", "b"), slowdown=0.0) == [
        Turn(engine_s=0.0, tool_s=1.0), Turn(engine_s=2.0, tool_s=1.5), Turn(engine_s=0.5, tool_s=5.0),
    ]  # fmt: skip
    assert found.turns(rollout("a", "lost"), slowdown=0.0) is None
    assert found.rollouts([rollout("a"), rollout("lost"), rollout()], slowdown=0.0) == [
        [Turn(engine_s=0.0, tool_s=1.0), Turn(engine_s=2.0, tool_s=7.0)]
    ]


def test_requests_of_two_agents_at_once_have_no_pause_between_them() -> None:
    found = times(request("a", 0.0, 4.0), request("b", 1.0, 1.0))
    turns = found.turns(rollout("a", "b", ended_s=4.0), slowdown=0.0)
    assert turns is not None
    assert [turn.tool_s for turn in turns] == [0.0, 0.0, 0.0]


def test_a_pause_in_which_this_process_worked_for_others_is_no_tool() -> None:
    """From 0 to 2 s it uses a core, then none; 3 turns (before the first request, two requests) share the 2 s."""
    found = times(request("a", 1.0, 2.0), request("b", 4.5, 0.5))
    found.cpu = [(0.0, 7.0), (2.0, 9.0), (10.0, 9.0)]
    assert found.used_s(-5.0, 1.0) == pytest.approx(1.0)
    (turns,) = found.rollouts([rollout("a", "b")], slowdown=0.0)
    assert [turn.tool_s for turn in turns] == pytest.approx([0.0, 1.5, 5.0])
    assert [turn.worker_s for turn in turns] == pytest.approx([2 / 3] * 3)


def test_the_load_is_a_mean_over_the_request() -> None:
    found = times(request("a", 0.0, 4.0), request("b", 3.0, 5.0), request("c", 0.0, 1.0))
    assert found.load(found.ended["a"]) == pytest.approx(1 + 1 / 4 + 1 / 4)
    assert found.load(found.ended["c"]) == pytest.approx(2)


@pytest.mark.parametrize("slowdown", [0.0, 0.1, 0.5])
def test_the_slowdown_is_that_of_the_engine(slowdown: float) -> None:
    """Requests of 10 tokens and 0.2 s alone, in separate bursts of 1 to 8 that begin and end together."""
    found = times(
        *(
            request(f"{size}/{i}", 100.0 * size, 0.2 * (1 + slowdown * (size - 1)))
            for size in range(1, 9)
            for i in range(size)
        )
    )
    assert found.slowdown() == pytest.approx(slowdown, abs=1e-6)
    turns = found.turns(rollout("8/0", began_s=800.0), slowdown)
    assert turns is not None
    assert turns[1].engine_s == pytest.approx(0.2)


def test_equal_load_tells_nothing_so_the_worst_is_assumed() -> None:
    assert times(*(request(str(i), 0.0, 2.0) for i in range(8))).slowdown() == 1.0
    assert RequestTimes().slowdown() == 1.0


@pytest.mark.asyncio
async def test_late_reports_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = times()
    task = asyncio.create_task(found.wait_for(["a"]))
    await asyncio.sleep(0.01)
    assert not task.done()
    found.ended["a"] = request("a", 0.0, 1.0)
    await asyncio.wait_for(task, 60)
    monkeypatch.setattr("art.cli.examining.request_times.LAST_REPORTS_S", 0.01)
    await asyncio.wait_for(found.wait_for(["never"]), 60)


def test_the_check_advises_by_the_figures() -> None:
    rollouts = [[Turn(engine_s=0.1, tool_s=30.0 if i == 0 else 1.0)] for i in range(16)]
    defaults = TaskDefaults(groups_per_step=4, rollouts_per_group=8)
    (check,) = check_pacing(rollouts, Machine(train_s=2.0), defaults)
    advised = int(check.measured["advised_max_staleness"])
    assert advised >= 2
    assert f"max_staleness={advised} is advised" in check.found
    assert "take turns" not in check.found
    table = pacing_table(check)
    assert table is not None
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    (row,) = (line for line in console.export_text().splitlines() if line.startswith("│             2 │"))
    assert f"{check.measured['staleness_2/speedup']:.2f} (" in row
    assert pacing_table(check.model_copy(update={"name": "forecast"})) is None
    assert check.measured["staleness_2/speedup"] > 1.5
    (alone,) = check_pacing([[Turn(engine_s=1.0)]] * 4, Machine(train_s=1.0, alternates=True, slowdown=1.0), defaults)
    assert alone.measured["advised_max_staleness"] == 0
    assert "engine and trainer take turns on this device; max_staleness=0 is advised, a larger" in alone.found
    assert check_pacing(rollouts[:3], Machine(train_s=2.0), defaults) == []
