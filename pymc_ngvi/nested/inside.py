"""The Gaussian of the latent variables as what is inside: given hyperparameters, log m and weighted draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pymc_ngvi.core import prices
from pymc_ngvi.core.refusal import Reason
from pymc_ngvi.core.types import Array
from pymc_ngvi.marginal.ratios import Ratios
from pymc_ngvi.marginal.sampler import Hopeless, OutsideDraws, Pairs, normalised_weights
from pymc_ngvi.marginal.sampling import by_neighbours
from pymc_ngvi.nested.defence import n_far_of
from pymc_ngvi.nested.found import Drawn, Marginal, missing
from pymc_ngvi.nested.pairs import WeightedPairs

#: Power of m that known values count by.
_FLATTENED = 0.25
#: Scale at which all hyperparameters are far from each other, so that none is fitted alone.
_NEVER = 1e-3
#: Nats that an ELBO may lack, as far as that can be told by few draws.
_MOST_LACKING = 3.0


@dataclass(frozen=True, eq=False)
class LatentPairs(Pairs):
    """Draws of the latent variables at one value of the hyperparameters; NaN where there is no fit."""

    #: Of log p at these hyperparameters.
    elbo: Array
    #: Of the Gaussian; shape (d,).
    mean: Array
    sd: Array
    #: shape (n_draws, d).
    latents: Array
    #: log q' - log q; shape (n_draws,).
    log_mixed: Array


class Exploration(NamedTuple):
    """What is known of the hyperparameters, and of the latent variables given these."""

    pairs: WeightedPairs
    #: Part of the predicted weight that is where there is no fit.
    lost: float
    #: By how much values from farther out move a mean, in its standard errors; 0 where it is by little.
    moved: float


class Uneven(Hopeless):
    """Weights of draws of the latent variables vary too much."""


class LatentInside:
    """Latent variables given hyperparameters, which are divided by the scales that others are the logarithms of."""

    def __init__(
        self,
        marginal: Marginal,
        start: Array,
        ratios: Sequence[tuple[int, int]],
        most_variance: float = np.inf,
        n_values: float = 0.0,
        n_before: int = 0,
    ) -> None:
        self._marginal, self._most_variance = marginal, most_variance
        #: Values with draws that are expected, and fits that came before.
        self._n_values, self._n_before = n_values, n_before
        self.bend = Ratios.about(ratios, start)
        self._is_ready = False

    def log_m(self, y: Array) -> Array:
        """Return log m, as a density of what is divided; once there is a fit, those that fail are not begun again."""
        g = self.bend.inverse(y)
        values = self._marginal(g) - self.bend.log_slope(g)
        if self._marginal.known:
            self._marginal.scale = np.full(g.shape[1], _NEVER)
        return values

    def pairs(self, y: Array, n_draws: int, rng: np.random.Generator) -> LatentPairs:
        """Return draws of the latent variables."""
        if not self._is_ready:
            self._begin()
        g = self.bend.inverse(y)
        half = rng.standard_normal((len(g), (n_draws + 1) // 2, self._marginal.n_dim))
        base = np.concatenate([half, -half], axis=1)[:, :n_draws]
        found = self._marginal.drawn(g, base, rng)
        return self._stacked(found, n_draws, -self.bend.log_slope(g))

    def _begin(self) -> None:
        """See whether draws are worth it, and prepare what they begin from."""
        if (variance := self._marginal.variance()) > self._most_variance:
            raise Uneven(
                Reason.NOT_PASSED,
                "given the hyperparameters, latent variables are too far from a Gaussian (variance "
                f"{variance:.1f} of log weights at the mode)",
            )
        prices.expect(self._n_values / (self._n_before + self._marginal.n_fits))
        known, self._is_ready = self._marginal.known, True
        values, points = np.array([one.value for one in known]), np.array([one.g for one in known])
        weights = normalised_weights(_FLATTENED * values)
        self._marginal.scale = np.sqrt(weights @ (points - weights @ points) ** 2)
        self._marginal.begin_round()

    def _stacked(self, found: Sequence[Drawn | None], n_draws: int, log_slope: Array) -> LatentPairs:
        n, n_own = len(found), n_draws - n_far_of(n_draws)
        d = next((len(one.mean) for one in found if one is not None), self._marginal.n_dim)
        log_ratio, log_mixed = np.full((n, n_draws), -np.inf), np.zeros((n, n_draws))
        elbo, mean, sd, latents = np.full(n, -np.inf), np.zeros((n, d)), np.ones((n, d)), np.zeros((n, n_draws, d))
        for k, one in enumerate(found):
            if one is not None:
                log_ratio[k], log_mixed[k], elbo[k] = (
                    one.log_ratio + log_slope[k],
                    one.log_mixed,
                    one.elbo + log_slope[k],
                )
                mean[k], sd[k], latents[k] = one.mean, one.sd, one.latents
        own = log_ratio[:, :n_own] + log_mixed[:, :n_own]
        lacking = [missing(row - value)[0] if np.isfinite(value) else 0.0 for row, value in zip(own, elbo, strict=True)]
        return LatentPairs(
            log_ratio, own, elbo + np.minimum(lacking, _MOST_LACKING), elbo, mean, sd, latents, log_mixed
        )

    def weighted(self, draws: OutsideDraws) -> WeightedPairs:
        """Return what was drawn as weighted pairs of hyperparameters and latent variables."""
        pairs, spread = draws.pairs, normalised_weights(draws.log_marginal - draws.log_density)
        assert isinstance(pairs, LatentPairs)
        sd = np.sqrt(spread @ (draws.g - spread @ draws.g) ** 2)
        order = by_neighbours(draws.g / sd, np.full(len(draws.g), 1.0 / len(draws.g)), 0.0)
        g, pairs = self.bend.inverse(draws.g[order]), pairs[order]
        log_slope = self.bend.log_slope(g)
        return WeightedPairs(
            g,
            draws.log_density[order] + log_slope,
            pairs.log_ratio + log_slope[:, None],
            pairs.elbo + log_slope,
            pairs.log_estimate + log_slope,
            pairs.latents,
            pairs.mean,
            pairs.sd,
            pairs.log_mixed,
            n_far_of(pairs.log_ratio.shape[1]),
        )
