"""Estimators of the whitened gradient and curvature. One file and one row each."""

from pymc_ngvi.core.types import Estimator
from pymc_ngvi.estimators.gauss_newton import gauss_newton
from pymc_ngvi.estimators.pathwise import pathwise
from pymc_ngvi.estimators.price import price
from pymc_ngvi.estimators.stein import stein

ESTIMATORS: dict[str, Estimator] = {
    "price": price,
    "stein": stein,
    "pathwise": pathwise,
    "gauss_newton": gauss_newton,
}

#: Those that need no second derivatives.
FROM_GRADIENTS: frozenset[Estimator] = frozenset({stein, pathwise})

__all__ = ["ESTIMATORS", "FROM_GRADIENTS", "gauss_newton", "pathwise", "price", "stein"]
