"""Updates: parametrisation and step map. One file and one row each."""

from pymc_ngvi.types import Update
from pymc_ngvi.updates.natural import natural

UPDATES: dict[str, Update] = {"natural": natural}

__all__ = ["UPDATES", "natural"]
