"""The words that a game is played with, and how related a clue is to each of them.

    lexicon = load_lexicon(LexiconSource())
    lexicon.relatedness("farm", ["cow", "wave"])        # array([0.93, 0.  ])

Relatedness is the cosine of two vectors, which come from one of three places:

- `themes`: for our own words, from the table in `themes.py`. Words of a theme are close, words of a family a little,
  and typical words are closer to the theme's name than others.
- `vectors`: for any words, from a file in the text format of word2vec and GloVe.
- `letters`: for words from a file that has no vectors, from their pairs of letters. The scripted players then
  understand each other by spelling alone ("plan" for "plane").
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from art.errors import ConfigError
from art.tasks.codenames.vectors import file_vectors, letter_vectors, own_vectors, read_themes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from art.tasks.codenames.vectors import Vectors

logger = logging.getLogger(__name__)

LexiconKind = Literal["themes", "vectors", "letters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LexiconSource:
    """Where the words of a game come from; `CodenamesOptions` has the meaning of each field."""

    themes: str = "all"
    words_per_theme: int = 10
    words: str | None = None
    vectors: str | None = None
    clues: str = "any"


@dataclass(frozen=True)
class Lexicon:
    """Words for boards, words for clues, and a vector for each of them."""

    words: tuple[str, ...]
    """Words that may lie on a board."""
    clues: tuple[str, ...]
    """Words that scripted spymasters choose clues from."""
    themes: Mapping[str, tuple[str, ...]]
    """Words of each of our own themes; empty for words from a file."""
    vectors: Vectors
    """Unit vector [D] of each word and clue."""
    kind: LexiconKind
    """Where the vectors come from."""
    allowed_clues: frozenset[str] | None
    """The only clues that are legal; `None` if any word may be a clue."""

    @cached_property
    def _clue_vectors(self) -> NDArray[np.float32]:  # [C, D]
        import numpy as np

        return np.stack([self.vectors[clue] for clue in self.clues])

    def table(self, words: Sequence[str]) -> NDArray[np.float32]:
        """Cosine [C, W] of each word of `clues` with each of `words`."""
        import numpy as np

        table: NDArray[np.float32] = self._clue_vectors @ np.stack([self.vectors[word] for word in words]).T
        return table

    def relatedness(self, clue: str, words: Sequence[str]) -> NDArray[np.float32]:
        """Cosine [W] of a clue with each of `words`. A clue without a vector is compared by its letters."""
        import numpy as np

        vectors = self.vectors if clue in self.vectors else letter_vectors([clue, *words])
        return np.array([vectors[clue] @ vectors[word] for word in words], np.float32)


@cache
def load_lexicon(source: LexiconSource) -> Lexicon:
    """Load words, clues and vectors; a second call with the same source returns the same object.

    Raises:
        ConfigError: a file cannot be read or lacks words, or a theme is unknown.
    """
    themes = _chosen_themes(source)
    names = tuple(themes)
    words = tuple(dict.fromkeys(word for theme in themes.values() for word in theme))
    if source.words is not None:
        words, themes = tuple(read_words(source.words)), {}
    allowed = _allowed_clues(source, names)
    clues = None if allowed is None else tuple(sorted(allowed))
    kind, vectors = _vectors(source, words, clues)
    clues = tuple(word for word in (vectors if clues is None else clues) if word.isalpha() and word in vectors)
    if len(clues) < 2:
        raise ConfigError("the scripted players know fewer than two of the allowed clues; give more of them in `clues`")
    return Lexicon(words, clues, themes, vectors, kind, allowed)


def _chosen_themes(source: LexiconSource) -> dict[str, tuple[str, ...]]:
    every = {clues[0]: tuple(words) for _, clues, words in read_themes()}
    if source.themes == "all":
        names = list(every)
    elif source.words is not None:
        raise ConfigError(
            f"`words` replaces our own words, so themes={source.themes} has no effect; set themes=all. A tiny model "
            "gets themes by default, since it can learn only a few words: give other words to a real --base-model"
        )
    else:
        names = [name.strip() for name in source.themes.split(",")]
    if unknown := [name for name in names if name not in every]:
        raise ConfigError(f"there is no theme {unknown[0]!r}; the themes are {', '.join(every)}")
    return {name: every[name][: source.words_per_theme] for name in names}


def _allowed_clues(source: LexiconSource, names: Sequence[str]) -> frozenset[str] | None:
    if source.clues == "themes" and source.words is not None:
        raise ConfigError("`clues=themes` allows the names of our own themes, but `words` has none; give `clues=FILE`")
    if source.clues in ("any", "themes"):
        return None if source.clues == "any" else frozenset(names)
    return frozenset(read_words(source.clues))


def _vectors(source: LexiconSource, words: Sequence[str], clues: Sequence[str] | None) -> tuple[LexiconKind, Vectors]:
    if source.vectors is not None:
        return "vectors", file_vectors(source.vectors, words, clues)
    own = own_vectors()
    unknown = [word for word in words if word not in own]
    if not unknown:
        return "themes", own
    logger.warning(
        "%d of %d words have no vector (%s, ...): the scripted players relate words by their letters. Give "
        "vectors=FILE for players that understand the words", len(unknown), len(words), ", ".join(unknown[:3]),
    )  # fmt: skip
    return "letters", letter_vectors([*own, *words, *(clues or ())])


def read_words(path: str) -> list[str]:
    """Read a file with one word per line, in lower case and without repetitions. Lines that begin with # are comments.

    Raises:
        ConfigError: the file cannot be read, or has a line that is no word.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read words from {path!r}: {error}. Give a text file with one word per line"
        ) from error
    words = [" ".join(line.lower().split()) for line in lines if line.strip() and not line.startswith("#")]
    if wrong := [word for word in words if not word.replace(" ", "").replace("-", "").replace("'", "").isalpha()]:
        raise ConfigError(f"{path!r} has the line {wrong[0]!r}; write one word of letters per line")
    return list(dict.fromkeys(words))
