"""Models of ``jax_rows.py``, of simulated data: the same for the same sizes."""

import functools

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm

#: Rows of a group; coefficients of generalised linear mixed models.
PER_GROUP, SLOPES = 100, np.array([0.5, -0.3, 0.2, 0.1])


def logistic(n: int, d: int) -> Callable[[], pm.Model]:
    """Return what makes a logistic regression."""
    rng = np.random.default_rng(20)
    x = rng.standard_normal((n, d))
    y = (rng.random(n) < _expit(x @ (rng.standard_normal(d) / np.sqrt(d)))).astype(np.int8)

    def build() -> pm.Model:
        with pm.Model() as model:
            pm.Bernoulli("y", logit_p=x @ pm.Normal("beta", 0.0, 1.0, shape=d), observed=y)
        return model

    return build


def mixed(n: int, *, is_binary: bool) -> Callable[[], pm.Model]:
    """Return what makes a generalised linear mixed model: binary outcomes, or overdispersed counts."""
    rng = np.random.default_rng(21)
    n_groups = n // PER_GROUP
    group, x = np.arange(n) % n_groups, rng.standard_normal((n, len(SLOPES)))
    eta = 0.3 + x @ SLOPES + 0.6 * rng.standard_normal(n_groups)[group]
    y = rng.random(n) < _expit(eta) if is_binary else rng.poisson(np.exp(eta) * rng.gamma(2.0, 0.5, n))

    def build() -> pm.Model:
        with pm.Model() as model:
            sd = pm.HalfNormal("sd", 1.0)
            effect = pm.Normal("effect", 0.0, sd, shape=n_groups)
            mean = pm.Normal("level", 0.0, 2.0) + x @ pm.Normal("beta", 0.0, 1.0, shape=x.shape[1]) + effect[group]
            if is_binary:
                pm.Bernoulli("y", logit_p=mean, observed=y.astype(np.int8))
            else:
                pm.NegativeBinomial("y", mu=pm.math.exp(mean), alpha=pm.Exponential("alpha", 0.5), observed=y)
        return model

    return build


def _expit(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


#: Fits by name: what returns what makes the model, and options.
MODELS: dict[str, tuple[Callable[[], Callable[[], pm.Model]], dict[str, Any]]] = {
    "logistic, 1,000,000 x 20": (functools.partial(logistic, 1_000_000, 20), {"family": "full"}),
    "logistic mixed, 1,000,000 x 10,000 groups": (
        functools.partial(mixed, 1_000_000, is_binary=True),
        {"posterior": "gaussian"},
    ),
    "negative binomial mixed, 300,000 x 3,000 groups": (
        functools.partial(mixed, 300_000, is_binary=False),
        {"posterior": "gaussian"},
    ),
    "negative binomial mixed, 10,000 x 100 groups, exact": (functools.partial(mixed, 10_000, is_binary=False), {}),
}
#: Rows by name: from their number to a model.
ROWS: dict[str, Callable[[int], pm.Model]] = {
    "logistic": lambda n: logistic(n, 2)(),
    "negative binomial": lambda n: mixed(n, is_binary=False)(),
}
