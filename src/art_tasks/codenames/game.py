"""The rules of the game: a board of words, legal clues, guesses, and who has won.

us, them      the two teams; `us` is the team of the policy
ours, theirs  what lies under a word: an agent of either team, ...
neutral       ... a bystander, who ends the turn, ...
assassin      ... or the assassin, who ends the game for the team that names the word
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from art.task import TaskOptions

Role = Literal["spymaster", "guesser"]
ROLES: tuple[Role, ...] = ("spymaster", "guesser")


class CodenamesOptions(TaskOptions):
    """Which board is played, and against whom."""

    board: Literal["full", "short"] = "full"
    """`full`: the whole game. `short`: one turn with five words, which a tiny model can learn; see `BOARD_FORMS`."""
    opponent_skill: float = Field(default=0.6, ge=0, le=1)
    """Share of the scripted opponents' moves that are good."""
    max_tokens: int = Field(default=64, ge=4, le=100_000)
    """Largest number of tokens of an answer. Give a model room here that thinks before it answers."""


Team = Literal["us", "them"]
Kind = Literal["ours", "theirs", "neutral", "assassin"]
Outcome = Literal["win", "loss", "assassin", "turn_limit"]
"""How a game ends for the policy's team. `assassin` is a loss by the team's own guess."""

KINDS: tuple[Kind, ...] = ("ours", "theirs", "neutral", "assassin")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardForm:
    """How the boards of a form of the game are drawn."""

    first_words: int
    """Number of words of the team that begins; then of the other team, of nobody, and of the assassin."""
    second_words: int
    neutral_words: int
    assassin_words: int = 1
    max_turns: int
    """Turns of the policy's team, after which the game ends without a winner."""
    themes: tuple[str, ...] = ()
    """If there are any, only words of these are used, their names are the only legal clues, the policy begins, and its
    words share a theme that no other word has."""
    words_per_theme: int = 10
    """Number of words of each theme, the most typical first."""


BOARD_FORMS: Mapping[str, BoardForm] = {
    "full": BoardForm(first_words=9, second_words=8, neutral_words=7, max_turns=12),
    "short": BoardForm(
        first_words=2, second_words=1, neutral_words=1, max_turns=1, words_per_theme=4,
        themes=("sea", "farm", "body", "tools", "music", "road"),
    ),
}  # fmt: skip

PASS = "pass"
_OTHER: Mapping[Kind, Kind] = {"ours": "theirs", "theirs": "ours", "neutral": "neutral", "assassin": "assassin"}
_CLUE = re.compile(r"(\S+?)[\s,:]+(\d{1,3})\.?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TeamClue:
    word: str
    number: int
    """How many words the spymaster means. The guesser may name one more."""

    def __str__(self) -> str:
        return f"{self.word} {self.number}"


@dataclass(frozen=True, slots=True)
class WordBoard:
    """The words of a game in the order in which they lie, and what is under each."""

    cards: Mapping[str, Kind]
    begins: Team

    def count(self, kind: Kind) -> int:
        return list(self.cards.values()).count(kind)

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, Any]) -> WordBoard:
        return cls(dict(zip(inputs["words"], inputs["kinds"], strict=True)), inputs["begins"])

    def inputs(self) -> dict[str, Any]:
        return {"words": list(self.cards), "kinds": list(self.cards.values()), "begins": self.begins}


@dataclass(slots=True)
class TeamTurn:
    """What one team did in one turn, or does at the moment."""

    team: Team
    clue: TeamClue
    guesses: list[tuple[str, Kind]] = field(default_factory=list)
    """The words that the guesser named, and what was under them, as `us` sees it."""


class CodenamesGame:
    """A game under way."""

    def __init__(self, board: WordBoard, *, max_turns: int, allowed_clues: frozenset[str] | None = None) -> None:
        """
        Args:
            max_turns: turns of the policy's team, after which the game ends.
            allowed_clues: the only legal clues; `None` if any word is legal.
        """
        self.board, self.max_turns, self.allowed_clues = board, max_turns, allowed_clues
        self.hidden = dict(board.cards)
        """The words that nobody has named yet."""
        self.turns: list[TeamTurn] = []
        self.outcome: Outcome | None = None

    def seen_by(self, team: Team) -> dict[str, Kind]:
        """The hidden words, and what is under them, where `ours` are the words of `team`."""
        return self.hidden if team == "us" else {word: _OTHER[kind] for word, kind in self.hidden.items()}

    def words_of(self, team: Team, kind: Kind) -> list[str]:
        """The hidden words of a kind, seen by `team`."""
        return [word for word, its in self.seen_by(team).items() if its == kind]

    @property
    def own_found(self) -> float:
        """Share of the words of `us` that its guesser has named."""
        named = [kind for turn in self.turns if turn.team == "us" for _, kind in turn.guesses]
        return named.count("ours") / self.board.count("ours")

    @property
    def num_turns(self) -> int:
        """Number of turns that `us` has begun."""
        return sum(turn.team == "us" for turn in self.turns)

    def read_clue(self, answer: str) -> TeamClue | str:
        """Read the answer of the spymaster of `us`, whose last line must be a word and a number.

        Returns:
            The clue, or the reason in words why the answer is no legal clue.
        """
        line = (answer.strip().splitlines() or [""])[-1].strip().lower()
        match = _CLUE.fullmatch(line)
        if match is None:
            return f"the answer {_shorten(line)!r} is not one word and a number"
        clue = TeamClue(match[1], int(match[2]))
        most = self.board.count("ours")
        if not clue.word.isalpha():
            return f"the clue {_shorten(clue.word)!r} is not one word of letters"
        if not 1 <= clue.number <= most:
            return f"the number {clue.number} is not from 1 to {most}"
        return clue_problem(clue.word, self.hidden, self.allowed_clues) or clue

    def read_guess(self, answer: str, turn: TeamTurn) -> str | None:
        """Read a guesser's answer, whose last line must be a hidden word or `pass`; `None` if it is not legal.

        The first guess of a turn must be a word.
        """
        line = (answer.strip().splitlines() or [""])[-1].strip().strip("\"'.!").lower()
        return line if line in self.hidden or (line == PASS and turn.guesses) else None

    def guess(self, turn: TeamTurn, word: str) -> bool:
        """Uncover a hidden word in a team's turn. Returns whether the team may guess again."""
        kind = self.hidden.pop(word)
        turn.guesses.append((word, kind))
        if kind == "assassin":
            self.outcome = "assassin" if turn.team == "us" else "win"
        elif not self.words_of("us", "ours"):
            self.outcome = "win"
        elif not self.words_of("us", "theirs"):
            self.outcome = "loss"
        is_own = kind == ("ours" if turn.team == "us" else "theirs")
        return self.outcome is None and is_own and len(turn.guesses) <= turn.clue.number

    def end_turn(self) -> None:
        """End the game if the turn was the last one of the policy's team."""
        if self.outcome is None and self.num_turns >= self.max_turns:
            self.outcome = "turn_limit"


def clue_problem(clue: str, hidden: Iterable[str], allowed: frozenset[str] | None) -> str | None:
    """Say in words why `clue` is against the rules on a board with these hidden words; `None` if it is legal."""
    if allowed is not None and clue not in allowed:
        return f"the clue {_shorten(clue)!r} is not one of the allowed clues"
    for word in hidden:
        if clue == word:
            return f"the clue {clue!r} is on the board"
        if not legal_clues([clue], [word]):
            return f"the clue {_shorten(clue)!r} and {word!r} on the board are parts of one another"
    return None


def legal_clues(clues: Sequence[str], hidden: Iterable[str]) -> list[int]:
    """Indices of the clues that are in no hidden word, and contain none, nor a part of one ("ice" of "ice age")."""
    text = "\n".join(hidden)
    parts = re.findall(r"[^\s'-]+", text)
    return [at for at, clue in enumerate(clues) if clue not in text and not any(part in clue for part in parts)]


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
