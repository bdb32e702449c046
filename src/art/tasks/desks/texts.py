"""Reads texts that were made from a form such as "Set the price of {} to {}."."""

from __future__ import annotations

import re


def match_form(form: str, text: str, *, spaces: bool = False) -> list[str] | None:
    """Return the words in the places of a form's `{}`, or `None` for a text of another form.

    With `spaces`, a place may hold several words.

    Example: "{} of {}" and "2 of P-1" give ["2", "P-1"].
    """
    word = "(.+)" if spaces else r"(\S+)"
    matched = re.fullmatch(word.join(map(re.escape, form.split("{}"))), text)
    return list(matched.groups()) if matched else None
