"""Generate a realistic mailbox with questions. The same arguments give the same mailbox in every process.

world = generate(seed=7, size=1000)
world.mailbox        1,000 emails: threads with replies and quotes, folders, unread emails
world.questions      about 250 questions, each with its answer and the ids of the emails that state it

The functions that write threads make the questions too, which each thread answers or leaves open:

write_fact         a value is stated, and perhaps changed in a reply or in another thread later
write_gap          a value is asked for and never stated
write_chatter      no answer to anything, in words that other emails have too
write_approval     one of several people approves an order
write_order        a number in one email, the day of delivery of that number in another
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from art_tasks.mail_search.facts import (
    CHANGED,
    COMPANY,
    DROPPED,
    FILLERS,
    MENTIONED,
    REPLIES,
    STATED,
    TALK,
    Attribute,
    Person,
    draw_day,
    draw_order,
    draw_people,
    draw_subject,
)
from art_tasks.mail_search.mailbox import Email, Mailbox
from art_tasks.mail_search.questions import MailQuestion

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
class DraftEmail:
    """An email before it has an id."""

    sender: Person
    to: list[Person]
    cc: list[Person]
    subject: str
    text: str
    """The sender's own words, without the quoted emails."""
    when: datetime.datetime
    parent: DraftEmail | None = None
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
            body=self.body(), to=tuple(person.address for person in self.to),
            cc=tuple(person.address for person in self.cc),
        )  # fmt: skip


@dataclass(slots=True)
class Written:
    """Threads that belong together, and questions each with the drafts that state the answer."""

    threads: list[list[DraftEmail]]
    questions: list[tuple[MailQuestion, list[DraftEmail]]] = field(default_factory=list)


@dataclass(slots=True)
class Pen:
    """The people of a mailbox and a writer of their threads. No two are about the same attribute of a subject."""

    rng: random.Random
    people: Sequence[Person]
    taken: set[str] = field(default_factory=set)
    subjects: list[tuple[str, tuple[Attribute, ...]]] = field(default_factory=list)

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
        after: datetime.datetime | None = None,
    ) -> DraftEmail:  # fmt: skip
        """Begin a thread, on any day or a few days after a time. The owner of the mailbox gets a copy."""
        if after is None:
            age = datetime.timedelta(days=self.rng.randint(1, SPAN_DAYS), minutes=-self.rng.randrange(10 * 60))
            when = self._working_time(datetime.datetime.combine(TODAY, datetime.time(8)) - age)
        else:
            when = self._working_time(after + datetime.timedelta(days=self.rng.uniform(1, 12)))
        cc = [] if self.owner in (sender, *to) else [self.owner]
        text = self._letter(sender, to, sentences)
        return DraftEmail(sender, [*to], cc, subject, text, when)

    def reply(self, parent: DraftEmail, sender: Person, sentences: Sequence[str]) -> DraftEmail:
        """Answer an email to all of its people."""
        everyone = [person for person in (parent.sender, *parent.to) if person != sender]
        to, cc = everyone[:1], [person for person in (*everyone[1:], *parent.cc) if person != sender]
        subject = parent.subject if parent.subject.startswith("Re: ") else f"Re: {parent.subject}"
        delay = datetime.timedelta(minutes=10 + self.rng.expovariate(1 / 400))
        when = self._working_time(parent.when + delay)
        return DraftEmail(sender, to, cc, subject, self._letter(sender, to, sentences), when, parent)

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

    def draw(self, draw: Callable[[random.Random], str]) -> str:
        """Draw a subject that no thread has had."""
        return self.draw_value(lambda: draw(self.rng), self.taken)

    def draw_fact(self) -> tuple[str, Attribute]:
        """Draw a subject and an attribute of it. Often the subject is one of earlier threads."""
        while True:
            known = self.subjects and self.rng.random() < 0.4
            subject, attributes = self.rng.choice(self.subjects) if known else draw_subject(self.rng)
            attribute = self.rng.choice(attributes)
            if (key := f"{attribute.name} of {subject}") not in self.taken:
                self.taken.add(key)
                self.subjects.append((subject, attributes))
                return subject, attribute

    def draw_value(self, draw: Callable[[], str], taken: set[str]) -> str:
        """Draw a value that is not among those taken, and add it to them."""
        while (value := draw()) in taken:
            pass
        taken.add(value)
        return value

    def say(self, sentences: Sequence[str], **values: str) -> list[str]:
        """One of the sentences with its values, perhaps between others that say nothing."""
        parts = [self.rng.choice(sentences).format(**values)]
        if self.rng.random() < 0.6:
            parts.insert(self.rng.randrange(2), self.rng.choice(FILLERS))
        return parts


def write_fact(pen: Pen) -> Written:
    rng = pen.rng
    subject, attribute = pen.draw_fact()
    values: set[str] = set()
    value = pen.draw_value(lambda: attribute.draw(rng, subject), values)
    names = {"attribute": attribute.name, "subject": subject}
    group = [pen.owner, *pen.draw_people(rng.randint(2, 3))]
    rng.shuffle(group)
    if rng.random() < 0.4:
        thread = [pen.start(group[0], group[1:], _title(subject), pen.say(MENTIONED, **names))]
        thread.append(pen.reply(thread[-1], group[1], pen.say(STATED, value=value, **names)))
    else:
        title = f"{attribute.name.capitalize()} for {subject}"
        thread = [pen.start(group[0], group[1:], title, pen.say(STATED, value=value, **names))]
    threads, source = [thread], thread[-1]
    if rng.random() < 0.3:
        dropped = pen.draw_value(lambda: attribute.draw(rng, subject), values)
        thread.append(pen.reply(thread[-1], group[2], pen.say(DROPPED, value=dropped, **names)))
    num_changes = rng.choices((0, 1, 2), (5, 3, 2))[0]
    for _ in range(num_changes):
        add_chatter(pen, thread, group)
        old, value = value, pen.draw_value(lambda: attribute.draw(rng, subject), values)
        sender, sentences = rng.choice(group), pen.say(CHANGED, value=value, old=old, **names)
        if rng.random() < 0.6:
            thread.append(pen.reply(thread[-1], sender, sentences))
        else:
            others = [person for person in group if person != sender]
            thread = [pen.start(sender, others, f"News about {subject}", sentences, after=thread[-1].when)]
            threads.append(thread)
        source = thread[-1]
    add_chatter(pen, thread, group)
    paraphrased = rng.random() < 0.4
    question = MailQuestion(
        text=attribute.questions[paraphrased].format(subject), kind=attribute.kind, answer=value,
        wrong=sorted(values - {value}), keywords=[subject, attribute.name],
    )  # fmt: skip
    return Written(threads, [(question, [source])])


def write_gap(pen: Pen) -> Written:
    rng = pen.rng
    subject, attribute = pen.draw_fact()
    names = {"attribute": attribute.name, "subject": subject}
    group = [pen.owner, *pen.draw_people(2)]
    rng.shuffle(group)
    thread = [pen.start(group[0], group[1:], _title(subject), pen.say(MENTIONED, **names))]
    wrong = []
    if rng.random() < 0.6:
        wrong = [attribute.draw(rng, subject)]
        thread.append(pen.reply(thread[-1], group[1], pen.say(DROPPED, value=wrong[0], **names)))
    add_chatter(pen, thread, group)
    text = attribute.questions[0].format(subject)
    question = MailQuestion(text=text, kind=attribute.kind, wrong=wrong, keywords=[subject, attribute.name])
    return Written([thread], [(question, [])])


def write_chatter(pen: Pen) -> Written:
    rng = pen.rng
    group = [pen.owner, *pen.draw_people(rng.randint(1, 3))]
    rng.shuffle(group)
    title, text = rng.choice(TALK)
    sentences = [text]
    if pen.subjects and rng.random() < 0.5:
        subject, attributes = rng.choice(pen.subjects)
        sentences += pen.say(MENTIONED, subject=subject, attribute=rng.choice(attributes).name)
    thread = [pen.start(group[0], group[1:], title, sentences)]
    add_chatter(pen, thread, group)
    return Written([thread])


def add_chatter(pen: Pen, thread: list[DraftEmail], group: Sequence[Person]) -> None:
    """Add up to two replies that say nothing."""
    for _ in range(pen.rng.choice((0, 0, 1, 1, 2))):
        sender = pen.rng.choice([person for person in group if person != thread[-1].sender])
        thread.append(pen.reply(thread[-1], sender, [pen.rng.choice(REPLIES)]))


def _title(subject: str) -> str:
    return subject[0].upper() + subject[1:]


def write_approval(pen: Pen) -> Written:
    rng = pen.rng
    order = pen.draw(draw_order)
    asking, other, approving = rng.sample([pen.owner, *pen.draw_people(3)], 3)
    amount = f"{rng.randrange(5, 90) * 100:,} EUR"
    request = f"I need an approval for {order}, which cost {amount}."
    thread = [pen.start(asking, [other, approving], f"Approval for {order}", [request, "Can one of you look at it?"])]
    if rng.random() < 0.7:
        doubt = f"I have no objection to {order}, but {approving.first} has to decide."
        thread.append(pen.reply(thread[-1], other, [doubt]))
    thread.append(pen.reply(thread[-1], approving, [f"I approve {order}.", "Please go ahead."]))
    source = thread[-1]
    add_chatter(pen, thread, [asking, other])
    question = MailQuestion(
        text=f"Who approved {order}?", kind="name", answer=approving.name, wrong=[other.name],
        keywords=[order.removeprefix("the "), "approve"],
    )  # fmt: skip
    return Written([thread], [(question, [source])])


def write_order(pen: Pen) -> Written:
    rng = pen.rng
    order, vendor = pen.draw(draw_order), pen.draw_outsider()
    number = pen.draw(lambda rng: str(rng.randrange(10_000, 99_999)))
    buyer = rng.choice([pen.owner, *pen.draw_people(2)])
    reader = pen.owner if buyer != pen.owner else pen.draw_people(1)[0]
    text = f"I have ordered {order} from {vendor.company} today. The order number is {number}."
    placed = pen.start(buyer, [reader], f"Ordered: {order}", [text])
    day = draw_day(rng)
    text = f"Thank you for your order. Order {number} will be delivered on {day}."
    notices = [pen.start(vendor, [buyer], f"Your order {number}", [text], after=placed.when)]
    wrong = []
    if rng.random() < 0.4:
        wrong, day = [day], pen.draw_value(lambda: draw_day(rng), {day})
        late = f"We are sorry that order {number} is late. It will now be delivered on {day}."
        notices.append(pen.reply(notices[0], vendor, [late]))
    item = order.removeprefix("the ")
    asked_number = MailQuestion(
        text=f"What is the order number of {order}?", kind="code", answer=number,
        keywords=[item, "ordered"],
    )  # fmt: skip
    asked_day = MailQuestion(
        text=f"When will {order} be delivered?", kind="date", answer=day, wrong=wrong,
        keywords=[f"order {number}"],
    )  # fmt: skip
    return Written([[placed], notices], [(asked_number, [placed]), (asked_day, [notices[-1]])])


_WEIGHTS: dict[Callable[[Pen], Written], float] = {
    write_chatter: 0.36, write_fact: 0.36, write_gap: 0.06, write_approval: 0.08, write_order: 0.14,
}  # fmt: skip
_UNREAD_DAYS, _UNREAD = 14, 0.4
"""Emails in the inbox of this many last days are unread in this share."""
_INBOX_DAYS = 30
"""Older emails have been moved to the archive, most of them."""


@dataclass(frozen=True, slots=True)
class World:
    """A mailbox with what is known about it."""

    mailbox: Mailbox
    questions: tuple[MailQuestion, ...]
    owner: str
    """Name and address of the person whose mailbox it is."""
    today: datetime.date = TODAY


@lru_cache(maxsize=32)
def generate(seed: int, size: int) -> World:
    """Generate a mailbox of exactly `size` emails. Each question's emails are among them."""
    rng = random.Random(seed)
    people = draw_people(rng)
    pen = Pen(rng, people)
    threads: list[list[DraftEmail]] = []
    questions: list[tuple[MailQuestion, list[DraftEmail]]] = []
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


def _move_into_the_past(drafts: list[DraftEmail]) -> None:
    """Move emails back by whole weeks, so that all of them are older than today."""
    newest = max(draft.when for draft in drafts).date()
    weeks = max(0, ((newest - TODAY).days + 7) // 7)
    for draft in drafts:
        draft.when -= datetime.timedelta(weeks=weeks)


def _finish(rng: random.Random, owner: Person, threads: list[list[DraftEmail]]) -> list[Email]:
    """Give the emails ids, folders and states, and sort them by date."""
    num_emails = sum(map(len, threads))
    ids = iter(rng.sample(range(10_000, 10_000 + 90_000 * (1 + num_emails // 45_000)), num_emails))
    emails = []
    for number, thread in enumerate(threads):
        for draft in thread:
            draft.message_id = f"m{next(ids)}"
        for draft in thread:
            age = (TODAY - draft.when.date()).days
            folder = "inbox" if age <= _INBOX_DAYS or rng.random() < 0.1 else "archive"
            folder = "sent" if draft.sender == owner else folder
            unread = folder == "inbox" and age <= _UNREAD_DAYS and rng.random() < _UNREAD
            emails.append(draft.finish(f"t{number}", folder, is_read=not unread))
    return sorted(emails, key=lambda email: email.date)


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
_SHORT_UNREAD = 0.4


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
                body=f"{topic}: the {attribute} is {value}.", is_read=rng.random() >= _SHORT_UNREAD and not is_newest,
            )
        )  # fmt: skip
        questions.append(_ask(topic, attribute, answer=value, sources=[str(number)]))
    others = sorted({*TOPICS} - {topic for topic, _ in subjects})
    questions += [_ask(topic, rng.choice(ATTRIBUTES)) for topic in rng.sample(others, NUM_UNANSWERABLE)]
    return World(Mailbox.create(emails), tuple(questions), _OWNER)


def _ask(topic: str, attribute: str, **known: Any) -> MailQuestion:
    text = f'What is the {attribute} of "{topic}"?'
    return MailQuestion(text=text, kind="number", keywords=[topic, attribute], **known)


def _draw_days(rng: random.Random, count: int) -> list[datetime.date]:
    """Draw days before today, oldest first, none a Sunday. The newest is in last week."""
    days = [TODAY - datetime.timedelta(days=ago) for ago in range(1, 7 * NUM_WEEKS + 1)]
    weekdays = [day for day in days if day.isoweekday() != 7]
    return sorted([*rng.choices(weekdays, k=count - 1), rng.choice(weekdays[:6])])
