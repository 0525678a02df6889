"""Sums of the log densities of some variables of a model, at draws: of priors, of likelihoods, and their changes."""

from collections.abc import Callable, Sequence

import numpy as np
import pymc as pm

from pytensor.graph.basic import Variable

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.at_draws import FunctionsAtDraws
from pymc_ngvi.graphs.layout import Layout


class TermSums(FunctionsAtDraws):
    """Sums of terms of log p at unconstrained draws."""

    def __init__(self, model: pm.Model, layout: Layout, make: Callable[[], list[Variable]]) -> None:
        self.model, self.layout, self._make = model, layout, make
        self._forget()

    def _outputs(self) -> list[Variable]:
        return [term.sum() for term in self._make()]

    def __call__(self, theta: Array) -> Array:
        """Return the sum of all terms, (n_draws,), at draws (n_draws, n_dim)."""
        theta = np.ascontiguousarray(theta, dtype=np.float64)
        with np.errstate(invalid="ignore"):  # of terms that are infinite
            return np.sum(self.evaluate(theta), axis=0, dtype=np.float64) + np.zeros(len(theta))


def log_densities(model: pm.Model, names: Sequence[str], *, jacobian: bool = False) -> list[Variable]:
    """Return the log densities of variables and Potentials by name, elementwise, in the value variables."""
    if not names:
        return []
    return model.logp(vars=[model[name] for name in names], jacobian=jacobian, sum=False)
