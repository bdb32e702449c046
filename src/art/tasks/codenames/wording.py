"""What the two roles are told, and how a scripted player reads it.

    spymaster, user:  yours:          guesser, user:  board:
                      horse                           wave
                      cow                             cow
                      theirs:                         ...
                      wave                            guess 1 of 3 for the clue:
                      ...                             farm 2
    assistant:        farm 2          assistant:      cow

The clue comes last, since a tiny model reads best what is near to its answer.
"""

from __future__ import annotations

import re

from art.tasks.codenames.codenames_options import Role
from art.tasks.codenames.game import KINDS, Clue, Game, Kind, Team, Turn

_HEADINGS: dict[Kind, str] = {"ours": "yours", "theirs": "theirs", "neutral": "neutral", "assassin": "assassin"}
_GOAL = """\
Your team wins when all its words are named. A word of the other team, or a neutral one, ends your turn.
The team that names the assassin loses the game."""
_SYSTEM: dict[Role, str] = {
    "spymaster": f"""\
You are the spymaster of a team in a word game of two teams. Your guesser sees the board, but not whose the words are.
Give a clue: one word that fits some of your team's words, and no other, and the number of words that it fits.
The clue has to be one word of letters. It must not be on the board, contain a word of the board, or be a part of one.
{_GOAL}
Answer with the clue and the number and nothing else, for example: river 2""",
    "guesser": f"""\
You are the guesser of a team in a word game of two teams. Your spymaster gives you a clue: a word and a number.
The number says how many words of the board the clue fits. In a turn you may name one word more than that.
{_GOAL}
Answer with one word of the board and nothing else. After the first word of a turn, "pass" ends the turn.""",
}
_MAX_LISTED = 100


def system_text(role: Role, allowed_clues: frozenset[str] | None) -> str:
    """The instructions for a role, with the allowed clues if there are few."""
    if role == "guesser" or allowed_clues is None or len(allowed_clues) > _MAX_LISTED:
        return _SYSTEM[role]
    return "\n".join([_SYSTEM[role], "The clue has to be one of these words:", *sorted(allowed_clues)])


def role_of(system: str) -> Role:
    return "guesser" if system.startswith(_SYSTEM["guesser"]) else "spymaster"


def key_text(game: Game) -> str:
    """The message that asks the spymaster for a clue: what happened last, and whose the hidden words are."""
    lines = _news(game)
    for kind in KINDS:
        if words := game.words_of("us", kind):
            lines += [f"{_HEADINGS[kind]}:", *words]
    return "\n".join(lines)


def board_text(game: Game, turn: Turn) -> str:
    """The message that asks the guesser for a word: what happened last, the hidden words, and the clue."""
    lines = [f"{word}: {_HEADINGS[kind]}" for word, kind in turn.guesses[-1:]] or _news(game, before=1)
    place = f"guess {len(turn.guesses) + 1} of {turn.clue.number + 1} for the clue:"
    return "\n".join([*lines, "board:", *game.hidden, place, str(turn.clue)])


def read_key(text: str) -> dict[str, Kind]:
    """Read the hidden words from the text of `key_text`."""
    seen: dict[str, Kind] = {}
    kinds = {f"{heading}:": kind for kind, heading in _HEADINGS.items()}
    kind: Kind | None = None
    for line in text.splitlines():
        if line in kinds:
            kind = kinds[line]
        elif kind is not None:
            seen[line] = kind
    return seen


def read_board(text: str) -> tuple[Clue, int, list[str]]:
    """Read the clue, the number of guesses in this turn, and the hidden words from the text of `board_text`."""
    match = re.search(r"^board:\n([^:]*)\nguess (\d+) of \d+ for the clue:\n(\S+) (\d+)$", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"no message for a guesser: {text!r}")
    return Clue(match[3], int(match[4])), int(match[2]) - 1, match[1].splitlines()


def _news(game: Game, *, before: int = 0) -> list[str]:
    """Lines about the turns since our team's previous one, that one included, without the last `before` turns."""
    turns = game.turns[: len(game.turns) - before]
    ours = [at for at, turn in enumerate(turns) if turn.team == "us"]
    return [describe_turn(turn) for turn in turns[ours[-1] if ours else 0 :]]


def describe_turn(turn: Turn) -> str:
    """Describe a turn in a line, such as `your team: farm 2, horse (yours), wave (theirs)`."""
    guesses = "".join(f", {word} ({_HEADINGS[kind]})" for word, kind in turn.guesses)
    names: dict[Team, str] = {"us": "your team", "them": "the other team"}
    return f"{names[turn.team]}: {turn.clue}{guesses}"
