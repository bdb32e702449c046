"""The short form of the task for a tiny model: a dozen one-line emails with names and numbers of one token each.

    id 12   from Ann   2026-03-11, unread   subject "opal: budget"   body "opal: the budget is 47."

Each email answers a question, and two questions are about topics that no email is about.

A tiny model of 0.1 million parameters cannot read emails of a hundred words. No short email was sent on a Sunday, so
"last week" means the same emails whether a week begins on Sunday or Monday, and also for people who mean seven days.
"""

from __future__ import annotations

import datetime
import random
from functools import lru_cache
from typing import Any

from art.tasks.mail_search.generator.letters import TODAY
from art.tasks.mail_search.generator.world import World
from art.tasks.mail_search.mailbox import Email, Mailbox
from art.tasks.mail_search.questions import Question

TOPICS = (
    "lark", "fern", "opal", "ruby", "echo", "nova", "iris", "puma", "sage", "dune", "reef", "moss", "jade", "kiwi",
    "tusk", "wren",
)  # fmt: skip
ATTRIBUTES = ("budget", "code", "price", "room")
SENDERS = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn")
NUM_TOPICS, ATTRIBUTES_PER_TOPIC = 6, 2
NUM_UNANSWERABLE = 2
"""Number of questions about topics that no email is about."""
NUM_WEEKS = 3
"""The emails are from this many weeks before `TODAY`."""
_OWNER = "me@short.example"
_UNREAD = 0.4


@lru_cache(maxsize=1024)
def generate_short(seed: int) -> World:
    """Generate a mailbox of twelve emails with fourteen questions. It is cached, since each rollout needs it."""
    rng = random.Random(seed)
    subjects = [
        (topic, attribute)
        for topic in rng.sample(TOPICS, NUM_TOPICS)
        for attribute in rng.sample(ATTRIBUTES, ATTRIBUTES_PER_TOPIC)
    ]
    rng.shuffle(subjects)
    ids = sorted(rng.sample(range(10, 100), len(subjects)))
    days = _draw_days(rng, len(subjects))
    emails, questions = [], []
    for i, ((topic, attribute), number, day) in enumerate(zip(subjects, ids, days, strict=True)):
        sender, value = rng.choice(SENDERS), str(rng.randint(10, 99))
        is_newest = i == len(subjects) - 1
        emails.append(
            Email(
                message_id=str(number), thread_id=topic, date=f"{day} 12:00", from_name=sender,
                from_address=f"{sender.lower()}@short.example", to=(_OWNER,), subject=f"{topic}: {attribute}",
                body=f"{topic}: the {attribute} is {value}.", is_read=rng.random() >= _UNREAD and not is_newest,
            )
        )  # fmt: skip
        questions.append(_ask(topic, attribute, answer=value, sources=[str(number)]))
    others = sorted({*TOPICS} - {topic for topic, _ in subjects})
    questions += [_ask(topic, rng.choice(ATTRIBUTES)) for topic in rng.sample(others, NUM_UNANSWERABLE)]
    return World(Mailbox.create(emails), tuple(questions), _OWNER)


def _ask(topic: str, attribute: str, **known: Any) -> Question:
    text = f'What is the {attribute} of "{topic}"?'
    return Question(text=text, kind="number", keywords=[topic, attribute], **known)


def _draw_days(rng: random.Random, count: int) -> list[datetime.date]:
    """Draw days before today, oldest first, none a Sunday. The newest is in last week."""
    days = [TODAY - datetime.timedelta(days=ago) for ago in range(1, 7 * NUM_WEEKS + 1)]
    weekdays = [day for day in days if day.isoweekday() != 7]
    return sorted([*rng.choices(weekdays, k=count - 1), rng.choice(weekdays[:6])])
