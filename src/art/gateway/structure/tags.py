"""How a chat template writes calls whose arguments have a tag each, and strings without quotation marks.

    <function= zq_one > \\n<parameter= zqa >\\n zq1 \\n</parameter> \\n<parameter= zqb >\\n zq2 \\n</parameter>\\n</...
    head       name middle first   key value   close         following     key

As for calls with JSON arguments (`style.py`), all of it is found in what the template makes of probe calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from art.gateway.parsing.typed_text import typed
from art.gateway.structure.pieces import Pieces, pieces

RenderCalls: TypeAlias = Callable[[Sequence[str]], tuple[str, int] | None]
"""Renders an answer with one call for each JSON text of arguments: its text and the token that ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagStyle:
    """What surrounds the arguments of a call."""

    first: Pieces
    """Before the first key."""
    value: Pieces
    """Between a key and its value."""
    close: str
    """Text after a value that is part of every argument; empty where a special token ends values."""
    following: Pieces
    """After `close`, up to the next key."""
    last: Pieces
    """After `close`, up to where a call without arguments ends."""
    empty: Pieces
    """In place of all this in a call without arguments."""
    closing_tags: tuple[str, ...]
    """Text that ends arguments and calls, so that no value may contain it."""
    words: Mapping[bool | None, str]
    """How the template writes true, false and null."""
    nested_json: bool
    """Whether the template writes lists and objects as JSON. Answers always do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """What surrounds calls, as text, and their arguments."""

    head: str
    middle: str
    between: str | None
    tail: str
    item_separator: str
    key_separator: str
    tags: TagStyle


_PLAIN = '{"zqa": "zq1", "zqb": "zq2"}'
_TYPED = '{"zqa": true, "zqb": false, "zqc": null, "zqd": {"zqe": [1, "zq3"]}}'
_NESTED = re.compile(r'\{"zqe"(?P<key>:\s*)\[1(?P<item>,\s*)"zq3"\]\}')
_CLOSING_TAG = re.compile(r"</[^<>\s]+>")


def find_tags(render: RenderCalls, spell: Callable[[str], str], names: tuple[str, str]) -> TaggedCalls | None:
    """Find out what surrounds calls and arguments; `None` if the template has no closing tag after each argument.

    Args:
        spell: writes out the special tokens of a rendered text.
        names: the functions that the rendered calls name, in their order.
    """
    rendered = [render(probe) for probe in ([_PLAIN], ["{}"], [_TYPED])]
    if None in rendered:
        return None
    plain, empty, of_types = (one[0] for one in rendered if one is not None)
    match = re.fullmatch(
        rf"(?P<head>.*?){names[0]}(?P<middle>.*?)zqa(?P<value>.*?)zq1(?P<next>.*?)zqb(?P=value)zq2(?P<end>.*)",
        plain,
        re.DOTALL,
    )
    if match is None or not empty.startswith(match["head"] + names[0]):
        return None
    head, middle, value, following, end = match.groups()
    nothing = empty[len(head) + len(names[0]) :]
    close, ended = _find_close(_shared(following, end), spell)
    tail = _shared(end[len(ended) :][::-1], nothing[::-1])[::-1]
    written = _find_typed(of_types, (head + names[0] + middle, value, following, end))
    if not ended or written is None or [typed(text, None) for text in written[:3]] != [True, False, None]:
        return None
    last, nothing = end.removesuffix(tail), nothing.removesuffix(tail)
    opened = _shared(middle, nothing)
    nested = _NESTED.fullmatch(written[3])
    return TaggedCalls(
        head=head,
        middle=opened,
        between=_find_between(render, names, (head, middle, value, following, last, tail)),
        tail=tail,
        item_separator=", " if nested is None else nested["item"],
        key_separator=": " if nested is None else nested["key"],
        tags=TagStyle(
            first=pieces(middle.removeprefix(opened)),
            value=pieces(value),
            close=close,
            following=pieces(following.removeprefix(close)),
            last=pieces(last.removeprefix(close)),
            empty=pieces(nothing.removeprefix(opened)),
            closing_tags=tuple(dict.fromkeys(_CLOSING_TAG.findall(spell(following + end)))),
            words=dict(zip((True, False, None), written, strict=False)),
            nested_json=nested is not None,
        ),
    )


def _shared(one: str, other: str) -> str:
    """The text with which both begin."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _find_close(shared: str, spell: Callable[[str], str]) -> tuple[str, str]:
    """Text that ends each value, without and with a special token at its end; both empty if nothing ends values.

    Args:
        shared: what follows both a value before another one and the last value.
    """
    for i in range(1, len(shared) + 1):
        if _CLOSING_TAG.search(spell(shared[:i])):
            special = spell(shared[i - 1]) != shared[i - 1]
            return shared[: i - 1] if special else shared[:i], shared[:i]
    return "", ""


def _find_typed(text: str, parts: tuple[str, str, str, str]) -> list[str] | None:
    """How the template writes the values of `_TYPED`."""
    start, value, following, end = map(re.escape, parts)
    keys = json.loads(_TYPED)
    arguments = following.join(f"{key}{value}(.*?)" for key in keys)
    match = re.fullmatch(f"{start}{arguments}{end}", text, re.DOTALL)
    return None if match is None else list(match.groups())


def _find_between(render: RenderCalls, names: tuple[str, str], parts: tuple[str, ...]) -> str | None:
    """What follows the arguments of a call up to the name of the next; `None` where an answer has a single call."""
    one, two = render([_PLAIN]), render([_PLAIN, _PLAIN])
    head, middle, value, following, last, tail = map(re.escape, parts)
    if one is None or two is None or one[1] != two[1]:
        return None
    arguments = f"{middle}zqa{value}zq1{following}zqb{value}zq2{last}"
    match = re.fullmatch(f"{head}{names[0]}{arguments}(.*?){names[1]}{arguments}{tail}", two[0], re.DOTALL)
    return None if match is None else match[1]
