"""Boards: drawn at random, and divided among the splits by a hash of their content."""

from __future__ import annotations

import random

from art.errors import ConfigError
from art.task import Split, derive_seed
from art.tasks.codenames.codenames_options import CodenamesOptions
from art.tasks.codenames.game import KINDS, Board, Kind, Team, legal_clues
from art.tasks.codenames.lexicon import Lexicon

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
