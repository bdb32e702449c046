"""Write a puzzle as a prompt, and read a prompt that is written that way.

Suspects: Ada, Hugo
Rooms: attic, study, cellar
Hours: five, six
Weapons: lamp, bottle
Motives: envy, debt
Clues:
- At five, Marlow was in the study.
- ...
Questions:
A. Where did the murder happen?
B. Who is the murderer?
"""

from __future__ import annotations

import re
from string import ascii_uppercase

from art.tasks.temporal_clue.clues import Style, read, write
from art.tasks.temporal_clue.model import MAX_SIZE, VICTIM, Cast
from art.tasks.temporal_clue.puzzle import Puzzle, Question, open_questions

SYSTEM = f"""\
Solve the murder of {VICTIM} by deduction. These rules hold in every case:
- At each hour, everybody is in one room. From one hour to the next, a person stays or goes through one door.
- Each room has a door to the next one in the list, and the last room has one to the first. There are no other doors.
- Each suspect carries one weapon all the time and is driven by one motive. No two suspects share a weapon or a motive.
- At the hour of the murder, the murderer was alone with {VICTIM}, who stayed in that room from then on.
- The murderer used the weapon that he or she carried, for the motive that he or she was driven by.
Think for as long as you need. End with one line for each question: its letter, a full stop and one word of the lists.
For example:
A. kitchen
Only the last line of each letter counts."""
_QUESTIONS: dict[Style, dict[str, str]] = {
    "sentences": {
        "where": "Where did the murder happen?",
        "when": "At which hour did it happen?",
        "who": "Who is the murderer?",
        "what": "With which weapon was it done?",
        "why": "Which motive did the murderer have?",
        "room": "Where was {p} at {h}?",
    },
    "short": {"where": "where", "when": "when", "who": "who", "what": "what", "why": "why", "room": "{p} {h}"},
}
_LISTS = ("Suspects", "Rooms", "Hours", "Weapons", "Motives")
LABELS = ascii_uppercase


def write_prompt(puzzle: Puzzle, style: Style) -> str:
    """Write the message of the user. Lists without words are left out."""
    cast = puzzle.cast
    lines = [f"{name}: {', '.join(words)}" for name, words in zip(_LISTS, _lists_of(cast), strict=True) if words]
    clues = [f"- {write(clue, cast, style)}" for clue in puzzle.clues]
    asked = [f"{LABELS[i]}. {_ask(question, cast, style)}" for i, question in enumerate(puzzle.questions)]
    return "\n".join([*lines, "Clues:", *clues, "Questions:", *asked])


def _lists_of(cast: Cast) -> tuple[tuple[str, ...], ...]:
    return (cast.suspects, cast.rooms, cast.hours, cast.weapons, cast.motives)


def _ask(question: Question, cast: Cast, style: Style) -> str:
    return _QUESTIONS[style][question.fact].format(p=cast.people[question.person], h=cast.hours[question.hour])


def read_prompt(prompt: str) -> tuple[Puzzle, Style]:
    """Read a puzzle that is written as `write_prompt` does. Its words may be any.

    Raises:
        ValueError: a line is not written that way; the message quotes it.
    """
    lists: dict[str, tuple[str, ...]] = {}
    lines = [line.strip() for line in prompt.splitlines() if line.strip()]
    while lines and lines[0] != "Clues:":
        name, _, words = lines.pop(0).partition(":")
        if name not in _LISTS or name in lists:
            raise ValueError(f"expected one list each of {', '.join(_LISTS)}, then a line `Clues:`; got {name!r}")
        lists[name] = tuple(word.strip() for word in words.split(","))
    cast = _cast_of(lists)
    if "Questions:" not in lines:
        raise ValueError("expected a line `Clues:`, the clues, and then a line `Questions:`")
    middle = lines.index("Questions:")
    asked = lines[middle + 1 :]
    style: Style = "short" if asked and not asked[0].endswith("?") else "sentences"
    clues = []
    for line in lines[1:middle]:
        clue = read(line.removeprefix("- "), cast, style)
        if clue is None:
            raise ValueError(f"cannot read the clue {line!r}; docs/tasks/temporal_clue.md lists the kinds of clues")
        clues.append(clue)
    return Puzzle(cast=cast, clues=tuple(clues), questions=_read_questions(asked, cast, style)), style


def _cast_of(lists: dict[str, tuple[str, ...]]) -> Cast:
    suspects, rooms, hours, weapons, motives = (lists.get(name, ()) for name in _LISTS)
    words = [*suspects, *rooms, *hours, *weapons, *motives, VICTIM]
    if not all(re.fullmatch(r"\w[\w -]*", word) for word in words) or len(set(words)) < len(words):
        raise ValueError(f"each list needs words that are in no other list and are not {VICTIM!r}; got {words}")
    for name, least in (("Suspects", 2), ("Rooms", 2), ("Hours", 1)):
        if not least <= len(lists.get(name, ())):
            raise ValueError(f"expected a line `{name}:` with at least {least}, got {len(lists.get(name, ()))}")
    for name, listed in lists.items():
        if len(listed) > MAX_SIZE or (name in _LISTS[3:] and len(listed) < len(suspects)):
            raise ValueError(
                f"{name}: expected {len(suspects)} (one for each suspect) to {MAX_SIZE}, got {len(listed)}"
            )
    return Cast(suspects=suspects, rooms=rooms, hours=hours, weapons=weapons, motives=motives)


def _read_questions(lines: list[str], cast: Cast, style: Style) -> tuple[Question, ...]:
    known = {_ask(question, cast, style): question for question in open_questions(cast)}
    questions = []
    for label, line in zip(LABELS, lines, strict=False):
        question = known.get(line.removeprefix(f"{label}. "))
        if question is None:
            raise ValueError(f"cannot read question {line!r}; expected `{label}. ` and one of: {'; '.join(known)}")
        questions.append(question)
    if not questions or len(lines) > len(questions):
        raise ValueError(f"expected 1 to {len(LABELS)} questions, got {len(lines)}")
    return tuple(questions)
