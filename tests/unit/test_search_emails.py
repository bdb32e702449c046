"""The task `search_emails`: its mailbox, its tools, what is scored how, and a policy that knows the way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

from art.task import get_task
from art.tasks.search_emails import MAX_TURNS, NUM_MAILBOXES, TOOLS, SearchEmails, judge, mailbox_seed
from art.tasks.search_emails_mailbox import MAX_RESULTS, Mailbox, open_mailbox

TASK = SearchEmails()


class Policy:
    """A model whose answers are a function of the conversation: `(name, arguments)` of a call, or text."""

    def __init__(self, answer: Callable[[list[Any]], tuple[str, Any] | str]) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=self)

    def openai_client(self) -> Any:
        return self

    def get_inference_name(self, step: int | None = None) -> str:
        return f"p/m@{step}"

    async def create(self, **request: Any) -> Any:
        self.requests.append(request)
        said = self.answer(request["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": said if isinstance(said, str) else None}
        if not isinstance(said, str):
            arguments = said[1] if isinstance(said[1], str) else json.dumps(said[1])
            function = {"name": said[0], "arguments": arguments}
            message["tool_calls"] = [{"id": f"c{len(self.requests)}", "type": "function", "function": function}]
        return SimpleNamespace(
            choices=[Choice.model_validate({"index": 0, "finish_reason": "stop", "message": message})]
        )


def knows_the_way(messages: list[Any]) -> tuple[str, Any]:
    question, last = messages[1]["content"], messages[-1]["content"]
    attribute, topic = question.split()[3], question.split('"')[1]
    match len(messages):
        case 2:
            return "search_emails", {"keywords": [topic]}
        case 4:
            line = next(line for line in last.splitlines() if line.startswith(f"{topic}: {attribute} "))
            return "read_email", {"message_id": int(line.split("(")[1].split(",")[0])}
    return "return_final_answer", {"answer": last.rstrip(".").split()[-1]}


async def roll(answer: Callable[[list[Any]], Any], index: int = 0) -> Any:
    policy = Policy(answer)
    scenario = TASK.scenarios("val", seed=1, count=index + 1)[index]
    return await TASK.rollout(policy, scenario, step=3), policy  # type: ignore[arg-type]


async def test_a_policy_that_knows_the_way_is_right() -> None:
    for index in range(8):
        trajectory, policy = await roll(knows_the_way, index)
        assert trajectory.reward == pytest.approx(1.2)
        wanted = {"correct": 1.0, "found": 1.0, "read": 1.0, "num_turns": 3, "protocol_error": 0.0}
        assert trajectory.metrics | wanted == trajectory.metrics
        assert [request["model"] for request in policy.requests] == ["p/m@3"] * 3
        assert len({request["seed"] for request in policy.requests}) == 3
        assert "correct, reward 1.2" in TASK.render_trajectory(trajectory)


@pytest.mark.parametrize(
    ("answer", "outcome", "reward"),
    [
        (lambda messages: "47", "protocol_error", -0.5),
        (lambda messages: ("open_window", {}), "protocol_error", -0.5),
        (lambda messages: ("search_emails", {"keywords": "opal"}), "protocol_error", -0.5),
        (lambda messages: ("read_email", '{"message_id": 1'), "protocol_error", -0.5),
        (lambda messages: ("return_final_answer", {"answer": "I don't know."}), "no_idea", 0.0),
        (lambda messages: ("return_final_answer", {"answer": "0"}), "wrong", -0.25),
        (lambda messages: ("search_emails", {"keywords": []}), "no_answer", -0.25),
        (lambda messages: ("search_emails", {"keywords": [messages[1]["content"].split('"')[1]]}), "no_answer", -0.15),
    ],
)
async def test_what_other_policies_earn(answer: Any, outcome: str, reward: float) -> None:
    trajectory, policy = await roll(answer)
    assert trajectory.reward == pytest.approx(reward)
    assert trajectory.metrics[outcome] == 1.0
    assert len(policy.requests) == (MAX_TURNS if outcome == "no_answer" else 1)
    assert bool(trajectory.logs) == (outcome == "protocol_error")


def test_the_answer_may_be_a_sentence_but_not_a_list_of_guesses() -> None:
    assert judge("The budget is 47.", "47") == "correct"
    assert judge("47 or 48", "47") == judge("147", "47") == judge("", "47") == "wrong"


def test_mailboxes_are_the_same_everywhere_and_differ() -> None:
    assert Mailbox(7).emails == Mailbox(7).emails != Mailbox(8).emails
    assert len({email.id for email in Mailbox(7).emails}) == len(Mailbox(7).emails)
    assert len({(email.topic, email.attribute) for email in Mailbox(7).emails}) == len(Mailbox(7).emails)


def test_search_takes_all_words_and_no_syntax() -> None:
    mailbox = open_mailbox(7)
    email = mailbox.emails[3]
    assert mailbox.search([email.topic, email.attribute]) == [email]
    both = mailbox.search([email.topic])
    assert [found.topic for found in both] == [email.topic] * len(both)
    assert [found.id for found in both] == sorted((found.id for found in both), reverse=True)
    assert len(mailbox.search(["is"])) == MAX_RESULTS
    for words in (["nowhere"], [], [" "], ['"'], ["opal OR ruby*"], ["NEAR("], ["\x00"]):
        assert mailbox.search(words) == []


def test_scenarios_of_splits_share_no_mailbox() -> None:
    boxes = {
        split: {mailbox_seed(split, i) for i in range(NUM_MAILBOXES)}  # type: ignore[arg-type]
        for split in ("train", "val", "test")
    }
    assert len(set.union(*boxes.values())) == 3 * NUM_MAILBOXES
    scenarios = TASK.scenarios("test", seed=1, count=20)
    assert scenarios == TASK.scenarios("test", seed=1, count=20)
    assert {scenario.inputs["mailbox"] for scenario in scenarios} <= boxes["test"]


def calls_of(messages: list[Any]) -> list[dict[str, Any]]:
    return [call["function"] for message in messages for call in message.get("tool_calls") or ()]


def test_synthetic_play_shows_the_protocol_but_is_often_wrong() -> None:
    conversations = TASK.warm_start_conversations(random.Random(0), 400)
    outcomes = []
    for play in conversations[1::2]:
        messages: list[Any] = list(play.messages)
        calls = calls_of(messages)
        assert [call["name"] for call in calls][-2:] == ["read_email", "return_final_answer"]
        assert play.tools in (TOOLS, None)
        attribute, topic = messages[1]["content"].split()[3], messages[1]["content"].split('"')[1]
        read = next(message["content"] for message in reversed(messages) if message["role"] == "tool")
        outcomes.append(read.startswith(f"{topic}: the {attribute} is "))
        assert json.loads(calls[-1]["arguments"])["answer"] == read.rstrip(".").split()[-1]
    assert 0.3 < sum(outcomes) / len(outcomes) < 0.8


def test_drills_copy_from_the_message_before() -> None:
    for drill in TASK.warm_start_conversations(random.Random(0), 100)[::2]:
        messages: list[Any] = list(drill.messages)
        for before, answer in zip(messages[::2], messages[1::2], strict=True):
            copied = [answer["content"]] if answer["content"] else []
            for call in calls_of([answer]):
                (value,) = json.loads(call["arguments"]).values()
                copied.append(str(value[0] if isinstance(value, list) else value))
            assert copied
            assert all(text in before["content"] for text in copied)


def test_it_is_found_by_its_name() -> None:
    assert isinstance(get_task("search_emails"), SearchEmails)
