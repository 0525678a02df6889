"""Gaussian processes of ``functionals.py`` by importance weights: NUTS takes long on them.

Hyperparameters come of a mixture around the draws of a first round. Given these, Laplace's approximation proposes level
and process; the weights are those of log p of the PyMC model itself, of both together.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pymc as pm

from functionals_references import LIMITS, Summary
from measure import Array, coordinate_names
from scipy.linalg import solve_triangular
from scipy.optimize import minimize
from scipy.special import expit, gammaln, logsumexp

#: Draws of hyperparameters in both rounds, those of the rest for each, a seed, and the degrees of freedom of proposals.
_N_FIRST, _N, _EACH, _SEED, _DF = 1_200, 5_000, 2, 5, 5.0


class Rows(NamedTuple):
    """Log likelihood of rows by their linear predictor, with its two derivatives; the last hyperparameter may count."""

    kind: str
    y: Array
    trials: float = 1.0

    def at(self, eta: Array, h: Array) -> tuple[float, Array, Array]:
        """Return the sum, the first derivative, and minus the second."""
        if self.kind == "poisson":
            mean = np.exp(np.minimum(eta, 50.0))
            return float(self.y @ eta - mean.sum()), self.y - mean, mean
        if self.kind == "binomial":
            p = expit(eta)
            value = self.y @ eta - self.trials * np.logaddexp(0.0, eta).sum()
            return float(value), self.y - self.trials * p, self.trials * p * (1.0 - p)
        precision = np.exp(-2.0 * h[-1])
        apart = self.y - eta
        value = -0.5 * precision * apart @ apart - len(eta) * h[-1]
        return float(value), precision * apart, np.full(len(eta), precision)


class Latent(NamedTuple):
    """A model that is a linear predictor of standard normals, given hyperparameters on the log scale.

    Attributes
    ----------
    rows : Rows
    offset : array or float
    design : callable
        From hyperparameters to the matrix of the linear predictor, (n, q).
    log_prior : callable
        Of the hyperparameters on the log scale.
    start : array
        Of these.
    hyper : tuple of str
        Their value variables, in the order of ``start``.
    latent : tuple of str
        The value variables that make up the q others, in order.
    sd : array
        Their prior standard deviations, (q,).
    """

    rows: Rows
    offset: Array | float
    design: Callable[[Array], Array]
    log_prior: Callable[[Array], float]
    start: Array
    hyper: tuple[str, ...]
    latent: tuple[str, ...]
    sd: Array

    def given(self, h: Array, x: Array) -> tuple[float, Array, Array]:
        """Return Laplace's log p(y, h), the mode, and the lower factor of the precision there; ``x`` is a start."""
        a, precision = self.design(h), 1.0 / self.sd**2

        def log_p(x: Array) -> float:
            return self.rows.at(self.offset + a @ x, h)[0] - 0.5 * precision @ x**2

        x = max(x, np.zeros(len(x)), key=log_p)  # the mode of other hyperparameters may be far out at these
        for _ in range(40):
            _, gradient, weight = self.rows.at(self.offset + a @ x, h)
            factor = np.linalg.cholesky((a.T * weight) @ a + np.diag(precision))
            slope = a.T @ gradient - precision * x
            step = solve_triangular(factor.T, solve_triangular(factor, slope, lower=True))
            size, now = 1.0, log_p(x)
            while size > 1e-6 and log_p(x + size * step) < now - 1e-9:  # a full step may go too far
                size /= 2.0
            if size <= 1e-6:
                break
            x = x + size * step
            if slope @ step < 1e-8:
                break
        value, _, weight = self.rows.at(self.offset + a @ x, h)
        factor = np.linalg.cholesky((a.T * weight) @ a + np.diag(precision))
        log_m = value - 0.5 * precision @ x**2 - np.log(self.sd).sum() - np.log(np.diag(factor)).sum()
        return log_m + self.log_prior(h), x, factor


def weighted(model: pm.Model, latent: Latent, wanted: float = 0.0) -> Summary:
    """Return the reference of a model; with more draws, once, where the least effective size is below ``wanted``."""
    found = _weighted(model, latent, _N)
    least = found.least_size()
    return found if least >= wanted else _weighted(model, latent, int(1.8 * _N * wanted / least))


def _weighted(model: pm.Model, latent: Latent, n: int) -> Summary:
    rng = np.random.default_rng(_SEED)
    h, log_q = _proposed(latent, rng, n)
    x, q = np.zeros(len(latent.sd)), len(latent.sd)
    theta = []
    log_densities = []
    for one, log_density in zip(h, log_q, strict=True):
        _, x, factor = latent.given(one, x)
        z = rng.normal(size=(_EACH, q))
        theta += [np.concatenate([one, x + solve_triangular(factor.T, part)]) for part in z]
        log_densities += list(log_density - 0.5 * (z**2).sum(axis=1) + np.log(np.diag(factor)).sum())
    shapes = {name: np.shape(value) for name, value in model.initial_point().items()}
    points = [_point(shapes, latent, draw) for draw in theta]
    log_p = model.compile_logp()
    log_w = np.array([float(log_p(point)) for point in points]) - np.array(log_densities)
    weights = np.exp(log_w - logsumexp(log_w))
    values = model.replace_rvs_by_values(model.deterministics)
    outputs = model.compile_fn(values, inputs=model.value_vars, on_unused_input="ignore")
    parts = [outputs(point) for point in points]
    columns = [np.stack([np.ravel(part[i]) for part in parts]) for i in range(len(model.deterministics))]
    names = [
        f"{variable.name}[{','.join(map(str, index))}]" if index else variable.name
        for variable, first in zip(model.deterministics, parts[0], strict=True)
        for index in np.ndindex(np.shape(first))
    ]
    columns += [np.stack([np.ravel(point[v.name]) for point in points]) for v in model.value_vars]
    return _summary(np.concatenate(columns, axis=1), weights, [*names, *coordinate_names(model)], len(names))


def _point(shapes: dict[str, tuple[int, ...]], latent: Latent, theta: Array) -> dict[str, Array]:
    found, start = {}, 0
    for name in (*latent.hyper, *latent.latent):
        size = int(np.prod(shapes[name]))
        found[name] = theta[start : start + size].reshape(shapes[name])
        start += size
    return found


def _summary(draws: Array, weights: Array, names: list[str], n_functionals: int) -> Summary:
    """Summarise weighted draws, of which `_EACH` in a row have the same hyperparameters."""
    mean = weights @ draws
    apart = draws - mean
    var = weights @ apart**2
    order = np.argsort(draws, axis=0)
    below = np.cumsum(weights[order], axis=0)
    places = [[np.searchsorted(below[:, j], level) for j in range(draws.shape[1])] for level in LIMITS]
    ends = [np.take_along_axis(draws, order, axis=0)[np.array(p), np.arange(draws.shape[1])] for p in places]
    fourth = weights @ apart**4
    sizes = [_size(apart, var, weights), _size(apart**2 - var, fourth - var**2, weights)]
    is_functional = np.arange(len(names)) < n_functionals
    tiny = np.finfo(float).tiny
    return Summary(names, is_functional, mean, np.sqrt(var), *ends, fourth / np.maximum(var, tiny) ** 2, *sizes)


def _size(apart: Array, var: Array, weights: Array) -> Array:
    """Return the effective sample sizes of means: the variance over that of the weighted mean."""
    by_hyper = (weights[:, None] * apart).reshape(-1, _EACH, apart.shape[1]).sum(axis=1)
    return var / np.maximum((by_hyper**2).sum(axis=0), np.finfo(float).tiny)


def _proposed(latent: Latent, rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    """Return draws of the hyperparameters, (n, p), and the log density that they are from."""
    mode_x = np.zeros(len(latent.sd))
    p = len(latent.start)

    def minus(h: Array) -> float:
        return -latent.given(h, mode_x)[0] if np.all(np.abs(h) < 8.0) else 1e10

    mode = minimize(minus, latent.start, method="Nelder-Mead", options={"xatol": 0.01, "fatol": 0.01}).x
    covariance = np.linalg.inv(_hessian(minus, mode))
    if not np.all(np.linalg.eigvalsh(covariance) > 0):
        covariance = 0.25 * np.eye(p)
    factor = np.linalg.cholesky(1.5 * covariance)
    first = mode + _t(rng, _N_FIRST, p) @ factor.T
    log_m = np.array([-minus(h) for h in first])
    log_w = log_m - _log_t(first, mode, factor)
    w = np.exp(log_w - logsumexp(log_w))
    spread = np.cov(first.T, aweights=w).reshape(p, p)
    narrow = np.linalg.cholesky(0.3 * spread)
    centres = first[rng.choice(_N_FIRST, n, p=w)]
    wide = rng.uniform(size=n) < 0.2
    noise = _t(rng, n, p)
    h = np.where(wide[:, None], w @ first + noise @ (1.4 * np.linalg.cholesky(spread)).T, centres + noise @ narrow.T)
    near = np.array([logsumexp(_log_t(one, first, narrow) + log_w - logsumexp(log_w)) for one in h])
    far = _log_t(h, w @ first, 1.4 * np.linalg.cholesky(spread))
    return h, np.logaddexp(np.log(0.8) + near, np.log(0.2) + far)


def _t(rng: np.random.Generator, n: int, p: int) -> Array:
    return rng.normal(size=(n, p)) / np.sqrt(rng.chisquare(_DF, n) / _DF)[:, None]


def _log_t(x: Array, centre: Array, factor: Array) -> Array:
    """Return log densities of multivariate t distributions: of points, or at one point of many centres."""
    p = len(factor)
    z = solve_triangular(factor, (x - centre).T, lower=True)
    constant = gammaln((_DF + p) / 2) - gammaln(_DF / 2) - 0.5 * p * np.log(_DF * np.pi)
    return constant - np.log(np.diag(factor)).sum() - 0.5 * (_DF + p) * np.log1p((z**2).sum(axis=0) / _DF)


def _hessian(function: Callable[[Array], float], at: Array, step: float = 0.1) -> Array:
    p = len(at)
    e = step * np.eye(p)
    found = np.empty((p, p))
    for i in range(p):
        for j in range(p):
            values = [function(at + a * e[i] + b * e[j]) for a, b in ((1, 1), (1, -1), (-1, 1), (-1, -1))]
            found[i, j] = (values[0] - values[1] - values[2] + values[3]) / (4 * step**2)
    return found
