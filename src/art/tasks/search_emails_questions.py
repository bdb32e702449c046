"""What a prompt asks of the mailbox, and which answers are right.

    What is the budget of "opal"?             the value "47", or a sentence that has no other number
    Find all unread emails from last week.    the subjects or the ids of these emails, all of them and no others
    How many unread emails are from Ann?      their number

Emails are chosen by what is named: a topic, an attribute, a sender, "unread" or "already read", and a time ("today",
"yesterday", "this week", "last week", "last 10 days", "this month", "last month", "since 2026-03-09", and likewise
after, until, before, on). Any other prompt has no answer in the mailbox, and "I don't know" is what fits.
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
    text: str
    kind: Literal["value", "emails", "number"] = "value"
    wanted: tuple[Email, ...] = ()
    """The emails that hold the answer, or are it. Without one a `value` is not in the mailbox."""

    def judge(self, answer: str, mailbox: Mailbox) -> str:
        """The outcome of an answer."""
        if self.kind == "emails":
            named = named_emails(answer, mailbox.emails)
            if named == set(self.wanted) and (named or _NONE.search(answer.lower())):
                return "correct"
            return judge(answer, None)
        if self.kind == "number":
            return judge(answer, str(len(self.wanted)))
        return judge(answer, self.wanted[0].value if self.wanted else None)


def judge(answer: str, expected: str | None) -> str:
    """The outcome of an answer: right is the value itself, or a sentence that has no other number."""
    numbers = "".join(c if c.isdigit() else " " for c in answer).split()
    if expected is not None and numbers == [expected]:
        return "correct"
    return "no_idea" if answer.strip().rstrip(".").lower() == NO_IDEA.lower() else "wrong"


def named_emails(answer: str, emails: Iterable[Email]) -> set[Email]:
    """The emails whose subjects an answer has; where it has none, those whose ids it has."""
    by_subject = {email for email in emails if email.subject in answer.lower()}
    numbers = set(re.findall(r"\d+", re.sub(_DATE, "", answer)))
    return by_subject or {email for email in emails if str(email.id) in numbers}


def question_about(email: Email) -> Question:
    return Question(text=f'What is the {email.attribute} of "{email.topic}"?', wanted=(email,))


def read_question(prompt: str, mailbox: Mailbox) -> Question:
    """What somebody asks in words of their own."""
    said = prompt.lower()
    words = set(re.findall(r"[\w-]+", said))
    narrowed = _read_filter(said, words)
    about = [email for email in mailbox.emails if _is_about(email, words)]
    if narrowed.unread is not None or _SEVERAL.search(said):
        if narrowed == Filter() and not words & {*TOPICS, *ATTRIBUTES}:
            return Question(text=prompt)
        kind: Literal["number", "emails"] = "number" if "how many" in said else "emails"
        return Question(text=prompt, kind=kind, wanted=tuple(filter(narrowed.takes, about)))
    exact = [email for email in about if {email.topic, email.attribute} <= words]
    return Question(text=prompt, wanted=tuple(exact[:1]))


def _is_about(email: Email, words: set[str]) -> bool:
    """It has the topic and the attribute that are named, where one is."""
    topics, attributes = words & {*TOPICS}, words & {*ATTRIBUTES}
    return (not topics or email.topic in topics) and (not attributes or email.attribute in attributes)


def _read_filter(said: str, words: set[str]) -> Filter:
    unread = True if "unread" in words else False if _ALREADY_READ.search(said) else None
    since, until = _read_days(said)
    sender = next((name for name in SENDERS if name.lower() in words), None)
    return Filter(unread=unread, sender=sender, since=since, until=until)


def _read_days(said: str) -> tuple[date | None, date | None]:
    """The first and the last day that are meant."""
    day, month = timedelta(days=1), TODAY.replace(day=1)
    monday = TODAY - TODAY.weekday() * day
    spans = {
        "today": (TODAY, TODAY), "yesterday": (TODAY - day, TODAY - day), "this week": (monday, TODAY),
        "last week": (monday - 7 * day, monday - day), "past week": (monday - 7 * day, monday - day),
        "this month": (month, TODAY), "last month": ((month - day).replace(day=1), month - day),
    }  # fmt: skip
    for words, span in spans.items():
        if re.search(rf"\b{words}\b", said):
            return span
    if days := re.search(r"\b(?:last|past) (\d{1,3}) days\b", said):
        return TODAY - int(days[1]) * day, TODAY
    since, until = None, None
    for how, written in re.findall(rf"\b(since|from|after|until|to|before|on) ({_DATE})\b", said):
        try:
            named = date.fromisoformat(written)
        except ValueError:
            continue
        if how in ("since", "from", "on", "after"):
            since = named + day if how == "after" else named
        if how in ("until", "to", "on", "before"):
            until = named - day if how == "before" else named
    return since, until
