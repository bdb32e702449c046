"""The scripted players: a spymaster and a guesser that decide by the relatedness of words.

A player of skill 0.8 makes the best move that it knows in 80 % of its moves, and any legal move in the others.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from art.tasks.codenames.game import PASS, Clue, Game, Kind, Team, Turn, legal_clues
from art.tasks.codenames.lexicon import Lexicon

_MIN_RELATED = 0.3
"""A guesser would not connect a word with a clue below this cosine."""
_MARGIN, _ASSASSIN_MARGIN = 0.03, 0.15
"""Lead in cosine that each meant word has over the words of others, and over the assassin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedPlayer:
    """A player for either role."""

    lexicon: Lexicon
    rng: random.Random
    skill: float

    def give_clue(self, seen: Mapping[str, Kind], used: Collection[str] = ()) -> Clue:
        """Give a clue to the hidden words. `seen` says what is under each, with `ours` for the player's own team.

        The best clue is the one that connects the most own words, all of them more closely than any other word.
        """
        own = [word for word, kind in seen.items() if kind == "ours"]
        legal = legal_clues(self.lexicon.clues, seen)  # boards are drawn so that there is one
        legal = [at for at in legal if self.lexicon.clues[at] not in used] or legal
        if self.rng.random() >= self.skill:
            return Clue(self.lexicon.clues[self.rng.choice(legal)], self.rng.randint(1, min(3, len(own))))
        others = [word for word, kind in seen.items() if kind in ("theirs", "neutral")]
        assassins = [word for word, kind in seen.items() if kind == "assassin"]
        return self._best_clue(legal, own, others, assassins)

    def _best_clue(self, legal: list[int], own: list[str], others: list[str], assassins: list[str]) -> Clue:
        import numpy as np

        table = self.lexicon.table([*own, *others, *assassins])[legal]  # [L, W]
        mine, theirs, deadly = np.split(table, [len(own), len(own) + len(others)], axis=1)
        danger = np.maximum(
            theirs.max(axis=1, initial=-1) + _MARGIN, deadly.max(axis=1, initial=-1) + _ASSASSIN_MARGIN
        )  # [L]
        meant = mine > np.maximum(danger, _MIN_RELATED)[:, None]  # [L, O]
        numbers = meant.sum(axis=1)
        # Ties go to the clue whose meant words are nearest; if no clue is safe, to the one with the largest lead.
        nearness = np.where(numbers > 0, (mine * meant).sum(axis=1) / np.maximum(numbers, 1), mine.max(axis=1) - danger)
        best = int(np.lexsort((nearness, numbers))[-1])
        return Clue(self.lexicon.clues[legal[best]], max(int(numbers[best]), 1))

    def name_word(self, clue: Clue, hidden: Sequence[str], num_guesses: int) -> str:
        """Name the hidden word that is nearest to the clue, or pass after `clue.number` guesses in this turn."""
        if num_guesses >= clue.number:
            return PASS
        if self.rng.random() >= self.skill:
            return self.rng.choice(hidden)
        related = self.lexicon.relatedness(clue.word, hidden)
        best = int(related.argmax())
        return PASS if num_guesses and related[best] < _MIN_RELATED else hidden[best]


def play_turn(game: Game, team: Team, player: ScriptedPlayer) -> None:
    """Play a turn of `team`, with `player` in both roles.

    It never names the assassin: a game is not to be won by the other team's bad luck.
    """
    used = {turn.clue.word for turn in game.turns if turn.team == team}
    turn = Turn(team, player.give_clue(game.seen_by(team), used))
    game.turns.append(turn)
    may_guess = True
    while may_guess:
        hidden = [word for word, kind in game.hidden.items() if kind != "assassin"]
        word = player.name_word(turn.clue, hidden, len(turn.guesses))
        may_guess = word != PASS and game.guess(turn, word)
