"""Designs and models of ``simulated_glmms.py``: longitudinal data of two groups, binary or counts."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pymc as pm

#: Coefficients: intercept, time, group, and their product; standard deviations of intercepts and slopes, correlation.
TRUE_BETA, TRUE_SD, TRUE_CORRELATION = np.array([0.1, 0.3, -0.2, 0.1]), np.array([0.8, 0.4]), 0.2
#: Probability of the second group.
IN_GROUP = 0.4
COEFFICIENTS = ("(intercept)", "time", "group", "time x group")
SCALES = ("sd of intercepts", "sd of slopes", "correlation")


@dataclass(frozen=True)
class Design:
    """How data are simulated.

    Parameters
    ----------
    n_subjects : int
    most : int
        Each subject has 1 to as many measurements, at different times of a grid from 0 to 1.
    family : {"binomial", "poisson"}
        With the usual link.
    slopes : bool
        Whether subjects have slopes of time, correlated with their intercepts, or intercepts alone.
    """

    n_subjects: int
    most: int
    family: str
    slopes: bool

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of what is estimated."""
        return (*COEFFICIENTS, *SCALES[: 3 if self.slopes else 1])

    @property
    def truth(self) -> np.ndarray:
        """The values that data are simulated with."""
        return np.array([*TRUE_BETA, *TRUE_SD, TRUE_CORRELATION])[: len(self.parameters)]

    @property
    def reported(self) -> tuple[str, ...]:
        """Variables of the model that have these."""
        return ("beta", "s", "correlation") if self.slopes else ("beta", "s")


#: Six of the 24: 50, 100 or 200 subjects with up to 3 or 9 measurements, either response, with slopes or without.
DESIGNS = {
    "binary, 50 x 3, intercepts": Design(50, 3, "binomial", slopes=False),
    "binary, 200 x 3, intercepts": Design(200, 3, "binomial", slopes=False),
    "binary, 100 x 9, intercepts": Design(100, 9, "binomial", slopes=False),
    "binary, 100 x 9, slopes": Design(100, 9, "binomial", slopes=True),
    "counts, 50 x 3, intercepts": Design(50, 3, "poisson", slopes=False),
    "counts, 100 x 9, slopes": Design(100, 9, "poisson", slopes=True),
}


def simulate(design: Design, number: int) -> pd.DataFrame:
    """Return a data set: id, time, group and y of each measurement."""
    key = (design.n_subjects, design.most, design.family == "poisson", design.slopes)
    rng = np.random.default_rng([number, *map(int, key)])
    counts = rng.integers(1, design.most + 1, design.n_subjects)
    grid = np.arange(design.most) / (design.most - 1)
    time = np.concatenate([np.sort(rng.choice(grid, n, replace=False)) for n in counts])
    subject = np.repeat(np.arange(design.n_subjects), counts)
    group = rng.binomial(1, IN_GROUP, design.n_subjects)[subject]
    correlation = np.array([[1.0, TRUE_CORRELATION], [TRUE_CORRELATION, 1.0]])
    effects = TRUE_SD * rng.multivariate_normal(np.zeros(2), correlation, design.n_subjects)
    eta = _columns(time, group) @ TRUE_BETA + effects[subject, 0]
    if design.slopes:
        eta = eta + effects[subject, 1] * time
    y = rng.poisson(np.exp(eta)) if design.family == "poisson" else rng.binomial(1, 1.0 / (1.0 + np.exp(-eta)))
    return pd.DataFrame({"id": subject, "time": time, "group": group, "y": y})


def model_of(design: Design, data: pd.DataFrame) -> pm.Model:
    """Return the model of a data set, with weak priors."""
    subject, time, y = (data[name].to_numpy() for name in ("id", "time", "y"))
    x, n = _columns(time, data["group"].to_numpy()), design.n_subjects
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 2.5, shape=len(TRUE_BETA))
        if design.slopes:
            scales = pm.HalfNormal.dist(1.0, size=2)
            chol, correlation, sd = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=scales)
            pm.Deterministic("s", sd)
            pm.Deterministic("correlation", correlation[0, 1])
            own = pm.Normal("z", 0.0, 1.0, shape=(n, 2)) @ chol.T
            eta = x @ beta + own[subject, 0] + own[subject, 1] * time
        else:
            s = pm.HalfNormal("s", 1.0)
            eta = x @ beta + pm.Normal("b", 0.0, s, shape=n)[subject]
        if design.family == "poisson":
            pm.Poisson("y", pm.math.exp(eta), observed=y)
        else:
            pm.Bernoulli("y", logit_p=eta, observed=y)
    return model


def _columns(time: np.ndarray, group: np.ndarray) -> np.ndarray:
    return np.column_stack([np.ones(len(time)), time, group, time * group])
