"""Threads of a generated mailbox, with the questions that they answer.

write_fact         a value is stated, and perhaps changed in a reply or in another thread later
write_gap          a value is asked for and never stated
write_chatter      no answer to anything, in words that other emails have too
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from art.tasks.mail_search.generator.chatter import FILLERS, NEWS, REPLIES, TALK
from art.tasks.mail_search.generator.facts import CHANGED, DROPPED, MENTIONED, STATED, Attribute, draw_subject
from art.tasks.mail_search.generator.letters import Draft, Office
from art.tasks.mail_search.generator.people import Person
from art.tasks.mail_search.questions import LEVELS, Question


@dataclass(slots=True)
class Written:
    """Threads that belong together, and questions each with the drafts that state the answer."""

    threads: list[list[Draft]]
    questions: list[tuple[Question, list[Draft]]] = field(default_factory=list)


@dataclass(slots=True)
class Pen:
    """A writer of threads. No two of them are about the same attribute of the same subject."""

    office: Office
    taken: set[str] = field(default_factory=set)
    subjects: list[tuple[str, tuple[Attribute, ...]]] = field(default_factory=list)

    @property
    def rng(self) -> random.Random:
        return self.office.rng

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
    office, rng = pen.office, pen.rng
    subject, attribute = pen.draw_fact()
    values: set[str] = set()
    value = pen.draw_value(lambda: attribute.draw(rng, subject), values)
    names = {"attribute": attribute.name, "subject": subject}
    group = [office.owner, *office.draw_people(rng.randint(2, 3))]
    rng.shuffle(group)
    if rng.random() < 0.4:
        thread = [office.start(group[0], group[1:], _title(subject), pen.say(MENTIONED, **names))]
        thread.append(office.reply(thread[-1], group[1], pen.say(STATED, value=value, **names)))
    else:
        title = f"{attribute.name.capitalize()} for {subject}"
        thread = [office.start(group[0], group[1:], title, pen.say(STATED, value=value, **names))]
    threads, source = [thread], thread[-1]
    if rng.random() < 0.3:
        dropped = pen.draw_value(lambda: attribute.draw(rng, subject), values)
        thread.append(office.reply(thread[-1], group[2], pen.say(DROPPED, value=dropped, **names)))
    num_changes = rng.choices((0, 1, 2), (5, 3, 2))[0]
    for _ in range(num_changes):
        add_chatter(pen, thread, group)
        old, value = value, pen.draw_value(lambda: attribute.draw(rng, subject), values)
        sender, sentences = rng.choice(group), pen.say(CHANGED, value=value, old=old, **names)
        if rng.random() < 0.6:
            thread.append(office.reply(thread[-1], sender, sentences))
        else:
            others = [person for person in group if person != sender]
            thread = [office.start(sender, others, f"News about {subject}", sentences, after=thread[-1].when)]
            threads.append(thread)
        source = thread[-1]
    add_chatter(pen, thread, group)
    paraphrased = rng.random() < 0.4
    difficulty = num_changes + paraphrased + (len(threads) > 1)
    question = Question(
        text=attribute.questions[paraphrased].format(subject), kind=attribute.kind, answer=value,
        wrong=sorted(values - {value}), level=LEVELS[min(difficulty, 2)],
        keywords=[subject, attribute.name],
    )  # fmt: skip
    return Written(threads, [(question, [source])])


def write_gap(pen: Pen) -> Written:
    office, rng = pen.office, pen.rng
    subject, attribute = pen.draw_fact()
    names = {"attribute": attribute.name, "subject": subject}
    group = [office.owner, *office.draw_people(2)]
    rng.shuffle(group)
    thread = [office.start(group[0], group[1:], _title(subject), pen.say(MENTIONED, **names))]
    wrong = []
    if rng.random() < 0.6:
        wrong = [attribute.draw(rng, subject)]
        thread.append(office.reply(thread[-1], group[1], pen.say(DROPPED, value=wrong[0], **names)))
    add_chatter(pen, thread, group)
    text = attribute.questions[0].format(subject)
    question = Question(text=text, kind=attribute.kind, wrong=wrong, level="hard", keywords=[subject, attribute.name])
    return Written([thread], [(question, [])])


def write_chatter(pen: Pen) -> Written:
    office, rng = pen.office, pen.rng
    if rng.random() < 0.2:
        title, text = rng.choice(NEWS)
        letter = office.start(office.draw_outsider(), [office.owner], title, [text])
        letter.folder = "newsletters"
        return Written([[letter]])
    group = [office.owner, *office.draw_people(rng.randint(1, 3))]
    rng.shuffle(group)
    title, text = rng.choice(TALK)
    sentences = [text]
    if pen.subjects and rng.random() < 0.5:
        subject, attributes = rng.choice(pen.subjects)
        sentences += pen.say(MENTIONED, subject=subject, attribute=rng.choice(attributes).name)
    thread = [office.start(group[0], group[1:], title, sentences)]
    add_chatter(pen, thread, group)
    return Written([thread])


def add_chatter(pen: Pen, thread: list[Draft], group: Sequence[Person]) -> None:
    """Add up to two replies that say nothing."""
    for _ in range(pen.rng.choice((0, 0, 1, 1, 2))):
        sender = pen.rng.choice([person for person in group if person != thread[-1].sender])
        thread.append(pen.office.reply(thread[-1], sender, [pen.rng.choice(REPLIES)]))


def _title(subject: str) -> str:
    return subject[0].upper() + subject[1:]
