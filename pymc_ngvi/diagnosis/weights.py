"""The part of an approximation that weighs draws of q by p/q."""

import logging

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.diagnosis.budget import DIAGNOSIS, FEWEST_WEIGHED, Budget, seconds_of
from pymc_ngvi.diagnostics import FitReport
from pymc_ngvi.draws import chunks
from pymc_ngvi.posterior import Distribution, Posterior
from pymc_ngvi.progress import WorkProgress
from pymc_ngvi.psis import MIN_KHAT_DRAWS, Weights, pareto_khat, weigh
from pymc_ngvi.result import Elbo, FitRecord
from pymc_ngvi.sizes import check_draws
from pymc_ngvi.types import Array

logger = logging.getLogger("pymc.ngvi")

#: Draws behind k-hat, where evaluations are cheap.
DRAWS = 10_000
#: Numbers in the draws behind a diagnosis.
_ELEMENTS = 2**25
#: Number of the random stream behind the weights that belong to a fit.
_STREAM = 3_000_000
#: None of them.
NO_COORDINATES = np.empty(0, dtype=np.intp)


class _Kept(NamedTuple):
    q: Distribution
    density: Any
    log_ratio: Array


class WeightReport(FitReport):
    """The part of an approximation that weighs draws of q by p/q."""

    _kept_ratio: _Kept | None = None

    def khat(self, draws: int | None = None, random_seed: Any = None) -> float:
        """Return the Pareto k-hat of the importance weights: the shape of their tail.

        Parameters
        ----------
        draws : int, optional
            By default 10,000; fewer where they would cost much more than the fit did; a message says so.
        random_seed : int, Generator or None
            By default one that belongs to the fit: without arguments, k-hat is computed once and kept until q changes.
            With any, it is computed anew, and scatters by about .1 at 10,000 draws.

        Returns
        -------
        float
            Of an exact posterior, that of its pool of global parameters, whatever the arguments. Otherwise: up to .7,
            importance weights can correct q. Above, they can't, unless they are all but equal:
            `NGVIApproximation.diagnose` and `summary` tell, and give its standard error.

        Raises
        ------
        ValueError
            For fewer than 100 draws; where ``pm.set_data`` changed the data after the fit; for a model that reads
            minibatches.
        """
        ratio = self._log_ratio(draws, random_seed)
        return pareto_khat(ratio, np.zeros(len(ratio)))

    def _log_ratio(self, draws: int | None, random_seed: Any) -> Array:
        """Return log p - log q at draws of q, (n_draws,): those that belong to the fit where nothing is given."""
        self._posterior.check_weights()
        if (kept := self._distribution.kept_log_weights()) is not None:
            return kept
        if draws is None and random_seed is None:
            return self._own_ratio(n_own(self._posterior))
        n = DRAWS if draws is None else check_draws(draws)
        with WorkProgress("Importance weights", n) as progress:
            return weighed(self._posterior, n, self.generator(random_seed), NO_COORDINATES, progress.advance)[0]

    def _own_ratio(self, n: int, advance: Callable[[float], None] = lambda _: None) -> Array:
        """Return log p - log q at ``n`` or more of the draws that belong to the fit, evaluated once for a q."""
        if (of_pool := self._distribution.kept_log_weights()) is not None:
            return of_pool
        kept, q = self._kept_ratio, self._distribution
        if kept is None or kept.q is not q or kept.density is not self.density or len(kept.log_ratio) < n:
            ratio, _ = weighed(self._posterior, n, own_generator(self.record), NO_COORDINATES, advance)
            self._kept_ratio = kept = _Kept(q, self.density, ratio)
        return kept.log_ratio


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
    return min(draws, max(FEWEST_WEIGHED, _ELEMENTS // max(posterior.layout.n_dim, 1)))


def own_generator(record: FitRecord | None, stream: int = _STREAM) -> np.random.Generator:
    """Return the generator of draws that belong to a fit."""
    return np.random.default_rng([stream, 0 if record is None else record.seed])


def weighed(
    posterior: Posterior,
    n: int,
    rng: np.random.Generator,
    index: NDArray[np.intp],
    advance: Callable[[float], None] = lambda _: None,
) -> tuple[Array, Array]:
    """Return log weights of draws, (n,), and some coordinates of these, (n, n_index)."""
    ratio, coordinates, done = np.empty(n), np.empty((n, len(index))), 0
    for chunk in chunks(n, posterior.layout.n_dim):
        theta = posterior.distribution.proposed(chunk, rng)
        for part in np.array_split(theta, max(1, len(theta) // FEWEST_WEIGHED)):
            now = slice(done, done + len(part))
            ratio[now] = posterior.distribution.log_weights(part, posterior.density)
            coordinates[now] = part[:, index]
            done += len(part)
            advance(len(part))
    return ratio, coordinates


def own_coordinates(posterior: Posterior, n: int, index: NDArray[np.intp]) -> Array:
    """Return some coordinates of the draws that belong to the fit, (n, n_index)."""
    rng = own_generator(posterior.record)
    parts = [posterior.distribution.proposed(chunk, rng)[:, index] for chunk in chunks(n, posterior.layout.n_dim)]
    return np.concatenate(parts)


def judged(log_ratio: Array) -> tuple[Weights, Elbo]:
    """Return what log p - log q at draws says of weights, and the ELBO."""
    finite = np.isfinite(log_ratio)
    n = int(finite.sum())
    value = float(log_ratio[finite].mean()) if n else -np.inf
    se = float(log_ratio[finite].std(ddof=1) / np.sqrt(n)) if n > 1 else np.inf
    return weigh(log_ratio, np.zeros(len(log_ratio)))[1], Elbo(value, se)
