"""Estimators of the whitened gradient and curvature. One file and one row each."""

from pymc_ngvi.core.types import Estimator
from pymc_ngvi.estimators.draws import AtDraws
from pymc_ngvi.estimators.gauss_newton import GaussNewton
from pymc_ngvi.estimators.pathwise import Pathwise
from pymc_ngvi.estimators.price import Price
from pymc_ngvi.estimators.stein import Stein

price, stein, pathwise, gauss_newton = Price(), Stein(), Pathwise(), GaussNewton()

ESTIMATORS: dict[str, Estimator] = {
    "price": price,
    "stein": stein,
    "pathwise": pathwise,
    "gauss_newton": gauss_newton,
}

__all__ = [
    "ESTIMATORS",
    "AtDraws",
    "GaussNewton",
    "Pathwise",
    "Price",
    "Stein",
    "gauss_newton",
    "pathwise",
    "price",
    "stein",
]
