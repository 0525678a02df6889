"""The part of an approximation that weighs draws of q by p/q."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pymc_ngvi.core.psis import pareto_khat
from pymc_ngvi.core.sizes import check_draws
from pymc_ngvi.core.types import Array
from pymc_ngvi.fitting.progress import WorkProgress
from pymc_ngvi.results.diagnosis.weights import DRAWS, NO_COORDINATES, n_own, own_generator, weighed
from pymc_ngvi.results.methods.fit import FitReport
from pymc_ngvi.results.posterior import Distribution


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
