"""Emails in SQLite with full-text search (FTS5). Generated mailboxes and the Enron emails have the same schema.

emails       one row per email; `date` is "2026-03-11 14:20", so that it sorts as text
recipients   one row per address in to, cc and bcc
emails_fts   the index over subject, body and attachments; its words are reduced to their stems

mailbox = Mailbox.create(emails)
mailbox.search(Search(keywords=["heron", "budget"], sent_after="2026-03-01"))    # newest first
mailbox.read("m4217")
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from art.errors import ConfigError

SCHEMA = """
CREATE TABLE emails (
    id INTEGER PRIMARY KEY, message_id TEXT UNIQUE NOT NULL, thread_id TEXT NOT NULL, date TEXT NOT NULL,
    folder TEXT NOT NULL, is_read INTEGER NOT NULL, from_name TEXT NOT NULL, from_address TEXT NOT NULL,
    subject TEXT NOT NULL, body TEXT NOT NULL, attachments TEXT NOT NULL
);
CREATE TABLE recipients (email_id INTEGER NOT NULL, address TEXT NOT NULL, kind TEXT NOT NULL);
CREATE VIRTUAL TABLE emails_fts USING fts5(
    subject, body, attachments, content='emails', content_rowid='id', tokenize='porter unicode61'
);
"""
INDEXES = """
CREATE INDEX emails_by_date ON emails (date);
CREATE INDEX recipients_by_email ON recipients (email_id);
CREATE INDEX recipients_by_address ON recipients (address);
INSERT INTO emails_fts (emails_fts) VALUES ('rebuild');
"""
UNREAD = "unread"
"""A name that a search takes as a folder: all unread emails."""
MAX_RESULTS = 20
_KINDS = ("to", "cc", "bcc")
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
    bcc: tuple[str, ...] = ()
    thread_id: str = ""
    folder: str = "inbox"
    is_read: bool = True
    attachments: str = ""
    """Texts of the attachments, each after a line with its name: `[quote.csv]`."""


class Search(BaseModel):
    """Arguments of a search. An email must fit all of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keywords: list[str] = Field(default_factory=list)
    """Words or phrases that the email must contain in subject, body or attachments, in any form (`order`, `orders`)."""
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
    """A search result: the email, and the place in its body or attachments that matches, with these words in `**`."""

    email: Email
    snippet: str


@dataclass(slots=True)
class Mailbox:
    """The emails of one person, or with `inbox=None` a whole database."""

    database: sqlite3.Connection
    inbox: str | None = None
    """Address whose emails are shown: those that it sent or received."""

    @classmethod
    def create(cls, emails: Iterable[Email], path: str = ":memory:") -> Self:
        """Write emails to a new database.

        Raises:
            ConfigError: SQLite has no FTS5, or two emails have the same id.
        """
        database = sqlite3.connect(path, check_same_thread=False)
        try:
            database.executescript("PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY;" + SCHEMA)
            for number, email in enumerate(emails, 1):
                _insert(database, number, email)
            database.executescript(INDEXES)
        except sqlite3.OperationalError as error:
            raise ConfigError(f"task 'mail_search' needs SQLite with FTS5, and this one failed: {error}") from error
        except sqlite3.IntegrityError as error:
            raise ConfigError(f"two emails have the same `message_id`: {error}") from error
        return cls(database)

    def search(self, search: Search) -> list[Hit]:
        """Find the emails that fit, newest first. An empty search finds nothing."""
        if search.is_empty:
            return []
        where, values = _conditions(search, self.inbox)
        if search.terms:
            body, attachments = (f"snippet(emails_fts, {i}, '**', '**', ' ... ', {_SNIPPET_TOKENS})" for i in (1, 2))
            snippet = f"iif(instr({body}, '**') OR NOT instr({attachments}, '**'), {body}, {attachments})"
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
        where, values = _conditions(Search(), self.inbox)
        condition = " AND ".join(["e.message_id = ?", *where])
        row = self.database.execute(f"SELECT e.* FROM emails e WHERE {condition}", (message_id, *values)).fetchone()
        return None if row is None else self._email(row)

    def all(self) -> list[Email]:
        """Return all emails, oldest first."""
        where, values = _conditions(Search(), self.inbox)
        condition = " AND ".join(["1", *where])
        rows = self.database.execute(f"SELECT e.* FROM emails e WHERE {condition} ORDER BY e.date, e.id", values)
        return [self._email(row) for row in rows.fetchall()]

    def _email(self, row: tuple[Any, ...]) -> Email:
        number, message_id, thread_id, date, folder, is_read, from_name, from_address, subject, body, attachments = row
        addresses = self.database.execute("SELECT kind, address FROM recipients WHERE email_id = ?", (number,))
        recipients: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        for kind, address in addresses:
            recipients[kind].append(address)
        return Email(
            message_id=message_id, thread_id=thread_id, date=date, folder=folder, is_read=bool(is_read),
            from_name=from_name, from_address=from_address, subject=subject, body=body, attachments=attachments,
            to=tuple(recipients["to"]), cc=tuple(recipients["cc"]), bcc=tuple(recipients["bcc"]),
        )  # fmt: skip


def _insert(database: sqlite3.Connection, number: int, email: Email) -> None:
    database.execute(
        "INSERT INTO emails VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            number, email.message_id, email.thread_id, email.date, email.folder, email.is_read, email.from_name,
            email.from_address, email.subject, email.body, email.attachments,
        ),
    )  # fmt: skip
    rows = [(number, address, kind) for kind in _KINDS for address in getattr(email, kind)]
    database.executemany("INSERT INTO recipients VALUES (?, ?, ?)", rows)


def _conditions(search: Search, inbox: str | None) -> tuple[list[str], list[Any]]:
    """Conditions of SQL, besides the keywords, with their values."""
    where: list[str] = []
    values: list[Any] = []

    def add(condition: str, *arguments: Any) -> None:
        where.append(condition)
        values.extend(arguments)

    received = "EXISTS (SELECT 1 FROM recipients r WHERE r.email_id = e.id AND "
    if inbox is not None:
        add(f"(e.from_address = ? OR {received}r.address = ?))", inbox, inbox)
    if search.from_addr is not None:
        add("instr(lower(e.from_name || ' ' || e.from_address), lower(?)) > 0", search.from_addr)
    if search.to_addr is not None:
        add(f"{received}instr(r.address, lower(?)) > 0)", search.to_addr)
    if search.sent_after is not None:
        add("e.date >= ?", search.sent_after)
    if search.sent_before is not None:
        add("e.date < ?", search.sent_before)
    if search.folder is not None:
        add("e.is_read = 0") if search.folder.lower() == UNREAD else add("e.folder = lower(?)", search.folder)
    return where, values
