"""One game, from the first clue to the reward.

`play_match` lets two seats answer, each of them a model or a scripted player with a conversation of its own. What the
two roles are told:

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

import random
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art.errors import ContextLengthError
from art.task import Player, derive_seed, sample_answer
from art.trajectory import Trajectory
from art_tasks.codenames.game import (
    KINDS,
    PASS,
    CodenamesGame,
    Kind,
    Outcome,
    Role,
    Team,
    TeamClue,
    TeamTurn,
    legal_clues,
)
from art_tasks.codenames.lexicon import Lexicon

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


def system_text(role: Role, allowed_clues: frozenset[str] | None) -> str:
    """The instructions for a role, with the allowed clues if not any word is one."""
    if role == "guesser" or allowed_clues is None:
        return _SYSTEM[role]
    return "\n".join([_SYSTEM[role], "The clue has to be one of these words:", *sorted(allowed_clues)])


def role_of(system: str) -> Role:
    return "guesser" if system.startswith(_SYSTEM["guesser"]) else "spymaster"


def key_text(game: CodenamesGame) -> str:
    """The message that asks the spymaster for a clue: what happened last, and whose the hidden words are."""
    lines = _news(game)
    for kind in KINDS:
        if words := game.words_of("us", kind):
            lines += [f"{_HEADINGS[kind]}:", *words]
    return "\n".join(lines)


def board_text(game: CodenamesGame, turn: TeamTurn) -> str:
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


def read_board(text: str) -> tuple[TeamClue, int, list[str]]:
    """Read the clue, the number of guesses in this turn, and the hidden words from the text of `board_text`."""
    match = re.search(r"^board:\n([^:]*)\nguess (\d+) of \d+ for the clue:\n(\S+) (\d+)$", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"no message for a guesser: {text!r}")
    return TeamClue(match[3], int(match[4])), int(match[2]) - 1, match[1].splitlines()


def _news(game: CodenamesGame, *, before: int = 0) -> list[str]:
    """Lines about the turns since our team's previous one, that one included, without the last `before` turns."""
    turns = game.turns[: len(game.turns) - before]
    ours = [at for at, turn in enumerate(turns) if turn.team == "us"]
    return [describe_turn(turn) for turn in turns[ours[-1] if ours else 0 :]]


def describe_turn(turn: TeamTurn) -> str:
    """Describe a turn in a line, such as `your team: farm 2, horse (yours), wave (theirs)`."""
    guesses = "".join(f", {word} ({_HEADINGS[kind]})" for word, kind in turn.guesses)
    names: dict[Team, str] = {"us": "your team", "them": "the other team"}
    return f"{names[turn.team]}: {turn.clue}{guesses}"


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

    def give_clue(self, seen: Mapping[str, Kind], used: Collection[str] = ()) -> TeamClue:
        """Give a clue to the hidden words. `seen` says what is under each, with `ours` for the player's own team.

        The best clue is the one that connects the most own words, all of them more closely than any other word.
        """
        own, others, assassins = (
            [word for word, kind in seen.items() if kind in kinds]
            for kinds in (("ours",), ("theirs", "neutral"), ("assassin",))
        )
        legal = legal_clues(self.lexicon.clues, seen)  # boards are drawn so that there is one
        legal = [at for at in legal if self.lexicon.clues[at] not in used] or legal
        if self.rng.random() >= self.skill:
            return TeamClue(self.lexicon.clues[self.rng.choice(legal)], self.rng.randint(1, min(3, len(own))))
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
        return TeamClue(self.lexicon.clues[legal[best]], max(int(numbers[best]), 1))

    def name_word(self, clue: TeamClue, hidden: Sequence[str], num_guesses: int) -> str:
        """Name the hidden word that is nearest to the clue, or pass after `clue.number` guesses in this turn."""
        if num_guesses >= clue.number:
            return PASS
        if self.rng.random() >= self.skill:
            return self.rng.choice(hidden)
        related = self.lexicon.relatedness(clue.word, hidden)
        best = int(related.argmax())
        return PASS if num_guesses and related[best] < _MIN_RELATED else hidden[best]


def play_turn(game: CodenamesGame, team: Team, player: ScriptedPlayer) -> None:
    """Play a turn of `team`, with `player` in both roles.

    It never names the assassin: a game is not to be won by the other team's bad luck.
    """
    used = {turn.clue.word for turn in game.turns if turn.team == team}
    turn = TeamTurn(team, player.give_clue(game.seen_by(team), used))
    game.turns.append(turn)
    may_guess = True
    while may_guess:
        hidden = [word for word, kind in game.hidden.items() if kind != "assassin"]
        word = player.name_word(turn.clue, hidden, len(turn.guesses))
        may_guess = word != PASS and game.guess(turn, word)


RESULT_REWARDS: Mapping[Outcome, float] = {"win": 1.0, "turn_limit": 0.0, "loss": 0.0, "assassin": -0.5}
OWN_WORDS_REWARD = 0.5
"""Reward, times the share of own words that the guesser named, of a game that was not won."""
FAULT_REWARD = -1.0
"""Reward of an answer against the rules. The worst legal game earns -0.5: the assassin, with no own word named."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An answer against the rules, which ends the game."""

    role: Role
    why: str


Seat = Callable[[Role, Trajectory], Awaitable[tuple[str, str | None]]]
"""Appends an answer to a role's conversation. Returns its text, and why it is no whole answer if it is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedMatch:
    """A finished game."""

    game: CodenamesGame
    fault: Fault | None

    def reward_parts(self) -> dict[str, float]:
        """The parts of the reward, whose sum is the reward."""
        if self.fault is not None:
            return {"result": 0.0, "own_words": 0.0, "fault": FAULT_REWARD}
        assert self.game.outcome is not None
        own_words = 0.0 if self.game.outcome == "win" else OWN_WORDS_REWARD * self.game.own_found
        return {"result": RESULT_REWARDS[self.game.outcome], "own_words": own_words, "fault": 0.0}

    def metrics(self) -> dict[str, float]:
        outcome = None if self.fault is not None else self.game.outcome
        return {
            "win": float(outcome == "win"),
            "assassin": float(outcome == "assassin"),
            "turn_limit": float(outcome == "turn_limit"),
            "own_found": self.game.own_found,
            "num_turns": self.game.num_turns,
            "invalid_clue": float(self.fault is not None and self.fault.role == "spymaster"),
            "invalid_guess": float(self.fault is not None and self.fault.role == "guesser"),
            **{f"reward/{part}": value for part, value in self.reward_parts().items()},
        }

    def why(self) -> str:
        """Say in a sentence how the game ended."""
        total = self.game.board.count("ours")
        num_found, num_turns = round(total * self.game.own_found), self.game.num_turns
        turns = "1 turn" if num_turns == 1 else f"{num_turns} turns"
        state = f"the guesser named {num_found} of the team's {total} words in {turns}."
        if self.fault is not None:
            return f"Game over: the {self.fault.role} broke the rules, as {self.fault.why}; {state}"
        ways = {
            "win": "the team won", "loss": "the other team won", "turn_limit": "the turns are used up",
            "assassin": "the guesser named the assassin, and the team lost",
        }  # fmt: skip
        assert self.game.outcome is not None
        return f"Game over: {ways[self.game.outcome]}; {state}"


async def play_match(
    game: CodenamesGame, opponent: ScriptedPlayer, seat: Seat, conversations: Mapping[Role, Trajectory]
) -> PlayedMatch:
    """Play a game to its end with `seat` in both roles. Then the roles that took part are told how it ended."""

    async def ask(role: Role, message: str) -> tuple[str, str | None]:
        conversations[role].messages_and_choices.append({"role": "user", "content": message})
        return await seat(role, conversations[role])

    async def play_our_turn() -> Fault | None:
        text, cut = await ask("spymaster", key_text(game))
        clue = cut or game.read_clue(text)
        if isinstance(clue, str):
            return Fault("spymaster", clue)
        turn = TeamTurn("us", clue)
        game.turns.append(turn)
        may_guess = True
        while may_guess:
            text, cut = await ask("guesser", board_text(game, turn))
            word = game.read_guess(text, turn)
            if cut or word is None:
                return Fault("guesser", cut or f"the answer {text[:40]!r} is not a word of the board")
            may_guess = word != PASS and game.guess(turn, word)
        game.end_turn()
        return None

    fault, is_our_turn = None, game.board.begins == "us"
    while game.outcome is None and fault is None:
        if is_our_turn:
            fault = await play_our_turn()
        else:
            play_turn(game, "them", opponent)
        is_our_turn = not is_our_turn
    match = PlayedMatch(game=game, fault=fault)
    for conversation in conversations.values():
        if len(conversation.messages_and_choices) > 1:
            conversation.messages_and_choices.append({"role": "user", "content": match.why()})
    return match


def model_seat(model: Any, *, seed: int, step: int | None, max_tokens: int) -> Seat:
    """Let a model answer. Each request of a game has a seed of its own, made from `seed`."""

    async def answer(role: Role, conversation: Trajectory) -> tuple[str, str | None]:
        num_messages = len(conversation.messages_and_choices)
        try:
            choice = await sample_answer(
                model, conversation, step=step, temperature=1.0, max_completion_tokens=max_tokens,
                seed=derive_seed(seed, role, num_messages),
            )  # fmt: skip
        except Exception as error:
            if getattr(error, "code", None) == ContextLengthError.code and num_messages > 2:
                return "", "the conversation fills the context of the model"
            raise
        cut = f"the answer was cut off after {max_tokens} tokens" if choice.finish_reason == "length" else None
        return choice.message.content or "", cut

    return answer


def scripted_seat(player: Player) -> Seat:
    """Let a scripted player answer, as plain messages that are never trained."""

    async def answer(_: Role, conversation: Trajectory) -> tuple[str, str | None]:
        message: Any = player(conversation.messages(), None)
        conversation.messages_and_choices.append(message)
        return message["content"], None

    return answer


def message_player(lexicon: Lexicon, rng: random.Random, skill: float) -> Player:
    """Make a player for both roles that reads what it is told and knows nothing else."""
    player = ScriptedPlayer(lexicon=lexicon, rng=rng, skill=skill)

    def answer(messages: Any, tools: Any = None) -> dict[str, Any]:
        shown = str(messages[-1]["content"])
        if role_of(str(messages[0]["content"])) == "spymaster":
            used = {str(message["content"]).split()[0] for message in messages if message["role"] == "assistant"}
            return {"role": "assistant", "content": str(player.give_clue(read_key(shown), used))}
        clue, num_guesses, hidden = read_board(shown)
        return {"role": "assistant", "content": player.name_word(clue, hidden, num_guesses)}

    return answer
