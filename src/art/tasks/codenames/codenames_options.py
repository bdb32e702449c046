"""What a user may choose about the game."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from art.task import TaskOptions
from art.tasks.codenames.lexicon import LexiconSource

Role = Literal["spymaster", "guesser"]
ROLES: tuple[Role, ...] = ("spymaster", "guesser")


class CodenamesOptions(TaskOptions):
    """Board, words, players, and which role is trained. The defaults are the full game."""

    train: Literal["both", "spymaster", "guesser"] = "both"
    """The trained role. `both` lets one policy play both roles, with one reward for the team."""
    partner: str = Field(default="scripted", min_length=1)
    """Who plays the other role: `scripted`, or the name of a model."""
    partner_skill: float = Field(default=0.9, ge=0, le=1)
    """Share of the scripted partner's moves that are good."""
    partner_url: str | None = None
    """OpenAI-compatible address of the partner model, whose key is PARTNER_API_KEY; by default the policy's server."""
    opponent_skill: float = Field(default=0.6, ge=0, le=1)
    """Share of the scripted opponents' moves that are good."""
    first_words: int = Field(default=9, ge=1, le=100)
    """Number of words of the team that begins."""
    second_words: int = Field(default=8, ge=0, le=100)
    """Number of words of the other team."""
    neutral_words: int = Field(default=7, ge=0, le=100)
    """Number of words that belong to nobody."""
    assassin_words: int = Field(default=1, ge=0, le=10)
    """Number of words that lose the game for the team that names one."""
    begins: Literal["policy", "opponent", "random"] = "random"
    """The team that begins."""
    max_turns: int = Field(default=12, ge=1, le=100)
    """Turns of the policy's team, after which the game ends without a winner."""
    layout: Literal["mixed", "themed"] = "mixed"
    """Boards of any words, or boards on which the policy's words share a theme that no other word has."""
    themes: str = "all"
    """Themes of our own words, with commas between them: `themes=fruit,castle,space`."""
    words_per_theme: int = Field(default=10, ge=1, le=10)
    """Number of words of each theme, the most typical first."""
    words: str | None = None
    """File with one word per line, in place of our own words."""
    vectors: str | None = None
    """File of vectors in the text format of word2vec and GloVe, by which the scripted players relate words."""
    clues: str = "any"
    """Legal clues: `any` word of letters, the names of the `themes`, or the words of a file with one per line."""
    max_tokens: int = Field(default=64, ge=4, le=100_000)
    """Largest number of tokens of an answer. Give a model room here that thinks before it answers."""

    def source(self) -> LexiconSource:
        """Return where the words come from."""
        return LexiconSource(
            themes=self.themes, words_per_theme=self.words_per_theme, words=self.words, vectors=self.vectors,
            clues=self.clues,
        )  # fmt: skip
