"""Make puzzles: a random world, questions about it, and clues from which exactly one answer to each question follows.

Clues are chosen by counterexample: as long as the solver finds a world with other answers, a true clue that is false
there is added. Then each clue is left out that is not needed, so that the clues are minimal.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from art.tasks.temporal_clue.cast import Cast
from art.tasks.temporal_clue.clue_options import ClueOptions
from art.tasks.temporal_clue.clues import KINDS, Clue, all_clues, limits_of
from art.tasks.temporal_clue.model import Model, World, holds
from art.tasks.temporal_clue.solver import Solver

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
