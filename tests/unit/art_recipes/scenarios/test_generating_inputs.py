"""Inputs and task texts: what the generator is told, and what becomes of its answers, good and bad."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

import art
from art.client.openai_client import make_openai_client
from art.errors import BudgetError, GenerationError
from art.rewards import DEFAULT_RUBRIC, Budget, JudgeSettings
from art.testing.scripted_server import Reply, completion
from art_recipes.scenarios import Writer, generate_dataset, generate_inputs, write_task_text
from art_recipes.scripted_generator import ScriptedGenerator

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or importing litellm waits for a download

NOUNS = ["desk", "lamp", "shelf", "chair", "paper", "clock", "stool", "mirror", "carpet", "window", "kettle", "ladder"]
VERBS = ["buy", "paint", "mend", "sell", "find", "clean"]
INPUTS = [f"How do I {verb} a {noun}?" for noun in NOUNS for verb in VERBS]
SETTINGS = JudgeSettings(first_wait_s=0.01)


SORRY = "I'm sorry, but I can't help with that."


class FaultyGenerator(ScriptedGenerator):
    """A generator with further faults: answers that the client must ask again for, and some that it must accept."""

    known_faults: ClassVar[tuple[str, ...]] = (
        *ScriptedGenerator.known_faults, "refusal", "refused_in_words", "empty", "no_difficulty", "no_text", "too_few",
        "too_many", "fenced", "bare_list", "quoted",
    )  # fmt: skip

    def reply(self, body: dict[str, Any], fault: Any, rng: random.Random) -> Reply:
        if fault == "refusal":
            return completion(body, {"content": None, "refusal": SORRY})
        if fault in ScriptedGenerator.known_faults or fault is None:
            return super().reply(body, fault, rng)
        if factor := {"too_few": 1 / 3, "too_many": 2}.get(fault):
            question = body["messages"][1]
            question["content"] = re.sub(
                r"exactly (\d+)", lambda match: f"exactly {int(int(match[1]) * factor)}", question["content"]
            )
        content = self.write(body, None)
        rows = content["scenarios"]
        for row in rows:
            row |= {"difficulty": 0} if fault == "no_difficulty" else {"input": "  "} if fault == "no_text" else {}
            row["difficulty"] = str(row["difficulty"]) if fault == "quoted" else row["difficulty"]
        text = json.dumps(rows if fault == "bare_list" else content)
        fenced = f"Let me think {{about}} it.\n```json\n{text}\n```\nAnything else?"
        text = {"refused_in_words": SORRY, "empty": "", "fenced": fenced}.get(fault, text)
        return completion(body, {"content": text})


@pytest.fixture
def generator() -> Iterator[ScriptedGenerator]:
    with FaultyGenerator(inputs=INPUTS) as started:
        yield started


def writer(generator: ScriptedGenerator, settings: JudgeSettings = SETTINGS) -> Writer:
    return Writer("some/model", base_url=generator.base_url, settings=settings)


async def ask(generator: ScriptedGenerator, num: int = 6, **options: Any) -> list[str]:
    return [s.input for s in await generate_inputs("help  with\nthings", num, writer(generator), **options)]


async def test_what_the_generator_is_told(generator: ScriptedGenerator) -> None:
    found = await ask(generator, 3, instructions="Only furniture.", known=["How do I buy a desk?"])
    assert found == INPUTS[1:4]
    (request,) = generator.requests
    assert request["model"] == "some/model"
    assert request["max_completion_tokens"] == 8000
    schema = request["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]["scenarios"]["items"]["properties"]) == ["input", "difficulty"]
    told = request["messages"][1]["content"]
    assert "The job: help with things" in told
    assert "Only furniture." in told
    assert "- How do I buy a desk?" in told


async def test_a_writer_leaves_no_connection_open(
    generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def make(*args: Any, **options: Any) -> Any:
        opened.append(make_openai_client(*args, **options))
        return opened[-1]

    monkeypatch.setattr("art.client.openai_client.make_openai_client", make)
    await ask(generator, 40)
    assert len(opened) == 2
    assert all(client.is_closed() for client in opened)


async def test_many_are_asked_for_in_parts_and_all_differ(generator: ScriptedGenerator) -> None:
    found = await ask(generator, 60)
    assert len(set(found)) == 60
    assert len(generator.requests) == 3


@pytest.mark.parametrize(
    "fault", ["429", "500", "slow", "too_few", "too_many", "fenced", "bare_list", "quoted", "no_schema"]
)
async def test_what_passes_or_has_one_reading_is_no_failure(generator: ScriptedGenerator, fault: Any) -> None:
    generator.faults, generator.delay_s = [fault], 0.5
    settings = JudgeSettings(first_wait_s=0.01, timeout_s=0.2)
    found = await generate_inputs("help", 6, writer(generator, settings))
    assert len(found) == 6
    assert {scenario.difficulty for scenario in found} <= {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("refusal", "not a JSON object"),
        ("refused_in_words", "not a JSON object"),
        ("not_json", "not a JSON object"),
        ("cut_short", "not a JSON object"),
        ("empty", "not a JSON object"),
        ("duplicates", "existed already"),
        ("no_difficulty", "difficulty from 1 to 5"),
        ("no_text", "text `input`"),
    ],
)
async def test_what_is_of_no_use_is_asked_for_again(generator: ScriptedGenerator, fault: Any, told: str) -> None:
    generator.faults = [fault]
    assert len(await ask(generator, known=INPUTS[:1])) == 6
    assert told in generator.requests[1]["messages"][1]["content"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refusal", "wrote 0 of 6.*'I'm sorry, but I can't help with that.'|\"I'm sorry"),
        ("refused_in_words", "I'm sorry, but I can't"),
        ("not_json", "not a JSON object.*Here are some ideas"),
        ("empty", "The last was empty"),
        ("duplicates", "existed already"),
        ("401", "the generator .*some/model refused the request"),
        ("429", "the generator .*some/model failed 2 times"),
        ("slow", "no answer within"),
    ],
)
async def test_a_generator_that_goes_on_failing_is_an_error_that_says_why(
    generator: ScriptedGenerator, fault: Any, message: str
) -> None:
    generator.always, generator.delay_s = fault, 0.3
    settings = JudgeSettings(first_wait_s=0.01, timeout_s=0.1 if fault == "slow" else 5, max_attempts=2)
    with pytest.raises(GenerationError, match=message):
        await generate_inputs("help", 6, writer(generator, settings), known=INPUTS[:1])


async def test_a_generator_that_is_down() -> None:
    gone = Writer("m", base_url="http://127.0.0.1:9/v1", settings=JudgeSettings(first_wait_s=0.01, max_attempts=2))
    with pytest.raises(GenerationError, match=r"the generator http://127.0.0.1:9/v1/m failed 2 times"):
        await generate_inputs("help", 2, gone)


async def test_a_generator_without_further_ideas_says_how_far_it_came() -> None:
    with ScriptedGenerator(inputs=INPUTS[:4]) as generator, pytest.raises(GenerationError, match=r"wrote 4 of 6"):
        await ask(generator)


async def test_a_budget_ends_it(generator: ScriptedGenerator) -> None:
    ledger = Budget(max_usd=1)
    ledger.book("judge", usd=1)
    spent = JudgeSettings(budget=ledger)
    with pytest.raises(BudgetError):
        await generate_inputs("help", 1, writer(generator, spent))
    assert not generator.requests


async def test_what_it_costs_is_booked(generator: ScriptedGenerator) -> None:
    ledger = Budget()
    priced = JudgeSettings(prompt_usd_per_million=1, completion_usd_per_million=2, budget=ledger)
    await generate_inputs("help", 30, writer(generator, priced))
    booked = ledger.totals()["generator"]
    assert booked.prompt_tokens > 2 * 100
    assert booked.usd == pytest.approx((booked.prompt_tokens + 2 * booked.completion_tokens) / 1e6)


async def test_models_and_addresses_are_generators_too(generator: ScriptedGenerator) -> None:
    options: dict[str, Any] = {"inference_base_url": generator.base_url, "inference_api_key": "none"}
    model = art.Model(name="m", project="p", **options)
    assert len(await generate_inputs("help", 2, model)) == 2
    assert len(await generate_inputs("help", 2, Writer("a/b", base_url=generator.base_url))) == 2
    assert [request["model"] for request in generator.requests] == ["m", "a/b"]


@pytest.mark.parametrize(
    ("description", "num", "message"),
    [(" \n", 1, "description is empty"), ("help", 0, "num must be 1 or more, got 0")],
)
async def test_wrong_arguments(generator: ScriptedGenerator, description: str, num: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await generate_inputs(description, num, writer(generator))


# -- system prompt and rubric --


async def test_a_task_text(generator: ScriptedGenerator) -> None:
    generator.system_prompt = " Be helpful \ud800."
    generator.standards = ["- It is right.", " ", "It is short."]
    task = await write_task_text("help", writer(generator), instructions="In French.")
    assert task.system_prompt == "Be helpful ?."
    assert task.rubric.startswith(DEFAULT_RUBRIC)
    assert task.rubric.endswith("In this job:\n- It is right.\n- It is short.")
    told = generator.requests[0]["messages"]
    assert "The job: help" in told[1]["content"]
    assert "In French." in told[1]["content"]


@pytest.mark.parametrize("fault", ["refusal", "not_json", "cut_short"])
async def test_a_task_text_is_asked_for_again(generator: ScriptedGenerator, fault: Any) -> None:
    generator.faults = [fault]
    assert (await write_task_text("help", writer(generator))).system_prompt == "Do the job."
    assert "system_prompt` and a list" in generator.requests[1]["messages"][1]["content"]


@pytest.mark.parametrize(
    "answer",
    [
        {"system_prompt": "", "standards": ["a"]},
        {"system_prompt": "a", "standards": []},
        {"system_prompt": "a", "standards": [" "]},
        {"system_prompt": ["a"], "standards": ["a"]},
        {"system_prompt": "a"},
        [1],
    ],
)
async def test_half_a_task_text_is_none(
    generator: ScriptedGenerator, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FaultyGenerator, "write", lambda *_: answer)
    with pytest.raises(GenerationError, match=r"none of 3 answers of the generator could be used.*The last began"):
        await write_task_text("help", writer(generator))


async def test_a_data_set_from_a_sentence(generator: ScriptedGenerator) -> None:
    dataset = await generate_dataset("help", 40, writer(generator))
    assert [request["messages"][1]["content"].count("Write exactly") for request in generator.requests] == [0, 1, 1]
    assert dataset.task.system_prompt == "Do the job."
    assert [scenario.input for scenario in dataset.scenarios] == INPUTS[:40]
    assert sum(len(dataset.split(split)) for split in ("train", "val", "test")) == 40
    assert all(scenario.split is not None for scenario in dataset.scenarios)
