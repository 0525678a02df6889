"""Generalised linear mixed models, as ordinary PyMC models: those of table 6 of Tan (2025) [1]_, and simulated ones.

The random effects of table 6 have a precision B = W W^T, W lower triangular, and W is a function of the unconstrained
``omega``: log W_ii on the diagonal, W_ij below. All normalising constants are there, those of the priors included; what
the paper leaves out is in `Glmm.left_out`. Which constants these are, and that the times of toenail are standardised,
is not in the paper: its ELBOs agree with ours if all constants are left out, and those of q too, and then only.

References
----------
.. [1] L. S. L. Tan (2025). Analytic natural gradient updates for Cholesky factor in Gaussian variational approximation.
   https://doi.org/10.48550/arXiv.2109.00375
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm

from numpy.typing import NDArray
from scipy.special import expit, gammaln, multigammaln

Array = NDArray[np.float64]

PRIOR_SD = 10.0
#: Wishart priors of B: degrees of freedom, and the scale S of E B = df S. Gamma(a, rate) is the one with df = 2 a and
#: S = 1 / (2 rate).
EPILEPSY_PRIOR = (3.0, np.array([[11.0169, -0.1616], [-0.1616, 0.5516]]))
TOENAIL_PRIOR = (1.0, np.array([[0.5 / 0.4962]]))
HERS_PRIOR = (1.0, np.array([[0.5 / 0.5079]]))
#: Coefficients and standard deviation of the intercepts in the simulated regressions; that of the difficulties.
TRUE_BETA, TRUE_SD = np.array([-0.5, 1.0, -0.7, 0.4, 0.0]), 1.0
TRUE_DIFFICULTY_SD = 1.2
GROUP_SIZE = 10


@dataclass(frozen=True)
class Glmm:
    """A model, and what is to be known of it to compare it with the published one.

    Parameters
    ----------
    model : pymc.Model
    effects : tuple of str
        Variables with one element for each group; the others are global.
    n_groups : int
    left_out : float
        Nats: the constants of log p - log q that the paper leaves out, summed. Published ELBOs are to be compared with
        ours less this.
    """

    model: pm.Model
    effects: tuple[str, ...]
    n_groups: int
    left_out: float

    def blocks(self) -> list[list[str]]:
        """Return the variables in blocks, the global ones together and the effects group by group."""
        shared = [v.name for v in self.model.free_RVs if v.name not in self.effects]
        return [shared, *([f"{name}[{i}]" for name in self.effects] for i in range(self.n_groups))]

    def start_sigma(self, effects: float, others: float) -> dict[str, float]:
        """Return a standard deviation for each variable."""
        return {v.name: effects if v.name in self.effects else others for v in self.model.free_RVs}


class Regression(NamedTuple):
    """Data of a regression with groups: design (n, k), codes 0, 1, ... of the groups and responses, (n,)."""

    x: Array
    group: NDArray[np.intp]
    y: NDArray[np.intp]

    @property
    def n_groups(self) -> int:
        """Number of groups."""
        return int(self.group.max()) + 1


def load(name: str, data: Path, n_groups: int | None = None) -> Glmm:
    """Return a model of table 6, of the first groups only if a number is given.

    Parameters
    ----------
    name : {"epilepsy", "toenail", "hers"}
    data : Path
        Folder of the tables.
    n_groups : int, optional
    """
    return TABLE_6[name](read(name, data, n_groups))


def read(name: str, data: Path, n_groups: int | None = None) -> pd.DataFrame:
    """Return the table of a data set, of the first groups only if a number is given."""
    file, column = FILES[name]
    table = pd.read_csv(data / file)
    return table if n_groups is None else table[_codes(table[column]) < n_groups]


# --- table 6 ------------------------------------------------------------------------------------------------------


def epilepsy(table: pd.DataFrame) -> Glmm:
    """Seizure counts, Poisson: an intercept and a slope on the visit for each patient.

    W^T b ~ N(0, I) says that the slope is N(0, W_22^-2) and that the intercept, given it, is
    N(-slope W_21 / W_11, W_11^-2).
    """
    trt, base, visit = (_floats(table[name]) for name in ("trt", "log_base4", "visit_code"))
    age = np.log(_floats(table["age"]))
    x = np.column_stack([np.ones(len(table)), base, trt, base * trt, age - age.mean(), visit])
    group, y = _codes(table["subject"]), table["seizures"].to_numpy()
    n = int(group.max()) + 1
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, PRIOR_SD, shape=x.shape[1])
        omega = pm.Flat("omega", shape=3)
        w11, w21, w22 = pm.math.exp(omega[0]), omega[1], pm.math.exp(omega[2])
        pm.Potential("prior", log_prior([omega[0], omega[2]], [[w11], [w21, w22]], *EPILEPSY_PRIOR))
        slope = pm.Normal("slope", 0, 1 / w22, shape=n)
        intercept = pm.Normal("intercept", -slope * w21 / w11, 1 / w11, shape=n)
        pm.Poisson("y", pm.math.exp(x @ beta + intercept[group] + slope[group] * visit), observed=y)
    left_out = _constants(x.shape[1], EPILEPSY_PRIOR) - float(gammaln(y + 1.0).sum())
    return Glmm(model, ("intercept", "slope"), n, left_out)


def toenail(table: pd.DataFrame) -> Glmm:
    """Separation of the nail, logistic: an intercept for each patient; times are standardised."""
    return _random_intercepts(toenail_data(table.assign(time=_standardised(table["time"]))), TOENAIL_PRIOR)


def hers(table: pd.DataFrame) -> Glmm:
    """High blood pressure, logistic: an intercept for each woman."""
    return _random_intercepts(hers_data(table), HERS_PRIOR)


def toenail_data(table: pd.DataFrame) -> Regression:
    """Return design, groups and responses: intercept, treatment, time and their product."""
    treatment, time = _floats(table["treatment"]), _floats(table["time"])
    x = np.column_stack([np.ones(len(table)), treatment, time, treatment * time])
    return Regression(x, _codes(table["patient"]), table["outcome"].to_numpy())


def hers_data(table: pd.DataFrame) -> Regression:
    """Return design, groups and responses: intercept, age and BMI standardised, medication, visit."""
    columns = [_standardised(table["age"]), _standardised(table["bmi"]), table["htnmeds"], table["visit_code"]]
    x = np.column_stack([np.ones(len(table)), *columns])
    return Regression(x, _codes(table["pptid"]), table["high_sbp"].to_numpy())


TABLE_6 = {"epilepsy": epilepsy, "toenail": toenail, "hers": hers}
FILES = {
    "epilepsy": ("epilepsy.csv", "subject"),
    "toenail": ("toenail.csv", "patient"),
    "hers": ("hers_glmm.csv", "pptid"),
}


def log_prior(log_diagonal: Sequence[Any], w: Sequence[Sequence[Any]], df: float, scale: Array) -> Any:
    """Return the log density of omega where B = W W^T has a Wishart distribution.

    Parameters
    ----------
    log_diagonal : sequence of scalars
        log W_ii.
    w : sequence of sequences of scalars
        Rows of the lower triangle of W.
    df : float
    scale : ndarray, shape (r, r)
        E B = df scale.
    """
    r = len(scale)
    precision = np.linalg.solve(scale, np.eye(r))
    entries = [(i, j, k) for i in range(r) for j in range(r) for k in range(min(i, j) + 1)]
    trace = sum(precision[i, j] * w[i][k] * w[j][k] for i, j, k in entries)
    return sum((df - i) * log_diagonal[i] for i in range(r)) - trace / 2 + log_prior_constant(df, scale)


def log_prior_constant(df: float, scale: Array) -> float:
    """Return the normalising constant of `log_prior`, the Jacobian's r log 2 included."""
    r = len(scale)
    log_scale = float(np.linalg.slogdet(scale)[1])
    return float(r * np.log(2) - df / 2 * (r * np.log(2) + log_scale) - multigammaln(df / 2, r))


def _constants(n_beta: int, prior: tuple[float, Array]) -> float:
    """Return the constants of log p - log q apart from those of the likelihood.

    Each factor 2 pi of a prior has its partner in q, but for those of omega, whose prior is not Gaussian.
    """
    r = len(prior[1])
    n_omega = r * (r + 1) // 2
    return log_prior_constant(*prior) - n_beta * np.log(PRIOR_SD) + n_omega / 2 * np.log(2 * np.pi)


def _random_intercepts(data: Regression, prior: tuple[float, Array]) -> Glmm:
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, PRIOR_SD, shape=data.x.shape[1])
        omega = pm.Flat("omega")
        pm.Potential("prior", log_prior([omega], [[pm.math.exp(omega)]], *prior))
        b = pm.Normal("b", 0, pm.math.exp(-omega), shape=data.n_groups)
        pm.Bernoulli("y", logit_p=data.x @ beta + b[data.group], observed=data.y)
    return Glmm(model, ("b",), data.n_groups, _constants(data.x.shape[1], prior))


# --- as users write them ------------------------------------------------------------------------------------------


def random_intercept_logistic(data: Regression) -> pm.Model:
    """Return a logistic regression with an intercept for each group, centred; s ~ HalfNormal(3)."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, PRIOR_SD, shape=data.x.shape[1])
        s = pm.HalfNormal("s", 3)
        b = pm.Normal("b", 0, s, shape=data.n_groups)
        pm.Bernoulli("y", logit_p=data.x @ beta + b[data.group], observed=data.y)
    return model


def simulate_logistic(n_groups: int, seed: int) -> Regression:
    """Draw data of `random_intercept_logistic`: `GROUP_SIZE` responses in each group, `TRUE_BETA` and `TRUE_SD`."""
    rng = np.random.default_rng(seed)
    n = n_groups * GROUP_SIZE
    x = np.column_stack([np.ones(n), rng.standard_normal((n, len(TRUE_BETA) - 1))])
    group = np.repeat(np.arange(n_groups), GROUP_SIZE)
    logit = x @ TRUE_BETA + TRUE_SD * rng.standard_normal(n_groups)[group]
    return Regression(x, group, (rng.random(n) < expit(logit)).astype(np.intp))


def rasch(responses: NDArray[np.intp]) -> pm.Model:
    """Return the model of right and wrong answers, (n_persons, n_items): ability less difficulty."""
    n_persons, n_items = responses.shape
    with pm.Model() as model:
        sd = pm.HalfNormal("sd", 3)
        difficulty = pm.Normal("difficulty", 0, sd, shape=n_items)
        ability = pm.Normal("ability", 0, 1, shape=n_persons)
        pm.Bernoulli("y", logit_p=ability[:, None] - difficulty, observed=responses)
    return model


def simulate_rasch(n_persons: int, n_items: int, seed: int) -> tuple[NDArray[np.intp], Array]:
    """Draw the answers, (n_persons, n_items), and the difficulties that they were drawn with, (n_items,)."""
    rng = np.random.default_rng(seed)
    difficulty = TRUE_DIFFICULTY_SD * rng.standard_normal(n_items)
    logit = rng.standard_normal(n_persons)[:, None] - difficulty
    return (rng.random(logit.shape) < expit(logit)).astype(np.intp), difficulty


def _codes(column: pd.Series) -> NDArray[np.intp]:
    return np.unique(column.to_numpy(), return_inverse=True)[1]


def _floats(column: pd.Series) -> Array:
    return column.to_numpy(dtype=float)


def _standardised(column: pd.Series) -> Array:
    x = _floats(column)
    return (x - x.mean()) / x.std(ddof=1)
