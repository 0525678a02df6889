"""log m(g), the log density of hyperparameters with the latent variables integrated out, by several methods."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pymc as pm

from measure import Array, unconstrain
from scipy.special import logsumexp

from pymc_ngvi.core.psis import smoothed
from pymc_ngvi.core.types import GaussianState
from pymc_ngvi.density import LogDensity
from pymc_ngvi.density.hyperparameters import latent_rows
from pymc_ngvi.density.rows_given import RowsGiven
from pymc_ngvi.nested.conditional import ConditionalFits, LatentGaussian
from pymc_ngvi.nested.log_marginal import LatentMarginal
from pymc_ngvi.rows.seen import Seen

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
    q: GaussianState


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


@dataclass
class LogMarginals:
    """Evaluates log m of a model; all coordinates are unconstrained."""

    model: pm.Model
    density: LogDensity
    given: RowsGiven
    fits: ConditionalFits
    last: Seen | None = None

    @classmethod
    def of(cls, model: pm.Model) -> "LogMarginals":
        """Return that of a model."""
        density = LogDensity(model)
        given = latent_rows(density)
        return cls(model, density, given, ConditionalFits(given))

    def together(self, g: Array, latent: Array) -> Array:
        """Return whole points, (n, d), of hyperparameters (p,) and latent variables (n, n_latent)."""
        theta = np.empty((len(latent), self.density.n_dim))
        theta[:, self.given.outside], theta[:, self.given.inside] = g, latent
        return theta

    def laplace(self, g: Array, start: GaussianState | None = None) -> Mode:
        """Return Laplace's method, by Newton's method with halved steps, from a Gaussian nearby."""
        q = self.fit(g).q if start is None else start
        self._give(g)
        value = self._at(q.location)
        for _ in range(_MOST_NEWTON):
            q, move, decrement = self._newton(q)
            if decrement < _SMALL:
                break
            for size in 0.5 ** np.arange(30):
                moved = q.location + size * move
                if (new := self._at(moved)) > value - 1e-10 * abs(value):
                    break
            q, value = replace(q, location=moved), new
        else:
            raise RuntimeError("no mode")
        return Mode(value + q.entropy() - 0.5 * len(q.location), q)

    def fit(self, g: Array) -> LatentGaussian:
        """Return the conditional fit, which begins from what rows saw of the last one."""
        found = self.fits.fit(g, () if self.last is None else (self.last,))
        if found is None:
            raise RuntimeError("no conditional fit")
        self.last = found.seen
        return found

    def _give(self, g: Array) -> None:
        if not self.given.give(g):
            raise RuntimeError("rows do not add up to log p")

    def _at(self, x: Array) -> float:
        return float(self.given.rows.at(x[None])[0])

    def _newton(self, q: GaussianState) -> tuple[GaussianState, Array, float]:
        """Return q with the curvature at its mean, the Newton step from there, and twice what that should gain."""
        rows = self.given.rows
        seen = rows.seen(q)
        narrow = Seen(seen.mean, [_NARROW * covariance for covariance in seen.covariances])
        found = rows.under_seen(narrow, self.given)
        slope = q.whiten(found.grad)
        scaled = q.precision_scaled_by(found.hessian.whitened(q), slope)
        if scaled is None:
            raise RuntimeError("log p is not concave")
        curved, move = scaled
        return replace(curved, location=q.location), move, float(move @ found.grad)

    def check(self, g: Array, mode: Mode) -> None:
        """Compare what rows say of slope and curvature at a mode with gradients of the model's own log p."""
        q, rng = mode.q, np.random.default_rng(0)
        directions = q.draws(rng.standard_normal((_DIRECTIONS, self.given.n_dim))) - q.location
        points = q.location + _LENGTH * np.concatenate([0.0 * directions[:1], directions, -directions])
        slopes = self.density.logp_grad(self.together(g, points))[1][:, self.given.inside]
        forth, back = slopes[1 : 1 + _DIRECTIONS], slopes[1 + _DIRECTIONS :]
        curved = np.array([q.whiten(s) for s in (back - forth) / (2.0 * _LENGTH)])
        expected = np.array([q.whiten(q.precision_product(d[None])[0]) for d in directions])
        apart = np.linalg.norm(curved - expected, axis=1) / np.linalg.norm(expected, axis=1)
        left = np.linalg.norm(q.whiten(slopes[0]))
        if not (left < _LEFT and apart.max() < _LEFT):
            raise RuntimeError(f"rows and log p differ at a mode: slope {left:.1e}, curvature {apart.max():.1e}")

    def accurate(self, g: Array, q: GaussianState, n_draws: int, seed: int) -> Accurate:
        """Return log m by importance sampling from a Gaussian of the latent variables, with pairs of opposite draws."""
        rng, parts, sums, top = np.random.default_rng(seed), [], np.zeros((3, self.given.n_dim)), None
        self._give(g)
        for _ in range(n_draws // _AT_ONCE):
            half = rng.standard_normal((_AT_ONCE // 2, self.given.n_dim))
            latent = q.draws(np.concatenate([half, -half]))
            parts.append(self.given.rows.at(latent) - q.log_density(latent))
            top = parts[0].max() if top is None else top
            weights, apart = np.exp(parts[-1] - top), latent - q.location
            sums += np.stack([weights @ apart**k for k in range(3)])
        own = self.density.logp(self.together(g, latent[:_CHECKED]))
        np.testing.assert_allclose(parts[-1][:_CHECKED] + q.log_density(latent[:_CHECKED]), own, rtol=1e-6)
        log_weights = np.concatenate(parts)
        value = float(logsumexp(log_weights) - np.log(len(log_weights)))
        pairs = np.exp(log_weights - value).reshape(-1, 2, _AT_ONCE // 2).mean(axis=1)
        error, moved = float(pairs.std() / np.sqrt(pairs.size)), sums[1] / sums[0]
        return Accurate(value, error, smoothed(log_weights)[1], q.location + moved, sums[2] / sums[0] - moved**2)


def compared(model: pm.Model, n: int, seed: int) -> Compared:
    """Return log m at draws of the hyperparameters from their posterior."""
    found = LogMarginals.of(model)
    with model:
        approx = pm.fit(method="ngvi", posterior="nested", random_seed=seed, progressbar=False)
    draws = unconstrain(approx.sample(n, random_seed=seed).posterior, model)[:, found.given.outside]
    marginal, rows = LatentMarginal(found.given, seed), []
    n_draws = min(_N_ACCURATE, _MOST_NUMBERS // found.given.n_dim)
    for i, g in enumerate(draws):
        evaluated = marginal.at(g)
        if evaluated is None:
            raise RuntimeError("no fit at a draw")
        at, q = evaluated
        mode = found.laplace(g, q)
        found.check(g, mode)
        accurate = found.accurate(g, q, n_draws, i)
        rows.append((at.value - at.correction, at.value, mode.log_m, accurate.log_m, accurate.error, accurate.khat))
    return Compared(*np.array(rows).T)
