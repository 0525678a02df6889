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
from pymc_ngvi.nested.found import Marginal, missing
from pymc_ngvi.nested.pairs import WeightedPairs

#: Power of m that known values count by.
_FLATTENED = 0.25
#: Nats that an ELBO may lack, as far as that can be told by few draws.
_MOST_LACKING = 3.0


@dataclass(frozen=True, eq=False)
class LatentPairs(Pairs):
    """Draws of the latent variables at one value of the hyperparameters; NaN where there is no fit."""

    #: Of log p at these hyperparameters.
    elbo: Array
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
        self._known, self._is_ready = list[tuple[Array, Array]](), False

    def log_m(self, y: Array) -> Array:
        """Return log m, as a density of what is divided."""
        g = self.bend.inverse(y)
        self._known.append((g, self._marginal(g)))
        return self._known[-1][1] - self.bend.log_slope(g)

    def pairs(self, y: Array, n_draws: int, rng: np.random.Generator) -> LatentPairs:
        """Return draws of the latent variables."""
        if not self._is_ready:
            self._begin()
        g, n, d, n_own = self.bend.inverse(y), len(y), self._marginal.n_inside, n_draws - n_far_of(n_draws)
        half = rng.standard_normal((n, self._marginal.n_dim, (n_draws + 1) // 2))
        base = np.concatenate([half, -half], axis=2)[:, :, :n_draws]
        log_ratio, own = np.full((n, n_draws), -np.inf), np.full((n, n_own), -np.inf)
        elbo, estimate = np.full((2, n), -np.inf)
        latents, log_mixed = np.zeros((n, n_draws, d)), np.zeros((n, n_draws))
        for at, found in self._marginal.drawn(g, base, rng):
            log_slope, log_mixed[at] = self.bend.log_slope(g[at])[:, None], found.log_mixed
            log_ratio[at] = found.log_ratio - log_slope
            own[at] = log_ratio[at, :n_own] + found.log_mixed[:, :n_own]
            elbo[at] = found.elbo - log_slope[:, 0]
            estimate[at] = elbo[at] + np.minimum(missing(own[at] - elbo[at, None])[0], _MOST_LACKING)
            latents[at] = np.swapaxes(found.latents, 1, 2)
        return LatentPairs(log_ratio, own, estimate, elbo, latents, log_mixed)

    def _begin(self) -> None:
        """See whether draws are worth it, and prepare what they begin from."""
        if (variance := self._marginal.variance()) > self._most_variance:
            raise Uneven(
                Reason.NOT_PASSED,
                "given the hyperparameters, latent variables are too far from a Gaussian (variance "
                f"{variance:.1f} of log weights at the mode)",
            )
        prices.expect(self._n_values / (self._n_before + self._marginal.n_fits))
        points, values = (np.concatenate(parts) for parts in zip(*self._known, strict=True))
        weights, self._is_ready = normalised_weights(_FLATTENED * values), True
        scale = np.sqrt(weights @ (points - weights @ points) ** 2)
        self._marginal.begin_draws(points[np.argmax(values)], scale)

    def weighted(self, draws: OutsideDraws) -> WeightedPairs:
        """Return what was drawn as weighted pairs of hyperparameters and latent variables."""
        pairs, spread = draws.pairs, normalised_weights(draws.log_marginal - draws.log_density)
        assert isinstance(pairs, LatentPairs)
        sd = np.sqrt(spread @ (draws.g - spread @ draws.g) ** 2)
        order = by_neighbours(draws.g / sd)
        g, pairs = self.bend.inverse(draws.g[order]), pairs[order]
        log_slope = self.bend.log_slope(g)
        return WeightedPairs(
            g,
            draws.log_density[order] + log_slope,
            pairs.log_ratio + log_slope[:, None],
            pairs.elbo + log_slope,
            pairs.log_estimate + log_slope,
            pairs.latents,
            pairs.log_mixed,
            n_far_of(pairs.log_ratio.shape[1]),
        )
