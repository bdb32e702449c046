"""Emails in SQLite with full-text search (FTS5), and the tools of a rollout that search and read them.

emails       one row per email; `date` is "2026-03-11 14:20", so that it sorts as text; an address is a line
emails_fts   the index over subject and body; its words are reduced to their stems

mailbox = Mailbox.create(emails)
mailbox.search(Search(keywords=["heron", "budget"], sent_after="2026-03-01"))    # newest first
mailbox.read("m4217")
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from art.errors import ConfigError

SCHEMA = """
CREATE TABLE emails (
    id INTEGER PRIMARY KEY, message_id TEXT UNIQUE NOT NULL, thread_id TEXT NOT NULL, date TEXT NOT NULL,
    folder TEXT NOT NULL, is_read INTEGER NOT NULL, from_name TEXT NOT NULL, from_address TEXT NOT NULL,
    subject TEXT NOT NULL, body TEXT NOT NULL,
    "to" TEXT NOT NULL, cc TEXT NOT NULL
);
CREATE VIRTUAL TABLE emails_fts USING fts5(
    subject, body, content='emails', content_rowid='id', tokenize='porter unicode61'
);
"""
INDEXES = """
CREATE INDEX emails_by_date ON emails (date);
INSERT INTO emails_fts (emails_fts) VALUES ('rebuild');
"""
UNREAD = "unread"
"""A name that a search takes as a folder: all unread emails."""
MAX_RESULTS = 20
_SNIPPET_TOKENS = 18
_DAY = re.compile(r"\d{4}-\d\d-\d\d$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Email:
    """An email. Addresses are in lower case."""

    message_id: str
    date: str
    """`YYYY-MM-DD HH:MM`."""
    from_address: str
    subject: str
    body: str
    from_name: str = ""
    to: tuple[str, ...] = ()
    cc: tuple[str, ...] = ()
    thread_id: str = ""
    folder: str = "inbox"
    is_read: bool = True


class Search(BaseModel):
    """Arguments of a search. An email must fit all of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keywords: list[str] = Field(default_factory=list)
    """Words or phrases that the email must contain in subject or body, in any form (`order`, `orders`)."""
    from_addr: str | None = None
    """Part of the sender's address or name."""
    to_addr: str | None = None
    """Part of the address of one of the recipients."""
    sent_after: str | None = None
    """First day, inclusive: `YYYY-MM-DD`."""
    sent_before: str | None = None
    """First day that is too late: `YYYY-MM-DD`."""
    folder: str | None = None
    """Name of a folder, or `unread`."""
    max_results: int = Field(10, ge=1, le=MAX_RESULTS)

    @field_validator("sent_after", "sent_before")
    @classmethod
    def _is_a_day(cls, value: str | None) -> str | None:
        if value is not None and not _DAY.match(value):
            raise ValueError("expected a day as YYYY-MM-DD")
        return value

    @property
    def terms(self) -> list[str]:
        """The keywords as phrases of FTS5, without the signs of its query language."""
        words = [re.findall(r"\w+", keyword) for keyword in self.keywords]
        return [f'"{" ".join(phrase)}"' for phrase in words if phrase]

    @property
    def is_empty(self) -> bool:
        return not self.terms and not self.model_dump(exclude={"keywords", "max_results"}, exclude_none=True)


@dataclass(frozen=True, slots=True)
class Hit:
    """A search result: the email, and the place in its body that matches, with these words in `**`."""

    email: Email
    snippet: str


@dataclass(slots=True)
class Mailbox:
    """The emails of one person."""

    database: sqlite3.Connection

    @classmethod
    def create(cls, emails: Iterable[Email]) -> Self:
        """Write emails to a new database in memory.

        Raises:
            ConfigError: SQLite has no FTS5.
        """
        database = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            database.executescript("PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY;" + SCHEMA)
            for email in emails:
                row = (
                    email.message_id, email.thread_id, email.date, email.folder, email.is_read, email.from_name,
                    email.from_address, email.subject, email.body,
                    *("\n".join(addresses) for addresses in (email.to, email.cc)),
                )  # fmt: skip
                database.execute(f"INSERT INTO emails VALUES (NULL{', ?' * len(row)})", row)
            database.executescript(INDEXES)
        except sqlite3.OperationalError as error:
            raise ConfigError(f"task 'mail_search' needs SQLite with FTS5, and this one failed: {error}") from error
        return cls(database)

    def search(self, search: Search) -> list[Hit]:
        """Find the emails that fit, newest first. An empty search finds nothing."""
        if search.is_empty:
            return []
        where, values = _conditions(search)
        if search.terms:
            snippet = f"snippet(emails_fts, 1, '**', '**', ' ... ', {_SNIPPET_TOKENS})"
            source = "emails_fts JOIN emails e ON e.id = emails_fts.rowid"
            where, values = ["emails_fts MATCH ?", *where], [" AND ".join(search.terms), *values]
        else:
            snippet, source = "substr(e.body, 1, 100)", "emails e"
        rows = self.database.execute(
            f"SELECT e.*, {snippet} FROM {source} WHERE {' AND '.join(where)} ORDER BY e.date DESC, e.id DESC LIMIT ?",
            (*values, search.max_results),
        )
        return [Hit(self._email(row[:-1]), " ".join(row[-1].split())) for row in rows.fetchall()]

    def read(self, message_id: str) -> Email | None:
        row = self.database.execute("SELECT e.* FROM emails e WHERE e.message_id = ?", (message_id,)).fetchone()
        return None if row is None else self._email(row)

    def all(self) -> list[Email]:
        """Return all emails, oldest first."""
        rows = self.database.execute("SELECT e.* FROM emails e ORDER BY e.date, e.id").fetchall()
        return [self._email(row) for row in rows]

    def _email(self, row: tuple[Any, ...]) -> Email:
        _, message_id, thread_id, date, folder, is_read, from_name, from_address, subject, body = row[:-2]
        to, cc = (tuple(addresses.splitlines()) for addresses in row[-2:])
        return Email(
            message_id=message_id, thread_id=thread_id, date=date, folder=folder, is_read=bool(is_read),
            from_name=from_name, from_address=from_address, subject=subject, body=body,
            to=to, cc=cc,
        )  # fmt: skip


def _conditions(search: Search) -> tuple[list[str], list[Any]]:
    """Conditions of SQL, besides the keywords, with their values."""
    is_unread = search.folder is not None and search.folder.lower() == UNREAD
    conditions = {
        "instr(lower(e.from_name || ' ' || e.from_address), lower(?)) > 0": search.from_addr,
        'instr(e."to" || char(10) || e.cc, lower(?)) > 0': search.to_addr,
        "e.date >= ?": search.sent_after,
        "e.date < ?": search.sent_before,
        "e.is_read = ?": 0 if is_unread else None,
        "e.folder = lower(?)": None if is_unread else search.folder,
    }
    chosen = {condition: value for condition, value in conditions.items() if value is not None}
    return list(chosen), list(chosen.values())


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
        folder=_text(f"a folder: inbox, sent, archive, or {UNREAD}"),
        max_results={"type": "integer", "minimum": 1, "maximum": MAX_RESULTS, "description": "10 if left out"},
    ),
    _tool("read_email", "Read an email.", ["message_id"], message_id=_text("id of the email")),
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
    text = "\n".join([*lines, "", email.body])
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}\n... ({len(text) - MAX_SHOWN} more characters)"
