"""The game of 2048: slide tiles, merge equal ones, and reach the goal before the board is stuck.

    user       A.           A is 2, B is 4, C is 8: the form for tiny models
               BA
    assistant  d

A pretrained model is shown numbers and answers `<move>down</move>` or calls a tool; see `Game2048Options`. As in the
real game, a move that changes nothing is allowed: no new tile comes, and the turn is spent. The game ends when the goal
is reached, when no move can change the board (a full board may still have moves), after too many turns, and with an
answer that is no move.

The reward is from 0 to 1, by the log of the highest tile, the log of the points, and the goal: see `reward_parts` in
`game_state.py`. An answer that is no move makes it -0.5. That is below any legal game, or a policy in trouble would
have no reason to keep to the rules.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from art.task import Conversation, Scenario, Split, Task, TaskDefaults, derive_seed, take_turn
from art.tasks.game_2048.board import legal_moves
from art.tasks.game_2048.expert import best_move
from art.tasks.game_2048.formats import (
    read_board,
    read_end,
    read_move,
    render_game,
    say_move,
    show_end,
    show_turn,
    system_prompt,
    tools_of,
)
from art.tasks.game_2048.game_options import Game2048Options
from art.tasks.game_2048.game_state import ENDINGS, Game, reward_parts
from art.trajectory import History, Trajectory

if TYPE_CHECKING:
    from art.model import Model
    from art.task import Player

_SPLITS: Mapping[int, Split] = {8: "val", 9: "test"}  # by the last digit of a game's seed; the others are for training
_PLAYER_DEPTH = 1
"""New tiles that the scripted player looks ahead."""
_PULL = 0.2
"""How much the player of the warm start prefers the lower left corner."""
_SHOWN_TURNS = 8
"""Turns of a warm-start conversation with `history=last`: single turns of one game, each with its own board."""
_PLAYED_TURNS = 24
"""Turns of a warm-start conversation with `history=all`: the beginning of a game, which fits a tiny model's context."""


class Game2048(Task):
    """A task: play 2048.

    A tiny model plays on 2 x 2 cells until the tile 16, with one letter for each tile and move, about 8 moves a game.
    Random legal play wins 13 % of these games and the player by expectimax 97 %. A tiny model cannot learn the full
    game: 800 moves take minutes to sample, and on 3 x 3 cells a warm start of 600 steps left it at random play.
    """

    name: ClassVar[str] = "game_2048"
    description: ClassVar[str] = "play the game of 2048"
    headline_metric: ClassVar[str] = "goal"
    options_class: ClassVar[type[Game2048Options]] = Game2048Options
    options: Game2048Options
    tiny_options: ClassVar[Mapping[str, Any]] = {"size": 2, "goal": 16, "moves": "letter", "board": "letters"}
    rubric: ClassVar[str | None] = (
        "A good game of 2048 keeps to the rules in every turn, wastes no turn on a move that changes nothing, and "
        "reaches a high tile. Each doubling of the highest tile is worth as much as the one before it, and reaching "
        "the goal is best. Among games with the same highest tile, more points are better. A game that ends with an "
        "answer that is no move is worse than any other. The last message says how the game ended. Judge the result, "
        "not the style."
    )
    defaults: ClassVar[TaskDefaults] = TaskDefaults(warm_start_steps=200)

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Draw `count` games. A game is a number, from which its first board and its new tiles follow."""
        rng = random.Random(derive_seed(self.name, split, seed))
        games = [self._draw_game(split, rng) for _ in range(count)]
        return [self.scenario(split, seed, index, {"game": game}) for index, game in enumerate(games)]

    @staticmethod
    def _draw_game(split: Split, rng: random.Random) -> int:
        while _SPLITS.get((game := rng.getrandbits(48)) % 10, "train") != split:
            pass
        return game

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        options, game = self.options, Game(options=self.options, seed=scenario.inputs["game"])
        opening: list[Any] = [{"role": "system", "content": system_prompt(options)}]
        trajectory = Trajectory(
            messages_and_choices=[*opening, {"role": "user", "content": show_turn(game.cells, None, options)}],
            tools=tools_of(options), metadata={"scenario_id": scenario.id},
        )  # fmt: skip
        while game.ending is None:
            calls = await take_turn(
                model, trajectory, step=step, temperature=1.0, max_completion_tokens=options.answer_limit,
                seed=derive_seed(scenario.seed, rollout_index, game.num_moves + game.num_idle),
            )  # fmt: skip
            if calls == "context_full":
                game.end("context_full", "the conversation filled the model's context")
                break
            message = trajectory.messages_and_choices[-1].message  # type: ignore[union-attr]
            move = None if calls == "cut_short" else read_move(message, options.moves)
            if move is None:
                game.end("invalid_move", _describe_invalid(message, cut_short=calls == "cut_short"))
                break
            moved = game.play(move)
            if game.ending is None:
                shown = show_turn(game.cells, None if moved else move, options)
                if options.history == "last":
                    _begin_branch(trajectory, opening)
                trajectory.messages_and_choices.append(self._reply(trajectory, shown))
        self._close(trajectory, game)
        return trajectory

    def _reply(self, trajectory: Trajectory, text: str) -> Any:
        """The message that follows the agent's move: the result of its call, or a message of the user."""
        last = trajectory.messages()[-1]
        calls: Any = last.get("tool_calls") if last["role"] == "assistant" else None
        return {"role": "tool", "tool_call_id": calls[0]["id"], "content": text} if calls else _user(text)

    def _close(self, trajectory: Trajectory, game: Game) -> None:
        if game.ending != "invalid_move":
            shown = show_end(game.cells, game.why, game.points, self.options)
            trajectory.messages_and_choices.append(self._reply(trajectory, shown))
        trajectory.reward = game.reward
        trajectory.metrics |= {name: float(name == game.ending) for name in ENDINGS}
        trajectory.metrics |= {f"reward/{name}": value for name, value in game.parts().items()}
        trajectory.metrics |= {
            "log2_highest_tile": max(game.cells), "points": game.points, "num_moves": game.num_moves,
            "num_idle_moves": game.num_idle,
        }  # fmt: skip
        trajectory.metadata |= {
            "outcome": "policy_fault" if game.ending == "invalid_move" else "ok", "why": game.why,
        }  # fmt: skip

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        """A player by expectimax, which looks at the board alone."""

        def answer(messages: Any, tools: Any) -> dict[str, Any]:
            cells = read_board(str(messages[-1]["content"]), self.options)
            move = best_move(cells, depth=_PLAYER_DEPTH, chance_of_4=self.options.chance_of_4)
            return say_move(move, self.options.moves)

        return answer

    def play(self, rng: random.Random, skill: float) -> Conversation:
        """Make turns of a game. A move is the expert's with probability `skill`, else any legal one."""
        game = Game(options=self.options, seed=self._draw_game("train", rng))
        turns: list[tuple[str, str]] = []
        while game.ending is None and (self.options.history == "last" or len(turns) < _PLAYED_TURNS):
            good = best_move(game.cells, depth=0, chance_of_4=self.options.chance_of_4, pull=_PULL)
            move = good if rng.random() < skill else rng.choice(legal_moves(game.cells))
            turns.append((show_turn(game.cells, None, self.options), move))
            game.play(move)
        if self.options.history == "last":
            turns = rng.sample(turns, min(len(turns), _SHOWN_TURNS))
        messages: list[Any] = [{"role": "system", "content": system_prompt(self.options)}]
        for shown, move in turns:
            is_result = self.options.moves == "tool" and self.options.history == "all" and len(messages) > 1
            result = {"role": "tool", "tool_call_id": "call_0", "content": shown}
            messages += [result if is_result else _user(shown), say_move(move, self.options.moves)]
        return Conversation(messages=messages, tools=tools_of(self.options))

    def score_messages(self, messages: list[dict[str, Any]]) -> tuple[float, str]:
        """Score a game by its last message: 0 if an answer was no move, else from 0.1 to 1 by the reward."""
        text = str(messages[-1].get("content") or "")
        end = read_end(text) if messages[-1]["role"] != "assistant" else None  # an agent could write such a text itself
        if end is None:
            return 0.0, "The game ended with an answer that is no move."
        points, highest_tile = end
        reward = sum(reward_parts(highest_tile, points, self.options.goal).values())
        return 0.1 + 0.9 * reward, text.partition("\n")[0]

    def render_trajectory(self, trajectory: Trajectory) -> str:
        """Show the boards beside each other, each with the move that follows it."""
        end = f"{trajectory.metadata.get('why')}, reward {trajectory.reward:.2f}"
        return "\n".join([*render_game(trajectory, self.options), end])


def _begin_branch(trajectory: Trajectory, opening: list[Any]) -> None:
    """Put the turn just played among the further conversations, each of which is trained with the game's reward."""
    trajectory.additional_histories.append(
        History(messages_and_choices=trajectory.messages_and_choices, tools=trajectory.tools)
    )
    trajectory.messages_and_choices = [*opening]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _describe_invalid(message: Any, *, cut_short: bool) -> str:
    said = str(message.content or "")[:60]
    calls = "" if not message.tool_calls else f" and {len(message.tool_calls)} tool calls"
    return f"the answer {said!r}{calls} {'was cut short before a move' if cut_short else 'is no move'}"
