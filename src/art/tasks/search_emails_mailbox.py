"""Generate a mailbox with full-text search (SQLite FTS5) in memory. A seed gives the same mailbox in every process.

    id 12   from Ann   2026-03-11, unread   subject "opal: budget"   body "opal: the budget is 47."

"Today" is always the same Monday. No email was sent on a Sunday, so "last week" means the same emails whether a week
begins on Sunday or Monday, and also for people who mean the last seven days.
"""

from __future__ import annotations

import datetime
import random
import re
import sqlite3
from dataclasses import dataclass
from functools import lru_cache

from pydantic import BaseModel, ConfigDict

from art.errors import ConfigError

TOPICS = (
    "lark", "fern", "opal", "ruby", "echo", "nova", "iris", "puma", "sage", "dune", "reef", "moss", "jade", "kiwi",
    "tusk", "wren",
)  # fmt: skip
ATTRIBUTES = ("budget", "code", "price", "room")
SENDERS = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn")
NUM_TOPICS = 6
ATTRIBUTES_PER_TOPIC = 2
MAX_RESULTS = 5
"""Largest number of results of a search by keywords alone. A search by state, sender or date has no limit."""
TODAY = datetime.date(2026, 3, 16)
NUM_WEEKS = 3
"""The emails are from this many weeks before `TODAY`."""
_UNREAD = 0.4
"""Share of unread emails."""


@dataclass(frozen=True, slots=True)
class Email:
    """An email about one attribute of one topic."""

    id: int
    sender: str
    topic: str
    attribute: str
    value: str
    date: datetime.date
    is_read: bool

    @property
    def subject(self) -> str:
        return f"{self.topic}: {self.attribute}"

    @property
    def body(self) -> str:
        return f"{self.topic}: the {self.attribute} is {self.value}."


class Filter(BaseModel):
    """Conditions of a search besides keywords. `None` means no condition."""

    model_config = ConfigDict(frozen=True)

    unread: bool | None = None
    sender: str | None = None
    since: datetime.date | None = None
    """First day, inclusive."""
    until: datetime.date | None = None
    """Last day, inclusive."""

    def matches(self, email: Email) -> bool:
        return (
            self.unread in (None, not email.is_read)
            and (self.sender is None or self.sender.lower() == email.sender.lower())
            and (self.since is None or self.since <= email.date)
            and (self.until is None or email.date <= self.until)
        )


class Mailbox:
    """Emails that can be searched and read. Reading an email does not mark it as read."""

    def __init__(self, seed: int) -> None:
        self.emails = _generate(random.Random(seed))
        self._by_id = {email.id: email for email in self.emails}
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._database.execute("CREATE VIRTUAL TABLE mail USING fts5(sender, subject, body)")
        except sqlite3.OperationalError as error:
            problem = f"task 'search_emails' needs SQLite with FTS5, which this Python does not have: {error}"
            raise ConfigError(problem) from error
        rows = [(email.id, email.sender, email.subject, email.body) for email in self.emails]
        self._database.executemany("INSERT INTO mail (rowid, sender, subject, body) VALUES (?, ?, ?, ?)", rows)

    def search(self, keywords: list[str], condition: Filter | None = None) -> list[Email]:
        """Find the emails with all the keywords, newest (largest id) first. Without a filter, at most `MAX_RESULTS`.

        Without keywords, find all emails that match the filter.
        """
        terms = [f'"{word}"' for keyword in keywords for word in re.findall(r"\w+", keyword)]
        if condition is None:
            return self._matching(terms, MAX_RESULTS) if terms else []
        candidates = self._matching(terms, len(self.emails)) if terms else self.emails[::-1]
        return [email for email in candidates if condition.matches(email)]

    def _matching(self, terms: list[str], limit: int) -> list[Email]:
        rows = self._database.execute(
            "SELECT rowid FROM mail WHERE mail MATCH ? ORDER BY rowid DESC LIMIT ?", (" AND ".join(terms), limit)
        )
        return [self._by_id[row[0]] for row in rows]

    def read(self, email_id: int) -> Email | None:
        return self._by_id.get(email_id)


@lru_cache(maxsize=512)
def open_mailbox(seed: int) -> Mailbox:
    """Return the mailbox of a seed. It is cached, since building its index takes longer than a rollout's searches."""
    return Mailbox(seed)


def _generate(rng: random.Random) -> list[Email]:
    subjects = [
        (topic, attribute)
        for topic in rng.sample(TOPICS, NUM_TOPICS)
        for attribute in rng.sample(ATTRIBUTES, ATTRIBUTES_PER_TOPIC)
    ]
    rng.shuffle(subjects)
    ids = sorted(rng.sample(range(10, 100), len(subjects)))
    contents = [(rng.choice(SENDERS), topic, attribute, str(rng.randint(10, 99))) for topic, attribute in subjects]
    days = _draw_days(rng, len(subjects))
    unread = [rng.random() < _UNREAD for _ in subjects[1:]] + [True]  # the newest
    return [
        Email(email_id, *rest, date=day, is_read=not is_unread)
        for email_id, rest, day, is_unread in zip(ids, contents, days, unread, strict=True)
    ]


def _draw_days(rng: random.Random, count: int) -> list[datetime.date]:
    """Draw days before today, oldest first, none a Sunday. The newest is in last week."""
    days = [TODAY - datetime.timedelta(days=ago) for ago in range(1, 7 * NUM_WEEKS + 1)]
    weekdays = [day for day in days if day.isoweekday() != 7]
    return sorted([*rng.choices(weekdays, k=count - 1), rng.choice(weekdays[:6])])
