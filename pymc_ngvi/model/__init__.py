"""The only part that evaluates a PyMC model: log density, derivatives, constrained values."""

from pymc_ngvi.model.graphs.backends import without_c
from pymc_ngvi.model.graphs.graph import MissingDerivativeError
from pymc_ngvi.model.layout import Layout, Variable
from pymc_ngvi.model.logdensity import LogDensity
from pymc_ngvi.model.reuse import CannotReuse

__all__ = [
    "CannotReuse",
    "Layout",
    "LogDensity",
    "MissingDerivativeError",
    "Variable",
    "without_c",
]
