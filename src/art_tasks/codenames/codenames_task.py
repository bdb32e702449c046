"""Codenames with two agents per team: a spymaster who gives clues and a guesser who names words of the board.

    spymaster, user  yours:            guesser, user  clue: farm 2, guess 1 of 3
                     horse                            board:
                     cow                              wave
                     theirs:                          cow
                     wave ...                         horse ...
    assistant        farm 2            assistant      cow

One policy plays both roles. The other team is scripted. A trajectory has the spymaster's conversation and, as a further
history, the guesser's; both share the team's reward.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from art.task import Conversation, Player, Scenario, Split, Task, TaskDefaults, derive_seed
from art.trajectory import History, Trajectory
from art_tasks.codenames.game import (
    BOARD_FORMS,
    KINDS,
    ROLES,
    BoardForm,
    CodenamesGame,
    CodenamesOptions,
    Kind,
    Role,
    Team,
    WordBoard,
    legal_clues,
)
from art_tasks.codenames.lexicon import Lexicon, load_lexicon
from art_tasks.codenames.match import (
    ScriptedPlayer,
    message_player,
    model_seat,
    play_match,
    scripted_seat,
    system_text,
)

if TYPE_CHECKING:
    from art.model import Model


class Codenames(Task):
    """A task: find the own words of a board in a team of two, before the other team finds its words.

    A tiny model knows no words but those of its warm start, and reads short boards. So its smaller form has 24 words of
    six themes, whose names are the only clues, and boards of five words. Two of them are its own, share a theme, and
    have to be named in one turn. It learns to connect words with themes, in both roles.
    """

    name: ClassVar[str] = "codenames"
    description: ClassVar[str] = "a word game of two teams, each with a spymaster and a guesser"
    headline_metric: ClassVar[str] = "win"
    options_class: ClassVar[type[CodenamesOptions]] = CodenamesOptions
    options: CodenamesOptions
    tiny_options: ClassVar[Mapping[str, Any]] = {"board": "short", "max_tokens": 12}
    defaults: ClassVar[TaskDefaults] = TaskDefaults(play_skill=0.6)
    rubric: ClassVar[str | None] = """\
Two agents of one team play together, a spymaster and a guesser. `messages` has the conversation of one of them, and
`other_conversations` that of the guesser if both are judged. The last message says how the game ended. Score a won
game highest; after a lost one, score by the number of own words that the guesser named. A team that named the assassin
is worse than one that lost otherwise. Worst is a team that broke the rules: by an illegal clue, or by an answer that
is no word of the board. Among equal results, prefer clues that connect several own words and no others, and guesses
that follow from the clue."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.form = BOARD_FORMS[self.options.board]
        self.lexicon = load_lexicon(self.form)

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Draw `count` boards. A hash of its content decides the split of a board."""
        rng = random.Random(derive_seed(self.label, split, seed))
        boards = [draw_board(rng, self.lexicon, self.form, split) for _ in range(count)]
        return [self.scenario(split, seed, index, board.inputs()) for index, board in enumerate(boards)]

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        conversations = self._conversations()
        seed = derive_seed(scenario.seed, rollout_index)
        rng = random.Random(derive_seed(scenario.seed, rollout_index, "opponent"))
        opponent = ScriptedPlayer(lexicon=self.lexicon, skill=self.options.opponent_skill, rng=rng)
        seat = model_seat(model, seed=seed, step=step, max_tokens=self.options.max_tokens)
        match = await play_match(self._game(WordBoard.from_inputs(scenario.inputs)), opponent, seat, conversations)
        trajectory = conversations["spymaster"]
        if len(said := conversations["guesser"].messages_and_choices) > 1:
            trajectory.additional_histories = [History(messages_and_choices=said)]
        trajectory.reward = sum(match.reward_parts().values())
        trajectory.metrics |= match.metrics()
        trajectory.metadata |= {"scenario_id": scenario.id, "why": match.why()}
        if match.fault is not None:
            trajectory.metadata["outcome"] = "policy_fault"
        return trajectory

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        """Make a player of full skill. It knows what its role is told, and not what the scenario hides from it."""
        rng = random.Random(derive_seed(scenario.seed, rollout_index, "player"))
        return message_player(self.lexicon, rng, 1.0)

    def play(self, rng: random.Random, skill: float) -> Conversation:
        """Play a game, and return the conversation of either role."""
        role = rng.choice(ROLES)
        conversations = self._conversations()
        opponent = ScriptedPlayer(lexicon=self.lexicon, rng=rng, skill=self.options.opponent_skill)
        game = self._game(draw_board(rng, self.lexicon, self.form, "train"))
        seat = scripted_seat(message_player(self.lexicon, rng, skill))
        with suppress(StopIteration):  # scripted seats never wait, so the game needs no event loop
            play_match(game, opponent, seat, conversations).send(None)
        messages = conversations[role].messages()[:-1]  # without the message that says how the game ended
        return Conversation(messages=messages) if messages else self.play(rng, skill)

    def render_trajectory(self, trajectory: Trajectory) -> str:
        """Show the board, and then each role's answers and what came of them."""
        lines = []
        for history in (trajectory, *trajectory.additional_histories):
            system, *messages = history.messages()
            lines.append(str(system["content"]).partition(" of a team")[0].replace("You are the", "--"))
            for message in messages:
                content = str(message.get("content") or "")
                lines.append(f"-> {content}\n" if message["role"] == "assistant" else content)
        return "\n".join([*lines, f"reward: {trajectory.reward:g}"])

    def _conversations(self) -> dict[Role, Trajectory]:
        """Begin a conversation for each role, with what it is told."""
        told = {role: system_text(role, self.lexicon.allowed_clues) for role in ROLES}
        return {role: Trajectory(messages_and_choices=[{"role": "system", "content": told[role]}]) for role in ROLES}

    def _game(self, board: WordBoard) -> CodenamesGame:
        return CodenamesGame(board, max_turns=self.form.max_turns, allowed_clues=self.lexicon.allowed_clues)


_SPLIT_OF_TENTH: dict[int, Split] = {8: "val", 9: "test"}  # the other eight tenths are for training


def split_of(board: WordBoard) -> Split:
    """The split of a board. It depends on which words are of which kind and on who begins, and not on their order."""
    content = (board.begins, *sorted((word, kind) for word, kind in board.cards.items()))
    return _SPLIT_OF_TENTH.get(derive_seed("codenames", str(content)) % 10, "train")


def draw_board(rng: random.Random, lexicon: Lexicon, form: BoardForm, split: Split) -> WordBoard:
    """Draw a board of a split, on which some clue is legal."""
    while True:
        begins: Team = "us" if form.themes else rng.choice(("us", "them"))
        teams = (form.first_words, form.second_words)
        ours, theirs = teams if begins == "us" else teams[::-1]
        counts = (ours, theirs, form.neutral_words, form.assassin_words)
        if form.themes:
            theme = rng.choice([words for words in lexicon.themes.values() if len(words) >= ours])
            words = [*rng.sample(theme, ours), *rng.sample(_strangers(lexicon, theme), sum(counts) - ours)]
        else:
            words = rng.sample(lexicon.words, sum(counts))
        kinds: list[Kind] = [kind for kind, count in zip(KINDS, counts, strict=True) for _ in range(count)]
        cards = list(zip(words, kinds, strict=True))
        rng.shuffle(cards)
        board = WordBoard(dict(cards), begins)
        if split == split_of(board) and any(legal_clues([clue], board.cards) for clue in lexicon.clues):
            return board


def _strangers(lexicon: Lexicon, theme: tuple[str, ...]) -> list[str]:
    """Words that share no theme with a theme's words."""
    near = {word for words in lexicon.themes.values() if set(words) & set(theme) for word in words}
    return [word for word in lexicon.words if word not in near]
