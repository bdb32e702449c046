"""A generated mailbox with full-text search (SQLite FTS5): made of a seed, in memory, the same in every process.

id 12   from Ann   subject "opal: budget"   body "opal: the budget is 47."
"""

from __future__ import annotations

import random
import re
import sqlite3
from dataclasses import dataclass
from functools import lru_cache

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


@dataclass(frozen=True, slots=True)
class Email:
    id: int
    sender: str
    topic: str
    attribute: str
    value: str

    @property
    def subject(self) -> str:
        return f"{self.topic}: {self.attribute}"

    @property
    def body(self) -> str:
        return f"{self.topic}: the {self.attribute} is {self.value}."


class Mailbox:
    """Emails that can be searched and read; nothing in it changes."""

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

    def search(self, keywords: list[str]) -> list[Email]:
        """Emails that hold all the keywords, newest (the largest id) first, at most `MAX_RESULTS`."""
        terms = [f'"{word}"' for keyword in keywords for word in re.findall(r"\w+", keyword)]
        if not terms:
            return []
        found = self._database.execute(
            "SELECT rowid FROM mail WHERE mail MATCH ? ORDER BY rowid DESC LIMIT ?", (" AND ".join(terms), MAX_RESULTS)
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
    return [
        Email(email_id, rng.choice(SENDERS), topic, attribute, str(rng.randint(10, 99)))
        for email_id, (topic, attribute) in zip(ids, subjects, strict=True)
    ]
