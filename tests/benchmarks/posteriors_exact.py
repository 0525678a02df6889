"""Moments of some posteriors of ``posteriors.py`` without NUTS: of few numbers, all else integrated out exactly."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from functionals_references import LIMITS, Summary
from marginal import Marginal
from measure import Array
from models_glmm import Regression
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize
from scipy.sparse import coo_matrix, diags_array, hstack
from scipy.special import logsumexp
from scipy.stats import multivariate_t, norm

#: Draws of the proposal, its degrees of freedom and its width; step of second differences of log m.
N_DRAWS, _DEGREES, _WIDER, _STEP = 1_000, 8, 1.2, 0.02
#: Of the priors of `sparse_models.crossed`: of the level, the scales of effects, and of the noise.
_LEVEL_SD, _SCALES = 5.0, np.array([1.0, 1.0, 2.0])


def of_normals(names: list[str], mean: Array, sd: Array, size: float) -> Summary:
    """Return what is known of coordinates by their moments alone, nearly normal, as by so many draws."""
    low, high = (mean + sd * norm.ppf(level) for level in LIMITS)
    is_functional, sizes = np.zeros(len(names), dtype=bool), np.full(len(names), size)
    return Summary(list(names), is_functional, mean, sd, low, high, np.full(len(names), 3.0), sizes, sizes)


def by_quadrature(data: Regression) -> Summary:
    """Return coefficients and log standard deviation of random intercepts, which quadrature integrates out."""
    k = data.x.shape[1]
    found = Marginal(data).moments(np.zeros(k + 1))
    return of_normals([*(f"beta[{i}]" for i in range(k)), "s_log__"], found.mean, found.sd, np.inf)


class CrossedLinear:
    """Log m of the log scales of two crossed effects and noise, and the level given these, exactly.

    Students are eliminated one by one, as their matrix is diagonal; what is left has a row for each lecturer, and one
    for the level.

    Parameters
    ----------
    frame : pandas.DataFrame
        With columns y, s and d.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        student, lecturer = (pd.factorize(frame[name])[0] for name in ("s", "d"))
        y = frame["y"].to_numpy(dtype=float)
        self._n, self._of_s, self._of_d = len(y), np.bincount(student), np.bincount(lecturer)
        shape = len(self._of_s), len(self._of_d)
        both = coo_matrix((np.ones(self._n), (student, lecturer)), shape=shape)
        self._cross = hstack([both, self._of_s[:, None]]).tocsr()  # students by lecturers, and the level
        self._rest = np.diag(np.append(self._of_d, float(self._n)))
        self._rest[:-1, -1] = self._rest[-1, :-1] = self._of_d
        self._y_s = np.bincount(student, y)
        self._y_rest = np.append(np.bincount(lecturer, y), y.sum())
        self._yy = float(y @ y)

    def __call__(self, theta: Array) -> tuple[float, float, float]:
        """Return the log posterior of log scales (students, lecturers, noise), and mean and variance of the level."""
        scales = np.exp(theta)
        s, d, noise = scales
        own = self._of_s / noise**2 + s**-2.0
        eliminated = (self._cross.T @ diags_array(1.0 / own) @ self._cross).toarray()
        matrix = self._rest / noise**2 - eliminated / noise**4
        prior = np.append(np.full(len(self._of_d), d**-2.0), _LEVEL_SD**-2.0)
        matrix[np.diag_indices_from(matrix)] += prior
        factor = cho_factor(matrix, lower=True, overwrite_a=True)
        right = self._y_rest / noise**2 - self._cross.T @ (self._y_s / own) / noise**4
        mean = cho_solve(factor, right)
        quadratic = self._yy / noise**2 - np.sum(self._y_s**2 / own) / noise**4 - right @ mean
        log_det = np.log(own).sum() + 2.0 * np.log(np.diag(factor[0])).sum()
        log_det += 2.0 * (len(own) * np.log(s) + self._n * np.log(noise)) - np.log(prior).sum()
        last = np.zeros(len(mean))
        last[-1] = 1.0
        log_prior = np.sum(theta - 0.5 * (scales / _SCALES) ** 2)
        return -0.5 * (quadratic + log_det) + log_prior, float(mean[-1]), float(cho_solve(factor, last)[-1])


def crossed_linear(frame: pd.DataFrame, n_draws: int = N_DRAWS) -> Summary:
    """Return the level and the log scales of crossed effects in normal data, by importance weights on exact log m."""
    log_m = CrossedLinear(frame)
    start = np.log([0.5, 0.5, 1.0])
    mode = minimize(lambda t: -log_m(t)[0], start, method="Nelder-Mead", options={"xatol": 2e-3, "fatol": 1e-2}).x
    return _weighted(log_m, mode, n_draws)


def _weighted(log_m: Callable[[Array], tuple[float, float, float]], mode: Array, n_draws: int) -> Summary:
    root = np.linalg.cholesky(np.linalg.inv(_curvature(lambda t: log_m(t)[0], mode)))
    proposal = multivariate_t(mode, _WIDER**2 * root @ root.T, df=_DEGREES, seed=1)
    theta = proposal.rvs(n_draws)
    values = np.array([log_m(t) for t in theta])
    log_w = values[:, 0] - proposal.logpdf(theta)
    w = np.exp(log_w - logsumexp(log_w))
    draws = np.column_stack([values[:, 1], theta])
    mean = w @ draws
    variance = w @ (draws - mean) ** 2
    variance[0] += w @ values[:, 2]
    return of_normals(["level", "sd_s_log__", "sd_d_log__", "noise_log__"], mean, np.sqrt(variance), 1.0 / np.sum(w**2))


def _curvature(f: Callable[[Array], float], at: Array) -> Array:
    """Return minus the Hessian by central differences."""
    p = len(at)
    moves = _STEP * np.eye(p)
    signs = ((1, 1), (1, -1), (-1, 1), (-1, -1))
    return np.array([
        [-sum(a * b * f(at + a * moves[i] + b * moves[j]) for a, b in signs) / (4.0 * _STEP**2) for j in range(p)]
        for i in range(p)
    ])  # fmt: skip
