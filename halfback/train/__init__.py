"""Training with evidence: a loop (loop.py), data for it (sets.py, augment.py), and recipes that run it many times (reproduce.py)."""

from .reproduce import Arm, Recipe
from .settings import Settings

__all__ = ["Arm", "Recipe", "Settings"]
