"""Which answers count as right: numbers, dates, names, codes and free texts in the ways in which people write them."""

from __future__ import annotations

from typing import Any

import pytest

from art_tasks.mail_search.questions import MailQuestion, dates_in, is_right, numbers_in, says_no_idea

AMOUNT = {"text": "What is the budget for Project Blue Heron?", "kind": "number", "answer": "48,300 EUR"}
PRICE = {"text": "What is the price of 12 desk lamps?", "kind": "number", "answer": "89.50 EUR"}
COUNT = {"text": "How many people come?", "kind": "number", "answer": "4"}
DAY = {"text": "When will it be delivered?", "kind": "date", "answer": "14 May 2026"}
PERSON = {"text": "Who approved it?", "kind": "name", "answer": "Renée Sorensen", "wrong": ["Ivo Novak"]}
HOTEL = {"text": "Where do we stay?", "kind": "name", "answer": "Calm Otter House", "wrong": ["Red Heron Inn"]}
FLIGHT = {"text": "Which flight?", "kind": "code", "answer": "KQ 4580", "wrong": ["NB 5939"]}


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (AMOUNT, "48,300 EUR"), (AMOUNT, "48300"), (AMOUNT, "€48.300"), (AMOUNT, "48.3k"), (AMOUNT, "48 300 euros"),
        (AMOUNT, "The budget was raised to 48,300.00 EUR on 12 March 2026 at 14:20."),
        (PRICE, "89.5"), (PRICE, "89,50 €"), (PRICE, "One of the 12 desk lamps costs 89.50 EUR."),
        (COUNT, "Four people."), (COUNT, "4"),
        (DAY, "2026-05-14"), (DAY, "May 14, 2026"), (DAY, "on the 14th of May"), (DAY, "14.5.2026"), (DAY, "14 MAY 2026."),
        (DAY, "Order 48213 will come on 14 May 2026"),
        (PERSON, "It was Renee Sorensen."), (PERSON, "renée  sorensen"), (PERSON, "Renée Sorensen approved what Ida asked for"),
        (HOTEL, "At the Calm Otter House"), (FLIGHT, "KQ4580"), (FLIGHT, "flight kq-4580"),
    ],
)  # fmt: skip
def test_right(question: dict[str, Any], answer: str) -> None:
    assert is_right(MailQuestion(**question), answer)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (AMOUNT, "45,000 or 48,300 EUR"), (AMOUNT, "4,830 EUR"), (AMOUNT, "148,300"), (AMOUNT, ""), (AMOUNT, "m48300"),
        (AMOUNT, "on 12 March 2026"), (PRICE, "8950"), (PRICE, "12"), (COUNT, "4 or five"), (COUNT, "nobody"),
        (DAY, "14 May 2027"), (DAY, "13 or 14 May 2026"), (DAY, "14 May 2026, or 15 May 2026"), (DAY, "May 2026"), (DAY, "14"),
        (PERSON, "Ivo Novak"), (PERSON, "Ivo Novak or Renée Sorensen"), (PERSON, "Renée"), (PERSON, "word " * 50 + "Renée Sorensen"),
        (HOTEL, "Calm Otter"), (FLIGHT, "KQ 458"), (FLIGHT, "KQ 45801"), (FLIGHT, "NB 5939, then KQ 4580"),
    ],
)  # fmt: skip
def test_wrong(question: dict[str, Any], answer: str) -> None:
    assert not is_right(MailQuestion(**question), answer)


@pytest.mark.parametrize(
    ("answer", "gives_up"),
    [
        ("I don't know", True), ("I don’t know.", True), ("The date is not mentioned in any email.", True),
        ("Sorry, I could not find the hotel.", True), ("There is no information about it", True), ("", False),
        ("48,300 EUR", False), ("Nobody knows, but it is 5", False), ("word " * 60 + "I don't know", False),
    ],
)  # fmt: skip
def test_giving_up(answer: str, gives_up: bool) -> None:
    assert says_no_idea(answer) == gives_up


def test_numbers_and_dates_are_told_apart() -> None:
    assert numbers_in("On 14 May 2026 at 9:30 we paid 1,234.50 EUR, 2 million USD and three cents") == {
        1234.5,
        2e6,
        3.0,
    }
    assert numbers_in("number one") == {1.0}
    assert numbers_in("one of 5") == {5.0}
    assert dates_in("14 May 2026, 2026-05-14 and June 1st; Mark 12") == {(2026, 5, 14), (None, 6, 1)}
