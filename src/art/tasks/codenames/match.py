"""One game, from the first clue to the reward.

`play_match` asks for answers and knows nothing of models; `run_match` lets two seats answer, each of them a model
or a scripted player with a conversation of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass

from art.tasks.codenames.codenames_options import ROLES, Role
from art.tasks.codenames.game import PASS, Game, Outcome, Turn
from art.tasks.codenames.scripted import ScriptedPlayer, play_turn
from art.tasks.codenames.wording import board_text, key_text
from art.trajectory import Trajectory

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


@dataclass(frozen=True, slots=True)
class Answer:
    """What a seat answered; `cut` says why there is no whole answer."""

    text: str
    cut: str | None = None


Request = tuple[Role, str]
Seat = Callable[[Trajectory], Awaitable[Answer]]
"""Answers the last message of a role's conversation, and appends the answer to it."""


def play_match(game: Game, opponent: ScriptedPlayer) -> Generator[Request, Answer, Fault | None]:
    """Play a game to its end. Each role and message that it yields wants that role's answer.

    Returns:
        The fault that ended the game; `None` if it ended by its rules.
    """
    is_our_turn = game.board.begins == "us"
    while game.outcome is None:
        if is_our_turn:
            if (fault := (yield from _play_our_turn(game))) is not None:
                return fault
            game.end_turn()
        elif game.board.count("theirs"):
            play_turn(game, "them", opponent)
        is_our_turn = not is_our_turn
    return None


def _play_our_turn(game: Game) -> Generator[Request, Answer, Fault | None]:
    answer = yield "spymaster", key_text(game)
    clue = answer.cut or game.read_clue(answer.text)
    if isinstance(clue, str):
        return Fault("spymaster", clue)
    turn = Turn("us", clue)
    game.turns.append(turn)
    may_guess = True
    while may_guess:
        answer = yield "guesser", board_text(game, turn)
        word = game.read_guess(answer.text, turn)
        if answer.cut or word is None:
            return Fault("guesser", answer.cut or f"the answer {answer.text[:40]!r} is not a word of the board")
        may_guess = word != PASS and game.guess(turn, word)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A finished game, with what each role was told and answered."""

    game: Game
    fault: Fault | None
    conversations: Mapping[Role, Trajectory]

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


async def run_match(
    game: Game, opponent: ScriptedPlayer, seats: Mapping[Role, Seat], conversations: Mapping[Role, Trajectory]
) -> Match:
    """Play a game with these seats. At the end, the roles that took part are told how it ended."""
    match, answer, fault = play_match(game, opponent), None, None
    while True:
        try:
            role, message = next(match) if answer is None else match.send(answer)
        except StopIteration as end:
            fault = end.value
            break
        conversations[role].messages_and_choices.append({"role": "user", "content": message})
        answer = await seats[role](conversations[role])
    finished = Match(game=game, fault=fault, conversations=conversations)
    for role in ROLES:
        if len(conversations[role].messages_and_choices) > 1:
            conversations[role].messages_and_choices.append({"role": "user", "content": finished.why()})
    return finished
