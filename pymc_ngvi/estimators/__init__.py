"""Estimators of the whitened gradient and curvature. One file and one row each."""

from pymc_ngvi.estimators.price import price
from pymc_ngvi.types import Estimator

ESTIMATORS: dict[str, Estimator] = {"price": price}

__all__ = ["ESTIMATORS", "price"]
