"""Questions of generated mailboxes, answered again by SQL and regular expressions that know nothing of the generator.

A solver gets the question's text and the database. It finds every email whose sender states the value (quotes left
out), takes the newest, and says who states what.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator

import pytest

from art_tasks.mail_search.questions import is_right
from art_tasks.mail_search.world import generate

Row = tuple[str, str, str]  # id, sender, own words

ATTRIBUTES = {
    r"What is the budget for (.+)\?|How much may we spend on (.+)\?": "budget",
    r"What is the deadline for (.+)\?|By when must (.+) be finished\?": "deadline",
    r"Who is the supplier for (.+)\?|Which company delivers to (.+)\?": "supplier",
    r"What is the hotel for (.+)\?|Where do we stay on (.+)\?": "hotel",
    r"When is the departure for (.+)\?|When do we leave for (.+)\?": "departure",
    r"What is the flight for (.+)\?|Which plane do we take on (.+)\?": "flight",
    r"What is the venue for (.+)\?|Where does (.+) take place\?": "venue",
    r"What is the entry fee for (.+)\?|What does (.+) cost\?": "entry fee",
    r"What is the discount for (.+)\?|What do we save under (.+)\?": "discount",
    r"What is the signing date for (.+)\?|When will (the contract .+) be signed\?": "signing date",
    r"What is the door code for (.+)\?|How do I get into (.+)\?": "door code",
    r"What is the rent for (.+)\?|What do we pay a month for (.+)\?": "rent",
}


def rows(database: sqlite3.Connection, phrase: str) -> list[Row]:
    """Emails with a phrase in subject or body, oldest first, without what they quote."""
    found_rows = database.execute(
        "SELECT message_id, from_name, body FROM emails WHERE instr(subject || char(10) || body, ?) ORDER BY date",
        (phrase,),
    )
    return [(i, name, own_words(body)) for i, name, body in found_rows]


def own_words(body: str) -> str:
    lines = (line for line in body.splitlines() if not line.startswith(">"))
    return "\n".join(line for line in lines if not re.match(r"On \d{4}-\d\d-\d\d \d\d:\d\d, .* wrote:$", line))


def solve(database: sqlite3.Connection, text: str) -> tuple[str | None, set[str]]:
    """The answer to a question, `None` if no email tells, and the ids of the emails that state it."""
    for pattern, attribute in ATTRIBUTES.items():
        if match := re.fullmatch(pattern, text):
            subject = next(filter(None, match.groups()))
            return solve_fact(database, subject, attribute)
    for pattern, solver in {
        r"Who approved (.+)\?": solve_approval,
        r"What is the order number of (.+)\?": solve_order_number,
        r"When will (.+) be delivered\?": solve_delivery,
    }.items():
        if match := re.fullmatch(pattern, text):
            return solver(database, match[1])
    raise AssertionError(f"the solver does not know the question {text!r}")


def solve_fact(database: sqlite3.Connection, subject: str, attribute: str) -> tuple[str | None, set[str]]:
    stated = re.compile(rf"the {attribute} for {re.escape(subject)} is (?:now )?(.+?)(?:, not |\sinstead of |\.)", re.I)
    statements = [(i, m[1]) for i, _, words in rows(database, subject) if (m := stated.search(words))]
    assert all(len(stated.findall(words)) <= 1 for _, _, words in rows(database, subject))
    return (statements[-1][1], {statements[-1][0]}) if statements else (None, set())


def solve_approval(database: sqlite3.Connection, order: str) -> tuple[str | None, set[str]]:
    ((message_id, name),) = [(i, name) for i, name, words in rows(database, order) if f"I approve {order}" in words]
    return name, {message_id}


def solve_order_number(database: sqlite3.Connection, order: str) -> tuple[str | None, set[str]]:
    ordered = re.compile(rf"ordered {re.escape(order)} from .*The order number is (\d+)\.")
    ((message_id, number),) = [(i, m[1]) for i, _, words in rows(database, order) if (m := ordered.search(words))]
    return number, {message_id}


def solve_delivery(database: sqlite3.Connection, order: str) -> tuple[str | None, set[str]]:
    number, _ = solve_order_number(database, order)
    told = re.compile(r"will (?:now )?be delivered on (\d+ \w+ \d{4})")
    days = [(i, m[1]) for i, _, words in rows(database, str(number)) if (m := told.search(words))]
    return days[-1][1], {days[-1][0]}


def disagreements(seed: int, size: int) -> Iterator[str]:
    world = generate(seed, size)
    assert len({question.text for question in world.questions}) == len(world.questions)
    for question in world.questions:
        answer, sources = solve(world.mailbox.database, question.text)
        if answer != question.answer or sources != {*question.sources}:
            yield f"{question}: the solver says {answer!r} in {sources}"
        if answer is not None and not is_right(question, answer):
            yield f"{question}: the solver's answer {answer!r} is not taken as right"
        for value in question.wrong:
            if is_right(question, value) or is_right(question, f"{value} or {question.answer}"):
                yield f"{question}: takes {value!r}"


def test_100_answers_are_in_the_sources_and_the_only_ones() -> None:
    assert len(generate(1, 500).questions) >= 100
    assert list(disagreements(1, 500)) == []


@pytest.mark.slow
def test_1000_answers_are_in_the_sources_and_the_only_ones() -> None:
    assert len(generate(2, 5_000).questions) >= 1_000
    assert list(disagreements(2, 5_000)) == []


def test_the_solver_notices_a_newer_email() -> None:
    world = generate(1, 500)
    question = next(question for question in world.questions if question.text.startswith("What is the deadline for"))
    database = sqlite3.connect(":memory:")
    world.mailbox.database.backup(database)
    subject = question.text.removeprefix("What is the deadline for ").rstrip("?")
    later = (
        "new",
        "t",
        "2026-03-15 10:00",
        "inbox",
        1,
        "Eve Rask",
        "e@x",
        "",
        f"The deadline for {subject} is 1 May 2027.",
    )
    database.execute(f"INSERT INTO emails VALUES (NULL{', ?' * 9}, '', '')", later)
    assert solve(database, question.text) == ("1 May 2027", {"new"})
