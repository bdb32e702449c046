"""The practice of examples/: its play is what the real servers say, and its judge goes by what a transcript shows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from art_recipes.mcp import MCPClient, complete_task_tool
from art_recipes.scenarios.written import without_twins

EXAMPLES = Path(__file__).parents[4] / "examples" / "mcp_servers"


@pytest.fixture(params=["inventory", "calendar"])
def practice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import practice

    return practice.PRACTICES[request.param]()


async def test_play_is_what_the_real_server_says(practice: Any) -> None:
    rng = random.Random(0)
    jobs = rng.sample(practice.jobs, 6)
    calls = [job.call for job in jobs] + [rng.choice(job.slips) for job in jobs]
    async with MCPClient(practice.server) as client:
        local = practice.local
        offered = [*(tool.to_tool_schema() for tool in await client.list_tools()), complete_task_tool]
        assert json.dumps(local.tool_schemas) == json.dumps(offered), "the same text, the order of keys too"
        with local.states.fresh():  # both go through the same states, call by call
            for name, arguments in calls:
                result = await client.call_tool(name, arguments)
                said = f"Error: {result.text}" if result.is_error else result.text
                assert local.call(name, arguments) == said


def test_every_job_can_be_done_and_no_slip_does_it(practice: Any) -> None:
    for job in practice.jobs:
        assert job.call not in job.slips
        with practice.local.states.fresh():
            result = practice.local.call(*job.call)
        assert not result.startswith("Error"), job.task
        assert job.answer(result) not in ("", "failed"), job.task


def messages(task: str, *steps: tuple[str, dict[str, Any], str]) -> dict[str, Any]:
    """A trajectory as a judge reads it: calls with their results; the last is `complete_task` if it has that name."""
    said: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": task}]
    for i, (name, arguments, result) in enumerate(steps):
        call = {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        said.append({"role": "assistant", "content": None, "tool_calls": [call]})
        if name != "complete_task":
            said.append({"role": "tool", "tool_call_id": f"c{i}", "content": result})
    return {"context": said[:2], "messages": said[2:]}


def test_the_judge_goes_by_evidence(practice: Any) -> None:
    job = practice.jobs[0]
    with practice.local.states.fresh():
        result = practice.local.call(*job.call)
    answer = job.answer(result)
    right = (*job.call, result)

    def score(*steps: tuple[str, dict[str, Any], str]) -> float:
        return float(practice.grade(messages(job.task, *steps))[0])

    def done(summary: str) -> tuple[str, dict[str, Any], str]:
        return ("complete_task", {"summary": summary}, "")

    best = score(right, done(answer))
    assert best == 1.0
    assert score(right, done(f"It is {answer}.")) == best
    assert score(done(answer)) < 0.2, "an answer that nothing was asked for is a guess"
    assert score(right, done(f"1{answer}")) < best, "a part of a number is no answer"
    assert score((*job.call, "Error: out of order"), done(answer)) < 0.2, "the call has to succeed"
    assert score((*job.slips[0], result), done(answer)) < 0.2, "and to be the right one"
    assert score(right, right, done(answer)) == best
    assert score((*job.slips[0], result), right, done(answer)) < best, "detours cost"
    assert score(right) < score(right, done("?")) < best
    assert practice.grade(messages("Fly!"))[0] == 0.5


def test_the_writer_writes_as_many_as_it_is_asked_for(practice: Any) -> None:
    known = [job.task for job in practice.jobs[:5]]
    rows = practice.write("Write exactly 7 scenarios.\n\nThese exist already:\n" + "\n".join(f"- {t}" for t in known))
    assert len(rows) == 7
    assert not {row["task"] for row in rows} & set(known)


def test_there_are_scenarios_enough_that_differ(practice: Any) -> None:
    tasks = [row["task"] for row in practice.write("Write exactly 100 scenarios.")]
    assert len(without_twins(tasks)) >= practice.num_to_train + 12


def test_tiny_models_get_conversations_that_fit(practice: Any) -> None:
    play = practice.warm_start_conversations(random.Random(0), 40)
    assert all(conversation.messages[-1]["role"] == "assistant" for conversation in play)
    with_tools = [c for c in play + practice.warm_start_conversations(random.Random(1), 60) if c.tools]
    assert with_tools, "some show the tools"
    assert with_tools[0].tools == practice.local.tool_schemas
