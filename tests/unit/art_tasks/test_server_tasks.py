"""The tasks `inventory` and `calendar`: jobs against the real servers, the reward by state and answer, and splits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from art.errors import ConfigError
from art.task import get_task
from art.testing.scripted_model import ScriptedModel
from art.trajectory import Trajectory
from art_tasks.desks.server_task import OUTCOMES, Call, Case, ServerTask, field_of, said, says

pytest.importorskip("mcp")


@pytest.fixture(params=["inventory", "calendar"])
def task(request: pytest.FixtureRequest) -> ServerTask:
    made = get_task(request.param)
    assert isinstance(made, ServerTask)
    return made


async def done(task: ServerTask, scenario: Any, steps: list[Call | str]) -> Trajectory:
    """A rollout in which the agent makes these calls, or says these texts."""
    said_next = iter([{"content": step} if isinstance(step, str) else said(step) for step in steps])
    task.player = lambda scenario, *, rollout_index=0: lambda messages, tools: next(said_next)  # type: ignore[method-assign]
    return await ScriptedModel(task).play(scenario)


def case_with(task: ServerTask, *, changes: bool, slips: bool = True) -> tuple[Any, Case]:
    """A scenario of a job of one call that asks for a change, or for none."""
    small = type(task)(max_difficulty=3)
    for scenario in small.scenarios("val", seed=0, count=60):
        case = small._case(scenario.inputs["case"])
        if case.changes == changes and (case.job.slips or not slips):
            task.options = small.options
            return scenario, case
    raise AssertionError("no such job")


def summary(text: str) -> Call:
    return ("complete_task", {"summary": text})


async def test_players_solve_jobs_of_every_kind(task: ServerTask) -> None:
    scenarios = {s.inputs["task"].split()[0]: s for s in task.scenarios("test", seed=0, count=60)}
    for scenario in scenarios.values():
        trajectory = await ScriptedModel(task).play(scenario)
        assert trajectory.reward == 1.0, (scenario.inputs["task"], trajectory.metadata["why"])
        assert trajectory.metrics["solved"] == 1
        assert trajectory.metadata["outcome"] == "ok"


def check_cases(task: ServerTask, count: int) -> None:
    """Make the calls of drawn jobs on the real server, and compare what it says and keeps with what the case expects."""
    rng = random.Random(1)
    for _ in range(count):
        case = task.draw_case(rng, 5)
        with task.server.states.using(task.open_state(case.start)) as state:
            assert task.rows_of(state) == case.start
            results = [task.server.call(*call) for call in case.job.calls]
            assert not [result for result in results if result.startswith("Error")], case.job.task
            assert task.rows_of(state) == case.end, case.job.task
        assert case.answer in case.job.answer(results[-1]), case.job.task
        assert says(case.answer, case.answer)
        assert case.changes == (case.start != case.end) or case.job.call[0] == "set_price"
        assert case.job.call not in case.job.slips


def test_the_server_agrees_with_a_hundred_cases(task: ServerTask) -> None:
    check_cases(task, 100)


@pytest.mark.slow
def test_the_server_agrees_with_a_thousand_cases(task: ServerTask) -> None:
    check_cases(task, 1000)


async def test_reward_of_a_change(task: ServerTask) -> None:
    scenario, case = case_with(task, changes=True)
    call, answer = case.job.call, summary(case.answer)
    outcomes = {
        "solved": await done(task, scenario, [call, answer]),
        "misreported": await done(task, scenario, [call, summary("9999")]),
        "unsolved": await done(task, scenario, [answer]),
        "no_answer": await done(task, scenario, [call, "Done."]),
    }
    for outcome, trajectory in outcomes.items():
        assert trajectory.metrics[outcome] == 1, trajectory.metadata["why"]
        assert trajectory.reward == pytest.approx(OUTCOMES[outcome])
        assert sum(v for n, v in trajectory.metrics.items() if n.startswith("reward/")) == pytest.approx(
            trajectory.reward
        )
        assert trajectory.metadata["outcome"] == ("policy_fault" if outcome == "no_answer" else "ok")
    twice = await done(task, scenario, [("nonsense", {}), call, answer])
    assert twice.reward == pytest.approx(0.95), "a call that fails costs"
    assert min(OUTCOMES, key=lambda name: OUTCOMES[name]) == "no_answer"


async def test_a_wrong_change_is_worse_than_none(task: ServerTask) -> None:
    scenario, case = case_with(task, changes=True)
    harmful = []
    for slip in case.job.slips:
        with task.server.states.using(task.open_state(case.start)) as state:
            if not task.server.call(*slip).startswith("Error") and task.rows_of(state) not in (case.start, case.end):
                harmful.append(slip)
    trajectory = await done(task, scenario, [harmful[0], summary(case.answer)])
    assert trajectory.metrics["damaged"] == 1
    assert trajectory.reward < OUTCOMES["unsolved"]


async def test_reward_of_a_question(task: ServerTask) -> None:
    scenario, case = case_with(task, changes=False)
    solved = await done(task, scenario, [case.job.call, summary(f"It is {case.answer}.")])
    assert solved.reward == 1.0
    misread = await done(task, scenario, [case.job.call, summary("9999")])
    assert misread.reward == pytest.approx(0.1), "it looked at the right place"
    guessed = await done(task, scenario, [summary(case.answer)])
    assert guessed.metrics["solved"] == 0, "an answer that nothing was asked for is a guess"
    assert "nothing was looked up" in str(guessed.metadata["why"])


async def test_another_way_to_the_answer_counts_and_a_list_of_numbers_does_not() -> None:
    task = get_task("inventory")
    assert isinstance(task, ServerTask)
    scenario = next(s for s in task.scenarios("val", seed=0, count=200) if s.inputs["task"].startswith("How many of"))
    case = task._case(scenario.inputs["case"])
    listed: Call = ("list_products", {})
    solved = await done(task, scenario, [listed, summary(f"There are {case.answer} in stock.")])
    assert solved.reward == 1.0, solved.metadata["why"]
    product = next(row for row in case.start if row["sku"] in case.job.task)
    both = f"price {product['price'] + 0.5}, stock {product['stock']}"
    assert (await done(task, scenario, [listed, summary(both)])).metrics["unsolved"] == 1


async def test_a_list_of_all_categories_is_no_answer() -> None:
    task = get_task("inventory")
    assert isinstance(task, ServerTask)
    scenario = next(
        s for s in task.scenarios("val", seed=0, count=200) if s.inputs["task"].startswith("Which category")
    )
    case = task._case(scenario.inputs["case"])
    product = next(row for row in case.start if row["sku"] in case.job.task)
    told = await done(task, scenario, [case.job.call, summary(f"The {product['name']} is in {case.answer}.")])
    assert told.reward == 1.0, told.metadata["why"]
    every = ", ".join(sorted({row["category"] for row in case.start}))
    assert (await done(task, scenario, [case.job.call, summary(every)])).metrics["unsolved"] == 1


async def test_states_of_rollouts_are_apart(task: ServerTask) -> None:
    scenario, case = case_with(task, changes=True)
    first = await done(task, scenario, [case.job.call, summary(case.answer)])
    again = await done(task, scenario, [case.job.call, summary(case.answer)])
    assert (first.reward, again.reward) == (1.0, 1.0)


@pytest.mark.parametrize("answer", ["", "done", "<tool_call>{}</tool_call>"])
async def test_garbage_is_below_everything(task: ServerTask, answer: str) -> None:
    scenario, _ = case_with(task, changes=False)
    assert (await done(task, scenario, [answer])).reward == OUTCOMES["no_answer"] == min(OUTCOMES.values())


def test_no_job_is_in_two_splits(task: ServerTask) -> None:
    drawn = {
        split: {s.inputs["task"] for s in task.scenarios(split, seed=0, count=count)}
        for split, count in (("train", 2000), ("val", 400), ("test", 400))
    }
    assert not drawn["train"] & drawn["test"]
    assert not drawn["train"] & drawn["val"]
    assert not drawn["val"] & drawn["test"]
    assert len(drawn["test"]) > 30
    assert task.scenarios("test", seed=2, count=4) == task.scenarios("test", seed=2, count=4)


def test_play_calls_tools_and_ends_with_an_answer(task: ServerTask) -> None:
    small = type(task)(**task.tiny_options)
    play = small.warm_start_conversations(random.Random(0), 60)
    assert all(conversation.messages[-1]["role"] == "assistant" for conversation in play)
    with_tools = [conversation for conversation in play if conversation.tools]
    assert with_tools
    assert with_tools[0].tools == small.server.tool_schemas
    held_out = {s.inputs["task"] for s in small.scenarios("test", seed=0, count=200)}
    shown = {str(m["content"]) for conversation in play for m in conversation.messages if m["role"] == "user"}
    assert not shown & held_out


def test_difficulty_decides_the_number_of_calls(task: ServerTask) -> None:
    rng = random.Random(0)
    assert all(not task.draw_case(rng, 3).job.before for _ in range(40))
    assert any(task.draw_case(rng, 5).job.before for _ in range(40))
    with pytest.raises(ConfigError, match="max_difficulty"):
        type(task)(max_difficulty=6)


def test_without_the_sdk_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, task: ServerTask) -> None:
    from art_tasks.desks.server_task import LocalServer

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'agent-reinforcement-trainer\[mcp\]'"):
        _ = LocalServer("inventory_server").module


def test_answers_are_found_as_whole_words() -> None:
    assert says("The price is 90.", "90.0")
    assert says("90.00", "90.0")
    assert not says("1900", "90.0")
    assert not says("90.5", "90.0")
    assert not says("P-90", "90")
    assert says("2030-01-07 09:00", "2030-01-07 09:00")
    assert says("It begins at 09:00 on 2030-01-07.", "2030-01-07 09:00")
    assert not says("It begins at 09:30 on 2030-01-07.", "2030-01-07 09:00")
    assert not says("x" * 200 + " 90", "90")
    assert not says(None, "90")
    assert field_of("no JSON", "price") == "failed"
