"""Log p in which the rows of an observed variable have weights, 0 or 1: with them, rows are left out."""

import functools

from collections.abc import Sequence

import numpy as np
import pymc as pm

from pytensor import shared

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.density.observed_logp import ObservedLogp
from pymc_ngvi.reading.factors import Factor, factors_of

#: Difference of two log densities that is rounding.
_ROUNDING = 1e-9


class MaskedDensity:
    """The log density of a model whose factor of an observed variable has a weight for each row.

    Raises ValueError where log p is another one than that of ``given`` while all weights are 1.
    """

    def __init__(self, given: LogDensity, rows: ObservedLogp) -> None:
        self.name, self._given, self._shape = rows.name, given, rows.shape
        self._weights = shared(np.ones(self._shape), name=f"weights of {self.name}", shape=self._shape)

    @functools.cached_property
    def density(self) -> LogDensity:
        """Log p, whose weights change with `leave_out`."""
        self.leave_out(np.empty(0, dtype=np.intp))
        density = LogDensity(self._given.model, factors=self._factors)
        points = density.initial_point() + 0.5 * np.random.default_rng(0).standard_normal((2, density.n_dim))
        logp, of_model = density.logp(points), self._given.logp(points)
        if not np.allclose(logp, of_model, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True):
            raise ValueError(
                f"Rows of {self.name!r} can't be left out: with a weight of 1 for each, log p is {logp[0]:.6g} near "
                f"the start, and {of_model[0]:.6g} in the model. Fit the model without these rows."
            )
        return density

    def _factors(self, model: pm.Model) -> Sequence[Factor]:
        return [self._weighted(factor) if factor.name == self.name else factor for factor in factors_of(model)]

    def _weighted(self, factor: Factor) -> Factor:
        """Return a factor that goes for a Potential, as it is the log density of no distribution."""
        logp = self._weights * factor.logp
        logp.name = self.name
        return Factor(logp, "potential", logp)

    def leave_out(self, rows: AnyArray) -> None:
        """Give some observations, numbered in one row, a weight of 0, and all others one of 1."""
        weights = np.ones(self._shape)
        weights.reshape(-1)[rows] = 0.0
        self._weights.set_value(weights)
