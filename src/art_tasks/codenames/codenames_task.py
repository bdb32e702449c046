"""Codenames with two agents per team: a spymaster who gives clues and a guesser who names words of the board.

    spymaster, user  yours:            guesser, user  clue: farm 2, guess 1 of 3
                     horse                            board:
                     cow                              wave
                     theirs:                          cow
                     wave ...                         horse ...
    assistant        farm 2            assistant      cow

One policy plays both roles, or one of them beside a scripted partner. The other team is scripted. A trajectory has the
spymaster's conversation and, as a further history, the guesser's; both share the team's reward.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from art.errors import ConfigError
from art.task import Conversation, Player, Scenario, Split, Task, TaskDefaults, derive_seed
from art.trajectory import History, Trajectory
from art_tasks.codenames.game import (
    KINDS,
    ROLES,
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
    tiny_options: ClassVar[Mapping[str, Any]] = {
        "first_words": 2, "second_words": 1, "neutral_words": 1, "assassin_words": 1, "begins": "policy",
        "max_turns": 1, "layout": "themed", "themes": "sea,farm,body,tools,music,road",
        "words_per_theme": 4, "clues": "themes", "max_tokens": 12,
    }  # fmt: skip
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
        chosen = self.options
        self.lexicon = load_lexicon(chosen.themes, chosen.words_per_theme, chosen.clues)
        check_board_size(self.lexicon, chosen)
        if chosen.train == "both" and "partner_skill" in chosen.model_fields_set:
            raise ConfigError("`partner_skill` has no effect with train=both; set train=spymaster or train=guesser")

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Draw `count` boards. A hash of its content decides the split of a board."""
        rng = random.Random(derive_seed(self.label, split, seed))
        boards = [draw_board(rng, self.lexicon, self.options, split) for _ in range(count)]
        return [self.scenario(split, seed, index, board.inputs()) for index, board in enumerate(boards)]

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        options, conversations = self.options, self._conversations()

        def rng(what: str) -> random.Random:
            return random.Random(derive_seed(scenario.seed, rollout_index, what))

        partner = scripted_seat(message_player(self.lexicon, rng("partner"), options.partner_skill))
        seats = {
            role: model_seat(
                model, seed=derive_seed(scenario.seed, rollout_index, role), step=step, max_tokens=options.max_tokens
            )
            if options.train in (role, "both")
            else partner
            for role in ROLES
        }
        opponent = ScriptedPlayer(lexicon=self.lexicon, skill=options.opponent_skill, rng=rng("opponent"))
        game = self._game(WordBoard.from_inputs(scenario.inputs))
        match = await play_match(game, opponent, seats, conversations)
        trajectory = conversations["guesser" if options.train == "guesser" else "spymaster"]
        if options.train == "both" and len(said := conversations["guesser"].messages_and_choices) > 1:
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
        """Play a game, and return the conversation of one role: the trained one, or either."""
        role = rng.choice(ROLES) if self.options.train == "both" else self.options.train
        players = {own: message_player(self.lexicon, rng, skill) for own in ROLES}
        conversations = self._conversations()
        opponent = ScriptedPlayer(lexicon=self.lexicon, rng=rng, skill=self.options.opponent_skill)
        game = self._game(draw_board(rng, self.lexicon, self.options, "train"))
        seats = {own: scripted_seat(player) for own, player in players.items()}
        with suppress(StopIteration):  # scripted seats never wait, so the game needs no event loop
            play_match(game, opponent, seats, conversations).send(None)
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
        return CodenamesGame(board, max_turns=self.options.max_turns, allowed_clues=self.lexicon.allowed_clues)


_SPLIT_OF_TENTH: dict[int, Split] = {8: "val", 9: "test"}  # the other eight tenths are for training
_MAX_TRIES = 1000
"""Boards drawn for one of a split. A tenth of all boards is in the smallest split."""


def split_of(board: WordBoard) -> Split:
    """The split of a board. It depends on which words are of which kind and on who begins, and not on their order."""
    content = (board.begins, *sorted((word, kind) for word, kind in board.cards.items()))
    return _SPLIT_OF_TENTH.get(derive_seed("codenames", str(content)) % 10, "train")


def draw_board(
    rng: random.Random, lexicon: Lexicon, options: CodenamesOptions, split: Split | None = None
) -> WordBoard:
    """Draw a board, of a split if one is named.

    Raises:
        ConfigError: the options do not allow such a board.
    """
    for _ in range(_MAX_TRIES):
        begins: Team = "us" if options.begins == "policy" else "them"
        if options.begins == "random":
            begins = rng.choice(("us", "them"))
        teams = (options.first_words, options.second_words)
        ours, theirs = teams if begins == "us" else teams[::-1]
        counts = (ours, theirs, options.neutral_words, options.assassin_words)
        if options.layout == "themed":
            theme = rng.choice([words for words in lexicon.themes.values() if len(words) >= ours])
            words = [*rng.sample(theme, ours), *rng.sample(_strangers(lexicon, theme), sum(counts) - ours)]
        else:
            words = rng.sample(lexicon.words, sum(counts))
        kinds: list[Kind] = [kind for kind, count in zip(KINDS, counts, strict=True) for _ in range(count)]
        cards = list(zip(words, kinds, strict=True))
        rng.shuffle(cards)
        board = WordBoard(dict(cards), begins)
        if split in (None, split_of(board)) and any(legal_clues([clue], board.cards) for clue in lexicon.clues):
            return board
    raise ConfigError(
        f"none of {_MAX_TRIES} boards with these options has a legal clue and is in the split {split!r}; give more "
        "words, larger boards or more `clues`"
    )


def check_board_size(lexicon: Lexicon, options: CodenamesOptions) -> None:
    """Check that there are enough words for a board.

    Raises:
        ConfigError: there are too few words.
    """
    sizes = (options.first_words, options.second_words, options.neutral_words, options.assassin_words)
    if options.second_words == 0 and options.begins != "policy":
        raise ConfigError("`second_words=0` leaves the other team out, so the policy has to begin: set begins=policy")
    if sum(sizes) > len(lexicon.words):
        raise ConfigError(f"a board of {sum(sizes)} words needs as many different words, got {len(lexicon.words)}")
    if options.layout == "mixed":
        return
    most = options.first_words if options.begins != "opponent" else options.second_words
    fits = [words for words in lexicon.themes.values() if len(words) >= most]
    if not fits or sum(sizes) - most > min(len(_strangers(lexicon, words)) for words in fits):
        raise ConfigError(
            f"a themed board of {sum(sizes)} words, {most} of one theme, needs larger themes or more of them; there "
            f"are {len(lexicon.themes)} with up to {options.words_per_theme} words"
        )


def _strangers(lexicon: Lexicon, theme: tuple[str, ...]) -> list[str]:
    """Words that share no theme with a theme's words."""
    near = {word for words in lexicon.themes.values() if set(words) & set(theme) for word in words}
    return [word for word in lexicon.words if word not in near]
