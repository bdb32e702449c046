"""The path of `art_recipes` in the programs of users: functions that run a complete training."""

from typing import TYPE_CHECKING, Any

import art_recipes
from art_recipes import __all__ as __all__

if TYPE_CHECKING:
    from art_recipes import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(art_recipes, name)
