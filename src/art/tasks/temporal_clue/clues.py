"""The kinds of clues: how they are written, in sentences and in short, and the limits that they put on a world.

Clue("in", (0, 2, 1))        At eight, Ada was in the attic.        Ada attic eight
Clue("bearer_in", (1, 0, 1)) At eight, the bearer of the lamp was in the study.        lamp study eight
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from art.tasks.temporal_clue.model import Cast, Limit, Model, Pair

Statements = Literal["company", "facts", "denials", "all"]
"""Which kinds of clues a puzzle may have: see `KINDS_OF`."""
Style = Literal["sentences", "short"]


@dataclass(frozen=True, slots=True)
class Clue:
    kind: str
    words: tuple[int, ...]
    """Indices of the words in the cast's lists, in the order of the kind's slots."""


def _is(variable: int, value: int) -> Limit:
    return Limit(variable, 1 << value)


def _is_not(variable: int, value: int) -> Limit:
    return Limit(variable, ~(1 << value))


def _owner_in(model: Model, owner: int, room: int, hour: int) -> list[Limit | Pair]:
    """The suspect who has a weapon or motive was in this room at this hour. `owner` is a holder or feeler."""
    suspects = range(model.num_suspects)
    return [model.has_owner(owner), *(model.follows(owner, s, model.room(s, hour), room) for s in suspects)]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of clue. Slots of its texts: `{p}`, `{q}` two people, `{s}` a suspect, `{r}` a room, `{w}` a weapon, `{m}`
    a motive, `{h}` an hour, `{i}` the hour after `{h}`."""

    slots: str
    sentence: str
    short: str
    limits: Callable[..., list[Limit | Pair]]
    """The limits on the variables of a model, from the model and the words' indices in the order of `slots`."""


KINDS = {
    "in": Kind(
        "prh", "At {h}, {p} was in the {r}.", "{p} {r} {h}",
        lambda model, p, r, h: [_is(model.room(p, h), r)],
    ),
    "carries": Kind(
        "sw", "{s} carried the {w}.", "{s} {w}",
        lambda model, s, w: [_is(model.weapon_of(s), w)],
    ),
    "feels": Kind(
        "sm", "{s} was driven by {m}.", "{s} {m}",
        lambda model, s, m: [_is(model.motive_of(s), m)],
    ),
    "before": Kind(
        "h", "The murder happened before {h}.", "murder before {h}",
        lambda model, h: [Limit(model.when, (1 << h) - 1)],
    ),
    "after": Kind(
        "h", "The murder happened after {h}.", "murder after {h}",
        lambda model, h: [Limit(model.when, -1 << (h + 1))],
    ),
    "not_in": Kind(
        "prh", "At {h}, {p} was not in the {r}.", "{p} not {r} {h}",
        lambda model, p, r, h: [_is_not(model.room(p, h), r)],
    ),
    "carries_not": Kind(
        "sw", "{s} did not carry the {w}.", "{s} not {w}",
        lambda model, s, w: [_is_not(model.weapon_of(s), w)],
    ),
    "feels_not": Kind(
        "sm", "{s} was not driven by {m}.", "{s} not {m}",
        lambda model, s, m: [_is_not(model.motive_of(s), m)],
    ),
    "together": Kind(
        "pqh", "At {h}, {p} and {q} were in the same room.", "{p} with {q} {h}",
        lambda model, p, q, h: [model.same(model.room(p, h), model.room(q, h))],
    ),
    "apart": Kind(
        "pqh", "At {h}, {p} and {q} were in different rooms.", "{p} without {q} {h}",
        lambda model, p, q, h: [model.differ(model.room(p, h), model.room(q, h))],
    ),
    "empty": Kind(
        "rh", "At {h}, the {r} was empty.", "{r} empty {h}",
        lambda model, r, h: [_is_not(model.room(p, h), r) for p in range(model.num_suspects + 1)],
    ),
    "never": Kind(
        "pr", "{p} was never in the {r}.", "{p} never {r}",
        lambda model, p, r: [_is_not(model.room(p, h), r) for h in range(model.num_hours)],
    ),
    "stayed": Kind(
        "phi", "From {h} to {i}, {p} stayed in one room.", "{p} stayed {h} {i}",
        lambda model, p, h, i: [model.same(model.room(p, h), model.room(p, i))],
    ),
    "moved": Kind(
        "phi", "Between {h} and {i}, {p} went to another room.", "{p} moved {h} {i}",
        lambda model, p, h, i: [model.differ(model.room(p, h), model.room(p, i))],
    ),
    "bearer_in": Kind(
        "wrh", "At {h}, the bearer of the {w} was in the {r}.", "{w} {r} {h}",
        lambda model, w, r, h: _owner_in(model, model.holder(w), r, h),
    ),
    "driven_in": Kind(
        "mrh", "At {h}, the suspect driven by {m} was in the {r}.", "{m} {r} {h}",
        lambda model, m, r, h: _owner_in(model, model.feeler(m), r, h),
    ),
    "bearer_feels": Kind(
        "wm", "The bearer of the {w} was driven by {m}.", "{w} {m}",
        lambda model, w, m: [model.has_owner(model.holder(w)), model.same(model.holder(w), model.feeler(m))],
    ),
}  # fmt: skip
_FACTS = ("in", "carries", "feels", "before", "after")
KINDS_OF: dict[Statements, tuple[str, ...]] = {
    "company": ("in", "together", "carries", "feels"),
    "facts": _FACTS,
    "denials": (*_FACTS, "not_in", "carries_not", "feels_not"),
    "all": tuple(KINDS),
}


def limits_of(clue: Clue, model: Model) -> list[Limit | Pair]:
    """The limits that a clue puts on the variables of a model."""
    return KINDS[clue.kind].limits(model, *clue.words)


def all_clues(cast: Cast, statements: Statements) -> Iterator[Clue]:
    """All clues that can be said of a cast, true or not."""
    for name in KINDS_OF[statements]:
        kind = KINDS[name]
        for words in itertools.product(*(range(len(_words(cast, slot))) for slot in kind.slots)):
            if _is_sensible(kind, words):
                yield Clue(name, words)


def _is_sensible(kind: Kind, words: tuple[int, ...]) -> bool:
    """Two people are named once in a fixed order, and `{i}` is the hour after `{h}`."""
    if "q" in kind.slots:
        return words[0] < words[1]
    return "i" not in kind.slots or words[2] == words[1] + 1


def _words(cast: Cast, slot: str) -> tuple[str, ...]:
    return {
        "p": cast.people, "q": cast.people, "s": cast.suspects, "r": cast.rooms, "w": cast.weapons,
        "m": cast.motives, "h": cast.hours, "i": cast.hours,
    }[slot]  # fmt: skip


def write(clue: Clue, cast: Cast, style: Style) -> str:
    """Write a clue as a sentence or in short. In short, the hour is left out if there is only one."""
    kind = KINDS[clue.kind]
    words = {slot: _words(cast, slot)[index] for slot, index in zip(kind.slots, clue.words, strict=True)}
    return _template(kind, cast, style).format(**words)


def read(text: str, cast: Cast, style: Style) -> Clue | None:
    """Read a clue that is written as `write` does; `None` if it is no such clue."""
    for name, kind in KINDS.items():
        if match := re.fullmatch(_pattern(kind, cast, style), text.strip()):
            named = match.groupdict()
            words = tuple(_words(cast, slot).index(named[slot]) if slot in named else 0 for slot in kind.slots)
            words = (*sorted(words[:2]), *words[2:]) if "q" in kind.slots else words
            return Clue(name, words) if _is_sensible(kind, words) else None
    return None


def _template(kind: Kind, cast: Cast, style: Style) -> str:
    if style == "sentences":
        return kind.sentence
    return kind.short if len(cast.hours) > 1 else kind.short.removesuffix(" {h}")


@cache
def _pattern(kind: Kind, cast: Cast, style: Style) -> str:
    def words(slot: re.Match[str]) -> str:
        return f"(?P<{slot[1]}>{'|'.join(_words(cast, slot[1]) or ['(?!)'])})"

    return re.sub(r"\\{(.)\\}", words, re.escape(_template(kind, cast, style)))
