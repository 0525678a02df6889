"""Sums of the log densities of some variables of a model, at draws: of priors, of likelihoods, and their changes."""

from collections.abc import Callable, Sequence

import numpy as np
import pymc as pm

from pytensor.graph.basic import Variable

from pymc_ngvi.core.types import Array
from pymc_ngvi.density.at_draws import FunctionsAtDraws
from pymc_ngvi.graphs.layout import Layout


class TermSums(FunctionsAtDraws):
    """Sums of terms of log p at unconstrained draws.

    Parameters
    ----------
    model : pymc.Model
    layout : Layout
        Of the fit.
    make : callable
        Returns the terms, arrays that are functions of the value variables.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> from pymc_ngvi.density import LogDensity
    >>> from pymc_ngvi.density.terms import TermSums, log_densities
    >>> with pm.Model() as model:
    ...     s = pm.HalfNormal("s")
    ...     y = pm.Normal("y", 0.0, s, observed=[1.0, 2.0])
    >>> of_prior = TermSums(model, LogDensity(model).layout, lambda: log_densities(model, ["s"]))
    >>> of_prior(np.zeros((1, 1))).round(3)  # log(2) - log(2 pi) / 2 - 1 / 2
    array([-0.726])
    """

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
    """Return the log densities of variables and Potentials by name, elementwise, as functions of the value variables.

    Parameters
    ----------
    model : pymc.Model
    names : sequence of str
    jacobian : bool, default False
        Whether those of transformed variables are on the unconstrained scale.
    """
    if not names:
        return []
    return model.logp(vars=[model[name] for name in names], jacobian=jacobian, sum=False)
