"""Generate a realistic mailbox with questions. The same arguments give the same mailbox in every process.

world = generate(seed=7, size=1000, num_people=40)
world.mailbox        1,000 emails: threads with replies and quotes, folders, unread emails, attachments
world.questions      about 250 questions, each with its answer and the ids of the emails that state it
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from art.tasks.mail_search.generator.errands import write_approval, write_invitation, write_order, write_quote
from art.tasks.mail_search.generator.letters import TODAY, Draft, Office
from art.tasks.mail_search.generator.people import Person, draw_people
from art.tasks.mail_search.generator.threads import Pen, Written, write_chatter, write_fact, write_gap
from art.tasks.mail_search.mailbox import Email, Mailbox
from art.tasks.mail_search.questions import Question

_WEIGHTS: dict[Callable[[Pen], Written], float] = {
    write_chatter: 0.36, write_fact: 0.36, write_gap: 0.06, write_approval: 0.06, write_invitation: 0.02,
    write_order: 0.07, write_quote: 0.07,
}  # fmt: skip
_UNREAD_DAYS, _UNREAD = 14, 0.4
"""Emails in the inbox of this many last days are unread in this share."""
_INBOX_DAYS = 30
"""Older emails have been moved to the archive, most of them."""


@dataclass(frozen=True, slots=True)
class World:
    """A mailbox with what is known about it."""

    mailbox: Mailbox
    questions: tuple[Question, ...]
    owner: str
    """Name and address of the person whose mailbox it is."""
    today: datetime.date = TODAY


@lru_cache(maxsize=32)
def generate(seed: int, size: int, num_people: int) -> World:
    """Generate a mailbox of exactly `size` emails. Each question's emails are among them."""
    rng = random.Random(seed)
    people = draw_people(rng, num_people)
    pen = Pen(Office(rng, people))
    threads: list[list[Draft]] = []
    questions: list[tuple[Question, list[Draft]]] = []
    room = size
    while room:
        write = rng.choices([*_WEIGHTS], [*_WEIGHTS.values()])[0]
        written = write(pen)
        drafts = [draft for thread in written.threads for draft in thread]
        if len(drafts) > room:
            written = write_chatter(pen)
            drafts = written.threads[0][:room]
            written.threads = [drafts]
        _move_into_the_past(drafts)
        threads += written.threads
        questions += written.questions
        room -= len(drafts)
    emails = _finish(rng, people[0], threads)
    asked = [
        question.model_copy(update={"sources": [draft.message_id for draft in sources]})
        for question, sources in questions
    ]
    owner = f"{people[0].name} <{people[0].address}>"
    return World(Mailbox.create(emails), tuple(asked), owner)


def _move_into_the_past(drafts: list[Draft]) -> None:
    """Move emails back by whole weeks, so that all of them are older than today."""
    newest = max(draft.when for draft in drafts).date()
    weeks = max(0, ((newest - TODAY).days + 7) // 7)
    for draft in drafts:
        draft.when -= datetime.timedelta(weeks=weeks)


def _finish(rng: random.Random, owner: Person, threads: list[list[Draft]]) -> list[Email]:
    """Give the emails ids, folders and states, and sort them by date."""
    num_emails = sum(map(len, threads))
    ids = iter(rng.sample(range(10_000, 10_000 + 90_000 * (1 + num_emails // 45_000)), num_emails))
    emails = []
    for number, thread in enumerate(threads):
        for draft in thread:
            draft.message_id = f"m{next(ids)}"
        for draft in thread:
            age = (TODAY - draft.when.date()).days
            folder = draft.folder or ("inbox" if age <= _INBOX_DAYS or rng.random() < 0.1 else "archive")
            folder = "sent" if draft.sender == owner else folder
            unread = folder == "inbox" and age <= _UNREAD_DAYS and rng.random() < _UNREAD
            emails.append(draft.finish(f"t{number}", folder, is_read=not unread))
    return sorted(emails, key=lambda email: email.date)
