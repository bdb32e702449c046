"""Scripted players: the best one, and one that makes mistakes for the warm start of a tiny model."""

from __future__ import annotations

import json
import random
from typing import Any

from art.task import Conversation
from art.tasks.mail_search.generator.world import World
from art.tasks.mail_search.mailbox import Hit, Search
from art.tasks.mail_search.questions import NO_IDEA, Question, numbers_in, plain, says_no_idea
from art.tasks.mail_search.tools import TOOLS, Desk

_NUM_DRILLED = 4


def best_answer(question: Question, messages: list[Any]) -> dict[str, Any]:
    """The next assistant message of a player who knows the answer: search, read all sources, answer."""
    turn = sum(message["role"] == "assistant" for message in messages)
    if turn == 0:
        words = question.keywords or question.text.split()
        return call_message(("search_emails", {"keywords": words, "max_results": 20}))
    if turn == 1 and question.sources:
        return call_message(*(("read_email", {"message_id": source}) for source in question.sources))
    answer = question.answer or (", ".join(question.sources) if question.kind == "emails" else NO_IDEA)
    return call_message(("return_final_answer", {"answer": answer or "none", "sources": question.sources}))


def play_rollout(
    world: World, opening: list[Any], question: Question, rng: random.Random, skill: float
) -> Conversation:
    """Make a rollout in the short form by a player who takes the right step with probability `skill`, else any."""
    desk = Desk(mailbox=world.mailbox, is_short=True, shows_state=False)
    messages = [*opening]

    def act(name: str, arguments: dict[str, Any]) -> str:
        messages.append(call_message((name, arguments)))
        result = desk.call(name, json.dumps(arguments))
        if not desk.is_over:
            messages.append(_result(result))
        return result

    topic, attribute = question.keywords
    if rng.random() >= skill:
        topic = rng.choice(world.questions).keywords[0]
    hits: list[Hit] = []
    for keywords in ([topic, attribute], [topic])[rng.randrange(2) :]:
        if not hits:
            hits = world.mailbox.search(Search(keywords=keywords))
            act("search_emails", {"keywords": keywords})
    if not hits:
        act("return_final_answer", {"answer": NO_IDEA, "sources": []})
        return Conversation(messages=messages, tools=TOOLS)
    right = [hit.email for hit in hits if hit.email.subject.endswith(attribute)]
    email = right[0] if right and rng.random() < skill else rng.choice(hits).email
    text = act("read_email", {"message_id": email.message_id})
    value = text.rstrip(".").split()[-1]
    act("return_final_answer", {"answer": value, "sources": [email.message_id]})
    return Conversation(messages=messages, tools=TOOLS)


def play_drill(world: World, rng: random.Random) -> Conversation:
    """Make short exchanges that need copying: repeat search results, or call a tool with a word just shown."""
    emails = rng.sample(world.mailbox.all(), _NUM_DRILLED)
    desk = Desk(mailbox=world.mailbox, is_short=True, shows_state=False)
    if rng.random() < 0.3:
        lines = "\n".join(
            desk.call("search_emails", json.dumps({"keywords": email.subject.split(": ")})) for email in emails
        )
        return Conversation(messages=[{"role": "user", "content": lines}, {"role": "assistant", "content": lines}])
    messages: list[Any] = []
    for email in emails:
        topic, attribute = email.subject.split(": ")
        line = desk.call("search_emails", json.dumps({"keywords": [topic, attribute]}))
        answer = {"answer": email.body.rstrip(".").split()[-1], "sources": [email.message_id]}
        steps: list[list[dict[str, Any]]] = [
            [
                {"role": "user", "content": f'What is the {attribute} of "{topic}"?'},
                call_message(("search_emails", {"keywords": [topic]})),
            ],
            [_result(line), call_message(("read_email", {"message_id": email.message_id}))],
            [
                _result(line),
                call_message(("read_email", {"message_id": email.message_id})),
                _result(email.body),
                call_message(("return_final_answer", answer)),
            ],
        ]
        messages += rng.choice(steps)
    return Conversation(messages=messages)


def call_message(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """An assistant message with tool calls, each a name with arguments."""
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
    tool_calls = [{"id": f"call_{i}", "type": "function", "function": function} for i, function in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_0", "content": text}


SCORES = {"supported": 0.9, "no_idea": 0.45, "unsupported": 0.2, "no_answer": 0.3, "protocol_error": 0.05}
CITED = 0.1
"""Added to `supported` if the sources are exactly the emails that support the answer."""
_COMMON = set(
    [
        "what",
        "is",
        "the",
        "of",
        "for",
        "do",
        "we",
        "on",
        "in",
        "by",
        "to",
        "are",
        "how",
        "who",
        "which",
        "when",
        "where",
        "much",
        "many",
        "does",
        "it",
        "from",
        "my",
    ]
)


def score_transcript(messages: list[dict[str, Any]]) -> tuple[float, str]:
    """Score a rollout from 0 to 1, with the reason."""
    question = next(plain(str(message["content"])) for message in messages if message["role"] == "user")
    last = messages[-1]
    if last["role"] != "assistant":  # the result of a tool
        return SCORES["no_answer"], "The rollout ends without an answer."
    try:
        call = last["tool_calls"][-1]["function"]
        final = json.loads(call["arguments"])
        answer, sources = str(final["answer"]), {str(source) for source in final.get("sources", ())}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return SCORES["protocol_error"], "The last message is not a valid call of `return_final_answer`."
    if call["name"] != "return_final_answer":
        return SCORES["protocol_error"], f"The last message calls {call['name']}, which was not answered."
    if says_no_idea(answer):
        return SCORES["no_idea"], "The agent says that it does not know."
    emails = _emails_read(messages)
    supporting = {message_id for message_id, text in emails.items() if _supports(text, question, answer)}
    if not supporting:
        return SCORES["unsupported"], f"No email that was read supports the answer {answer!r}."
    if sources and sources <= supporting:
        return SCORES["supported"] + CITED, f"The answer {answer!r} is in an email that was read and cited."
    return SCORES["supported"], f"The answer {answer!r} is in an email that was read, and not or wrongly cited."


def _emails_read(messages: list[dict[str, Any]]) -> dict[str, str]:
    """Texts of the emails that were read, by id."""
    texts: dict[str, str] = {}
    for i, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] != "read_email":
                continue
            answers = (m for m in messages[i + 1 :] if m["role"] == "tool" and m.get("tool_call_id") == call["id"])
            if (result := next(answers, None)) is not None:
                texts[str(json.loads(call["function"]["arguments"]).get("message_id"))] = str(result["content"])
    return texts


def _supports(text: str, question: str, answer: str) -> bool:
    """Whether an email has the answer and most of the question's words."""
    words = set(question.split()) - _COMMON
    shared = words & set(plain(text).split())
    values = numbers_in(answer) - numbers_in(question)
    stated_values = numbers_in(text) | numbers_in(text.replace(",", " , "))  # also as cells of a CSV file
    stated = values <= stated_values if values else plain(answer) in plain(text)
    return stated and bool(answer.strip()) and 2 * len(shared) >= len(words) + (len(words) <= 2)
