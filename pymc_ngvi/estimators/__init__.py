"""Estimators of the whitened gradient and curvature. One file and one row each."""

from pymc_ngvi.core.types import Estimator
from pymc_ngvi.estimators.draws import AtDraws
from pymc_ngvi.estimators.gauss_newton import GaussNewton
from pymc_ngvi.estimators.pathwise import Pathwise
from pymc_ngvi.estimators.price import Price
from pymc_ngvi.estimators.quadrature import Quadrature
from pymc_ngvi.estimators.stein import Stein

price, stein, pathwise, gauss_newton, quadrature = Price(), Stein(), Pathwise(), GaussNewton(), Quadrature()

ESTIMATORS: dict[str, Estimator] = {
    "price": price,
    "stein": stein,
    "pathwise": pathwise,
    "gauss_newton": gauss_newton,
    "quadrature": quadrature,
}

__all__ = [
    "ESTIMATORS",
    "AtDraws",
    "GaussNewton",
    "Pathwise",
    "Price",
    "Quadrature",
    "Stein",
    "gauss_newton",
    "pathwise",
    "price",
    "quadrature",
    "stein",
]
