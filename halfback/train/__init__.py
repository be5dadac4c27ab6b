"""Training with evidence: a loop (loop.py), data for it (sets.py, folder.py, augment.py), and recipes (recipes.py) that are run many times
(reproduce.py) and compared (results.py)."""

from .recipes import Arm, Recipe
from .results import in_words
from .settings import Settings

__all__ = ["Arm", "Recipe", "Settings", "in_words"]
