"""Models of ``rows.py``: regressions, random intercepts, a Rasch model, and likelihoods with kinks."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pymc as pm

from measure import Array, load_models
from models_glmm import Regression, hers_data, read, toenail_data

#: Columns of the large regressions, and observations of the small kinked ones.
N_COLUMNS, N_KINKED = 50, 300
#: Largest value of a pixel.
_WHITE = 255.0


class Design(NamedTuple):
    """Predictors (n, d), responses 0 or 1 (n,), and the standard deviation of the prior of each coefficient."""

    x: Array
    y: Array
    prior_sd: float


def simulated(n: int, d: int = N_COLUMNS) -> Design:
    """Return a logistic regression of standard normal columns with coefficients of about .3."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, d))
    beta = 0.3 * rng.standard_normal(d)
    y = (rng.random(n) < 1.0 / (1.0 + np.exp(-x @ beta))).astype(float)
    return Design(x, y, 1.0)


def mushroom(data: Path) -> Design:
    """Return one-hot attributes, with an intercept."""
    return _with_intercept(pd.read_csv(data / "mushroom_onehot.csv.gz"), 1.0)


def mnist(data: Path) -> Design:
    """Return pixels of the digits 1 and 7, with an intercept."""
    return _with_intercept(pd.read_csv(data / "mnist_1vs7_train.csv.gz"), _WHITE)


def _with_intercept(table: pd.DataFrame, scale: float) -> Design:
    y = table.pop("y").to_numpy(dtype=float)
    x = table.to_numpy(dtype=float) / scale
    return Design(np.column_stack([np.ones(len(x)), x]), y, 1.0)


DESIGNS: dict[str, Callable[[Path], Design]] = {"mushroom": mushroom, "mnist": mnist}


def logistic(design: Design) -> pm.Model:
    """Return a logistic regression."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, design.prior_sd, shape=design.x.shape[1])
        pm.Bernoulli("y", logit_p=pm.math.dot(design.x, beta), observed=design.y.astype(int))
    return model


def intercepts(n_groups: int, size: int = 10) -> Regression:
    """Return a logistic regression with an intercept for each group: responses, one predictor, groups."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(n_groups), size)
    x = rng.standard_normal(n_groups * size)
    logit = 0.3 + 0.5 * x + 0.8 * rng.standard_normal(n_groups)[group]
    y = (rng.random(len(x)) < 1.0 / (1.0 + np.exp(-logit))).astype(int)
    return Regression(np.column_stack([np.ones(len(x)), x]), group, y)


def random_intercepts(data: Regression) -> pm.Model:
    """Return a logistic regression with random intercepts, centred."""
    with pm.Model() as model:
        a, b = pm.Normal("a", 0, 2), pm.Normal("b", 0, 2)
        s = pm.HalfNormal("s", 1)
        u = pm.Normal("u", 0, s, shape=data.n_groups)
        pm.Bernoulli("y", logit_p=a + b * data.x[:, 1] + u[data.group], observed=data.y)
    return model


def grouped(name: str, n_groups: int, data: Path) -> tuple[Regression, str, str]:
    """Return what glmmTMB needs: data, the family, and the random effects of groups g as a formula."""
    if name == "intercepts":
        return intercepts(n_groups), "binomial", "(1 | g)"
    if name in _REAL:
        return _REAL[name](read(name, data)), "binomial", "(1 | g)"
    table = read(name, data)
    age, base, trt, visit = (table[c].to_numpy(dtype=float) for c in ("age", "log_base4", "trt", "visit_code"))
    x = np.column_stack([np.ones(len(table)), base, trt, base * trt, np.log(age) - np.log(age).mean(), visit])
    group, _ = pd.factorize(table["subject"])
    return Regression(x, group, table["seizures"].to_numpy()), "poisson", "(1 | g) + (0 + x5 | g)"


_REAL = {"hers": hers_data, "toenail": toenail_data}


def rasch(n_persons: int, n_items: int) -> pm.Model:
    """Return a Rasch model: abilities N(0, 1), difficulties N(0, sd)."""
    rng = np.random.default_rng(0)
    ability, difficulty = rng.standard_normal(n_persons), rng.standard_normal(n_items)
    person, item = (at.ravel() for at in np.meshgrid(np.arange(n_persons), np.arange(n_items), indexing="ij"))
    y = rng.random(len(person)) < 1.0 / (1.0 + np.exp(difficulty[item] - ability[person]))
    with pm.Model() as model:
        theta = pm.Normal("theta", 0, 1, shape=n_persons)
        sd = pm.HalfNormal("sd", 1)
        b = pm.Normal("b", 0, sd, shape=n_items)
        pm.Bernoulli("y", logit_p=theta[person] - b[item], observed=y.astype(int))
    return model


# --- kinks ------------------------------------------------------------------------------------------------------------


def _line() -> tuple[Array, Array]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((N_KINKED, 4))
    return x, 1.0 + x @ np.array([1.0, -0.5, 0.25, 0.0]) + rng.laplace(0.0, 0.7, N_KINKED)


def laplace() -> pm.Model:
    """Return a median regression."""
    x, y = _line()
    with pm.Model() as model:
        a, beta = pm.Normal("a", 0, 5), pm.Normal("beta", 0, 5, shape=4)
        pm.Laplace("y", a + pm.math.dot(x, beta), pm.HalfNormal("b", 2), observed=y)
    return model


def quantile() -> pm.Model:
    """Return a regression for the quantile .9."""
    x, y = _line()
    with pm.Model() as model:
        a, beta = pm.Normal("a", 0, 5), pm.Normal("beta", 0, 5, shape=4)
        pm.AsymmetricLaplace("y", mu=a + pm.math.dot(x, beta), b=pm.HalfNormal("b", 2), q=0.9, observed=y)
    return model


def lasso() -> pm.Model:
    """Return a normal regression with a Laplace prior of its coefficients, and of their scale."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((100, 10))
    y = x[:, :3] @ np.array([1.0, -0.5, 0.3]) + rng.standard_normal(100)
    with pm.Model() as model:
        beta = pm.Laplace("beta", 0, pm.HalfNormal("scale", 1), shape=10)
        pm.Normal("y", pm.math.dot(x, beta), pm.HalfNormal("sd", 2), observed=y)
    return model


def lasso_fixed() -> pm.Model:
    """Return a normal regression with a Laplace prior of a known scale."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((100, 10))
    y = x[:, :3] @ np.array([1.0, -0.5, 0.3]) + rng.standard_normal(100)
    with pm.Model() as model:
        beta = pm.Laplace("beta", 0, 0.3, shape=10)
        pm.Normal("y", pm.math.dot(x, beta), pm.HalfNormal("sd", 2), observed=y)
    return model


KINKS: dict[str, Callable[[], pm.Model]] = {
    "laplace likelihood": laplace,
    "asymmetric laplace": quantile,
    "laplace prior": lasso_fixed,
    "laplace prior, its scale unknown": lasso,
}


def reference(name: str, references: Path, data: Path) -> pm.Model:
    """Return a model of the references by its name."""
    model: pm.Model = getattr(load_models(references), name)(data)
    return model
