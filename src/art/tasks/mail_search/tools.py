"""The tools of a rollout, and what it did with them.

search_emails(keywords, from_addr, to_addr, sent_after, sent_before, folder, max_results)
read_email(message_id)
return_final_answer(answer, sources)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from art.tasks.mail_search.mailbox import MAX_RESULTS, UNREAD, Email, Hit, Mailbox, Search

MAX_SHOWN = 6_000
"""Characters of an email that `read_email` shows."""


def _tool(name: str, description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _text(description: str) -> dict[str, str]:
    return {"type": "string", "description": description}


_TEXTS = {"type": "array", "items": {"type": "string"}}
TOOLS: list[Any] = [
    _tool(
        "search_emails", "Find emails that fit all of the arguments, newest first. Give at least one.", [],
        keywords={**_TEXTS, "description": "words or phrases that the email contains, all of them"},
        from_addr=_text("part of the sender's name or address"),
        to_addr=_text("part of a recipient's address"),
        sent_after=_text("first day, YYYY-MM-DD"),
        sent_before=_text("day after the last day, YYYY-MM-DD"),
        folder=_text(f"a folder: inbox, sent, archive, newsletters, or {UNREAD}"),
        max_results={"type": "integer", "minimum": 1, "maximum": MAX_RESULTS, "description": "10 if left out"},
    ),
    _tool("read_email", "Read an email with its attachments.", ["message_id"], message_id=_text("id of the email")),
    _tool(
        "return_final_answer", "End with an answer.", ["answer", "sources"],
        answer=_text("short answer to the question, or: I don't know"),
        sources={**_TEXTS, "description": "ids of the emails that state the answer, and of no others"},
    ),
]  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Desk:
    """The mailbox tools of one rollout, and what has been found, read and answered."""

    mailbox: Mailbox
    is_short: bool = False
    """Whether emails are shown in as few words as possible, for a tiny model."""
    shows_state: bool = True
    """Whether short search results show date and state."""
    answer: str | None = None
    sources: tuple[str, ...] = ()
    """Ids that the final answer names."""
    error: str | None = None
    """Description of a call that broke the rules. It ends the rollout."""
    seen: set[str] = field(default_factory=set)
    """Ids of all search results."""
    opened: set[str] = field(default_factory=set)
    """Ids of the emails that were read."""
    num_searches: int = 0
    num_made_up: int = 0
    """Number of ids, read or named as a source, that no email has."""

    @property
    def is_over(self) -> bool:
        return self.answer is not None or self.error is not None

    def call(self, name: str, arguments: str) -> str:
        """Call a tool and return its result. A call that breaks the rules sets `error`."""
        try:
            values = json.loads(arguments or "{}")
        except ValueError:
            return self.fail(f"the arguments of {name} are not valid JSON")
        match name, values:
            case "search_emails", dict():
                try:
                    search = Search.model_validate({key: value for key, value in values.items() if value is not None})
                except ValidationError as error:
                    first = error.errors()[0]
                    return self.fail(f"search_emails: {'.'.join(map(str, first['loc']))}: {first['msg']}")
                return self._search(search)
            case "read_email", {"message_id": str() | int() as message_id}:
                return self._read(str(message_id))
            case "return_final_answer", {"answer": str(answer), **rest}:
                return self._finish(answer, rest.get("sources", []))
        return self.fail(f"there is no tool {name} with the arguments {arguments}")

    def fail(self, error: str) -> str:
        self.error = error
        return error

    def _search(self, search: Search) -> str:
        if search.is_empty:
            return "give at least one argument to search for"
        self.num_searches += 1
        hits = self.mailbox.search(search)
        self.seen |= {hit.email.message_id for hit in hits}
        return "\n".join(map(self._line, hits)) or "nothing found"

    def _read(self, message_id: str) -> str:
        email = self.mailbox.read(message_id)
        if email is None:
            self.num_made_up += 1
            return f"no email has the id {message_id}"
        self.opened.add(message_id)
        return email.body if self.is_short else describe(email)

    def _finish(self, answer: str, sources: Any) -> str:
        if not isinstance(sources, list) or not all(isinstance(source, str | int) for source in sources):
            return self.fail("return_final_answer: `sources` must be a list of ids")
        self.answer, self.sources = answer, tuple(dict.fromkeys(map(str, sources)))
        self.num_made_up += sum(self.mailbox.read(source) is None for source in self.sources)
        return "done"

    def _line(self, hit: Hit) -> str:
        email, state = hit.email, "" if hit.email.is_read else "unread"
        if not self.is_short:
            parts = [email.message_id, email.date, sender_of(email), email.subject, hit.snippet]
            return " | ".join([*parts, state] if state else parts)
        details = f", {email.date[:10]}, {state or 'read'}" if self.shows_state else ""
        return f"{email.subject} ({email.message_id}, {email.from_name}{details})"


def sender_of(email: Email) -> str:
    return f"{email.from_name} <{email.from_address}>" if email.from_name else email.from_address


def describe(email: Email) -> str:
    """An email as `read_email` shows it. A long one is cut."""
    head = {
        "id": email.message_id, "date": email.date, "from": sender_of(email), "to": ", ".join(email.to),
        "cc": ", ".join(email.cc), "subject": email.subject,
    }  # fmt: skip
    lines = [f"{name}: {value}" for name, value in head.items() if value]
    text = "\n".join([*lines, "", email.body, *(["", "Attached:", email.attachments] if email.attachments else [])])
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}\n... ({len(text) - MAX_SHOWN} more characters)"
