"""Moments of latent Gaussian models by a sum over a lattice of hyperparameters.

At each of these, log m and the moments of the latent variables are those of importance sampling; or those of Laplace's
method, which is exact where the likelihood is Gaussian.
"""

import itertools

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from measure import Array
from nested_log_m import LogMarginals
from scipy.optimize import minimize

#: Step of the lattice in standard deviations, for few hyperparameters and for more; nats below the top where it ends.
_FEW, _STEPS, _DEPTH = 2, (0.75, 1.0), 10.0
#: Step of the second differences of log m.
_CURVED = 0.2
#: Draws at each value of the hyperparameters, and numbers in these, at most; draws come in lots of the last.
_N_DRAWS, _NUMBERS, _LOT = 2**14, 2**23, 2**12


class _At(NamedTuple):
    """At one value of the hyperparameters: log m, its standard error, and moments of the latent variables."""

    g: Array
    log_m: float
    error: float
    mean: Array
    variance: Array


class Integral(NamedTuple):
    """Means and standard deviations of all coordinates, (d,), and as how many draws the means are accurate."""

    mean: Array
    sd: Array
    size: Array


def integral(found: LogMarginals, *, is_gaussian: bool) -> Integral:
    """Return the moments of a model; ``is_gaussian``: its likelihood is Gaussian, given the hyperparameters."""
    given, parts = found.given, []
    n_draws = min(_N_DRAWS, max(1, _NUMBERS // (given.n_dim * _LOT)) * _LOT)
    for number, g in enumerate(_lattice(found)):
        fit = found.fit(g)
        if is_gaussian:
            mode = found.laplace(g, fit)
            parts.append(_At(g, mode.log_m, 0.0, mode.mean[0], mode.factors.sd[0] ** 2))
        else:
            accurate = found.accurate(g, fit, n_draws, number)
            parts.append(_At(g, accurate.log_m, accurate.error, accurate.mean, accurate.variance))
    g, log_m, errors, means, variances = (np.array(part) for part in zip(*parts, strict=True))
    w = np.exp(log_m - log_m.max())
    w /= w.sum()
    mean, variance, noise = (np.empty(found.density.n_dim) for _ in range(3))
    for where, values, within in ((given.outside, g, 0.0 * g), (given.inside, means, variances)):
        mean[where] = w @ values
        apart = (values - mean[where]) ** 2
        variance[where] = w @ (within + apart)
        noise[where] = w**2 @ (errors[:, None] ** 2 * apart + within / n_draws * (not is_gaussian))
    with np.errstate(divide="ignore"):
        return Integral(mean, np.sqrt(variance), variance / noise)


def _lattice(found: LogMarginals) -> Iterator[Array]:
    """Yield points of a lattice from the mode of log m outwards, as long as the ELBO is not far below the top."""
    centre, root = _whitening(found)
    p = len(centre)
    waiting, seen, top = [(0,) * p], {(0,) * p}, -np.inf
    while waiting:
        place = waiting.pop(0)
        g = centre + _STEPS[p > _FEW] * root @ np.array(place, dtype=float)
        elbo = _elbo(found, g)
        top = max(top, elbo)
        if not elbo > top - _DEPTH:
            continue
        yield g
        for i, by in itertools.product(range(p), (1, -1)):
            beside = (*place[:i], place[i] + by, *place[i + 1 :])
            if beside not in seen:
                seen.add(beside)
                waiting.append(beside)


def _elbo(found: LogMarginals, g: Array) -> float:
    try:
        return float(found.fit(g).elbo[0])
    except RuntimeError:
        return -np.inf


def _whitening(found: LogMarginals) -> tuple[Array, Array]:
    """Return the mode of the ELBO, and a root of minus its inverse Hessian there."""
    start = found.density.initial_point()[found.given.outside]
    options = {"xatol": 0.02, "fatol": 1e-3}
    centre = minimize(lambda g: -_elbo(found, g), start, method="Nelder-Mead", options=options).x
    p, moves = len(centre), _CURVED * np.eye(len(centre))
    hessian = np.empty((p, p))
    for i, j in itertools.combinations_with_replacement(range(p), 2):
        corners = [
            a * b * _elbo(found, centre + a * moves[i] + b * moves[j]) for a, b in itertools.product((1, -1), repeat=2)
        ]
        hessian[i, j] = hessian[j, i] = sum(corners) / (4.0 * _CURVED**2)
    return centre, np.linalg.cholesky(np.linalg.inv(-hessian))
