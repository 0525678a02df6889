"""log m(g), the log density of hyperparameters with the latent variables integrated out, by several methods."""

import itertools

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pymc as pm

from measure import Array, unconstrain
from scipy.linalg import solve_triangular
from scipy.optimize import minimize
from scipy.special import logsumexp

from pymc_ngvi.model import LogDensity
from pymc_ngvi.model.hyperparameters import latent_rows
from pymc_ngvi.model.rows_given import RowsGiven
from pymc_ngvi.nested.log_marginal import LatentMarginal

#: Step of the differences of gradients; Newton steps at most; squared size of a step that ends them.
_STEP, _MOST_NEWTON, _SMALL = 1e-4, 100, 1e-8
#: Draws behind an accurate value, and numbers in these, at most; draws at once.
_MOST_ACCURATE, _MOST_NUMBERS, _AT_ONCE = 2**16, 2**24, 2**12
#: Draws of which log p is compared with the sum over rows.
_CHECKED = 8
#: Of the lattice of hyperparameters: its step in standard deviations, for few and for more, and nats below the top.
_FEW, _LATTICE_STEPS, _DEPTH = 2, (0.5, 1.0), 12.0
#: Step of the second differences of log m.
_CURVED = 0.1


class Mode(NamedTuple):
    """Laplace's method at one value of the hyperparameters: log m, the mode, and the factor of minus the Hessian."""

    log_m: float
    mode: Array
    factor: Array


class Compared(NamedTuple):
    """What methods find at some hyperparameters, (n,) each, the first at their posterior mode."""

    elbo: Array
    corrected: Array
    laplace: Array
    accurate: Array
    error: Array


@dataclass
class LogMarginals:
    """Evaluates log m of a model; all coordinates are unconstrained."""

    model: pm.Model
    density: LogDensity
    given: RowsGiven
    last: Array

    @classmethod
    def of(cls, model: pm.Model) -> "LogMarginals":
        """Return that of a model."""
        density = LogDensity(model)
        given = latent_rows(density)
        return cls(model, density, given, given.start())

    def together(self, g: Array, latent: Array) -> Array:
        """Return whole points, (n, d), of hyperparameters (p,) and latent variables (n, n_latent)."""
        theta = np.empty((len(latent), self.density.n_dim))
        theta[:, self.given.outside], theta[:, self.given.inside] = g, latent
        return theta

    def laplace(self, g: Array) -> Mode:
        """Return Laplace's method, by Newton's method with halved steps, from the last mode."""
        x = self.last
        value, slope = self._at(g, x)
        for _ in range(_MOST_NEWTON):
            factor = np.linalg.cholesky(self._curvature(g, x))
            half = solve_triangular(factor, slope, lower=True)
            move = solve_triangular(factor.T, half)
            if half @ half < _SMALL:
                break
            for size in 0.5 ** np.arange(30):
                new = self._at(g, x + size * move)
                if new[0] > value - 1e-10 * abs(value):
                    break
            x, (value, slope) = x + size * move, new
        else:
            raise RuntimeError("no mode")
        self.last = x
        log_m = value + 0.5 * len(x) * np.log(2.0 * np.pi) - np.log(np.diag(factor)).sum()
        return Mode(float(log_m), x, factor)

    def _at(self, g: Array, x: Array) -> tuple[float, Array]:
        value, slope = self.density.logp_grad(self.together(g, x[None]))
        return float(value[0]), slope[0, self.given.inside]

    def _curvature(self, g: Array, x: Array) -> Array:
        """Return minus the Hessian by differences of gradients: exact, but for rounding, where that is constant."""
        moves = _STEP * np.eye(len(x))
        slopes = [self.density.logp_grad(self.together(g, x + s * moves))[1] for s in (1.0, -1.0)]
        hessian = (slopes[1] - slopes[0])[:, self.given.inside] / (2.0 * _STEP)
        return 0.5 * (hessian + hessian.T)

    def accurate(self, g: Array, q: object, seed: int) -> tuple[float, float]:
        """Return log m by importance sampling from a Gaussian of the latent variables, and its standard error."""
        rng, parts = np.random.default_rng(seed), []
        if not self.given.give(g):
            raise RuntimeError("rows do not add up to log p")
        n = min(_MOST_ACCURATE, _MOST_NUMBERS // self.given.n_dim)
        for _ in range(n // _AT_ONCE):
            latent = q.draws(rng.standard_normal((_AT_ONCE, self.given.n_dim)))
            parts.append(self.given.rows.at(latent) - q.log_density(latent))
        own = self.density.logp(self.together(g, latent[:_CHECKED]))
        np.testing.assert_allclose(parts[-1][:_CHECKED] + q.log_density(latent[:_CHECKED]), own, rtol=1e-8)
        log_weights = np.concatenate(parts)
        value = float(logsumexp(log_weights) - np.log(len(log_weights)))
        weights = np.exp(log_weights - value)
        return value, float(weights.std() / np.sqrt(len(weights)))


def compared(model: pm.Model, n: int, seed: int) -> Compared:
    """Return log m at the posterior mode of the hyperparameters and at draws from their posterior."""
    found = LogMarginals.of(model)
    with model:
        approx = pm.fit(method="ngvi", posterior="nested", random_seed=seed, progressbar=False)
    draws = unconstrain(approx.sample(n, random_seed=seed).posterior, model)[:, found.given.outside]
    marginal = LatentMarginal(found.given, seed)
    start = approx.mean_flat[found.given.outside]
    top = minimize(lambda g: -marginal(g), start, method="Nelder-Mead", options={"xatol": 0.02, "fatol": 0.01})
    rows = []
    for i, g in enumerate([top.x, *draws]):
        evaluated = marginal.at(g)
        assert evaluated is not None
        at, q = evaluated
        found.last = q.location
        rows.append((at.value - at.correction, at.value, found.laplace(g).log_m, *found.accurate(g, q, i)))
    return Compared(*np.array(rows).T)


def exact_moments(found: LogMarginals) -> tuple[Array, Array]:
    """Return means and standard deviations of all coordinates where Laplace's method is exact: on a lattice."""
    given = found.given
    centre, root = _whitening(found)
    step, weights, parts = _LATTICE_STEPS[len(centre) > _FEW], [], []
    for g, mode in _lattice(found, centre, step * root):
        inverse = solve_triangular(mode.factor, np.eye(given.n_dim), lower=True)
        weights.append(mode.log_m)
        parts.append((g, mode.mode, (inverse**2).sum(axis=0)))
    w = np.exp(np.array(weights) - max(weights))
    w /= w.sum()
    g, modes, variances = (np.array(part) for part in zip(*parts, strict=True))
    mean, variance = np.empty(found.density.n_dim), np.empty(found.density.n_dim)
    for where, values, within in ((given.outside, g, 0.0 * g), (given.inside, modes, variances)):
        mean[where] = w @ values
        variance[where] = w @ (within + (values - mean[where]) ** 2)
    return mean, np.sqrt(variance)


def _whitening(found: LogMarginals) -> tuple[Array, Array]:
    """Return the mode of log m, and a root of minus its inverse Hessian there."""
    start = found.density.initial_point()[found.given.outside]
    centre = minimize(lambda g: -found.laplace(g).log_m, start, method="Nelder-Mead", options={"fatol": 1e-3}).x
    p, moves = len(centre), _CURVED * np.eye(len(centre))
    hessian = np.empty((p, p))
    for i, j in itertools.combinations_with_replacement(range(p), 2):
        corners = [
            a * b * found.laplace(centre + a * moves[i] + b * moves[j]).log_m
            for a, b in itertools.product((1, -1), repeat=2)
        ]
        hessian[i, j] = hessian[j, i] = sum(corners) / (4.0 * _CURVED**2)
    return centre, np.linalg.cholesky(np.linalg.inv(-hessian))


def _lattice(found: LogMarginals, centre: Array, root: Array) -> Iterator[tuple[Array, Mode]]:
    """Yield points of a lattice with log m, from the centre outwards as long as it is not far below the top."""
    p = len(centre)
    waiting, seen, top = [(0,) * p], {(0,) * p}, -np.inf
    while waiting:
        place = waiting.pop(0)
        g = centre + root @ np.array(place, dtype=float)
        mode = found.laplace(g)
        top = max(top, mode.log_m)
        yield g, mode
        if mode.log_m < top - _DEPTH:
            continue
        for i, by in itertools.product(range(p), (1, -1)):
            beside = (*place[:i], place[i] + by, *place[i + 1 :])
            if beside not in seen:
                seen.add(beside)
                waiting.append(beside)
