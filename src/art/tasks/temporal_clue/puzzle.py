"""Make puzzles: a random world, questions about it, and clues from which exactly one answer to each question follows.

Clues are chosen by counterexample: as long as the solver finds a world with other answers, a true clue that is false
there is added. Then each clue is left out that is not needed, so that the clues are minimal.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from art.task import TaskOptions
from art.tasks.temporal_clue.clues import KINDS, Clue, Statements, Style, all_clues, limits_of
from art.tasks.temporal_clue.model import (
    HOURS,
    MAX_SIZE,
    MOTIVES,
    ROOMS,
    SUSPECTS,
    WEAPONS,
    Cast,
    Limit,
    Limits,
    Model,
    Table,
    World,
    holds,
)

FACTS = ("where", "when", "who", "what", "why")
"""The facts of the murder, in the order in which they are asked."""
_FIRST_ASKED = ("who", "what", "why", "where", "when")
"""The facts in the order in which they are chosen, if not all are asked."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a fact of the murder, or with `fact="room"`, where this person was at this hour."""

    fact: str
    person: int = 0
    hour: int = 0

    def variable(self, model: Model) -> int:
        return model.room(self.person, self.hour) if self.fact == "room" else int(getattr(model, self.fact))

    def options(self, cast: Cast) -> tuple[str, ...]:
        """The possible answers."""
        return {
            "who": cast.suspects, "where": cast.rooms, "when": cast.hours, "what": cast.weapons,
            "why": cast.motives, "room": cast.rooms,
        }[self.fact]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """Clues about a cast and questions, whose answers may be unknown."""

    cast: Cast
    clues: tuple[Clue, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The answers to a puzzle, and how hard it is to prove that there are no others."""

    answers: tuple[str, ...]
    num_assumptions: int
    """Number of values that the solver has to try in its proof, after it has supposed a murderer and an hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A world and the questions about it, for which clues are still to be chosen."""

    model: Model
    world: World
    questions: tuple[Question, ...]

    @property
    def content(self) -> str:
        """What the puzzle is about: its words, questions and answers. Puzzles with equal texts have equal contents."""
        return repr((self.model.cast, self.questions, self.answers))

    @property
    def answers(self) -> tuple[str, ...]:
        return answers_in(self.world, self.questions, self.model)


def answers_in(world: World, questions: Iterable[Question], model: Model) -> tuple[str, ...]:
    """The answers that hold in a world."""
    return tuple(question.options(model.cast)[world[question.variable(model)]] for question in questions)


def open_questions(cast: Cast) -> list[Question]:
    """All questions that can be asked about this cast. A fact with one possible value is not asked."""
    facts = [Question(fact) for fact in _FIRST_ASKED if len(Question(fact).options(cast)) > 1]
    rooms = [Question("room", person, hour) for person in range(len(cast.people)) for hour in range(len(cast.hours))]
    return facts + (rooms if len(cast.rooms) > 1 else [])


def choose_questions(cast: Cast, num: int, rng: random.Random) -> tuple[Question, ...]:
    """Choose the facts of the murder first, then random persons and hours, and order them as they are asked."""
    facts = [question for question in open_questions(cast) if question.fact != "room"][:num]
    rooms = [question for question in open_questions(cast) if question.fact == "room"]
    facts.sort(key=lambda question: FACTS.index(question.fact))
    return (*facts, *rng.sample(rooms, num - len(facts)))


def draw_draft(options: ClueOptions, rng: random.Random) -> Draft:
    model = Model(options.draw_cast(rng))
    questions = choose_questions(model.cast, options.questions, rng)
    return Draft(model=model, world=draw_world(model, rng), questions=questions)


def draw_world(model: Model, rng: random.Random) -> World:
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


def choose_clues(draft: Draft, options: ClueOptions, rng: random.Random) -> list[Clue] | None:
    """Choose a minimal set of true clues that prove the answers, and add redundant ones.

    Returns:
        `None` if even all true clues of this kind leave an answer open.
    """
    model, world = draft.model, draft.world
    answers = {variable: world[variable] for variable in (question.variable(model) for question in draft.questions)}
    limits = {clue: limits_of(clue, model) for clue in all_clues(model.cast, options.statements)}
    limits = {clue: limits[clue] for clue in _shuffled(limits, rng) if holds(limits[clue], world)}

    def other_world(clues: Iterable[Clue]) -> World | None:
        return Solver(model, [limit for clue in clues for limit in limits[clue]]).other_world(answers)

    chosen: list[Clue] = []
    while (other := other_world(chosen)) is not None:
        clue = next((clue for clue in limits if not holds(limits[clue], other)), None)
        if clue is None:
            return None
        chosen.append(clue)
    for clue in list(chosen):
        if other_world(rest := [other for other in chosen if other != clue]) is None:
            chosen = rest
    chosen += [clue for clue in limits if clue not in chosen][: options.redundant]
    return rng.sample(chosen, len(chosen)) if options.is_shuffled else sorted(chosen, key=_place)


def _place(clue: Clue) -> tuple[int, tuple[int, ...]]:
    return list(KINDS).index(clue.kind), clue.words


def solve(puzzle: Puzzle) -> Solution:
    """Solve a puzzle.

    Raises:
        ValueError: the clues contradict each other, or leave an answer open.
    """
    model = Model(puzzle.cast)
    solver = Solver(model, [limit for clue in puzzle.clues for limit in limits_of(clue, model)])
    world = solver.any_world()
    if world is None:
        raise ValueError("the clues contradict each other")
    solver.num_assumptions = 0
    answers = answers_in(world, puzzle.questions, model)
    variables = [question.variable(model) for question in puzzle.questions]
    other = solver.other_world({variable: world[variable] for variable in variables})
    if other is not None:
        pairs = zip(answers, answers_in(other, puzzle.questions, model), strict=True)
        index, (one, two) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        raise ValueError(f"the clues leave open whether the answer to question {index + 1} is {one} or {two}")
    return Solution(answers=answers, num_assumptions=solver.num_assumptions)


def _shuffled(clues: Iterable[Clue], rng: random.Random) -> list[Clue]:
    """Clues in random order. Each kind is about as frequent as the others, although some can say more."""
    clues = list(clues)
    counts = Counter(clue.kind for clue in clues)
    return sorted(clues, key=lambda clue: rng.expovariate(1 / counts[clue.kind]))


Grade = Literal["easy", "medium", "hard"]
MAX_QUESTIONS = 8
MEDIUM = 20
"""Largest number of assumptions of a puzzle that counts as `medium`. About a fifth of the puzzles of four suspects,
rooms, hours, weapons and motives need more."""


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
    """Kinds of clues: plain facts, also denials (what is not so), or all kinds."""
    redundant: int = Field(0, ge=0, le=100)
    """Number of true clues that are added to those that suffice, if there are that many. They make a puzzle easier to
    solve and longer to read."""
    is_shuffled: bool = True
    """Whether clues come in random order. Otherwise they are ordered by kind and then by person, weapon or motive."""
    difficulty: Literal["any", Grade] = "any"
    """Grade of the puzzles."""
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


def grade_of(num_assumptions: int) -> Grade:
    """Grade a puzzle by the number of assumptions that its proof needs.

    `easy`: for each murderer and hour, the clues contradict each other by plain deduction. `medium`: at most 20 times a
    value has to be assumed and refuted. `hard`: more often.
    """
    return "easy" if not num_assumptions else "medium" if num_assumptions <= MEDIUM else "hard"


class Solver:
    """Search over the worlds of a model that keep to some clues."""

    def __init__(self, model: Model, clues: Limits) -> None:
        self.model = model
        self.num_assumptions = 0
        """Number of values that were tried where no limit decided; it counts over all searches of this solver."""
        self._start = _Worlds.all(model.sizes)
        self._weights = [1] * len(model.sizes)
        self._is_possible = self._keep_to(self._start, [*model.rules, *clues])

    def any_world(self) -> World | None:
        """Find a world that keeps to the clues."""
        return next((world for case in self._cases() for world in self._search(case)), None)

    def other_world(self, answers: Mapping[int, int]) -> World | None:
        """Find a world in which one of these variables has another value. `None` proves that there is none."""
        for case in self._cases():
            for variable, value in answers.items():
                other = case.copy()
                if self._keep_to(other, [Limit(variable, ~(1 << value))]):
                    world = next(self._search(other), None)
                    if world is not None:
                        return world
        return None

    def _cases(self) -> Iterator[_Worlds]:
        """The worlds for each murderer and hour that the limits leave possible."""
        if not self._is_possible:
            return
        for murderer in range(len(self.model.cast.suspects)):
            for hour in range(len(self.model.cast.hours)):
                case = self._start.copy()
                if self._keep_to(case, self.model.murder(murderer, hour)):
                    yield case

    def _search(self, worlds: _Worlds) -> Iterator[World]:
        undecided = [variable for variable, values in enumerate(worlds.values) if values & (values - 1)]
        if not undecided:
            yield tuple(values.bit_length() - 1 for values in worlds.values)
            return
        variable = min(undecided, key=lambda v: worlds.values[v].bit_count() / self._weights[v])
        for value in range(self.model.sizes[variable]):
            if worlds.values[variable] >> value & 1:
                self.num_assumptions += 1
                assumed = worlds.copy()
                if self._keep_to(assumed, [Limit(variable, 1 << value)]):
                    yield from self._search(assumed)

    def _keep_to(self, worlds: _Worlds, limits: Limits) -> bool:
        conflict = worlds.keep_to(limits)
        if conflict is not None:
            self._weights[conflict] += 1
        return conflict is None


@dataclass(slots=True)
class _Worlds:
    """A set of worlds: the values that each variable may still have, and the limits on pairs as tables by variable."""

    values: list[int]
    pairs: list[list[tuple[int, Table]]]

    @classmethod
    def all(cls, sizes: list[int]) -> _Worlds:
        return cls([(1 << size) - 1 for size in sizes], [[] for _ in sizes])

    def copy(self) -> _Worlds:
        return _Worlds(self.values.copy(), self.pairs.copy())

    def keep_to(self, limits: Limits) -> int | None:
        """Drop the values that no longer fit, until every pair of variables is consistent.

        Returns:
            A variable that no value is left for; `None` if all have some.
        """
        values, pairs = self.values, self.pairs
        changed = set()
        for limit in limits:
            if isinstance(limit, Limit):
                changed.add(limit.variable)
                values[limit.variable] &= limit.values
            else:
                changed |= {limit.x, limit.y}
                pairs[limit.x] = [*pairs[limit.x], (limit.y, limit.tables[0])]
                pairs[limit.y] = [*pairs[limit.y], (limit.x, limit.tables[1])]
        for x in changed:
            if not values[x]:
                return x
        while changed:
            x = changed.pop()
            values_of_x = values[x]
            for y, table in pairs[x]:
                left = values[y] & table[values_of_x]
                if left != values[y]:
                    if not left:
                        return y
                    values[y] = left
                    changed.add(y)
        return None
