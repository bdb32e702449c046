"""Make puzzles: a random world, questions about it, and clues from which exactly one answer to each question follows.

Clues are chosen by counterexample: as long as the solver finds a world with other answers, a true clue that is false
there is added. Then each clue is left out that is not needed, so that the clues are minimal.

A kind of clues says how they are written, in sentences and in short, and what limits they put on a world:

CaseClue("in", (0, 2, 1))        At eight, Ada was in the attic.        Ada attic eight
CaseClue("bearer_in", (1, 0, 1)) At eight, the bearer of the lamp was in the study.        lamp study eight
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from art.task import TaskOptions
from art_tasks.clue_solver import CaseModel, Cast, Pair, Solver, ValueLimit, World, holds

SUSPECTS = (
    "Ada", "Basil", "Cora", "Dorian", "Edith", "Felix", "Greta", "Hugo", "Iris", "Jasper", "Leonie", "Norbert",
)  # fmt: skip
ROOMS = (
    "study", "attic", "cellar", "kitchen", "library", "terrace", "chapel", "gallery", "pantry", "nursery", "stable",
    "tower",
)  # fmt: skip
WEAPONS = (
    "hatpin", "shovel", "scissors", "corkscrew", "bottle", "hammer", "scarf", "lamp", "chisel", "sickle", "trophy",
    "anvil",
)  # fmt: skip
MOTIVES = (
    "envy", "greed", "fear", "revenge", "pride", "debt", "shame", "rivalry", "boredom", "ambition", "spite", "grief",
)  # fmt: skip
HOURS = ("five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
MAX_SIZE = 8
"""Largest number of suspects, rooms, hours, weapons or motives of a puzzle."""
Statements = Literal["company", "all"]
"""Which kinds of clues a puzzle may have: see `KINDS_OF`."""
Style = Literal["sentences", "short"]


@dataclass(frozen=True, slots=True)
class CaseClue:
    kind: str
    words: tuple[int, ...]
    """Indices of the words in the cast's lists, in the order of the kind's slots."""


def _is(variable: int, value: int) -> ValueLimit:
    return ValueLimit(variable, 1 << value)


def _is_not(variable: int, value: int) -> ValueLimit:
    return ValueLimit(variable, ~(1 << value))


def _owner_in(model: CaseModel, owner: int, room: int, hour: int) -> list[ValueLimit | Pair]:
    """The suspect who has a weapon or motive was in this room at this hour. `owner` is a holder or feeler."""
    suspects = range(model.num_suspects)
    return [model.has_owner(owner), *(model.pair(owner, model.room(s, hour), "follows", s, room) for s in suspects)]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of clue. Slots of its texts: `{p}`, `{q}` two people, `{s}` a suspect, `{r}` a room, `{w}` a weapon, `{m}`
    a motive, `{h}` an hour, `{i}` the hour after `{h}`."""

    slots: str
    sentence: str
    short: str
    limits: Callable[..., list[ValueLimit | Pair]]
    """The limits on the variables of a model, from the model and the words' indices in the order of `slots`."""


KINDS = {
    "in": Kind("prh", "At {h}, {p} was in the {r}.", "{p} {r} {h}", lambda model, p, r, h: [_is(model.room(p, h), r)]),
    "carries": Kind("sw", "{s} carried the {w}.", "{s} {w}", lambda model, s, w: [_is(model.weapon_of(s), w)]),
    "feels": Kind("sm", "{s} was driven by {m}.", "{s} {m}", lambda model, s, m: [_is(model.motive_of(s), m)]),
    "before": Kind(
        "h", "The murder happened before {h}.", "murder before {h}",
        lambda model, h: [ValueLimit(model.when, (1 << h) - 1)],
    ),
    "after": Kind(
        "h", "The murder happened after {h}.", "murder after {h}",
        lambda model, h: [ValueLimit(model.when, -1 << (h + 1))],
    ),
    "not_in": Kind(
        "prh", "At {h}, {p} was not in the {r}.", "{p} not {r} {h}",
        lambda model, p, r, h: [_is_not(model.room(p, h), r)],
    ),
    "carries_not": Kind(
        "sw", "{s} did not carry the {w}.", "{s} not {w}", lambda model, s, w: [_is_not(model.weapon_of(s), w)],
    ),
    "feels_not": Kind(
        "sm", "{s} was not driven by {m}.", "{s} not {m}", lambda model, s, m: [_is_not(model.motive_of(s), m)],
    ),
    "together": Kind(
        "pqh", "At {h}, {p} and {q} were in the same room.", "{q} with {p} {h}",
        lambda model, p, q, h: [model.same(model.room(p, h), model.room(q, h))],
    ),
    "apart": Kind(
        "pqh", "At {h}, {p} and {q} were in different rooms.", "{p} without {q} {h}",
        lambda model, p, q, h: [model.pair(model.room(p, h), model.room(q, h), "differ")],
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
        lambda model, p, h, i: [model.pair(model.room(p, h), model.room(p, i), "differ")],
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
KINDS_OF: dict[Statements, tuple[str, ...]] = {"company": ("in", "together", "carries", "feels"), "all": tuple(KINDS)}


def limits_of(clue: CaseClue, model: CaseModel) -> list[ValueLimit | Pair]:
    """The limits that a clue puts on the variables of a model."""
    return KINDS[clue.kind].limits(model, *clue.words)


def all_clues(cast: Cast, statements: Statements) -> Iterator[CaseClue]:
    """All clues that can be said of a cast, true or not."""
    for name in KINDS_OF[statements]:
        kind = KINDS[name]
        for words in itertools.product(*(range(len(_words(cast, slot))) for slot in kind.slots)):
            # Two people are named once in a fixed order, and `{i}` is the hour after `{h}`.
            if ("q" not in kind.slots or words[0] < words[1]) and ("i" not in kind.slots or words[2] == words[1] + 1):
                yield CaseClue(name, words)


def _words(cast: Cast, slot: str) -> tuple[str, ...]:
    return {
        "p": cast.people, "q": cast.people, "s": cast.suspects, "r": cast.rooms, "w": cast.weapons,
        "m": cast.motives, "h": cast.hours, "i": cast.hours,
    }[slot]  # fmt: skip


def write(clue: CaseClue, cast: Cast, style: Style) -> str:
    """Write a clue as a sentence or in short. In short, the hour is left out if there is only one."""
    kind = KINDS[clue.kind]
    words = {slot: _words(cast, slot)[index] for slot, index in zip(kind.slots, clue.words, strict=True)}
    short = kind.short if len(cast.hours) > 1 else kind.short.removesuffix(" {h}")
    return (kind.sentence if style == "sentences" else short).format(**words)


FACTS = ("where", "when", "who", "what", "why")
"""The facts of the murder, in the order in which they are asked."""
_FIRST_ASKED = ("who", "what", "why", "where", "when")
"""The facts in the order in which they are chosen, if not all are asked."""


@dataclass(frozen=True, slots=True)
class CaseQuestion:
    """A question about a fact of the murder, or with `fact="room"`, where this person was at this hour."""

    fact: str
    person: int = 0
    hour: int = 0

    def variable(self, model: CaseModel) -> int:
        return model.room(self.person, self.hour) if self.fact == "room" else int(getattr(model, self.fact))

    def options(self, cast: Cast) -> tuple[str, ...]:
        """The possible answers."""
        return {
            "who": cast.suspects, "where": cast.rooms, "when": cast.hours, "what": cast.weapons,
            "why": cast.motives, "room": cast.rooms,
        }[self.fact]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCase:
    """A world and the questions about it."""

    model: CaseModel
    world: World
    questions: tuple[CaseQuestion, ...]

    @property
    def content(self) -> str:
        """What the puzzle is about: its words, questions and answers. Puzzles with equal texts have equal contents."""
        text = repr((self.model.cast, self.questions, self.answers))
        return text.replace("CaseQuestion(", "Question(")  # the text decides the split, whatever the class is called

    @property
    def answers(self) -> tuple[str, ...]:
        return tuple(one.options(self.model.cast)[self.world[one.variable(self.model)]] for one in self.questions)


def choose_questions(cast: Cast, num: int, rng: random.Random) -> tuple[CaseQuestion, ...]:
    """Choose the facts of the murder first, then random persons and hours, and order them as they are asked.

    A fact with one possible value is not asked.
    """
    facts = [CaseQuestion(fact) for fact in _FIRST_ASKED if len(CaseQuestion(fact).options(cast)) > 1][:num]
    facts.sort(key=lambda question: FACTS.index(question.fact))
    people, hours = range(len(cast.people)), range(len(cast.hours))
    rooms = [CaseQuestion("room", person, hour) for person in people for hour in hours if len(cast.rooms) > 1]
    return (*facts, *rng.sample(rooms, num - len(facts)))


def draw_draft(options: ClueOptions, rng: random.Random) -> DraftCase:
    model = CaseModel(options.draw_cast(rng))
    questions = choose_questions(model.cast, options.questions, rng)
    return DraftCase(model=model, world=draw_world(model, rng), questions=questions)


def draw_world(model: CaseModel, rng: random.Random) -> World:
    """Draw a world in which a suspect is alone with the victim at some hour, which becomes the hour of the murder."""
    cast, victim = model.cast, model.num_suspects
    alone: list[tuple[int, int]] = []
    while not alone:
        paths = [_draw_path(cast, rng) for _ in cast.people]
        visits = [[s for s in range(victim) if paths[s][h] == place] for h, place in enumerate(paths[victim])]
        alone = [(hour, inside[0]) for hour, inside in enumerate(visits) if len(inside) == 1]
    hour, murderer = rng.choice(alone)
    place = paths[victim][hour]
    paths[victim][hour:] = [place] * (model.num_hours - hour)
    weapons = rng.sample(range(len(cast.weapons)), victim if cast.weapons else 0)
    motives = rng.sample(range(len(cast.motives)), victim if cast.motives else 0)
    owners = [
        [owned.index(i) if i in owned else victim for i in range(num)]
        for owned, num in ((weapons, len(cast.weapons)), (motives, len(cast.motives)))
    ]
    means = [owned[murderer] if owned else 0 for owned in (weapons, motives)]
    rooms = [room for path in paths for room in path]
    return (*rooms, *weapons, *owners[0], *motives, *owners[1], murderer, place, hour, *means)


def _draw_path(cast: Cast, rng: random.Random) -> list[int]:
    path = [rng.randrange(len(cast.rooms))]
    while len(path) < len(cast.hours):
        path.append(rng.choice(sorted(cast.next_to(path[-1]))))
    return path


def choose_clues(draft: DraftCase, options: ClueOptions, rng: random.Random) -> list[CaseClue] | None:
    """Choose a minimal set of true clues that prove the answers, and add redundant ones.

    Returns:
        `None` if even all true clues of this kind leave an answer open.
    """
    model, world = draft.model, draft.world
    answers = {variable: world[variable] for variable in (question.variable(model) for question in draft.questions)}
    limits = {clue: limits_of(clue, model) for clue in all_clues(model.cast, options.statements)}
    limits = {clue: limits[clue] for clue in _shuffled(limits, rng) if holds(limits[clue], world)}

    def other_world(clues: Iterable[CaseClue]) -> World | None:
        return Solver(model, [limit for clue in clues for limit in limits[clue]]).other_world(answers)

    chosen: list[CaseClue] = []
    while (other := other_world(chosen)) is not None:
        clue = next((clue for clue in limits if not holds(limits[clue], other)), None)
        if clue is None:
            return None
        chosen.append(clue)
    for clue in list(chosen):
        if other_world(rest := [other for other in chosen if other != clue]) is None:
            chosen = rest
    chosen += [clue for clue in limits if clue not in chosen][: options.redundant]
    return rng.sample(chosen, len(chosen))


def _shuffled(clues: Iterable[CaseClue], rng: random.Random) -> list[CaseClue]:
    """Clues in random order. Each kind is about as frequent as the others, although some can say more."""
    clues = list(clues)
    counts = Counter(clue.kind for clue in clues)
    return sorted(clues, key=lambda clue: rng.expovariate(1 / counts[clue.kind]))


MAX_QUESTIONS = 8


class ClueOptions(TaskOptions):
    suspects: int = Field(4, ge=2, le=MAX_SIZE)
    """Number of suspects."""
    rooms: int = Field(4, ge=2, le=MAX_SIZE)
    """Number of rooms."""
    hours: int = Field(4, ge=1, le=MAX_SIZE)
    """Number of hours. With 1, nobody moves."""
    weapons: int = Field(4, ge=0, le=MAX_SIZE)
    """Number of weapons: at least one for each suspect, or 0 for puzzles without weapons."""
    motives: int = Field(4, ge=0, le=MAX_SIZE)
    """Number of motives: at least one for each suspect, or 0 for puzzles without motives."""
    words: int = Field(12, ge=2, le=12)
    """Number of names, rooms, weapons and motives that puzzles draw from."""
    questions: int = Field(5, ge=1, le=MAX_QUESTIONS)
    """Number of questions. Who, what, why, where and when come first, then where somebody was at some hour."""
    statements: Statements = "all"
    """Kinds of clues: who was with whom and who carried what and why, or all kinds."""
    redundant: int = Field(0, ge=0, le=100)
    """Number of true clues that are added to those that suffice, if there are that many. They make a puzzle easier to
    solve and longer to read."""
    style: Style = "sentences"
    """How clues and questions are written: in sentences or in short."""
    max_completion_tokens: int = Field(2048, ge=8, le=131072)
    """Longest answer in tokens, with all thinking."""

    @model_validator(mode="after")
    def _fits(self) -> ClueOptions:
        for name in ("weapons", "motives"):
            if 0 < (num := getattr(self, name)) < self.suspects:
                raise ValueError(f"`{name}` must be 0 or at least `suspects` ({self.suspects}), got {num}")
        largest = max(self.suspects, self.rooms, self.weapons, self.motives)
        if self.words < largest:
            raise ValueError(f"`words` must be at least {largest} for a puzzle of this size, got {self.words}")
        facts = [self.suspects, self.rooms, self.hours, self.weapons, self.motives]
        possible = sum(num > 1 for num in facts) + (self.suspects + 1) * self.hours
        if self.questions > possible:
            raise ValueError(f"`questions` must be at most {possible} for a puzzle of this size, got {self.questions}")
        return self

    def draw_cast(self, rng: random.Random) -> Cast:
        """Draw the words of a puzzle of this size. The hours follow one another."""
        first = rng.randrange(len(HOURS) - self.hours + 1)
        return Cast(
            suspects=tuple(rng.sample(SUSPECTS[: self.words], self.suspects)),
            rooms=tuple(rng.sample(ROOMS[: self.words], self.rooms)),
            hours=HOURS[first : first + self.hours],
            weapons=tuple(rng.sample(WEAPONS[: self.words], self.weapons)),
            motives=tuple(rng.sample(MOTIVES[: self.words], self.motives)),
        )
