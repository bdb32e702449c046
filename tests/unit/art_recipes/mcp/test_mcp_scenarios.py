"""Scenarios: the collection, and what becomes of a generator's answers, good and bad."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from art.errors import BudgetError, GenerationError
from art.rewards import Budget, JudgeSettings, judge_client
from art_recipes.mcp import GeneratedScenario, GeneratedScenarioCollection, MCPTool, generate_scenarios

TOOLS = [MCPTool("look", "Look at a thing"), {"name": "take", "description": "Take it", "parameters": {}}]
NOUNS = ["desk", "lamp", "shelf", "chair", "paper", "clock", "stool", "mirror", "carpet", "window"]
SETTINGS = JudgeSettings(first_wait_s=0.01)


def rows(*tasks: str) -> list[dict[str, Any]]:
    return [{"task": task, "difficulty": 1 + i % 5} for i, task in enumerate(tasks)]


def answer(*tasks: str) -> str:
    return json.dumps({"scenarios": rows(*tasks)})


def tasks_of(scenarios: GeneratedScenarioCollection) -> list[str]:
    return [scenario.task for scenario in scenarios]


async def generate(model: Any, num_scenarios: int, **options: Any) -> GeneratedScenarioCollection:
    options = {"tools": TOOLS, "settings": SETTINGS, "show_preview": False} | options
    return await generate_scenarios(
        num_scenarios=num_scenarios, generator_model="some/model", generator_base_url=model.base_url, **options
    )


async def test_what_the_generator_is_told(scripted: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    model = scripted([answer("look at the desk", "take a lamp")])
    found = await generate(model, 2, custom_instructions="About furniture.", show_preview=True)
    assert tasks_of(found) == ["look at the desk", "take a lamp"]
    (request,) = model.requests
    assert request["model"] == "some/model"
    assert request["max_completion_tokens"] == 8000
    assert request["response_format"]["json_schema"]["strict"] is True
    prompt = request["messages"][1]["content"]
    assert '"take"' in prompt
    assert "exactly 2 scenarios" in prompt
    assert "About furniture." in prompt
    printed = capsys.readouterr().out
    assert "1. look at the desk (difficulty 1)" in printed
    assert "difficulty 2:   1 #" in printed


async def test_duplicates_are_asked_for_again_until_the_count_is_right(scripted: Callable[..., Any]) -> None:
    first = answer("look at the desk", "Look at the desk!", "the desk: look at", "take a lamp")
    model = scripted(
        [first, answer("take a lamp", "find two shelves"), answer("count all chairs", "one too many here")]
    )
    found = await generate(model, 4)
    assert tasks_of(found) == ["look at the desk", "take a lamp", "find two shelves", "count all chairs"]
    again = model.requests[1]["messages"][1]["content"]
    assert "exactly 2 scenarios" in again
    assert "- take a lamp" in again


async def test_many_are_asked_for_in_parts(scripted: Callable[..., Any]) -> None:
    def write(body: dict[str, Any]) -> str:
        start = 25 * (len(model.requests) - 1)
        return answer(*(f"{NOUNS[i % 10]} {i} of room {1000 + i}" for i in range(start, start + 25)))

    model = scripted([write] * 3)
    assert len(await generate(model, 60)) == 60
    asked = [request["messages"][1]["content"] for request in model.requests]
    assert ["exactly 25" in asked[0], "exactly 25" in asked[1], "exactly 10" in asked[2]] == [True] * 3


@pytest.mark.parametrize(
    "text",
    [
        "Here they are:\n```json\n" + answer("look at the desk") + "\n```",
        json.dumps(rows("look at the desk")),
        json.dumps({"scenarios": [{"task": " look at the desk ", "difficulty": "1"}]}),
        json.dumps({"scenarios": [{"task": "look at the desk", "difficulty": 1.0}]}),
        json.dumps(
            {"scenarios": [{"task": "too hard", "difficulty": 9}, {"difficulty": 1}, *rows("look at the desk")]}
        ),
    ],
)
async def test_what_has_one_reading_is_repaired(scripted: Callable[..., Any], text: str) -> None:
    found = await generate(scripted([text]), 1)
    assert found.to_dicts() == rows("look at the desk")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("I would rather not.", "not a JSON object"),
        (answer("look at the desk")[:-8], "not a JSON object"),
        (
            '{"scenarios": [{"task": "a", "difficulty": 0}, {"task": "b", "difficulty": true}]}',
            "difficulty from 1 to 5",
        ),
        (
            '{"scenarios": [{"task": "a", "difficulty": "1e999"}, {"task": "", "difficulty": 1}]}',
            "difficulty from 1 to 5",
        ),
    ],
)
async def test_what_is_of_no_use_is_asked_for_again(scripted: Callable[..., Any], text: str, told: str) -> None:
    model = scripted([text, answer("look at the desk")])
    assert len(await generate(model, 1)) == 1
    assert told in model.requests[1]["messages"][1]["content"]


async def test_a_generator_that_has_no_more_ideas(scripted: Callable[..., Any]) -> None:
    model = scripted([answer("look at the desk")] * 4)
    with pytest.raises(GenerationError, match=r"wrote 1 of 5 scenarios; then 3 answers brought nothing new"):
        await generate(model, 5)
    assert len(model.requests) == 4


async def test_an_outage_passes_and_a_refusal_does_not(scripted: Callable[..., Any]) -> None:
    error = {"error": {"message": "scripted", "type": "x"}}
    assert len(await generate(scripted([(503, error), (429, error), answer("look at the desk")]), 1)) == 1


async def test_a_refusal_ends_it(scripted: Callable[..., Any]) -> None:
    model = scripted([(401, {"error": {"message": "wrong key", "type": "x"}})])
    with pytest.raises(GenerationError, match="wrong key"):
        await generate(model, 1)


async def test_a_budget_ends_it(scripted: Callable[..., Any]) -> None:
    with pytest.raises(BudgetError):
        await generate(scripted([]), 1, settings=JudgeSettings(budget=Budget(max_usd=0)))


async def test_tools_of_a_real_server(scripted: Callable[..., Any], calendar: list[str]) -> None:
    model = scripted([answer("look at the desk")])
    await generate(model, 1, tools=None, server_url=calendar)
    prompt = model.requests[0]["messages"][1]["content"]
    assert "find_free_times" in prompt
    assert "calendar://people" in prompt


async def test_without_an_address_it_goes_through_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, Any] = {}

    async def complete(**arguments: Any) -> Any:
        sent.update(arguments)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=answer("look at the desk")))])

    async def load() -> Any:
        return SimpleNamespace(acompletion=complete)

    monkeypatch.setattr(judge_client, "_has_litellm", lambda: True)
    monkeypatch.setattr(judge_client, "_load_litellm", load)
    options = {"generator_model": "anthropic/m", "generator_base_url": None, "generator_api_key": "k"}
    await generate_scenarios(TOOLS, num_scenarios=1, show_preview=False, **options)
    assert (sent["model"], sent["api_key"], sent["max_completion_tokens"]) == ("anthropic/m", "k", 8000)
    assert "base_url" not in sent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either `tools` or `server_url`"),
        ({"tools": TOOLS, "server_url": "http://a"}, "either `tools` or `server_url`"),
        ({"tools": TOOLS}, "OPENROUTER_API_KEY"),
        ({"tools": [], "generator_api_key": "k"}, "no tools"),
        ({"tools": TOOLS, "num_scenarios": 0}, "1 or more"),
    ],
)
async def test_wrong_arguments(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match=message):
        await generate_scenarios(**options)


# -- the collection --


def collection(count: int = 200) -> GeneratedScenarioCollection:
    return GeneratedScenarioCollection(GeneratedScenario(f"task number {i}", 1 + i % 5) for i in range(count))


def test_a_collection_is_a_list_and_survives_json() -> None:
    all_of_it = collection(10)
    assert GeneratedScenarioCollection.from_json(all_of_it.to_json(indent=1)).to_dicts() == all_of_it.to_dicts()
    assert all_of_it[0].task == "task number 0"
    assert len(all_of_it[2:4]) == 2
    assert all_of_it[9] in all_of_it
    train, rest = all_of_it.split(7)
    assert [len(train), len(rest)] == [7, 3]
    assert [*train, *rest] == list(all_of_it)
    assert sorted(tasks_of(all_of_it.shuffle(seed=1))) == sorted(tasks_of(all_of_it))
    assert tasks_of(all_of_it.shuffle(seed=1)) != tasks_of(all_of_it)
    assert len(all_of_it.filter_by_difficulty(4)) == 4
    assert all_of_it.get_difficulty_distribution() == dict.fromkeys(range(1, 6), 2)
    assert all_of_it.get_summary()["avg_difficulty"] == 3
    assert all_of_it[0].preview(8) == "task ..."
    with pytest.raises(ValueError, match="train_size"):
        all_of_it.split(11)


def test_the_split_by_hash_depends_on_the_task_only() -> None:
    train, val = collection().split_by_hash(val_fraction=0.25)
    assert len(train) + len(val) == 200
    assert 30 < len(val) < 70
    assert not set(tasks_of(train)) & set(tasks_of(val))
    reworded = GeneratedScenarioCollection(GeneratedScenario(f"Task, NUMBER: {i}!", 1) for i in reversed(range(100)))
    again = {task.split()[-1].rstrip("!") for task in tasks_of(reworded.split_by_hash(0.25)[1])}
    assert again == {task.split()[-1] for task in tasks_of(val) if int(task.split()[-1]) < 100}


@pytest.mark.parametrize("difficulty", [0, 6, "3", 2.5, True, None])
def test_a_difficulty_is_from_1_to_5(difficulty: Any) -> None:
    with pytest.raises(ValueError, match="from 1 to 5"):
        GeneratedScenario("a", difficulty)
