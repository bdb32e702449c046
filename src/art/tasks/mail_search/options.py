"""What a user may choose about the task `mail_search`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Literal

from pydantic import Field, model_validator

from art.errors import ConfigError
from art.task import TaskOptions
from art.tasks.mail_search.enron import EMAILS, QUESTIONS
from art.tasks.mail_search.generator.people import MAX_PEOPLE
from art.tasks.mail_search.questions import Level
from art.utils.attributes import load_attribute

Checker = Callable[[str, str, str], bool | Awaitable[bool]]
"""Tells from a question, its right answer and the policy's answer whether the last one is right."""


class MailSearchOptions(TaskOptions):
    """Options of the task `mail_search`."""

    mailbox: Literal["generated", "short", "enron"] = "generated"
    """`generated`: realistic mailboxes with threads, corrections and attachments. `short`: a dozen one-line emails,
    which a tiny model can learn. `enron`: the emails and questions that `emails` and `questions` name."""
    max_turns: int = Field(10, ge=2, le=100)
    """Number of assistant messages of a rollout."""
    size: int = Field(1_000, ge=100, le=50_000)
    """Number of emails of a generated mailbox."""
    people: int = Field(40, ge=20, le=MAX_PEOPLE)
    """Number of people of a generated mailbox."""
    mailboxes: int = Field(16, ge=1, le=1_000)
    """Number of generated mailboxes in each split. Each has a question for about four emails."""
    level: Literal["all"] | Level = "all"
    """Difficulty of the questions about a generated mailbox. `easy`: one email states the answer in the question's
    words. `medium`: it was changed in a reply, is in an attachment, or is asked for in other words. `hard`: several
    changes, several emails, or no answer."""
    emails: str = EMAILS
    """Enron emails: a file, a folder, an archive of maildirs, or a data set on the hub."""
    questions: str = QUESTIONS
    """Questions about the Enron emails: a file, a folder, or a data set on the hub."""
    checker: str | None = None
    """`module:function` that checks answers in place of the built-in comparison, e.g. by asking a language model:
    `(question, right_answer, answer) -> bool`, which may be asynchronous."""

    @model_validator(mode="after")
    def _fits_the_mailbox(self) -> MailSearchOptions:
        only = {
            "generated": ("size", "people", "mailboxes", "level"), "enron": ("emails", "questions"), "short": ()
        }  # fmt: skip
        for mailbox, names in only.items():
            fields = type(self).model_fields
            unused = [name for name in names if mailbox != self.mailbox and getattr(self, name) != fields[name].default]
            if unused:
                raise ValueError(f"{', '.join(unused)} has no effect with mailbox={self.mailbox}; leave it out")
        return self


class ShortOptions(MailSearchOptions):
    """Options of the task `search_emails`, the short form under an older name."""

    mailbox: Literal["short"] = "short"
    """Only `short`. The task `mail_search` has the others."""


@cache
def load_checker(path: str) -> Checker:
    checker = load_attribute(path, "checker")
    if not callable(checker):
        raise ConfigError(f"checker {path!r}: expected a function, got {checker!r}")
    return checker  # type: ignore[no-any-return]
