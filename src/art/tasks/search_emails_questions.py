"""Understand what a prompt asks about the mailbox, and decide which answers are correct.

    What is the budget of "opal"?             the value "47", or a sentence with no other number
    Find all unread emails from last week.    the subjects or ids of exactly these emails
    How many unread emails are from Ann?      their number

A prompt selects emails by topic, attribute, sender, "unread" or "already read", and time ("today", "yesterday", "this
week", "last week", "last 10 days", "this month", "last month", "since 2026-03-09", and also after, until, before, on).
Any other prompt has no answer in the mailbox, so "I don't know" fits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal

from art.tasks.search_emails_mailbox import ATTRIBUTES, SENDERS, TODAY, TOPICS, Email, Filter, Mailbox

NO_IDEA = "I don't know"
_DATE = r"\d{4}-\d\d-\d\d"
_SEVERAL = re.compile(r"\b(e-?mails|mails|messages)\b")
_ALREADY_READ = re.compile(r"\b(already|have|i've) read\b|\bread (e-?mails|mails|messages) (from|of)\b")
_NONE = re.compile(r"\b(no|none|nothing|zero|0)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with the emails that answer it."""

    text: str
    kind: Literal["value", "emails", "number"] = "value"
    emails: tuple[Email, ...] = ()
    """The emails that are the answer, or whose text contains it. If empty, a `value` is not in the mailbox."""

    def judge(self, answer: str, mailbox: Mailbox) -> str:
        """The outcome of an answer: `correct`, `no_idea` or `wrong`."""
        if self.kind == "emails":
            named = named_emails(answer, mailbox.emails)
            if named == set(self.emails) and (named or _NONE.search(answer.lower())):
                return "correct"
            return judge(answer, None)
        if self.kind == "number":
            return judge(answer, str(len(self.emails)))
        return judge(answer, self.emails[0].value if self.emails else None)


def judge(answer: str, expected: str | None) -> str:
    """The outcome of an answer: `correct` if its only number is `expected`, `no_idea` if it says so, else `wrong`."""
    numbers = "".join(c if c.isdigit() else " " for c in answer).split()
    if expected is not None and numbers == [expected]:
        return "correct"
    return "no_idea" if answer.strip().rstrip(".").lower() == NO_IDEA.lower() else "wrong"


def named_emails(answer: str, emails: Iterable[Email]) -> set[Email]:
    """The emails that an answer names by their subjects, or else by their ids."""
    by_subject = {email for email in emails if email.subject in answer.lower()}
    numbers = set(re.findall(r"\d+", re.sub(_DATE, "", answer)))
    return by_subject or {email for email in emails if str(email.id) in numbers}


def question_about(email: Email) -> Question:
    return Question(text=f'What is the {email.attribute} of "{email.topic}"?', emails=(email,))


def read_question(prompt: str, mailbox: Mailbox) -> Question:
    """Read a user's prompt as a question about the mailbox, with the emails that answer it."""
    text = prompt.lower()
    words = set(re.findall(r"[\w-]+", text))
    condition = _read_filter(text, words)
    about = [email for email in mailbox.emails if _is_about(email, words)]
    if condition.unread is not None or _SEVERAL.search(text):
        if condition == Filter() and not words & {*TOPICS, *ATTRIBUTES}:
            return Question(text=prompt)
        kind: Literal["number", "emails"] = "number" if "how many" in text else "emails"
        return Question(text=prompt, kind=kind, emails=tuple(filter(condition.matches, about)))
    exact = [email for email in about if {email.topic, email.attribute} <= words]
    return Question(text=prompt, emails=tuple(exact[:1]))


def _is_about(email: Email, words: set[str]) -> bool:
    """Whether an email has the topic and the attribute that the prompt names, if it names any."""
    topics, attributes = words & {*TOPICS}, words & {*ATTRIBUTES}
    return (not topics or email.topic in topics) and (not attributes or email.attribute in attributes)


def _read_filter(text: str, words: set[str]) -> Filter:
    unread = True if "unread" in words else False if _ALREADY_READ.search(text) else None
    since, until = _read_days(text)
    sender = next((name for name in SENDERS if name.lower() in words), None)
    return Filter(unread=unread, sender=sender, since=since, until=until)


def _read_days(text: str) -> tuple[date | None, date | None]:
    """The first and the last day that a prompt names; `None` where it names none."""
    day, month = timedelta(days=1), TODAY.replace(day=1)
    monday = TODAY - TODAY.weekday() * day
    spans = {
        "today": (TODAY, TODAY), "yesterday": (TODAY - day, TODAY - day), "this week": (monday, TODAY),
        "last week": (monday - 7 * day, monday - day), "past week": (monday - 7 * day, monday - day),
        "this month": (month, TODAY), "last month": ((month - day).replace(day=1), month - day),
    }  # fmt: skip
    for words, span in spans.items():
        if re.search(rf"\b{words}\b", text):
            return span
    if days := re.search(r"\b(?:last|past) (\d{1,3}) days\b", text):
        return TODAY - int(days[1]) * day, TODAY
    since, until = None, None
    for how, written in re.findall(rf"\b(since|from|after|until|to|before|on) ({_DATE})\b", text):
        try:
            named = date.fromisoformat(written)
        except ValueError:
            continue
        if how in ("since", "from", "on", "after"):
            since = named + day if how == "after" else named
        if how in ("until", "to", "on", "before"):
            until = named - day if how == "before" else named
    return since, until
