"""The task `mail_search`: its tools, what is scored how, its splits, its players, and prompts of a user's own."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from art.errors import ConfigError
from art.task import Player, Scenario, Split, get_task, list_tasks
from art.testing.scripted_model import ScriptedModel
from art_tasks.mail_search.mail_search_task import OUTCOMES, SCORES, MailSearch, SearchEmails, call_message, judge
from art_tasks.mail_search.mailbox import TOOLS, Desk, Email, Mailbox, Search
from art_tasks.mail_search.questions import MailQuestion
from art_tasks.mail_search.world import TOPICS, generate, generate_short

SMALL = {"size": 200}
SHORT = {"mailbox": "short", "max_turns": 6}
Act = Callable[[list[Any]], dict[str, Any]]


def acting(act: Act, **options: Any) -> MailSearch:
    """The task, with a function of the conversation as its player."""

    class Acting(MailSearch):
        def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
            return lambda messages, tools: act(list(messages))

    return Acting(**options)


async def roll(act: Act, options: dict[str, Any] = SHORT, prompt: str | None = None) -> Any:
    task = acting(act, **options)
    scenario = task.scenarios("val", seed=1, count=1)[0] if prompt is None else task.prompt_scenario(prompt)
    return await ScriptedModel(task).play(scenario)


def says(*calls: tuple[str, dict[str, Any]]) -> Act:
    return lambda messages: call_message(*calls)


@pytest.mark.parametrize("options", [SMALL, SHORT])
async def test_the_scripted_player_earns_the_best_reward(options: dict[str, Any]) -> None:
    task = MailSearch(**options)
    model = ScriptedModel(task)
    for scenario in task.scenarios("val", seed=1, count=10):
        trajectory = await model.play(scenario)
        question = MailQuestion(**scenario.inputs["question"])
        num_turns = 2 if question.is_unanswerable else 3
        found_and_read = 0 if question.is_unanswerable else 0.15
        turns = 0.1 * (1 - num_turns / task.options.max_turns)
        assert trajectory.reward == pytest.approx(1.3 + found_and_read + turns)
        assert trajectory.reward == pytest.approx(
            sum(v for k, v in trajectory.metrics.items() if k.startswith("reward/"))
        )
        facts = {"correct": 1.0, "cited": 1.0, "num_turns": num_turns, "protocol_error": 0.0}
        assert trajectory.metrics | facts == trajectory.metrics
        assert (trajectory.metadata["outcome"], trajectory.metadata["scenario_id"]) == ("ok", scenario.id)
        assert " is right." in task.render_trajectory(trajectory)


READ_FIRST: Act = lambda messages: call_message(  # noqa: E731
    ("read_email", {"message_id": messages[-1]["content"].split("(")[1].split(",")[0]})
)


def finds_and_gives_up(messages: list[Any]) -> dict[str, Any]:
    topic, attribute = messages[1]["content"].split('"')[1], messages[1]["content"].split()[3]
    if len(messages) == 2:
        return call_message(("search_emails", {"keywords": [topic, attribute]}))
    if len(messages) == 4:
        return READ_FIRST(messages)
    return call_message(("return_final_answer", {"answer": "I don't know.", "sources": []}))


@pytest.mark.parametrize(
    ("act", "outcome", "reward", "why"),
    [
        (lambda messages: {"content": "47"}, "protocol_error", -1.5, "an answer without a tool call"),
        (says(("open_window", {})), "protocol_error", -1.5, "there is no tool open_window"),
        (says(("search_emails", {"keywords": "opal"})), "protocol_error", -1.5, "keywords: Input should be a valid list"),
        (says(("search_emails", {"sent_after": "May"})), "protocol_error", -1.5, "expected a day as YYYY-MM-DD"),
        (says(("search_emails", {"max_results": 99})), "protocol_error", -1.5, "less than or equal to 20"),
        (says(("search_emails", {"sender": "Ann"})), "protocol_error", -1.5, "Extra inputs"),
        (says(("read_email", {})), "protocol_error", -1.5, "no tool read_email with the arguments {}"),
        (says(("return_final_answer", {"answer": "1", "sources": "12"})), "protocol_error", -1.5, "must be a list"),
        (says(("return_final_answer", {"answer": "I don't know", "sources": []})), "no_idea", 0.0, "without a search"),
        (says(("return_final_answer", {"answer": "0", "sources": []})), "wrong", -1.0, "were missed"),
        (says(("return_final_answer", {"answer": "0", "sources": ["x"]})), "wrong", -1.1, "1 ids were made up"),
        (says(("search_emails", {})), "no_answer", -0.5, "turns ended without an answer"),
        (says(("read_email", {"message_id": "9"}), ("read_email", {"message_id": "9"})), "no_answer", -0.6, "12 ids"),
        (finds_and_gives_up, "no_idea", 0.15, "were read"),
    ],
)  # fmt: skip
async def test_what_other_policies_earn(act: Act, outcome: str, reward: float, why: str) -> None:
    trajectory = await roll(act)
    assert trajectory.reward == pytest.approx(reward)
    assert [name for name in OUTCOMES if trajectory.metrics[name]] == [outcome]
    assert why in trajectory.metadata["why"]
    assert (trajectory.metadata["outcome"] == "policy_fault") == (outcome == "protocol_error")


async def test_arguments_that_are_no_json_break_the_rules() -> None:
    call = {"function": {"name": "read_email", "arguments": '{"message_id": 1'}}
    trajectory = await roll(lambda messages: {"tool_calls": [call]})
    assert (trajectory.reward, "not valid JSON" in trajectory.metadata["why"]) == (-1.5, True)


def test_no_part_changes_the_order_of_outcomes() -> None:
    question = MailQuestion(text="?", kind="number", answer="1", sources=["a"])
    mailbox = Mailbox.create([])
    worst = Desk(mailbox=mailbox, answer="", num_made_up=3, error="e")
    best = Desk(mailbox=mailbox, answer="", sources=("a",), seen={"a"}, opened={"a"}, error="e")
    spans = [
        [judge(question, desk, outcome=outcome, turns_left=left).reward for desk, left in ((worst, 0), (best, 0.9))]
        for outcome in ("correct", "no_idea", "no_answer", "wrong", "protocol_error")
    ]
    assert all(better[0] > worse[1] for better, worse in itertools.pairwise(spans))


def test_sources_count_as_far_as_they_are_right() -> None:
    question = MailQuestion(text="?", kind="number", answer="1", sources=["a", "b"])
    rewards = [
        judge(question, Desk(mailbox=Mailbox.create([]), sources=cited), outcome="correct", turns_left=0).parts[
            "sources"
        ]
        for cited in (("a", "b"), ("a",), ("a", "c"), ("c",), ())
    ]
    assert rewards == pytest.approx([0.3, 0.15, 0.1, 0, 0])


async def test_not_knowing_is_right_where_the_mailbox_does_not_tell_but_only_after_a_search() -> None:
    task = MailSearch(**SMALL)
    scenarios = task.scenarios("train", seed=0, count=60)
    scenario = next(each for each in scenarios if MailQuestion(**each.inputs["question"]).is_unanswerable)
    give_up = ("return_final_answer", {"answer": "I don't know", "sources": []})
    search = ("search_emails", {"keywords": ["the"]})
    for calls, outcome in (((give_up,), "no_idea"), ((search, give_up), "correct")):
        other = acting(says(*calls), **SMALL)
        trajectory = await ScriptedModel(other).play(scenario)
        assert trajectory.metrics[outcome] == 1.0


def contents(task: MailSearch, split: Split, count: int) -> set[tuple[int, str]]:
    """What scenarios are about, without ids and seeds: all emails of the mailbox, and the question."""

    @functools.cache
    def emails(mailbox: int) -> int:
        bodies = [(email.message_id, email.subject, email.body) for email in task._world(mailbox).mailbox.all()]
        return hash(tuple(bodies))

    drawn = [scenario.inputs for scenario in task.scenarios(split, seed=3, count=count)]
    return {(emails(inputs["mailbox"]), inputs["question"]["text"]) for inputs in drawn}


@pytest.mark.parametrize("options", [SHORT, SMALL])
def test_no_content_is_in_two_splits(options: dict[str, Any]) -> None:
    task = MailSearch(**options)
    train = contents(task, "train", 2000)
    held_out = [contents(task, split, 400) for split in ("val", "test")]
    assert min(len(train), *map(len, held_out)) > 50
    assert not train & (held_out[0] | held_out[1])
    assert not held_out[0] & held_out[1]


def test_the_same_arguments_give_the_same_scenarios_and_mailboxes() -> None:
    task = MailSearch(**SMALL)
    assert task.scenarios("test", seed=1, count=9) == task.scenarios("test", seed=1, count=9)
    assert task.scenarios("test", seed=1, count=9) != task.scenarios("test", seed=2, count=9)
    first = generate(5, 200).mailbox.all()
    generate.cache_clear()
    assert generate(5, 200).mailbox.all() == first != generate(6, 200).mailbox.all()
    assert task.scenarios("test", seed=1, count=1)[0].id.startswith(f"{task.label}/test")


def test_sizes() -> None:
    assert len(generate(1, 137).mailbox.all()) == 137


def test_generated_mailboxes_look_like_mailboxes() -> None:
    world = generate(4, 600)
    emails = world.mailbox.all()
    address = world.owner.split("<")[1].rstrip(">")
    assert all(address in (email.from_address, *email.to, *email.cc) for email in emails)
    assert all((email.folder == "sent") == (email.from_address == address) for email in emails)
    assert {email.folder for email in emails} == {"inbox", "sent", "archive"}
    assert all(email.date < "2026-03-16" for email in emails)
    assert 0.01 < sum(not email.is_read for email in emails) / 600 < 0.2
    assert sum("> " in email.body for email in emails) > 150
    outside = sum(not "08" <= email.date[11:13] < "18" for email in emails)
    assert 0 < outside < 60
    first_of_thread: dict[str, str] = {}
    for email in emails:
        if first_of_thread.setdefault(email.thread_id, email.message_id) != email.message_id:
            assert email.subject.startswith("Re: ")


def test_searches() -> None:
    def email(number: str, date: str, **fields: Any) -> Email:
        values = {
            "from_address": "ann@a",
            "from_name": "Ann Berg",
            "to": ("bob@b",),
            "body": "",
            "subject": "",
            **fields,
        }
        return Email(message_id=number, date=date, **values)

    mailbox = Mailbox.create([
        email("1", "2026-03-01 09:00", body="The orders for blue lamps, please."),
        email("2", "2026-03-02 09:00", subject="Lamp, blue", is_read=False, cc=("eve@e",)),
        email("3", "2026-03-03 09:00", body="Only a lamp.", folder="archive", from_address="dan@d", from_name="D"),
    ])  # fmt: skip
    everything = {
        ("1", "2", "3"): [{"keywords": ["lamp"]}, {"keywords": ["LAMPS"]}, {"sent_after": "2026-03-01"}],
        ("1",): [{"keywords": ["blue lamps"]}, {"keywords": ["order", "please"]}, {"sent_before": "2026-03-02"}],
        ("2",): [{"folder": "unread"}, {"to_addr": "EVE"}, {"sent_after": "2026-03-02", "sent_before": "2026-03-03"}],
        ("3",): [{"folder": "Archive"}, {"keywords": ["lamp"], "from_addr": "dan"}],
        ("1", "2"): [{"from_addr": "berg"}, {"keywords": ["blue"]}],
        (): [{"keywords": ["NEAR("]}, {"keywords": ['"', " "]}, {}, {"keywords": ["lamp OR nothing*"]}],
    }
    for ids, searches in everything.items():
        for search in searches:
            hits = mailbox.search(Search.model_validate(search))
            assert [hit.email.message_id for hit in hits] == [*reversed(ids)], search
    snippets = {hit.email.message_id: hit.snippet for hit in mailbox.search(Search(keywords=["lamp"]))}
    assert snippets == {"1": "The orders for blue **lamps**, please.", "2": "", "3": "Only a **lamp**."}
    assert len(mailbox.search(Search(keywords=["lamp"], max_results=2))) == 2


def calls_of(messages: list[Any]) -> list[dict[str, Any]]:
    return [call["function"] for message in messages for call in message.get("tool_calls") or ()]


def test_play_shows_the_protocol_and_depends_on_skill() -> None:
    task, rng = MailSearch(**SHORT), random.Random(0)
    shares = []
    for skill in (0.3, 1.0):
        scores = []
        for _ in range(100):
            conversation = task.play(rng, skill)
            messages: list[Any] = list(conversation.messages)
            for call in calls_of(messages):
                arguments = json.loads(call["arguments"])
                assert {tool["function"]["name"]: tool for tool in TOOLS}[call["name"]]
                assert Search.model_validate(arguments) if call["name"] == "search_emails" else arguments
            if messages[0]["role"] == "system":
                assert conversation.tools == TOOLS
                scores.append(task.score_messages(messages)[0] in (1.0, SCORES["no_idea"]))
        shares.append(sum(scores) / len(scores))
    assert shares[0] < 0.65
    assert shares[1] == 1.0


def test_a_tiny_model_is_given_the_short_form() -> None:
    assert get_task("mail_search", is_tiny=True).options.mailbox == "short"
    assert get_task("mail_search").options.mailbox == "generated"
    with pytest.raises(ConfigError, match="too long for a tiny model"):
        MailSearch().play(random.Random(0), 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mailbox": "short", "size": 500}, "size has no effect with mailbox=short"),
        ({"size": 5}, "size"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MailSearch(**options)


def test_messages_alone_tell_whether_the_answer_is_supported() -> None:
    task = MailSearch(**SHORT)

    def score(*tail: Any) -> float:
        messages = [{"role": "user", "content": 'What is the budget of "opal"?'}, *tail]
        return task.score_messages(messages)[0]

    read = [
        call_message(("read_email", {"message_id": "12"})),
        {"role": "tool", "tool_call_id": "call_0", "content": "opal: the budget is 47."},
    ]
    answers = {
        name: call_message(("return_final_answer", {"answer": answer, "sources": sources}))
        for name, answer, sources in (
            ("right", "47", ["12"]), ("uncited", "47", []), ("unknown", "I don't know", []), ("invented", "48", ["12"])
        )
    }  # fmt: skip
    scores = [score(*read, answers[name]) for name in ("right", "uncited", "unknown", "invented")]
    assert scores == sorted(scores, reverse=True)
    assert len({*scores, score(*read), score(*read, {"role": "assistant", "content": "47"})}) == 6
    broken = [
        {"role": "assistant", "content": "47"},
        call_message(("open_window", {})),
        call_message(("read_email", {})),
    ]
    assert max(map(score, broken)) < min(scores)
    other = [read[0], {**read[1], "content": "opal: the room is 47."}]
    assert score(*other, answers["right"]) == score(*read, answers["invented"])


# -- the form under its older name, and prompts of a user's own --

BOX = generate_short(SearchEmails().prompt_scenario("?").inputs["mailbox"])
EMAILS = BOX.mailbox.all()


def test_the_older_name_is_the_short_form() -> None:
    task = get_task("search_emails")
    assert isinstance(task, SearchEmails)
    assert "search_emails" not in list_tasks()
    assert (task.label, task.options.mailbox) == ("search_emails", "short")
    assert task.play(random.Random(0), 0.5)
    with pytest.raises(ConfigError, match="mailbox"):
        SearchEmails(mailbox="generated")


def test_short_mailboxes_have_dates_and_unread_emails_of_last_week() -> None:
    for seed in range(40):
        emails = generate_short(seed).mailbox.all()
        assert len({email.subject for email in emails}) == len(emails) == 12
        assert all("2026-02-23" <= email.date <= "2026-03-16" for email in emails)
        assert any(not email.is_read and email.date >= "2026-03-09" for email in emails)
        assert {email.subject.split(":")[0] for email in emails} < {*TOPICS}


def test_prompts_with_a_known_and_with_no_known_answer() -> None:
    task = SearchEmails()
    known = BOX.questions[0]
    for prompt in (
        known.text,
        known.text.lower().rstrip("?"),
        f"tell me the {known.keywords[1]} of {known.keywords[0]}",
    ):
        assert MailQuestion(**task.prompt_scenario(prompt).inputs["question"]) == known
    for unclear in ("who?", "Find all unread emails from last week", "What is the weather in Bonn?"):
        assert task.prompt_scenario(unclear).inputs["question"]["kind"] == "open"
    full = MailSearch(**SMALL)
    box = full.prompt_scenario("?").inputs["mailbox"]
    for question in generate(box, SMALL["size"]).questions[:20]:
        assert MailQuestion(**full.prompt_scenario(question.text.upper()).inputs["question"]) == question


async def test_an_agent_is_told_the_date_and_searches_by_state() -> None:
    right = [email for email in EMAILS if not email.is_read and email.date >= "2026-03-09"]

    def act(messages: list[Any]) -> dict[str, Any]:
        if len(messages) == 2:
            assert messages[0]["content"].startswith("Today is Monday, 2026-03-16. Answer from the mailbox.")
            return call_message(("search_emails", {"folder": "unread", "sent_after": "2026-03-09"}))
        assert messages[-1]["content"].count("unread)") == len(right)
        return call_message(("return_final_answer", {"answer": "these", "sources": []}))

    trajectory = await roll(act, SHORT, "Find all unread emails from last week")
    assert trajectory.metrics["unjudged"] == 1.0


async def test_an_answer_to_an_open_question_is_not_judged() -> None:
    act = says(("return_final_answer", {"answer": "sunny", "sources": []}))
    trajectory = await roll(act, SHORT, "What is the weather in Bonn?")
    assert (trajectory.reward, trajectory.metrics["unjudged"]) == (0.0, 1.0)
    assert "let a judge score it" in trajectory.metadata["why"]
