"""The values that options take, as types, for signatures, completion and type checkers."""

from typing import Literal

from pymc_ngvi.families import ComponentsName, FamilyName

__all__ = [
    "BaseDrawsName",
    "ComponentsName",
    "EstimatorName",
    "FactorName",
    "FamilyName",
    "PosteriorName",
    "ReparamName",
    "StepName",
    "UpdateName",
]

UpdateName = Literal["natural", "natural_pd", "cholesky", "cholesky_precision", "sqrt", "euclidean"]
EstimatorName = Literal["price", "stein", "pathwise", "gauss_newton", "quadrature"]
StepName = Literal["adaptive", "linesearch", "constant", "decay", "proximal", "snngm", "adam", "sgd", "ivon"]
BaseDrawsName = Literal["sobol", "antithetic", "plain"]
FactorName = Literal["covariance", "precision"]
PosteriorName = Literal["auto", "gaussian", "exact", "nested", "moved"]
ReparamName = Literal["rvb1", "rvb2", "noncentred"]
