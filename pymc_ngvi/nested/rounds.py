"""Rounds of hyperparameters, each with draws of its latent variables: from what is predicted, and from farther out."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.refusal import Reason
from pymc_ngvi.core.sizes import HELD
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.fitting import Hopeless
from pymc_ngvi.marginal.proposals import Base, Proposal, effective_size, first_proposal
from pymc_ngvi.marginal.regression import Whitening, predictor, quadratic_terms
from pymc_ngvi.marginal.sampling import Pool, evenly_picked
from pymc_ngvi.marginal.tails import Bend
from pymc_ngvi.nested.defence import n_far_of
from pymc_ngvi.nested.found import Drawn, Marginal
from pymc_ngvi.nested.pairs import WeightedPairs

#: Draws of the latent variables at each value of the hyperparameters; fewest of each.
N_DRAWS, FEWEST_VALUES, _FEWEST_DRAWS = 16, 64, 2
#: Part of the values that are drawn from farther out, by how much farther, and with what degrees of freedom.
_OF_WIDE, _WIDER, _DF = 0.2, 2.0, 5.0
#: Nats below the top, and more for each hyperparameter, beyond which only short ways to a fit are tried.
_DEEP, _DEEP_PER_DIM = 12.0, 2.0
#: Whitened hyperparameters are cut off here in regressions: beyond, few draws would have all the say.
_BULK = 3.0
#: Power of their density that hyperparameters count by in regressions.
_FLATTENED = 0.25
#: Points that are not divided.
_FEW = 2
#: Numbers of the random streams.
_STREAM, _PICKS = 8_000_000, 8_000_001


class Guess:
    """A predicted density of the hyperparameters, normalised and drawn from by a pool."""

    def __init__(self, value: Callable[[Array], Array], whitening: Whitening, pool: Pool) -> None:
        self._value, self.whitening, self._pool = value, whitening, pool
        self.values = self._of(pool.g)
        log_ratio = self.values - pool.log_density
        self.log_total = float(logsumexp(log_ratio) - np.log(len(log_ratio)))
        self.weights: Array = np.exp(log_ratio - logsumexp(log_ratio))

    def log_density(self, g: Array) -> Array:
        """Return the log density at the rows of ``g``."""
        return self._of(g) - self.log_total

    def draws(self, n: int, at: float) -> Array:
        """Return ``n`` values, as evenly as can be: by weight, along an order in which neighbours are near."""
        order = by_neighbours(self.whitening.whitened(self._pool.g), self.weights, 0.5 / n)
        return self._pool.g[order[evenly_picked(self.weights[order], n, at)]]

    def mean(self, function: Callable[[Array], Array]) -> Array:
        """Return the mean of functions of the hyperparameters."""
        return self.weights @ function(self._pool.g)

    def wide(self, bend: Bend) -> Proposal:
        """Return a proposal that is wider, with heavier tails."""
        y = bend.forward(self._pool.g)
        mean = self.weights @ y
        cov = (self.weights[:, None] * (y - mean)).T @ (y - mean)
        return first_proposal(Base(mean, np.linalg.cholesky(cov)), bend, _DF, _WIDER)

    def _of(self, g: Array) -> Array:
        return self._value(g)


@dataclass
class _Round:
    """Hyperparameters of one proposal, and what is found there."""

    log_density: Callable[[Array], Array]
    g: Array
    found: list[Drawn | None]
    is_wide: bool


class Rounds:
    """Evaluates rounds of hyperparameters and pools them."""

    def __init__(self, marginal: Marginal, n_values: int, seed: int, ridge: Proposal | None = None) -> None:
        self._marginal, self._seed, self._ridge = marginal, seed, ridge
        n_dim = max(marginal.n_dim, 1)
        at_once = HELD // n_dim
        self._m = N_DRAWS if at_once >= N_DRAWS * FEWEST_VALUES else max(_FEWEST_DRAWS, at_once // FEWEST_VALUES)
        self._n = max(FEWEST_VALUES, min(n_values, at_once // self._m))
        self._rounds: list[_Round] = []
        self._n_drawn = 0
        self._rng = np.random.default_rng([seed, _PICKS])

    def add(self, guess: Guess, bend: Bend, part: float) -> None:
        """Draw a part of all values from what is predicted, and some from farther out."""
        self._marginal.begin_round(guess.whitening)
        n, n_wide = int(np.ceil(part * self._n)), int(np.ceil(part * _OF_WIDE * self._n))
        wide = guess.wide(bend)
        if self._ridge is not None:
            n_wide = max(1, n_wide // 2)
            g = self._ridge.draws(n_wide, self._rng)
            self._rounds.append(_Round(self._ridge.log_density, g, self._found(g, guess), False))
        g = guess.draws(n, float(self._rng.random()))
        self._rounds.append(_Round(guess.log_density, g, self._found(g, guess), False))
        g = wide.draws(n_wide, self._rng)
        self._rounds.append(_Round(wide.log_density, g, self._found(g, guess), True))
        self._guess = guess

    def _found(self, g: Array, guess: Guess) -> list[Drawn | None]:
        """Return what is found at values of the hyperparameters, None where there is no fit."""
        lowest = guess.values.max() - _DEEP - _DEEP_PER_DIM * g.shape[1]
        rng = np.random.default_rng([self._seed, _STREAM, self._n_drawn])
        self._n_drawn += len(g)
        half = rng.standard_normal((len(g), (self._m + 1) // 2, self._marginal.n_dim))
        base = np.concatenate([half, -half], axis=1)[:, : self._m]
        return self._marginal.drawn(g, base, rng, guess._of(g) < lowest)

    def efficiency(self) -> float:
        """Return the effective part of the values of the last round by itself, but for those from farther out."""
        last = self._rounds[-2]
        log_m = np.array([-np.inf if f is None else logsumexp(f.log_ratio) for f in last.found])
        return effective_size(log_m - last.log_density(last.g)) / len(last.g)

    def pooled(self) -> tuple[WeightedPairs, Array, float]:
        """Return all rounds as pairs, the log density of the proposals but for the wide ones, and what was lost.

        Weights are those of draws of the mixture of all proposals. What was lost is the part of the predicted weight
        that is where there is no fit.
        """
        g = np.concatenate([r.g for r in self._rounds])
        log_parts = np.array([np.log(len(r.g)) + r.log_density(g) for r in self._rounds])
        is_wide_round = np.array([r.is_wide for r in self._rounds])
        log_all = logsumexp(log_parts, axis=0) - np.log(len(g))
        n_near = sum(len(r.g) for r in self._rounds if not r.is_wide)
        log_near = logsumexp(log_parts[~is_wide_round], axis=0) - np.log(n_near)
        found = [f for r in self._rounds for f in r.found]
        predicted = self._guess.log_density(g)
        share = np.exp(predicted - log_all)
        is_lost = np.array([f is None for f in found])
        lost = float(share[is_lost].sum() / share.sum())
        keep = np.flatnonzero(~is_lost)
        if not len(keep):
            raise Hopeless(Reason.HOPELESS, "the latent variables can be fitted at none of the hyperparameters")
        u = self._guess.whitening.whitened(g[keep])
        keep = keep[by_neighbours(u, np.full(len(keep), 1.0 / len(keep)), 0.0)]
        is_wide = np.concatenate([np.full(len(r.g), r.is_wide) for r in self._rounds])
        some = [f for i in keep if (f := found[i]) is not None]
        # Where there is no fit, there is no weight: the proposal's density is that of the values that are left.
        left = np.log(len(keep) / len(g))
        elbo = np.array([f.elbo for f in some])
        pairs = WeightedPairs(
            g[keep],
            log_all[keep] - left,
            np.array([f.log_ratio for f in some]),
            elbo,
            elbo + self._lacking(g[keep]),
            np.array([f.latents for f in some]),
            np.array([f.mean for f in some]),
            np.array([f.sd for f in some]),
            self._features(g[keep]),
            self._guess.mean(self._features),
            predicted[keep],
            is_wide[keep],
            np.array([f.log_mixed for f in some]),
            n_far_of(self._m),
        )
        return pairs, log_near[keep], lost

    def _lacking(self, g: Array) -> Array:
        """Return what ELBOs lack of log m, (n,), by a regression on what the fits before the rounds have measured."""
        known = [k for k in self._marginal.known if np.isfinite(k.doubt)]
        if not any(k.correction for k in known):
            return np.zeros(len(g))
        features = self._features(np.array([k.g for k in known]))
        if len(known) < 2 * (1 + features.shape[1]):
            return np.zeros(len(g))
        values, lacking = np.array([k.value for k in known]), np.array([k.correction for k in known])
        weights = np.exp(_FLATTENED * (values - values.max()))
        one, ones = np.ones((len(known), 1)), np.ones((len(g), 1))
        slopes = predictor(np.concatenate([one, features], axis=1), lacking[:, None], weights, g.shape[1])
        found = np.concatenate([ones, self._features(g)], axis=1) @ slopes
        return np.clip(found[:, 0], lacking.min(), lacking.max())

    def _features(self, g: Array) -> Array:
        """Return whitened hyperparameters and, where there are values enough, their products: of the bulk."""
        u = np.clip(self._guess.whitening.whitened(g), -_BULK, _BULK)
        p = u.shape[1]
        if 10 * (p + p * (p + 1) // 2) > self._n:
            return u
        return quadratic_terms(u)[:, 1:]


def by_neighbours(points: Array, weights: Array, least: float) -> NDArray[np.intp]:
    """Return an order in which neighbours are near each other: halves by weight, halved again along what is longest."""
    order, first = np.arange(len(points)), np.zeros(1, dtype=np.intp)
    while True:  # all parts at once
        size = np.diff(np.append(first, len(order)))
        part = np.repeat(np.arange(len(first)), size)
        w, x = weights[order], points[order]
        total = np.add.reduceat(w, first)
        goes_on = (size > _FEW) & (total > least)
        if not goes_on.any():
            return order
        per = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0.0)[:, None]
        mean = np.add.reduceat(w[:, None] * x, first) * per
        longest = np.add.reduceat(w[:, None] * (x - mean[part]) ** 2, first).argmax(axis=1)
        along = np.where(goes_on[part], x[np.arange(len(x)), longest[part]], 0.0)
        order = order[np.lexsort((along, part))]
        reached = np.cumsum(w := weights[order])
        reached -= (reached[first] - w[first])[part]
        half = 0.5 * reached[first + size - 1]
        below = np.add.reduceat((reached < half[part]).astype(np.intp), first)
        first = np.union1d(first, (first + np.clip(below, 1, np.maximum(size - 1, 1)))[goes_on])
