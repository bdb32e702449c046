"""Understand a user's own question about a mailbox, as far as its right answer can be looked up.

    What is the budget of "opal"?             a question that the mailbox was generated with
    Find all unread emails from last week.    these emails
    How many unread emails are from Ann?      their number

A prompt selects emails by "unread" or "already read", sender, what they are `about`, and time ("today", "yesterday",
"this week", "last week", "last 10 days", "this month", "last month", "since 2026-03-09", and also after, until, before,
on). The right answer to any other prompt is not known, and a judge has to score it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, timedelta

from art.tasks.mail_search.mailbox import Email, Mailbox
from art.tasks.mail_search.questions import Question, plain

_DATE = r"\d{4}-\d\d-\d\d"
_SEVERAL = re.compile(r"\b(e-?mails|mails|messages)\b")
_ALREADY_READ = re.compile(r"\b(already|have|i've) read\b|\bread (e-?mails|mails|messages) (from|of)\b")
_ABOUT = re.compile(r"\babout \"?([^\"?.!]+)")
_NONE = re.compile(r"\b(no|none|nothing|zero|0)\b")


def read_prompt(prompt: str, mailbox: Mailbox, questions: Sequence[Question], today: date) -> Question:
    """Read a user's prompt as a question about the mailbox. If its answer cannot be looked up, its kind is `open`."""
    text = prompt.lower()
    words = f" {plain(prompt)} "
    if not _SEVERAL.search(text):
        same = [question for question in questions if plain(question.text) == plain(prompt)]
        near = [question for question in questions if all(f" {plain(word)} " in words for word in question.keywords)]
        return (same or (near if len(near) == 1 else None) or [Question(text=prompt, kind="open")])[0]
    emails = mailbox.all()
    chosen = _select(text, words, emails, today)
    if chosen is None:
        return Question(text=prompt, kind="open")
    ids = [email.message_id for email in chosen]
    if "how many" in text:
        return Question(text=prompt, kind="number", answer=str(len(ids)), sources=ids)
    return Question(text=prompt, kind="emails", sources=ids)


def names_the_emails(question: Question, answer: str, mailbox: Mailbox) -> bool:
    """Whether an answer names exactly the emails of a question, by their subjects or their ids."""
    emails, right = mailbox.all(), {*question.sources}
    numbers = {*re.findall(r"\w+", re.sub(_DATE, "", answer))}
    named = {email.message_id for email in emails if email.subject.lower() in answer.lower()}
    named = named or {email.message_id for email in emails if email.message_id in numbers}
    return named == right and bool(named or _NONE.search(answer.lower()))


def _select(text: str, words: str, emails: list[Email], today: date) -> list[Email] | None:
    """The emails that a prompt selects; `None` if it does not say which."""
    since, until = _read_days(text, today)
    unread = "unread" in text or (False if _ALREADY_READ.search(text) else None)
    names = {name for email in emails for name in (plain(email.from_name), plain(email.from_name).partition(" ")[0])}
    sender = max((name for name in names if name and f" {name} " in words), key=len, default=None)
    about = _ABOUT.search(text)
    if (since, until, unread, sender, about) == (None,) * 5:
        return None
    return [
        email
        for email in emails
        if unread in (None, not email.is_read)
        and (sender is None or f" {sender} " in f" {plain(email.from_name)} ")
        and (since is None or email.date[:10] >= str(since))
        and (until is None or email.date[:10] <= str(until))
        and (about is None or about[1].strip() in f"{email.subject}\n{email.body}".lower())
    ]


def _read_days(text: str, today: date) -> tuple[date | None, date | None]:
    """The first and the last day that a prompt names; `None` where it names none."""
    day, month = timedelta(days=1), today.replace(day=1)
    monday = today - today.weekday() * day
    spans = {
        "today": (today, today), "yesterday": (today - day, today - day), "this week": (monday, today),
        "last week": (monday - 7 * day, monday - day), "past week": (monday - 7 * day, monday - day),
        "this month": (month, today), "last month": ((month - day).replace(day=1), month - day),
    }  # fmt: skip
    for words, span in spans.items():
        if re.search(rf"\b{words}\b", text):
            return span
    if days := re.search(r"\b(?:last|past) (\d{1,3}) days\b", text):
        return today - int(days[1]) * day, today
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
