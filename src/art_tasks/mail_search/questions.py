"""Questions about a mailbox, and whether an answer is right.

MailQuestion(text="What is the budget for Project Blue Heron?", kind="number", answer="48,300 EUR",
         wrong=["45,000 EUR"], sources=["m48213"])

is_right(question, "It is 48.300 euros since 12 March.")     True
is_right(question, "45,000 or 48,300 EUR")                   False: two numbers are a guess
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

NO_IDEA = "I don't know"
MAX_NAME_WORDS = 40
"""Longest answer, in words, that may name a person, a place or a code. A longer one is a copy of an email."""
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = rf"({'|'.join(_MONTHS)})(?:uary|ruary|ch|il|e|y|ust|t|tember|ober|ember)?\.?"
_DATES = (
    (re.compile(r"\b(\d{4})-(\d\d?)-(\d\d?)\b"), "ymd"),
    (re.compile(r"\b(\d\d?)\.(\d\d?)\.(\d{4})\b"), "dmy"),
    (re.compile(rf"\b(\d\d?)(?:st|nd|rd|th)?(?: of)? {_MONTH}(?:,? (\d{{4}}))?\b", re.I), "dmy"),
    (re.compile(rf"\b{_MONTH} (\d\d?)(?:st|nd|rd|th)?(?:,? (\d{{4}}))?\b", re.I), "mdy"),
)
_TIME = re.compile(r"\b\d\d?:\d\d\b")
_NUMBER = re.compile(
    r"(?<![\w.,])(?:EUR|USD|[€$£])? ?(\d+(?:[ .,'’]\d{3})*(?:[.,]\d+)?) ?(k|m|thousand|million)?(?!\w)", re.I
)
_SCALES = {"k": 1e3, "thousand": 1e3, "m": 1e6, "million": 1e6}
_NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_IS_NO_IDEA = re.compile(
    r"\b((do not|don't|cannot|can't|could not|couldn't) (know|tell|find|say)|(is|was) not (stated|mentioned|given)"
    r"|no (information|answer|mention)|(not|nothing) (in|found in) the (mailbox|emails?)|unknown)\b",
    re.I,
)


class MailQuestion(BaseModel):
    """A question about a mailbox with what is needed to grade answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    kind: Literal["number", "date", "name", "code", "open"]
    """How answers are compared. `open`: the right answer is not known."""
    answer: str | None = None
    """The right answer. `None`: the mailbox does not tell, so "I don't know" is right."""
    wrong: list[str] = Field(default_factory=list)
    """Values that a right answer must not name, e.g. those that are out of date."""
    sources: list[str] = Field(default_factory=list)
    """Ids of the emails that state the answer."""
    keywords: list[str] = Field(default_factory=list)
    """Words with which a search finds the sources."""

    @property
    def is_unanswerable(self) -> bool:
        return self.answer is None and self.kind != "open"


def says_no_idea(answer: str) -> bool:
    """Whether an answer says that the mailbox does not tell, rather than anything else."""
    return bool(_IS_NO_IDEA.search(answer.replace("’", "'"))) and len(answer.split()) <= MAX_NAME_WORDS


def is_right(question: MailQuestion, answer: str) -> bool:
    """Whether an answer to a question with a known answer states it, and nothing that contradicts it."""
    expected = question.answer
    if expected is None:
        return False
    if question.kind == "number":
        return numbers_in(answer) - (numbers_in(question.text) - numbers_in(expected)) == numbers_in(expected)
    if question.kind == "date":
        dates = dates_in(answer)
        return bool(dates) and all(_same_day(date, _date(expected)) for date in dates) and not _is_range(answer)
    if question.kind == "code":
        return _codes_fit(answer, expected, question.wrong)
    named = f" {plain(answer)} "
    others = [plain(value) for value in question.wrong]
    return (
        f" {plain(expected)} " in named
        and not any(f" {value} " in named for value in others if value)
        and len(named.split()) <= MAX_NAME_WORDS
    )


def plain(text: str) -> str:
    """Text in lower case without accents and signs, with single spaces: "Renée O'Neil" is "renee o neil"."""
    letters = unicodedata.normalize("NFKD", text.casefold())
    return " ".join(re.findall(r"\w+", "".join(c for c in letters if not unicodedata.combining(c))))


def numbers_in(text: str) -> set[float]:
    """All numbers in a text besides dates and times: `48,300`, `48.300`, `48 300`, `48.3k`, `twelve`.

    The words `zero` and `one` count if the text has no other number, since `one` has other meanings.
    """
    for pattern in (*(pattern for pattern, _ in _DATES), _TIME):
        text = pattern.sub(" ", text)
    numbers = {round(_number(digits) * _SCALES.get(scale.lower(), 1), 6) for digits, scale in _NUMBER.findall(text)}
    words = {float(_NUMBER_WORDS.index(word)) for word in plain(text).split() if word in _NUMBER_WORDS}
    return numbers | (words - {0.0, 1.0}) or words


def _number(digits: str) -> float:
    """The value of a number in any of the usual ways to write it. Three digits after a sign are thousands."""
    digits = re.sub(r"[ '’]", "", digits)
    if re.fullmatch(r"\d{1,3}([.,]\d{3})+", digits):
        return float(re.sub(r"[.,]", "", digits))
    *whole, last = re.split(r"[.,]", digits)
    return float(f"{''.join(whole)}.{last}") if whole else float(last)


def dates_in(text: str) -> set[tuple[int | None, int, int]]:
    """All dates in a text as (year, month, day), with `None` for a year that is left out."""
    dates = set()
    for pattern, order in _DATES:
        for match in pattern.findall(text):
            parts = dict(zip(order, match, strict=True))
            month = parts["m"].lower()
            number = _MONTHS.index(month) + 1 if month in _MONTHS else int(month)
            dates.add((int(parts["y"]) if parts["y"] else None, number, int(parts["d"])))
    return {date for date in dates if date[0] is not None or all(date[1:] != other[1:] for other in dates - {date})}


def _date(text: str) -> tuple[int | None, int, int]:
    (date,) = dates_in(text)
    return date


def _same_day(date: tuple[int | None, int, int], expected: tuple[int | None, int, int]) -> bool:
    return date[1:] == expected[1:] and (date[0] is None or date[0] == expected[0])


def _is_range(text: str) -> bool:
    """Whether a text has a second day with the same month: `13 or 14 May`."""
    for pattern, _ in _DATES:
        text = pattern.sub("@", text)
    return bool(re.search(r"\b\d\d?(st|nd|rd|th)?,?\s*(or|and|to|[-–/,])\s*@", text))


def _codes_fit(answer: str, expected: str, wrong: list[str]) -> bool:
    """Whether an answer has the expected code, with or without spaces and signs in it, and no outdated one."""

    def has(code: str) -> bool:
        parts = [re.escape(part) for part in re.findall(r"[a-z]+|\d+", code.lower())]
        return bool(re.search(rf"(?<![a-z0-9]){'[ -]?'.join(parts)}(?![a-z0-9])", answer.lower()))

    return has(expected) and not any(map(has, wrong)) and len(answer.split()) <= MAX_NAME_WORDS
