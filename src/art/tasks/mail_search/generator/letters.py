"""Write emails of a generated mailbox: letters with greetings and signatures, replies with quotes, working hours."""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from dataclasses import dataclass

from art.tasks.mail_search.generator.people import COMPANY, Person
from art.tasks.mail_search.mailbox import Email

TODAY = datetime.date(2026, 3, 16)
"""The day on which questions are asked, a Monday. All emails are older."""
SPAN_DAYS = 180
"""The emails are from this many days before `TODAY`."""
MAX_QUOTES = 3
"""A reply quotes this many earlier emails of its thread."""
_OPENINGS = ("Hi {}", "Hello {}", "Dear {}", "Good day {}")
_CLOSINGS = ("Best", "Best regards", "Thanks", "Cheers", "Kind regards")
_RARELY = 0.05
"""Share of emails outside working hours."""


@dataclass(slots=True)
class Draft:
    """An email before it has an id."""

    sender: Person
    to: list[Person]
    cc: list[Person]
    subject: str
    text: str
    """The sender's own words, without the quoted emails."""
    when: datetime.datetime
    parent: Draft | None = None
    attachments: str = ""
    folder: str | None = None
    message_id: str = ""
    """Set when all emails of the mailbox are written."""

    def body(self) -> str:
        """The text with the emails below that it answers, each quoted once more than the one above it."""
        lines, quoted, depth = [self.text], self.parent, 1
        while quoted is not None and depth <= MAX_QUOTES:
            mark = "> " * depth
            lines.append("")
            lines.append(f"{mark[2:]}On {quoted.when:%Y-%m-%d %H:%M}, {quoted.sender.name} wrote:")
            lines += [f"{mark}{line}".rstrip() for line in quoted.text.splitlines()]
            quoted, depth = quoted.parent, depth + 1
        return "\n".join(lines)

    def finish(self, thread_id: str, folder: str, *, is_read: bool) -> Email:
        return Email(
            message_id=self.message_id, thread_id=thread_id, date=f"{self.when:%Y-%m-%d %H:%M}", folder=folder,
            is_read=is_read, from_name=self.sender.name, from_address=self.sender.address, subject=self.subject,
            body=self.body(), attachments=self.attachments, to=tuple(person.address for person in self.to),
            cc=tuple(person.address for person in self.cc),
        )  # fmt: skip


@dataclass(slots=True)
class Office:
    """The people of a mailbox and the random numbers with which they write."""

    rng: random.Random
    people: Sequence[Person]

    @property
    def owner(self) -> Person:
        return self.people[0]

    def draw_people(self, count: int) -> list[Person]:
        """Draw colleagues of the owner, without the owner."""
        colleagues = [person for person in self.people[1:] if person.is_colleague]
        return self.rng.sample(colleagues, min(count, len(colleagues)))

    def draw_outsider(self) -> Person:
        return self.rng.choice([person for person in self.people if not person.is_colleague])

    def start(
        self, sender: Person, to: Sequence[Person], subject: str, sentences: Sequence[str], *,
        after: datetime.datetime | None = None, attachments: str = "",
    ) -> Draft:  # fmt: skip
        """Begin a thread, on any day or a few days after a time. The owner of the mailbox gets a copy."""
        if after is None:
            age = datetime.timedelta(days=self.rng.randint(1, SPAN_DAYS), minutes=-self.rng.randrange(10 * 60))
            when = self._working_time(datetime.datetime.combine(TODAY, datetime.time(8)) - age)
        else:
            when = self._working_time(after + datetime.timedelta(days=self.rng.uniform(1, 12)))
        cc = [] if self.owner in (sender, *to) else [self.owner]
        text = self._letter(sender, to, sentences)
        return Draft(sender, [*to], cc, subject, text, when, attachments=attachments)

    def reply(self, parent: Draft, sender: Person, sentences: Sequence[str], *, attachments: str = "") -> Draft:
        """Answer an email to all of its people."""
        everyone = [person for person in (parent.sender, *parent.to) if person != sender]
        to, cc = everyone[:1], [person for person in (*everyone[1:], *parent.cc) if person != sender]
        subject = parent.subject if parent.subject.startswith("Re: ") else f"Re: {parent.subject}"
        delay = datetime.timedelta(minutes=10 + self.rng.expovariate(1 / 400))
        when = self._working_time(parent.when + delay)
        return Draft(sender, to, cc, subject, self._letter(sender, to, sentences), when, parent, attachments)

    def _letter(self, sender: Person, to: Sequence[Person], sentences: Sequence[str]) -> str:
        rng = self.rng
        greeting = rng.choice(_OPENINGS).format(to[0].first if len(to) == 1 else "all")
        signature = sender.first if rng.random() < 0.5 else f"{sender.name}\n{sender.role}, {sender.company}"
        if sender.company != COMPANY:
            signature = f"{sender.name}\n{sender.role}, {sender.company}"
        return f"{greeting},\n\n{' '.join(sentences)}\n\n{rng.choice(_CLOSINGS)}\n{signature}"

    def _working_time(self, when: datetime.datetime) -> datetime.datetime:
        """The time itself if somebody works then, else a time in the next working hours."""
        if self.rng.random() < _RARELY:
            return when
        if when.hour >= 18:
            when = when.replace(hour=8) + datetime.timedelta(days=1)
        while when.isoweekday() > 5:
            when = when.replace(hour=8) + datetime.timedelta(days=1)
        return when if when.hour >= 8 else when.replace(hour=8, minute=self.rng.randrange(60))
