"""Codenames with two agents per team: a spymaster who gives clues and a guesser who names words of the board.

    spymaster, user  yours:            guesser, user  clue: farm 2, guess 1 of 3
                     horse                            board:
                     cow                              wave
                     theirs:                          cow
                     wave ...                         horse ...
    assistant        farm 2            assistant      cow

One policy plays both roles, or one of them beside a scripted partner or another model; two policies learn together by
`two_policies.train_two`. The other team is scripted. A trajectory has the spymaster's conversation and, as a further
history, the guesser's; both share the team's reward.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from art.errors import ConfigError, RolloutError
from art.task import Conversation, Player, Scenario, Split, Task, TaskDefaults, derive_seed
from art.tasks.codenames.codenames_options import ROLES, CodenamesOptions, Role
from art.tasks.codenames.game import KINDS, Board, Game, Kind, Team, legal_clues
from art.tasks.codenames.lexicon import Lexicon, load_lexicon
from art.tasks.codenames.match import Answer, Match, Seat, play_match, run_match
from art.tasks.codenames.scripted import ScriptedPlayer
from art.tasks.codenames.seats import PartnerModel, message_player, model_seat, partner_role, scripted_seat
from art.tasks.codenames.wording import system_text
from art.trajectory import History, Trajectory

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
        self.lexicon = load_lexicon(self.options.source())
        check_board_size(self.lexicon, self.options)
        self._partner = self._find_partner()

    def _find_partner(self) -> PartnerModel | None:
        """Return the model that plays the other role of the policy's team, if a model does.

        Raises:
            ConfigError: the options about the partner contradict each other, or the scripted one cannot play.
        """
        options = self.options
        if options.train == "both":
            if changed := {"partner", "partner_skill", "partner_url"} & options.model_fields_set:
                raise ConfigError(
                    f"`{min(changed)}` has no effect with train=both; set train=spymaster or train=guesser"
                )
            return None
        if options.partner != "scripted":
            return PartnerModel(options)
        if options.partner_url is not None:
            raise ConfigError("`partner_url` is the address of a partner model; name the model by `partner=NAME`")
        if self.lexicon.kind == "letters":
            raise ConfigError(
                "the scripted partner does not understand these words, since they have no vectors; give vectors=FILE, "
                "name a partner model, or set train=both"
            )
        return None

    def scenarios(self, split: Split, *, seed: int, count: int) -> list[Scenario]:
        """Draw `count` boards. A hash of its content decides the split of a board."""
        rng = random.Random(derive_seed(self.label, split, seed))
        boards = [draw_board(rng, self.lexicon, self.options, split) for _ in range(count)]
        return [self.scenario(split, seed, index, board.inputs()) for index, board in enumerate(boards)]

    async def rollout(
        self, model: Model[Any, Any], scenario: Scenario, *, rollout_index: int = 0, step: int | None = None
    ) -> Trajectory:
        trained = self.options.train
        if trained == "both":
            return await self.team_rollout(dict.fromkeys(ROLES, model), scenario, rollout_index, step)
        match = await self._play(scenario, rollout_index, {
            trained: self._model_seat(model, scenario, rollout_index, trained, step),
            partner_role(trained): self._partner_seat(model, scenario, rollout_index),
        })  # fmt: skip
        if match.fault is not None and match.fault.role != trained:
            raise RolloutError(f"the partner {self.options.partner!r} spoilt a game of the policy. {match.why()}")
        return self._record(match, trained, scenario)

    async def team_rollout(
        self, models: Mapping[Role, Model[Any, Any]], scenario: Scenario, rollout_index: int, step: int | None = None
    ) -> Trajectory:
        """Play a game with a model in each role.

        Returns:
            The spymaster's conversation with the team's reward, and the guesser's as a further history.
        """
        seats = {role: self._model_seat(models[role], scenario, rollout_index, role, step) for role in ROLES}
        match = await self._play(scenario, rollout_index, seats)
        trajectory = self._record(match, "spymaster", scenario)
        if len(said := match.conversations["guesser"].messages_and_choices) > 1:
            trajectory.additional_histories = [History(messages_and_choices=said)]
        return trajectory

    async def _play(self, scenario: Scenario, rollout_index: int, seats: Mapping[Role, Seat]) -> Match:
        conversations = {
            role: Trajectory(messages_and_choices=[{"role": "system", "content": self._system(role)}]) for role in ROLES
        }
        opponent = ScriptedPlayer(
            lexicon=self.lexicon, skill=self.options.opponent_skill,
            rng=random.Random(derive_seed(scenario.seed, rollout_index, "opponent")),
        )  # fmt: skip
        return await run_match(self._game(Board.from_inputs(scenario.inputs)), opponent, seats, conversations)

    def _record(self, match: Match, role: Role, scenario: Scenario) -> Trajectory:
        """Return the conversation of one role with the team's reward."""
        trajectory = match.conversations[role]
        trajectory.reward = sum(match.reward_parts().values())
        trajectory.metrics |= match.metrics()
        trajectory.metadata |= {"scenario_id": scenario.id, "why": match.why()}
        if match.fault is not None:
            trajectory.metadata["outcome"] = "policy_fault"
        return trajectory

    def _model_seat(
        self, model: Model[Any, Any], scenario: Scenario, rollout_index: int, role: Role, step: int | None
    ) -> Seat:
        seed = derive_seed(scenario.seed, rollout_index, role)
        return model_seat(model, seed=seed, step=step, max_tokens=self.options.max_tokens)

    def _partner_seat(self, model: Model[Any, Any], scenario: Scenario, rollout_index: int) -> Seat:
        seed = derive_seed(scenario.seed, rollout_index, "partner")
        if self._partner is not None:
            return self._partner.seat(model, seed=seed, max_tokens=self.options.max_tokens)
        return scripted_seat(message_player(self.lexicon, random.Random(seed), self.options.partner_skill))

    def player(self, scenario: Scenario, *, rollout_index: int = 0) -> Player:
        """Make a player of full skill. It knows what its role is told, and not what the scenario hides from it."""
        rng = random.Random(derive_seed(scenario.seed, rollout_index, "player"))
        return message_player(self.lexicon, rng, 1.0)

    def play(self, rng: random.Random, skill: float) -> Conversation:
        """Play a game, and return the conversation of one role: the trained one, or either."""
        role = rng.choice(ROLES) if self.options.train == "both" else self.options.train
        players = {own: message_player(self.lexicon, rng, skill) for own in ROLES}
        messages: dict[Role, list[Any]] = {own: [{"role": "system", "content": self._system(own)}] for own in ROLES}
        opponent = ScriptedPlayer(lexicon=self.lexicon, rng=rng, skill=self.options.opponent_skill)
        match = play_match(self._game(draw_board(rng, self.lexicon, self.options, "train")), opponent)
        answer: Answer | None = None
        try:
            while True:
                asked, shown = next(match) if answer is None else match.send(answer)
                messages[asked].append({"role": "user", "content": shown})
                said: Any = players[asked](messages[asked], None)
                messages[asked].append(said)
                answer = Answer(said["content"])
        except StopIteration:
            pass
        return Conversation(messages=messages[role]) if len(messages[role]) > 1 else self.play(rng, skill)

    def score_messages(self, messages: list[dict[str, Any]]) -> tuple[float, str]:
        """Score a game from 0 to 1 by its last message: won 1, lost 0.3 to 0.6, assassin 0.15 to 0.3, fault 0."""
        end = str(messages[-1]["content"])
        match = re.search(r"named (\d+) of the team's (\d+) words", end)
        if not end.startswith("Game over") or match is None:
            return 0.0, "The game has no end."
        share = int(match[1]) / int(match[2])
        if "broke the rules" in end:
            return 0.0, end
        if "the team won" in end:
            return 1.0, end
        return (0.15 + 0.15 * share if "assassin" in end else 0.3 + 0.3 * share), end

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

    def _system(self, role: Role) -> str:
        return system_text(role, self.lexicon.allowed_clues)

    def _game(self, board: Board) -> Game:
        return Game(board, max_turns=self.options.max_turns, allowed_clues=self.lexicon.allowed_clues)


_SPLIT_OF_TENTH: dict[int, Split] = {8: "val", 9: "test"}  # the other eight tenths are for training
_MAX_TRIES = 1000
"""Boards drawn for one of a split. A tenth of all boards is in the smallest split."""


def split_of(board: Board) -> Split:
    """The split of a board. It depends on which words are of which kind and on who begins, and not on their order."""
    content = (board.begins, *sorted((word, kind) for word, kind in board.cards.items()))
    return _SPLIT_OF_TENTH.get(derive_seed("codenames", str(content)) % 10, "train")


def draw_board(rng: random.Random, lexicon: Lexicon, options: CodenamesOptions, split: Split | None = None) -> Board:
    """Draw a board, of a split if one is named.

    Raises:
        ConfigError: the options do not allow such a board.
    """
    for _ in range(_MAX_TRIES):
        board = _draw(rng, lexicon, options)
        if split in (None, split_of(board)) and any(legal_clues([clue], board.cards) for clue in lexicon.clues):
            return board
    raise ConfigError(
        f"none of {_MAX_TRIES} boards with these options has a legal clue and is in the split {split!r}; give more "
        "words, larger boards or more `clues`"
    )


def check_board_size(lexicon: Lexicon, options: CodenamesOptions) -> None:
    """Check that there are enough words for a board.

    Raises:
        ConfigError: there are too few words, or a themed board needs our own words.
    """
    sizes = (options.first_words, options.second_words, options.neutral_words, options.assassin_words)
    if options.second_words == 0 and options.begins != "policy":
        raise ConfigError("`second_words=0` leaves the other team out, so the policy has to begin: set begins=policy")
    if sum(sizes) > len(lexicon.words):
        raise ConfigError(f"a board of {sum(sizes)} words needs as many different words, got {len(lexicon.words)}")
    if options.layout == "mixed":
        return
    if not lexicon.themes:
        raise ConfigError("`layout=themed` needs our own words, whose themes are known; leave `words` out")
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


def _draw(rng: random.Random, lexicon: Lexicon, options: CodenamesOptions) -> Board:
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
    return Board(dict(cards), begins)
