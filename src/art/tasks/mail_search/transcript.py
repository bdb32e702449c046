"""Score a rollout by its messages alone: is the answer one that the emails it read support?

The mailbox and the right answer are not known here. A fact that changed later is not noticed, and an answer that takes
several emails, such as a count, is not recognised.
"""

from __future__ import annotations

import json
from typing import Any

from art.tasks.mail_search.questions import numbers_in, plain, says_no_idea

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
