"""The path of `art_recipes.training.pictures` in the programs of users."""

from art_recipes.training.pictures import plot_learning as plot_learning
from art_recipes.training.pictures import plot_scores as plot_scores
from art_recipes.training.pictures import plot_seeds as plot_seeds
from art_recipes.training.pictures import save_picture as save_picture
