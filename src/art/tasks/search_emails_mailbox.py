"""A generated mailbox with full-text search (SQLite FTS5): made of a seed, in memory, the same in every process.

id 12   from Ann   2026-03-11, unread   subject "opal: budget"   body "opal: the budget is 47."

It is always the same Monday. No mail is of a Sunday, so that "last week" means the same emails wherever a week begins,
and for people who mean the last seven days.
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
"""Most emails that a search for words alone gives; one by state, sender or date gives all."""
TODAY = datetime.date(2026, 3, 16)
NUM_WEEKS = 3
"""The emails are spread over this many weeks before `TODAY`."""
_UNREAD = 0.4
"""Share of the emails that nobody has read yet."""


@dataclass(frozen=True, slots=True)
class Email:
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
    """What narrows a search down, beside its keywords; `None` does not."""

    model_config = ConfigDict(frozen=True)

    unread: bool | None = None
    sender: str | None = None
    since: datetime.date | None = None
    """The first day."""
    until: datetime.date | None = None
    """The last day."""

    def takes(self, email: Email) -> bool:
        return (
            self.unread in (None, not email.is_read)
            and (self.sender is None or self.sender.lower() == email.sender.lower())
            and (self.since is None or self.since <= email.date)
            and (self.until is None or email.date <= self.until)
        )


class Mailbox:
    """Emails that can be searched and read; nothing in it changes, not even that an email is unread."""

    def __init__(self, seed: int) -> None:
        self.emails = _generate(random.Random(seed))
        self._by_id = {email.id: email for email in self.emails}
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._database.execute("CREATE VIRTUAL TABLE mail USING fts5(sender, subject, body)")
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"task 'search_emails' needs an SQLite with FTS5, and this Python has none: {error}"
            ) from error
        rows = [(email.id, email.sender, email.subject, email.body) for email in self.emails]
        self._database.executemany("INSERT INTO mail (rowid, sender, subject, body) VALUES (?, ?, ?, ?)", rows)

    def search(self, keywords: list[str], narrowed: Filter | None = None) -> list[Email]:
        """Emails that hold all the keywords, newest (the largest id) first, at most `MAX_RESULTS` without a filter.

        Without keywords these are all that the filter takes.
        """
        terms = [f'"{word}"' for keyword in keywords for word in re.findall(r"\w+", keyword)]
        if narrowed is None:
            return self._matching(terms, MAX_RESULTS) if terms else []
        found = self._matching(terms, len(self.emails)) if terms else self.emails[::-1]
        return [email for email in found if narrowed.takes(email)]

    def _matching(self, terms: list[str], limit: int) -> list[Email]:
        found = self._database.execute(
            "SELECT rowid FROM mail WHERE mail MATCH ? ORDER BY rowid DESC LIMIT ?", (" AND ".join(terms), limit)
        )
        return [self._by_id[row[0]] for row in found]

    def read(self, email_id: int) -> Email | None:
        return self._by_id.get(email_id)


@lru_cache(maxsize=512)
def open_mailbox(seed: int) -> Mailbox:
    """The mailbox of a seed, made once: its index takes longer than the searches of a rollout."""
    return Mailbox(seed)


def _generate(rng: random.Random) -> list[Email]:
    subjects = [
        (topic, attribute)
        for topic in rng.sample(TOPICS, NUM_TOPICS)
        for attribute in rng.sample(ATTRIBUTES, ATTRIBUTES_PER_TOPIC)
    ]
    rng.shuffle(subjects)
    ids = sorted(rng.sample(range(10, 100), len(subjects)))
    told = [(rng.choice(SENDERS), topic, attribute, str(rng.randint(10, 99))) for topic, attribute in subjects]
    days = _draw_days(rng, len(subjects))
    unread = [rng.random() < _UNREAD for _ in subjects[1:]] + [True]  # the newest
    return [
        Email(email_id, *rest, date=day, is_read=not is_unread)
        for email_id, rest, day, is_unread in zip(ids, told, days, unread, strict=True)
    ]


def _draw_days(rng: random.Random, count: int) -> list[datetime.date]:
    """Days before today, oldest first, none a Sunday; the newest is of last week."""
    days = [TODAY - datetime.timedelta(days=ago) for ago in range(1, 7 * NUM_WEEKS + 1)]
    weekdays = [day for day in days if day.isoweekday() != 7]
    return sorted([*rng.choices(weekdays, k=count - 1), rng.choice(weekdays[:6])])
