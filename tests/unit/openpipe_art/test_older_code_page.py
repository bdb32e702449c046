"""docs/older_code.md lists what `openpipe_art` serves: every module of it, and every word that is translated or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from art.config import TrainConfig
from openpipe_art import dev, train_words
from openpipe_art.older import REFUSED

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/older_code.md").read_text()
MODULES = {path.name for path in (ROOT / "src/openpipe_art").glob("*.py")} - {"__init__.py"}


def test_the_page_lists_every_module_and_no_other() -> None:
    assert {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `") and ".py` |" in line} == MODULES


@pytest.mark.parametrize(
    "word",
    sorted(
        (set(train_words._HONOURED) - TrainConfig.model_fields.keys())
        | set(train_words.NEUTRAL)
        | (train_words.HINTS - {"verbose"})
        | set(dev._OPTIMIZER)
        | {"pbar_total_completion_tokens"}
        | set(train_words._REFUSED)
        | {name for names in REFUSED.values() for name in names}
    ),
)
def test_every_word_is_on_the_page(word: str) -> None:
    assert word in PAGE
