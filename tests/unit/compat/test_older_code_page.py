"""docs/older_code.md lists what `art.compat` serves: every module of it, and every word that is translated or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from art.compat import internal_config, settings
from art.compat.gather import OlderOptions
from art.compat.refused import REFUSED
from art.config import TrainConfig

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/older_code.md").read_text()
MODULES = sorted(path.stem for path in (ROOT / "src/art/compat").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("module", MODULES)
def test_every_module_is_on_the_page(module: str) -> None:
    assert f"`compat/{module}.py`" in PAGE


def test_no_module_on_the_page_is_gone() -> None:
    listed = {word.split(".py`")[0] for word in PAGE.split("`compat/")[1:]}
    assert listed == set(MODULES)


@pytest.mark.parametrize(
    "word",
    sorted(
        (set(settings._HONOURED) - TrainConfig.model_fields.keys())
        | set(settings.NEUTRAL)
        | (settings.HINTS - {"verbose"})
        | set(internal_config._OPTIMIZER)
        | set(OlderOptions.__annotations__)
        | set(settings._REFUSED)
        | {name for names in REFUSED.values() for name in names}
    ),
)
def test_every_word_is_on_the_page(word: str) -> None:
    assert word in PAGE


def test_todays_code_needs_no_older_word() -> None:
    """What a program of today uses does not load the older settings."""
    import subprocess
    import sys

    script = (
        "import sys, art, art.gather, art.backends.local, art.config.training as training\n"
        "training.train_config(None, {'learning_rate': 1e-5, 'loss': 'grpo'})\n"
        "art.TrainableModel(name='n', project='p', base_model='b').model_settings()\n"
        "print(*sorted(name for name in sys.modules if name.startswith('art.compat.')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["art.compat.gather"], "the options that gather functions refuse or drop"
