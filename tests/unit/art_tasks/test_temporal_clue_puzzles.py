"""Puzzles of `temporal_clue`: checked by trying every world."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest

from art_tasks.clue_puzzle import CaseClue, ClueOptions, DraftCase, choose_clues, draw_draft, limits_of
from art_tasks.clue_solver import Solver
from art_tasks.temporal_clue import TemporalClue


@dataclass(frozen=True)
class Tried:
    """A world of the check: rooms[person][hour], with the victim last, and what each suspect carries and feels."""

    rooms: tuple[tuple[int, ...], ...]
    weapons: tuple[int, ...]
    motives: tuple[int, ...]
    who: int
    when: int


@cache
def every_world(suspects: int, rooms: int, hours: int, weapons: int, motives: int) -> list[Tried]:
    """All worlds of a size that keep to the rules, by trying everything."""
    near = [{a, (a + 1) % rooms, (a - 1) % rooms} for a in range(rooms)]
    paths = [
        path
        for path in itertools.product(range(rooms), repeat=hours)
        if all(b in near[a] for a, b in itertools.pairwise(path))
    ]
    worlds = []
    for walked in itertools.product(paths, repeat=suspects + 1):
        *others, victim = walked
        for when in range(hours):
            present = [s for s in range(suspects) if others[s][when] == victim[when]]
            if len(present) != 1 or len(set(victim[when:])) > 1:
                continue
            for carried in itertools.permutations(range(weapons), suspects if weapons else 0):
                for felt in itertools.permutations(range(motives), suspects if motives else 0):
                    worlds.append(Tried(walked, carried, felt, present[0], when))
    return worlds


def reader(prompt: str) -> tuple[Callable[[str], Callable[[Tried], bool]], dict[str, list[str]]]:
    """A reader of clue sentences that shares nothing with the task's own, and the words of the prompt."""
    words = {line.split(": ")[0]: line.split(": ")[1].split(", ") for line in prompt.splitlines() if ": " in line}
    people = [*words["Suspects"], "Marlow"]
    room, hour, person = words["Rooms"].index, words["Hours"].index, people.index
    weapon = words.get("Weapons", []).index
    motive = words.get("Motives", []).index

    def meaning(sentence: str) -> Callable[[Tried], bool]:
        def say(pattern: str) -> list[str]:
            found = re.fullmatch(pattern, sentence)
            return list(found.groups()) if found else []

        if g := say(r"At (\w+), the bearer of the (\w+) was in the (\w+)\."):
            t, w, r = hour(g[0]), weapon(g[1]), room(g[2])
            return lambda x: w in x.weapons and x.rooms[x.weapons.index(w)][t] == r
        if g := say(r"At (\w+), the suspect driven by (\w+) was in the (\w+)\."):
            t, m, r = hour(g[0]), motive(g[1]), room(g[2])
            return lambda x: m in x.motives and x.rooms[x.motives.index(m)][t] == r
        if g := say(r"The bearer of the (\w+) was driven by (\w+)\."):
            w, m = weapon(g[0]), motive(g[1])
            return lambda x: w in x.weapons and x.motives[x.weapons.index(w)] == m
        if g := say(r"At (\w+), the (\w+) was empty\."):
            t, r = hour(g[0]), room(g[1])
            return lambda x: all(path[t] != r for path in x.rooms)
        if g := say(r"At (\w+), (\w+) was (not )?in the (\w+)\."):
            t, p, r = hour(g[0]), person(g[1]), room(g[3])
            return lambda x: (x.rooms[p][t] == r) != bool(g[2])
        if g := say(r"At (\w+), (\w+) and (\w+) were in (the same room|different rooms)\."):
            t, p, q = hour(g[0]), person(g[1]), person(g[2])
            return lambda x: (x.rooms[p][t] == x.rooms[q][t]) == (g[3] == "the same room")
        if g := say(r"(\w+) was never in the (\w+)\."):
            p, r = person(g[0]), room(g[1])
            return lambda x: r not in x.rooms[p]
        if g := say(r"From (\w+) to (\w+), (\w+) stayed in one room\."):
            t, u, p = hour(g[0]), hour(g[1]), person(g[2])
            return lambda x: x.rooms[p][t] == x.rooms[p][u]
        if g := say(r"Between (\w+) and (\w+), (\w+) went to another room\."):
            t, u, p = hour(g[0]), hour(g[1]), person(g[2])
            return lambda x: x.rooms[p][t] != x.rooms[p][u]
        if g := say(r"(\w+) (carried|did not carry) the (\w+)\."):
            p, w = person(g[0]), weapon(g[2])
            return lambda x: (x.weapons[p] == w) == (g[1] == "carried")
        if g := say(r"(\w+) was (not )?driven by (\w+)\."):
            p, m = person(g[0]), motive(g[2])
            return lambda x: (x.motives[p] == m) != bool(g[1])
        if g := say(r"The murder happened (before|after) (\w+)\."):
            t = hour(g[1])
            return lambda x: x.when < t if g[0] == "before" else x.when > t
        raise AssertionError(f"what does this clue mean? {sentence}")

    return meaning, words


def worlds_left(prompt: str, *, without: int | None = None) -> list[Tried]:
    """The worlds that agree with the clues of a prompt, with one left out if `without` says which."""
    meaning, words = reader(prompt)
    sizes = [len(words.get(name, [])) for name in ("Suspects", "Rooms", "Hours", "Weapons", "Motives")]
    worlds = every_world(*sizes)
    clues = prompt.partition("Clues:\n")[2].partition("Questions:")[0].splitlines()
    for clue in (clue for i, clue in enumerate(clues) if i != without):
        holds = meaning(clue.removeprefix("- "))
        worlds = [world for world in worlds if holds(world)]
    return worlds


def answers_of(prompt: str, worlds: list[Tried]) -> list[set[str]]:
    """For each question of a prompt, the answers in these worlds."""
    _, words = reader(prompt)
    people = [*words["Suspects"], "Marlow"]

    def answer(question: str, world: Tried) -> str:
        if "murderer?" in question:
            return words["Suspects"][world.who]
        if "Where did" in question:
            return words["Rooms"][world.rooms[-1][world.when]]
        if "hour" in question:
            return words["Hours"][world.when]
        if "weapon" in question:
            return words["Weapons"][world.weapons[world.who]]
        if "motive" in question:
            return words["Motives"][world.motives[world.who]]
        _, _, _, person, _, hour = question.rstrip("?").split()
        return words["Rooms"][world.rooms[people.index(person)][words["Hours"].index(hour)]]

    return [{answer(question, world) for world in worlds} for question in prompt.split("Questions:\n")[1].splitlines()]


SIZES = [
    {"suspects": 2, "rooms": 3, "hours": 2, "weapons": 2, "motives": 2, "questions": 7},
    {"suspects": 2, "rooms": 4, "hours": 2, "weapons": 3, "motives": 0, "questions": 4},
    {"suspects": 3, "rooms": 3, "hours": 1, "weapons": 3, "motives": 4, "questions": 4},
    {"suspects": 2, "rooms": 2, "hours": 3, "weapons": 0, "motives": 3, "questions": 3, "redundant": 2},
    {"suspects": 3, "rooms": 3, "hours": 1, "weapons": 3, "motives": 0, "questions": 2, "statements": "company"},
]


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_puzzle_has_one_solution_and_no_clue_too_many(count: int) -> None:
    """The check knows every world of the size and reads the sentences by itself."""
    for index in range(count // len(SIZES)):
        for size in SIZES:
            task = TemporalClue(**size)
            inputs = task.scenarios("train", seed=index, count=1)[0].inputs
            prompt = inputs["prompt"]
            left = worlds_left(prompt)
            assert left, prompt
            assert answers_of(prompt, left) == [{answer} for answer in inputs["answers"].values()], prompt
            if index < 5 and "redundant" not in size:
                for clue in range(inputs["num_clues"]):
                    open_answers = answers_of(prompt, worlds_left(prompt, without=clue))
                    assert any(len(answers) > 1 for answers in open_answers), f"clue {clue} is not needed:\n{prompt}"


def test_redundant_clues_are_true_and_come_on_top() -> None:
    rng = random.Random(3)
    draft = draw_draft(ClueOptions(), rng)
    clues = choose_clues(draft, ClueOptions(redundant=6), rng)
    assert clues is not None
    assert len(set(clues)) == len(clues)
    assert is_proven(draft, clues)
    assert sum(is_proven(draft, [one for one in clues if one != clue]) for clue in clues) >= 6


def is_proven(draft: DraftCase, clues: list[CaseClue]) -> bool:
    model = draft.model
    answers = {variable: draft.world[variable] for variable in (one.variable(model) for one in draft.questions)}
    limits = [limit for clue in clues for limit in limits_of(clue, model)]
    return Solver(model, limits).other_world(answers) is None
