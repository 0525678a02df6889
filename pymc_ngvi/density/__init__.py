"""The log density of a PyMC model: values, derivatives, expectations, constrained values."""

from pymc_ngvi.density.info import CannotReuse
from pymc_ngvi.density.logdensity import LogDensity, ModelDensity
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.graph import MissingDerivativeError
from pymc_ngvi.graphs.layout import Layout, Variable

__all__ = [
    "CannotReuse",
    "Layout",
    "LogDensity",
    "MissingDerivativeError",
    "ModelDensity",
    "Variable",
    "without_c",
]
