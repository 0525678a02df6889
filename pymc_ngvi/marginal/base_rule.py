"""A cheap rule for log m, with a polynomial for what it lacks."""

from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.nodes import PathRule
from pymc_ngvi.marginal.regression import Whitening, gram_of, leverage_of, regressed


@stored("exact.base_rule")
@dataclass(frozen=True, eq=False)
class BaseRule:
    """A cheap rule, and the polynomial of the globals that is added to its log m.

    Parameters
    ----------
    rule : PathRule
        Of no nodes where the polynomial is log m by itself.
    coefficients : ndarray, shape (n_features,)
    residual : float
        Leave-one-out, an sd in nats.
    gram : ndarray, shape (n_features, n_features)
        Of the features that the polynomial was fitted to.
    reach : float
        Variance of a prediction, in that of residuals, beyond which it extrapolates.
    """

    rule: PathRule
    coefficients: Array
    residual: float
    gram: Array
    reach: float

    def is_beyond(self, features: Array) -> NDArray[np.bool_]:
        """Tell at which globals the polynomial is far from all that it was fitted to.

        A low log m says nothing there: about the wrong centres, it is too low by any amount.
        """
        result: NDArray[np.bool_] = leverage_of(self.gram, features) > self.reach
        return result

    @classmethod
    def fitted(
        cls,
        rule: PathRule,
        whitening: Whitening,
        g: Array,
        values: Array,
        weights: Array,
        tolerance: float,
        reach: float,
    ) -> "BaseRule | None":
        """Fit the polynomial to what it is to add; None where the residual is larger than the tolerance."""
        features = whitening.features(g)
        coefficients, residual = regressed(features, values, weights, g.shape[1])
        if not residual < tolerance:
            return None
        return cls(rule, coefficients, residual, gram_of(features, weights / weights.max()), reach)
