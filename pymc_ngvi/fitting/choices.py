"""The words that options take, as types: what signatures show, and what completion and type checkers know."""

from typing import Literal

FamilyName = Literal["auto", "full", "diagonal", "block", "sparse", "mixture", "student_t"]
UpdateName = Literal["natural", "natural_pd", "cholesky", "cholesky_precision", "sqrt", "euclidean"]
EstimatorName = Literal["price", "stein", "pathwise", "gauss_newton"]
StepName = Literal["adaptive", "constant", "decay", "proximal", "snngm", "adam", "sgd", "trust_region", "scale_mixture"]
BaseDrawsName = Literal["sobol", "antithetic", "plain"]
FactorName = Literal["covariance", "precision"]
PosteriorName = Literal["auto", "gaussian", "exact"]
ReparamName = Literal["rvb1", "rvb2", "noncentred"]
ComponentsName = Literal["full", "diagonal", "sparse"]
WeightUpdateName = Literal["natural", "tan"]
