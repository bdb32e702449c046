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
from art.tasks.search_emails import LIST_TOOLS, MAX_TURNS, NUM_MAILBOXES, TOOLS, SearchEmails, mailbox_seed
from art.tasks.search_emails_mailbox import MAX_RESULTS, TODAY, Filter, Mailbox, open_mailbox
from art.tasks.search_emails_questions import judge, read_question

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


BOX = open_mailbox(mailbox_seed("test", 0))


def asked(prompt: str) -> set[Any]:
    question = read_question(prompt, BOX)
    assert question.kind == "emails", prompt
    return set(question.emails)


def days_ago(email: Any) -> int:
    return int((TODAY - email.date).days)


def test_mailboxes_have_dates_and_unread_emails_of_last_week() -> None:
    for seed in range(200):
        emails = Mailbox(seed).emails
        assert [email.date for email in emails] == sorted(email.date for email in emails)
        assert all(1 <= days_ago(email) <= 21 and email.date.isoweekday() != 7 for email in emails)
        assert any(not email.is_read and days_ago(email) <= 6 for email in emails)
    assert 0.2 < sum(email.is_read for seed in range(50) for email in Mailbox(seed).emails) / 600 < 0.8


def test_prompts_about_many_emails_are_understood() -> None:
    unread = {email for email in BOX.emails if not email.is_read}
    last_week = {email for email in BOX.emails if days_ago(email) <= 7}
    assert unread & last_week
    assert last_week < set(BOX.emails)
    assert asked("Find all unread emails from last week") == unread & last_week
    assert asked("Which unread messages do I have?") == unread
    assert asked("List the emails from the past week that I have read.") == last_week - unread
    assert asked("all e-mails from the last 7 days") == asked("emails since 2026-03-09") == last_week
    assert asked("emails on 2026-03-10") == {email for email in BOX.emails if days_ago(email) == 6}
    assert asked("emails after 2026-03-02 before 2026-03-09") == {
        email for email in BOX.emails if 8 <= days_ago(email) <= 13
    }
    assert asked("emails from this month") == {email for email in BOX.emails if email.date.month == 3}
    assert asked("emails from last month") == {email for email in BOX.emails if email.date.month == 2}
    assert asked("emails from today") == set()
    email = BOX.emails[0]
    assert asked(f"all emails from {email.sender}") == {other for other in BOX.emails if other.sender == email.sender}
    assert asked(f'my emails about "{email.topic}"') == {other for other in BOX.emails if other.topic == email.topic}
    about = read_question(f'What is the {email.attribute} of "{email.topic}"?', BOX)
    assert (about.kind, about.emails) == ("value", (email,))
    for unclear in ("who?", "Show me my emails", "What is the weather in Bonn?"):
        assert (read_question(unclear, BOX).kind, read_question(unclear, BOX).emails) == ("value", ())


def test_answers_that_name_emails() -> None:
    question = read_question("Find all unread emails from last week", BOX)
    ids = [email.id for email in question.emails]
    other = next(email for email in BOX.emails if email not in question.emails)
    right = [
        f"There are {len(ids)}: " + ", ".join(f"{email.subject} of {email.date}" for email in question.emails),
        " and ".join(map(str, reversed(ids))),
    ]
    assert [question.judge(answer, BOX) for answer in right] == ["correct"] * 2
    wrong = [str([*ids, other.id]), str(ids[1:]), "none", f"{right[0]}, {other.subject}"]
    assert [question.judge(answer, BOX) for answer in wrong] == ["wrong"] * 4
    assert question.judge("I don't know.", BOX) == "no_idea"
    nothing = read_question("emails from today", BOX)
    assert [nothing.judge(answer, BOX) for answer in ("There are none.", str(ids[0]), "")] == [
        "correct", "wrong", "wrong",
    ]  # fmt: skip
    number = read_question("How many unread emails came last week?", BOX)
    assert (number.judge(f"{len(ids)}.", BOX), number.judge("0", BOX)) == ("correct", "wrong")


async def ask_prompt(prompt: str, answer: Callable[[list[Any]], Any]) -> tuple[Any, Policy]:
    policy = Policy(answer)
    return await TASK.rollout(policy, TASK.prompt_scenario(prompt)), policy  # type: ignore[arg-type]


async def test_unread_emails_of_last_week_have_a_right_answer() -> None:
    """The agent is told the date, searches by state and date, and names what it finds."""

    def searches(messages: list[Any]) -> tuple[str, Any]:
        if len(messages) == 2:
            assert messages[0]["content"].startswith("Today is Monday, 2026-03-16. Answer from the mailbox.")
            return "search_emails", {"keywords": [], "unread": True, "since": "2026-03-09", "until": "2026-03-15"}
        assert "unread" in messages[-1]["content"]
        return "return_final_answer", {
            "answer": ", ".join(line.split(" (")[0] for line in messages[-1]["content"].splitlines())
        }

    trajectory, policy = await ask_prompt("Find all unread emails from last week", searches)
    assert trajectory.metrics["correct"] == trajectory.metrics["found"] == 1.0
    assert trajectory.reward == pytest.approx(1.1)
    assert policy.requests[0]["tools"] == LIST_TOOLS
    trajectory, policy = await ask_prompt('What is the budget of "opal"?', lambda messages: "47")
    assert policy.requests[0]["tools"] == TOOLS
    trajectory, _ = await ask_prompt("unread emails", lambda messages: ("search_emails", {"since": "last week"}))
    assert trajectory.metrics["protocol_error"] == 1.0


def test_searches_by_state_sender_and_date() -> None:
    everything = BOX.emails[::-1]
    sender = everything[0].sender
    assert BOX.search([], Filter(unread=False)) == [email for email in everything if email.is_read]
    assert BOX.search([], Filter(sender=sender.upper())) == [email for email in everything if email.sender == sender]
    assert BOX.search(["is"], Filter(until=TODAY)) == everything, "more than a search for words alone gives"
    assert BOX.search([everything[0].topic], Filter(since=everything[0].date)) == [
        email for email in everything if email.topic == everything[0].topic and email.date >= everything[0].date
    ]
