"""The path of `art_recipes.scenarios` in the programs of users: scenarios that a language model writes."""

from art_recipes.scenarios import *  # noqa: F403
from art_recipes.scenarios import __all__ as __all__
