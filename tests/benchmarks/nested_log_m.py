"""log m(g), the log density of hyperparameters with the latent variables integrated out, by several methods."""

from typing import NamedTuple

import numpy as np
import pymc as pm

from measure import Array, unconstrain
from scipy.special import logsumexp

from pymc_ngvi.core.psis import smoothed
from pymc_ngvi.density import LogDensity
from pymc_ngvi.density.rows_given import latent_rows
from pymc_ngvi.families.matrices.sparse.precisions import Factors
from pymc_ngvi.nested.log_marginal import EvaluatedMarginal, LatentMarginal
from pymc_ngvi.nested.many import SOLVED, ManyGaussians

#: Newton steps at most; squared size of a step that ends them.
_MOST_NEWTON, _SMALL = 100, 1e-10
#: Variance, in those of a posterior, of the Gaussian whose expectations stand for values at its mean.
_NARROW = 1e-6
#: Draws behind an accurate value, and numbers in these, at most; draws at once.
_N_ACCURATE, _MOST_NUMBERS, _AT_ONCE = 2**16, 2**25, 2**12
#: Draws of which log p is compared with the sum over rows; directions in which Hessians are compared, their length in
#: standard deviations, and what may be left of either in relation to the whole.
_CHECKED, _DIRECTIONS, _LENGTH, _LEFT = 8, 3, 1e-3, 1e-3


class Mode(NamedTuple):
    """Laplace's method at one value of the hyperparameters: log m, and the Gaussian around the mode."""

    log_m: float
    #: shape (1, n_latent).
    mean: Array
    factors: Factors


class Accurate(NamedTuple):
    """By importance sampling: log m, its standard error, k-hat, and means and variances of the latent variables."""

    log_m: float
    error: float
    khat: float
    mean: Array
    variance: Array


class Compared(NamedTuple):
    """What methods find at some hyperparameters, (n,) each; standard errors and k-hats of the accurate values."""

    elbo: Array
    corrected: Array
    laplace: Array
    accurate: Array
    error: Array
    khat: Array


class LogMarginals:
    """Evaluates log m of a model; all coordinates are unconstrained."""

    def __init__(self, model: pm.Model, seed: int = 0) -> None:
        self.model, self.density = model, LogDensity(model)
        self.given = latent_rows(self.density)
        self.marginal = LatentMarginal(self.given, seed)

    def together(self, g: Array, latent: Array) -> Array:
        """Return whole points, (n, d), of hyperparameters (p,) and latent variables (n, n_latent)."""
        theta = np.empty((len(latent), self.density.n_dim))
        theta[:, self.given.outside], theta[:, self.given.inside] = g, latent
        return theta

    def at(self, g: Array) -> EvaluatedMarginal:
        """Return log m with what the ELBO lacks."""
        [found] = self.marginal.at(g[None])
        if found is None:
            raise RuntimeError("no conditional fit")
        return found

    def fit(self, g: Array) -> ManyGaussians:
        """Return the conditional fit, which begins from what rows saw of others: one, with an axis of many."""
        self.at(g)
        [(_, fit)] = self.marginal.fits(g[None], [self.marginal.nearest(g[None])], SOLVED)
        return fit

    def laplace(self, g: Array, start: ManyGaussians | None = None) -> Mode:
        """Return Laplace's method, by Newton's method with halved steps, from a Gaussian nearby."""
        fit = self.fit(g) if start is None else start
        x, value, factors = fit.mean, self._at(fit, fit.mean), fit.factors
        for _ in range(_MOST_NEWTON):
            factors, move, decrement = self._newton(fit, x)
            if decrement < _SMALL:
                break
            for size in 0.5 ** np.arange(30):
                moved = x + size * move
                if (new := self._at(fit, moved)) > value - 1e-10 * abs(value):
                    break
            x, value = moved, new
        else:
            raise RuntimeError("no mode")
        return Mode(value + factors.entropy[0] - 0.5 * x.shape[1], x, factors)

    def _at(self, fit: ManyGaussians, x: Array) -> float:
        return float(fit.rows.values(x[:, :, None])[0, 0])

    def _newton(self, fit: ManyGaussians, x: Array) -> tuple[Factors, Array, float]:
        """Return the curvature at a point, the Newton step from there, and twice what that should gain."""
        found = fit.rows.expected(fit.rows.seen(x, _NARROW * fit.factors.covariance))
        factors, _ = self.given.precisions.factored(found.precision)
        if factors is None:
            raise RuntimeError("log p is not concave")
        slope = fit.rows.maps.transposed_times(found.slope)
        move = factors.times_covariance(slope)
        return factors, move, float(np.vdot(move, slope))

    def check(self, g: Array, mode: Mode) -> None:
        """Compare what rows say of slope and curvature at a mode with gradients of the model's own log p."""
        base = np.random.default_rng(0).standard_normal((1, self.given.n_dim, _DIRECTIONS))
        directions = mode.factors.solve(base, transposed=True)[0].T
        points = mode.mean + _LENGTH * np.concatenate([0.0 * directions[:1], directions, -directions])
        slopes = self.density.logp_grad(self.together(g, points))[1][:, self.given.inside]
        forth, back = slopes[1 : 1 + _DIRECTIONS], slopes[1 + _DIRECTIONS :]
        curved = mode.factors.solve(((back - forth) / (2.0 * _LENGTH)).T[None])[0]
        apart = np.linalg.norm(curved - base[0], axis=0) / np.linalg.norm(base[0], axis=0)
        left = np.linalg.norm(mode.factors.solve(slopes[:1, :, None]))
        if not (left < _LEFT and apart.max() < _LEFT):
            raise RuntimeError(f"rows and log p differ at a mode: slope {left:.1e}, curvature {apart.max():.1e}")

    def accurate(self, g: Array, fit: ManyGaussians, n_draws: int, seed: int) -> Accurate:
        """Return log m by importance sampling from a Gaussian of the latent variables, with pairs of opposite draws."""
        rng, parts, sums, top = np.random.default_rng(seed), [], np.zeros((3, self.given.n_dim)), None
        for _ in range(n_draws // _AT_ONCE):
            half = rng.standard_normal((1, self.given.n_dim, _AT_ONCE // 2))
            base = np.concatenate([half, -half], axis=2)
            latent = fit.draws(base)
            log_p = fit.rows.values(latent)
            parts.append((log_p - fit.log_density(base))[0])
            top = parts[0].max() if top is None else top
            weights, apart = np.exp(parts[-1] - top), latent[0].T - fit.mean
            sums += np.stack([weights @ apart**k for k in range(3)])
        own = self.density.logp(self.together(g, latent[0, :, :_CHECKED].T))
        np.testing.assert_allclose(log_p[0, :_CHECKED], own, rtol=1e-6)
        log_weights = np.concatenate(parts)
        value = float(logsumexp(log_weights) - np.log(len(log_weights)))
        pairs = np.exp(log_weights - value).reshape(-1, 2, _AT_ONCE // 2).mean(axis=1)
        error, moved = float(pairs.std() / np.sqrt(pairs.size)), sums[1] / sums[0]
        return Accurate(value, error, smoothed(log_weights)[1], fit.mean[0] + moved, sums[2] / sums[0] - moved**2)


def compared(model: pm.Model, n: int, seed: int) -> Compared:
    """Return log m at draws of the hyperparameters from their posterior."""
    found = LogMarginals(model, seed)
    with model:
        approx = pm.fit(method="ngvi", posterior="nested", random_seed=seed, progressbar=False)
    draws = unconstrain(approx.sample(n, random_seed=seed).posterior, model)[:, found.given.outside]
    n_draws, rows = min(_N_ACCURATE, _MOST_NUMBERS // found.given.n_dim), []
    for i, g in enumerate(draws):
        at, fit = found.at(g), found.fit(g)
        mode = found.laplace(g, fit)
        found.check(g, mode)
        accurate = found.accurate(g, fit, n_draws, i)
        rows.append((at.value - at.correction, at.value, mode.log_m, accurate.log_m, accurate.error, accurate.khat))
    return Compared(*np.array(rows).T)
