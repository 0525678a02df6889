"""The only part that evaluates a PyMC model: log density, derivatives, constrained values."""

from pymc_ngvi.model.backends import without_c
from pymc_ngvi.model.graph import MissingDerivativeError
from pymc_ngvi.model.hessian import PatternWidened
from pymc_ngvi.model.layout import Layout, Variable
from pymc_ngvi.model.logdensity import LogDensity
from pymc_ngvi.model.reuse import CannotReuse

__all__ = ["CannotReuse", "Layout", "LogDensity", "MissingDerivativeError", "PatternWidened", "Variable", "without_c"]
