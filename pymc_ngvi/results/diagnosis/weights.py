"""Importance weights of draws of q, within a budget of evaluations."""

import logging

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.draws import chunks
from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.psis import MIN_KHAT_DRAWS, Weights, smoothed, weigh
from pymc_ngvi.core.sizes import HELD, check_draws
from pymc_ngvi.core.types import Array
from pymc_ngvi.fitting.progress import WorkProgress
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.results.diagnosis.diagnosis import Kept
from pymc_ngvi.results.distributions import Costs, Posterior

#: Estimated seconds that a report may take in any case, and as a part of the fit.
SUMMARY, DIAGNOSIS = (1.2, 0.3), (4.0, 0.7)
#: Seconds for the k-hat of a coordinate from 10,000 draws, and the part of a budget that these may take.
_PER_KHAT, _OF_KHATS = 2e-3, 0.1
#: Part of a budget for importance weights.
_OF_WEIGHTS = 0.25
#: Importance weights of fewer draws are not judged within a budget.
FEWEST_WEIGHED = 1_000
#: Part of the gradients for comparing log p with its mirror images; evaluations at least, below which there are none.
_OF_SYMMETRIES, _LEAST_COMPARED = 0.05, 16


def seconds_of(share: tuple[float, float], costs: Costs, record: FitRecord | None) -> float:
    """Return the estimated seconds that a share allows: some in any case, or a part of what the fit took."""
    floor, part = share
    took = 0.0 if record is None else costs.gradient * record.n_gradients + costs.hessian * record.n_hessians
    return max(floor, part * took)


@dataclass(frozen=True)
class Budget:
    """What a report may evaluate."""

    #: Draws for importance weights; 0: none.
    n_weights: int
    #: Coordinates that get a k-hat.
    n_khats: int
    #: For moved draws, about.
    n_gradients: int
    #: Whether moved draws get less than they do where evaluations are cheap.
    cut: bool = False
    #: The same of importance weights.
    weights_cut: bool = False
    #: Whether gradients at draws are looked at, and few draws are moved: where a posterior has checks of its own, and
    #: these speak for it.
    scored: bool = False

    def compared(self, wanted: int) -> int:
        """Return how many log densities there are for symmetries: as many as wanted where nothing is cut."""
        n = int(min(wanted, _OF_SYMMETRIES * self.n_gradients)) if self.cut else wanted
        return n if n >= _LEAST_COMPARED else 0

    @classmethod
    def of(
        cls,
        share: tuple[float, float],
        costs: Costs,
        record: FitRecord | None,
        wanted: "Budget",
    ) -> "Budget":
        """Return as much of what is wanted as a share allows."""
        seconds = seconds_of(share, costs, record)
        n_weights = min(wanted.n_weights, int(_OF_WEIGHTS * seconds / costs.weight))
        if n_weights < min(FEWEST_WEIGHED, wanted.n_weights):
            n_weights = 0
        one_khat = _PER_KHAT * max(n_weights, 1_000) / 10_000
        n_khats = min(wanted.n_khats, int(_OF_KHATS * seconds / one_khat)) if n_weights else 0
        left = seconds - n_weights * costs.weight - n_khats * one_khat
        n_gradients = min(wanted.n_gradients, int(left / costs.gradient))
        cut = n_gradients < wanted.n_gradients
        return cls(n_weights, n_khats, n_gradients, cut, n_weights < wanted.n_weights)


logger = logging.getLogger("pymc.ngvi")

#: Draws behind k-hat, where evaluations are cheap.
DRAWS = 10_000
#: Number of the random stream behind the weights that belong to a fit.
_STREAM = 3_000_000


def n_own(posterior: Posterior) -> int:
    """Return how many draws belong to the fit: those of a diagnosis, or where it has none, what costs as much."""
    record, costs = posterior.record, posterior.distribution.costs(posterior.density, posterior.record)
    wanted = Budget(most_weighed(posterior, DRAWS), 0, 0)
    n = Budget.of(DIAGNOSIS, costs, record, wanted).n_weights
    n = n or int(np.clip(seconds_of(DIAGNOSIS, costs, record) / costs.weight, MIN_KHAT_DRAWS, FEWEST_WEIGHED))
    if n < wanted.n_weights:
        logger.info(f"Importance weights of {n:,} draws: evaluations of this model are dear, ask for more by draws=.")
    return n


def most_weighed(posterior: Posterior, draws: int) -> int:
    """Return how many of some draws can be held at once."""
    return min(draws, max(FEWEST_WEIGHED, HELD // max(posterior.layout.n_dim, 1)))


def own_generator(record: FitRecord | None, stream: int = _STREAM) -> np.random.Generator:
    """Return the generator of draws that belong to a fit."""
    return np.random.default_rng([stream, 0 if record is None else record.seed])


def drawn(posterior: Posterior, n: int, rng: np.random.Generator) -> Iterator[Array]:
    """Yield draws that are weighed, in chunks: the same ones whenever the generator is in the same state."""
    for chunk in chunks(n, posterior.layout.n_dim):
        yield posterior.distribution.draw(chunk, rng)


def weighed(
    posterior: Posterior, n: int, rng: np.random.Generator, advance: Callable[[float], None] = lambda _: None
) -> Array:
    """Return log weights of draws, (n,)."""
    ratio = []
    for theta in drawn(posterior, n, rng):
        for part in np.array_split(theta, max(1, len(theta) // FEWEST_WEIGHED)):
            ratio.append(posterior.distribution.log_weights(part, posterior.density))
            advance(len(part))
    return np.concatenate(ratio)


def own_log_ratio(posterior: Posterior, kept: Kept, n: int, advance: Callable[[float], None] = lambda _: None) -> Array:
    """Return log p - log q at ``n`` or more of the draws that belong to the fit, evaluated once for a q."""
    if (of_pool := posterior.distribution.kept_log_weights()) is not None:
        return of_pool
    if kept.log_ratio is None or len(kept.log_ratio) < n:
        kept.log_ratio = weighed(posterior, n, own_generator(posterior.record), advance)
    return kept.log_ratio


def log_ratio_of(posterior: Posterior, kept: Kept, draws: int | None, rng: np.random.Generator | None) -> Array:
    """Return log p - log q at draws of q, (n_draws,): those that belong to the fit where no generator is given."""
    posterior.check_weights()
    if (of_pool := posterior.distribution.kept_log_weights()) is not None:
        return of_pool
    if rng is None:
        return own_log_ratio(posterior, kept, n_own(posterior))
    n = DRAWS if draws is None else check_draws(draws)
    with WorkProgress("Importance weights", n) as progress:
        return weighed(posterior, n, rng, progress.advance)


def weights_and_elbo(log_ratio: Array) -> tuple[Weights, Elbo]:
    """Return what log p - log q at draws says of weights, and the ELBO."""
    finite = np.isfinite(log_ratio)
    n = int(finite.sum())
    with np.errstate(over="ignore"):  # far draws of a proposal may have next to no density
        value = float(log_ratio[finite].mean()) if n else -np.inf
        se = float(log_ratio[finite].std(ddof=1) / np.sqrt(n)) if n > 1 else np.inf
    return weigh(log_ratio)[1], Elbo(value, se)


def coordinate_khats(log_ratio: Array, standardised: Array) -> Array:
    """Return k-hat of the weighted mean and second moment of each coordinate, the worse of the two.

    References
    ----------
    .. [1] A. Vehtari, D. Simpson, A. Gelman, Y. Yao and J. Gabry (2024). Pareto smoothed importance sampling.
       JMLR 25(72). https://doi.org/10.48550/arXiv.1507.02646
    """
    with np.errstate(divide="ignore"):
        sizes = np.log(np.abs(standardised.T))
    return np.array([max(smoothed(log_ratio + size)[1], smoothed(log_ratio + 2.0 * size)[1]) for size in sizes])
